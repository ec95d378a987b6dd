/* What the C tests share: a table in a nameless file between two guard pages, writers, values that check themselves. */
#ifndef RIG_H
#define RIG_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "l0_move.h"
#include "l0_survey.h"
#include "l0_write.h"

#define CHECK(condition, ...)                                             \
    do {                                                                  \
        if (!(condition)) {                                               \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                 \
            fputc('\n', stderr);                                          \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

#define GUARD_BYTES 65536u

typedef struct rig {
    l0_table table; /* not yet a writer */
    char path[256];
} rig;

/* mmap'd memory has no red zones, so a page that nobody may touch stands on either side. */
static inline void rig_open(rig *r, uint64_t slots, uint64_t value, uint64_t key, uint64_t versions,
                            uint64_t spares) {
    const char *folder = getenv("TMPDIR");
    snprintf(r->path, sizeof r->path, "%s/l0-rig-XXXXXX", folder != NULL ? folder : "/tmp");
    int fd = mkstemp(r->path);
    CHECK(fd >= 0, "%s", r->path);
    l0_geometry g;
    CHECK(l0_plan(&g, slots, value, key, versions, spares), "sizes");
    CHECK(ftruncate(fd, (off_t)g.file_bytes) == 0, "room");
    unsigned char *guarded =
        mmap(NULL, g.file_bytes + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(guarded != MAP_FAILED, "address space");
    void *base = mmap(guarded + GUARD_BYTES, g.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    CHECK(base != MAP_FAILED, "mapping");
    l0_header_write(base, &g, UINT64_C(0x1234567), 42, 1, true);
    memset(&r->table, 0, sizeof r->table);
    r->table.life_fd = -1;
    r->table.ask_fd = fd;
    struct stat st;
    CHECK(fstat(fd, &st) == 0, "%s", r->path);
    r->table.dev = (uint64_t)st.st_dev;
    r->table.ino = (uint64_t)st.st_ino;
    r->table.base = base;
    CHECK(l0_header_check(base, g.file_bytes, &r->table.g) == L0_OK_HEADER, "header");
}

static inline void rig_join(const rig *r, l0_table *t) {
    *t = r->table;
    int fd = open(r->path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0, "%s", r->path);
    int failed = l0_writer_join(t, fd);
    CHECK(failed == 0, "joining: %d", failed);
}

static inline void rig_leave(l0_table *t) { l0_writer_leave(t); }

static inline void rig_close(rig *r) {
    unlink(r->path);
    close(r->table.ask_fd);
    munmap(r->table.base - GUARD_BYTES, r->table.g.file_bytes + 2 * GUARD_BYTES);
}

static inline uint64_t rig_random(uint64_t *state) {
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t x = *state;
    x = (x ^ x >> 31) * UINT64_C(0xbf58476d1ce4e5b9);
    return x ^ x >> 29;
}

/* A value says which key it belongs to and has every byte follow from its first sixteen. */
static inline void value_fill(unsigned char *bytes, size_t n, uint64_t key, uint64_t stamp) {
    uint64_t words[2] = {key, stamp};
    memcpy(bytes, words, 16);
    for (size_t i = 16; i < n; i++)
        bytes[i] = (unsigned char)(stamp + i * 7 + n);
}

static inline bool value_whole(const unsigned char *bytes, size_t n, uint64_t key) {
    uint64_t words[2];
    if (n < 16)
        return false;
    memcpy(words, bytes, 16);
    if (words[0] != key)
        return false;
    for (size_t i = 16; i < n; i++)
        if (bytes[i] != (unsigned char)(words[1] + i * 7 + n))
            return false;
    return true;
}

static inline l0_key numbered_key(const l0_table *t, unsigned char *bytes, uint64_t number) {
    size_t n = 8 + number % 9; /* lengths that are and are not multiples of a word */
    memset(bytes, 'k', 16);
    memcpy(bytes, &number, 8);
    return l0_key_of(t, bytes, n);
}

#endif
