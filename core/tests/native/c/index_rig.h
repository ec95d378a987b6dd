/* What the tests of the index share: a small pool between guard pages, objects that check themselves, dice. */
#ifndef INDEX_RIG_H
#define INDEX_RIG_H

#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "index_find.h"
#include "index_write.h"

/* Thread sanitizers copy word by word: a tenth of the work takes as long. */
#ifdef COPY_WITNESSED
#define RIG_SHARE(n) ((n) / 10)
#else
#define RIG_SHARE(n) (n)
#endif

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

enum { RIG_EPOCH = 7, RIG_SERVING = 8, RIG_GUARD = 1 << 20, RIG_SPACE = 5, RIG_LAYOUT = 2, RIG_TORN = 3 };

typedef struct {
    index_writer writer; /* with the view in it */
    unsigned char *base;
    uint64_t nbytes;
} rig;

/* Memory that is mapped has no red zones: a range that nobody may touch stands on either side. */
static inline void rig_open(rig *r, uint64_t entries, uint64_t data_bytes) {
    uint64_t data_offset = INDEX_PAGE_BYTES + index_bytes(entries);
    data_offset = (data_offset + INDEX_PAGE_BYTES - 1) & ~(uint64_t)(INDEX_PAGE_BYTES - 1);
    memset(r, 0, sizeof *r);
    r->nbytes = data_offset + data_bytes;
    unsigned char *guarded =
        mmap(NULL, r->nbytes + 2 * RIG_GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(guarded != MAP_FAILED, "address space");
    r->base = mmap(guarded + RIG_GUARD, r->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(r->base != MAP_FAILED, "memory");
    const char *wrong =
        index_view_make(&r->writer.view, r->base, r->nbytes, INDEX_PAGE_BYTES, entries, data_offset, RIG_SERVING);
    CHECK(wrong == NULL, "%s", wrong);
    atomic_store(r->writer.view.serving, RIG_EPOCH);
}

static inline void rig_close(rig *r) { munmap(r->base - RIG_GUARD, r->nbytes + 2 * RIG_GUARD); }

/* A child that ends with its parent, also where a CHECK ends that one. */
static inline pid_t rig_fork(void) {
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
    }
    return child;
}

static inline uint64_t rig_random(uint64_t *state) {
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = *state;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* 32 bytes that look like a digest. */
static inline void rig_key_bytes(unsigned char *bytes, uint64_t number) {
    uint64_t state = number * 4 + 1, words[4];
    for (int i = 0; i < 4; i++)
        words[i] = rig_random(&state);
    memcpy(bytes, words, sizeof words);
}

static inline index_key rig_key(uint64_t number) {
    unsigned char bytes[INDEX_KEY_BYTES];
    rig_key_bytes(bytes, number);
    return index_key_of(bytes, RIG_SPACE);
}

/* Of an object that these programs publish. */
static inline uint64_t rig_incarnation(uint64_t number, uint64_t offset) { return offset << 24 | (number + 1); }

static inline bool rig_publish(rig *r, uint64_t number, uint64_t offset, uint64_t nbytes, uint64_t checksum) {
    index_object object = {rig_key(number), offset, RIG_LAYOUT, nbytes, checksum, INDEX_CHECKSUM_KNOWN,
                           rig_incarnation(number, offset)};
    return index_publish(&r->writer, &object, index_home(&r->writer.view, &object.key), 1000);
}

static inline bool rig_remove(rig *r, uint64_t number, uint64_t offset) {
    index_key key = rig_key(number);
    bool had = index_remove(&r->writer, &key, offset, index_home(&r->writer.view, &key), 2, 1001);
    index_settle();
    return had;
}

static inline int rig_find(const index_view *view, uint64_t number, index_place *place) {
    index_key key = rig_key(number);
    return index_find(view, &key, index_home(view, &key), RIG_LAYOUT, place);
}

/* An object says which key it belongs to, and every word follows from the second. n is a multiple of 8. Relaxed
 * words: other threads may be reading, and throw away what they got. */
static inline void object_fill(unsigned char *bytes, uint64_t n, uint64_t number, uint64_t stamp) {
    _Atomic uint64_t *words = (_Atomic uint64_t *)(void *)bytes;
    index_store(&words[0], number);
    for (uint64_t i = 1; i < n / 8; i++)
        index_store(&words[i], (stamp + i) * UINT64_C(0x9e3779b97f4a7c15));
}

static inline bool object_whole(const unsigned char *bytes, uint64_t n, uint64_t number) {
    uint64_t first, word;
    memcpy(&first, bytes, 8);
    if (first != number)
        return false;
    memcpy(&first, bytes + 8, 8);
    for (uint64_t i = 2; i < n / 8; i++) {
        memcpy(&word, bytes + 8 * i, 8);
        if (word != first + (i - 1) * UINT64_C(0x9e3779b97f4a7c15))
            return false;
    }
    return true;
}

#endif
