/* SHA-256 against the standard's own examples, the processor's way against plain C, and chains against their definition. */
#include "chain.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static const sha256_way PLAIN = {sha256_blocks_plain, "plain C"};

static uint64_t drawn(uint64_t *state) {
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = *state;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A whole message in one piece; `room` is exactly as long as sha256_end is allowed to use. */
static void digest_of(sha256_way way, const unsigned char *bytes, size_t n, unsigned char digest[SHA256_BYTES]) {
    unsigned char *room = malloc(n + SHA256_END_BYTES);
    uint32_t state[8];
    CHECK(room != NULL, "memory");
    memcpy(room, bytes, n);
    memcpy(state, SHA256_START, sizeof state);
    sha256_end(way, state, NULL, room, n, n);
    sha256_bytes(state, digest);
    free(room);
}

static void check_example(sha256_way way, const char *text, size_t repeats, const char *expected) {
    size_t length = strlen(text);
    unsigned char *message = malloc(length * repeats + 1), digest[SHA256_BYTES];
    char hex[2 * SHA256_BYTES + 1];
    CHECK(message != NULL, "memory");
    for (size_t i = 0; i < repeats; i++)
        memcpy(message + i * length, text, length);
    digest_of(way, message, length * repeats, digest);
    for (int i = 0; i < SHA256_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    CHECK(strcmp(hex, expected) == 0, "%s, %zu times '%.10s': %s", way.name, repeats, text, hex);
    free(message);
}

static void check_examples(sha256_way way) {
    check_example(way, "", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_example(way, "abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_example(way, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    check_example(way, "a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Each length up to some blocks, at each alignment, ending at a page that nobody may touch. */
static void check_same_as_plain(sha256_way way, uint64_t seed) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED, "memory");
    CHECK(mprotect(pages + page, page, PROT_NONE) == 0, "guard page");
    for (size_t i = 0; i < page; i++)
        pages[i] = (unsigned char)drawn(&seed);
    for (size_t blocks = 1; blocks < 8; blocks++)
        for (size_t shift = 0; shift < 64; shift++) {
            const unsigned char *data = pages + page - shift - blocks * SHA256_BLOCK_BYTES;
            uint32_t one[8], two[8], head[8];
            memcpy(one, SHA256_START, sizeof one);
            memcpy(two, SHA256_START, sizeof two);
            memcpy(head, pages + shift, sizeof head);
            const uint32_t *with = shift % 2 ? head : NULL;
            way.blocks(one, with, data, blocks);
            PLAIN.blocks(two, with, data, blocks);
            CHECK(memcmp(one, two, sizeof one) == 0, "%s, %zu blocks at %zu", way.name, blocks, shift);
        }
    for (size_t n = 0; n < 300; n++) {
        unsigned char one[SHA256_BYTES], two[SHA256_BYTES];
        digest_of(way, pages + page - n, n, one);
        digest_of(PLAIN, pages + page - n, n, two);
        CHECK(memcmp(one, two, sizeof one) == 0, "%s, %zu bytes", way.name, n);
    }
    munmap(pages, 2 * page);
}

/* The chain as it is defined: each message built whole, each key from the one before. */
static void chain_defined(const unsigned char root[SHA256_BYTES], const uint32_t *words, size_t count, size_t chunk,
                          unsigned char *keys) {
    unsigned char *message = malloc(SHA256_BYTES + 4 * chunk);
    CHECK(message != NULL, "memory");
    for (size_t i = 0; i < count / chunk; i++) {
        memcpy(message, i ? keys + (i - 1) * SHA256_BYTES : root, SHA256_BYTES);
        memcpy(message + SHA256_BYTES, words + i * chunk, 4 * chunk);
        digest_of(PLAIN, message, SHA256_BYTES + 4 * chunk, keys + i * SHA256_BYTES);
    }
    free(message);
}

/* The same ids held in each of the ways, close together and apart, forwards and backwards, at odd addresses. */
static void check_chains(sha256_way way, uint64_t seed) {
    static const size_t CHUNKS[] = {1, 2, 5, 7, 8, 9, 16, 64, 256, 1016, 1017, 1024, 2040, 2041, 4000};
    enum { COUNT = 4100 };
    unsigned char root[SHA256_BYTES];
    uint32_t *words = malloc(4 * COUNT);
    unsigned char *expected = malloc(COUNT * SHA256_BYTES), *keys = malloc(COUNT * SHA256_BYTES);
    CHECK(words != NULL && expected != NULL && keys != NULL, "memory");
    for (int i = 0; i < SHA256_BYTES; i++)
        root[i] = (unsigned char)drawn(&seed);
    for (size_t i = 0; i < COUNT; i++)
        words[i] = (uint32_t)drawn(&seed) >> 1;
    for (size_t c = 0; c < sizeof CHUNKS / sizeof *CHUNKS; c++) {
        size_t chunk = CHUNKS[c], count = chunk * (COUNT / chunk < 20 ? COUNT / chunk : 20) + (chunk > 1);
        chain_defined(root, words, count, chunk, expected);
        for (int form = 0; form < 16; form++) {
            chain_kind kind = (chain_kind)(form & 3);
            size_t size = kind == CHAIN_U32 || kind == CHAIN_I32 ? 4 : 8, step = form & 4 ? size + 3 : size;
            unsigned char *held = malloc(step * count), *first = form & 8 ? held + step * (count - 1) : held;
            CHECK(held != NULL, "memory");
            chain_ids ids = {first, form & 8 ? -(ptrdiff_t)step : (ptrdiff_t)step, count, kind};
            memset(held, 0xff, step * count);
            for (size_t i = 0; i < count; i++) {
                uint64_t id = words[i];
                memcpy(first + (ptrdiff_t)i * ids.stride_bytes, &id, size);
            }
            if (form & 8) /* the last of them ends where the memory ends */
                CHECK(first + step == held + step * count, "layout");
            memset(keys, 0, count / chunk * SHA256_BYTES);
            CHECK(chain_keys(way, root, &ids, chunk, keys) == 0, "%s, chunk %zu, form %d", way.name, chunk, form);
            CHECK(memcmp(keys, expected, count / chunk * SHA256_BYTES) == 0, "%s, chunk %zu, form %d", way.name, chunk,
                  form);
            for (size_t bad = 0; bad < count && kind != CHAIN_U32; bad += 1 + bad * 2) {
                size_t where = bad % 2 ? bad : count - 1 - bad;
                memset(first + (ptrdiff_t)where * ids.stride_bytes + size - 1, 0x80, 1);
                CHECK(chain_keys(way, root, &ids, chunk, keys) == -1, "%s: id %zu was taken", way.name, where);
                memset(first + (ptrdiff_t)where * ids.stride_bytes + size - 1, size == 4 ? (int)(words[where] >> 24) : 0, 1);
            }
            free(held);
        }
    }
    free(words);
    free(expected);
    free(keys);
}

int main(void) {
    const sha256_way ways[] = {PLAIN, sha256_best()};
    for (int i = 0; i < 2; i++) {
        check_examples(ways[i]);
        check_same_as_plain(ways[i], 1);
        check_chains(ways[i], 2);
    }
    printf("%s\n", ways[1].name);
    return 0;
}
