/* Every form of the checksum agrees with the portable one, whatever the length and the alignment, and so does every
 * form that copies on its way; the portable one agrees with known values. Nothing is read before or behind the bytes,
 * and nothing is written there. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "copy.h"

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

#if defined(COPY_WITNESSED)
enum { STEP = 17 }; /* the thread sanitizer looks at every byte: some lengths have to do */
#else
enum { STEP = 1 };
#endif

enum { ROOM = 64 << 10, MARGIN = 64 };

/* A readable room that ends where nothing may be read. */
static unsigned char *room_before_a_wall(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *start = mmap(NULL, ROOM + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED, "no memory");
    CHECK(mprotect(start + ROOM, page, PROT_NONE) == 0, "no wall");
    return start;
}

typedef struct {
    const char *name;
    int how;
    size_t alignment; /* of the target */
    xxh3_stripes *take;
} form;

static const form forms[] = {
    {"portable", XXH3_HASH, 1, xxh3_portable_hash},
    {"portable, copying", XXH3_COPY, 1, xxh3_portable_copy},
    {"portable, streaming", XXH3_STREAM, 1, xxh3_portable_stream},
#if defined(__x86_64__)
    {"sse2", XXH3_HASH, 1, xxh3_sse2_hash},
    {"sse2, copying", XXH3_COPY, 1, xxh3_sse2_copy},
    {"sse2, streaming", XXH3_STREAM, 16, xxh3_sse2_stream},
    {"avx2", XXH3_HASH, 1, xxh3_avx2_hash},
    {"avx2, copying", XXH3_COPY, 1, xxh3_avx2_copy},
    {"avx2, streaming", XXH3_STREAM, 32, xxh3_avx2_stream},
#elif defined(__aarch64__)
    {"neon", XXH3_HASH, 1, xxh3_neon_hash},
    {"neon, copying", XXH3_COPY, 1, xxh3_neon_copy},
    {"neon, streaming", XXH3_STREAM, 1, xxh3_neon_stream},
#endif
};

static int runs_here(const form *f) {
#if defined(__x86_64__)
    return f->name[0] != 'a' || __builtin_cpu_supports("avx2");
#else
    (void)f;
    return 1;
#endif
}

static void check_margin(const unsigned char *from, const unsigned char *to, const char *name, size_t n) {
    for (; from < to; from++)
        CHECK(*from == 0xEE, "%s wrote beside %zu bytes", name, n);
}

static void check_length(unsigned char *source, unsigned char *target, size_t n, size_t misaligned) {
    const unsigned char *from = source + ROOM - n; /* its last byte stands before the wall */
    uint64_t expected = n > XXH3_SHORT_MAX ? xxh3_long(xxh3_portable_hash, XXH3_HASH, NULL, from, n) : xxh3_64(from, n);
    CHECK(xxh3_64(from, n) == expected, "%zu bytes", n);
    for (size_t i = 0; i < sizeof forms / sizeof *forms && n > XXH3_SHORT_MAX; i++) {
        const form *f = &forms[i];
        unsigned char *to = target + MARGIN + misaligned / f->alignment * f->alignment;
        if (!runs_here(f))
            continue;
        memset(target, 0xEE, n + 2 * MARGIN + 64);
        CHECK(xxh3_long(f->take, f->how, to, from, n) == expected, "%s of %zu bytes", f->name, n);
        if (f->how != XXH3_HASH)
            CHECK(memcmp(to, from, n) == 0, "%s of %zu bytes", f->name, n);
        check_margin(target, to, f->name, n);
        check_margin(f->how == XXH3_HASH ? to : to + n, target + n + 2 * MARGIN + 64, f->name, n);
    }
    unsigned char *to = target + MARGIN + misaligned;
    for (size_t job_bytes = 0; job_bytes <= 2 * COPY_STREAM_BYTES; job_bytes += 2 * COPY_STREAM_BYTES) {
        memset(target, 0xEE, n + 2 * MARGIN + 64);
        CHECK(copy_checksum_of(to, from, n, job_bytes) == expected, "%zu bytes of %zu", n, job_bytes);
        CHECK(memcmp(to, from, n) == 0, "%zu bytes of %zu", n, job_bytes);
        check_margin(target, to, "copy_checksum", n);
        check_margin(to + n, target + n + 2 * MARGIN + 64, "copy_checksum", n);
        memset(target, 0xEE, n + 2 * MARGIN + 64);
        copy_bytes_of(to, from, n, job_bytes);
        CHECK(memcmp(to, from, n) == 0, "%zu bytes of %zu", n, job_bytes);
        check_margin(target, to, "copy_bytes", n);
        check_margin(to + n, target + n + 2 * MARGIN + 64, "copy_bytes", n);
    }
}

int main(void) {
    /* From the specification's reference: xxh3_64 of the first n of the bytes 0, 1, 2, … 255, 0, 1, … */
    static const struct {
        size_t n;
        uint64_t checksum;
    } known[] = {
        {0, 0x2D06800538D394C2u},
        {1, 0xC44BDFF4074EECDBu},
        {3, 0x5F4299FC161C9CBBu},
        {4, 0x60DAB036A58211F2u},
        {8, 0x3A1C2D7C85AF88F8u},
        {9, 0xE9612598145BB9DCu},
        {16, 0x8355E3A6F61770DBu},
        {17, 0x9EF341A99DE37328u},
        {32, 0x3523581FE96E4C05u},
        {33, 0xE68C56BA88991E58u},
        {64, 0x6187EB9089B0ED55u},
        {65, 0x6928C76CE90422D0u},
        {96, 0x278A3E12EA046DFBu},
        {97, 0xE7220282DC4E14F4u},
        {128, 0x85C6174C7FF4C46Bu},
        {129, 0xEC7642B431BA3E5Au},
        {240, 0x375A384D957FE865u},
        {241, 0x02E8CD95421C6D02u},
        {512, 0x1059105AD19BFA09u},
        {1024, 0xA870F92984398D22u},
        {1025, 0x78C86E91EE939852u},
        {2048, 0xDD420471FF96BD00u},
        {10000, 0x3EEE77440C4C3D08u},
    };
    unsigned char *source = room_before_a_wall(), *target = aligned_alloc(64, ROOM + 256);
    CHECK(target, "no memory");
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        unsigned char *from = source + ROOM - known[i].n;
        for (size_t at = 0; at < known[i].n; at++)
            from[at] = (unsigned char)at;
        CHECK(xxh3_64(from, known[i].n) == known[i].checksum, "%zu bytes", known[i].n);
    }
    uint64_t dice = 1;
    for (size_t i = 0; i < ROOM; i++) {
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        source[i] = (unsigned char)(dice >> 56);
    }
    for (size_t n = 0; n <= 1400; n += STEP)
        check_length(source, target, n, n * 7 % 64);
    for (size_t blocks = 2; blocks <= 60; blocks += 7)
        for (size_t n = blocks * XXH3_BLOCK_BYTES - 66; n <= blocks * XXH3_BLOCK_BYTES + 66; n += STEP)
            check_length(source, target, n, n % 64);
    free(target);
    return 0;
}
