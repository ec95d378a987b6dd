/* Faults of a disk, put between a process and its file system by LD_PRELOAD. Only below one directory, and only while
 * they are armed. `fault_arm` and `fault_hits` are called by the process itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { UNLINK, RENAME, WRITE, FSYNC, OPEN, MKDIR, OPERATIONS };

static char root[4096];
static int percent[OPERATIONS], error_of[OPERATIONS]; /* error 0: of a write, that it is short */
static unsigned hits[OPERATIONS], state = 1;

void fault_arm(const char *below, int operation, int chance, int error, unsigned seed) {
    snprintf(root, sizeof root, "%s", below);
    error_of[operation] = error;
    state = seed;
    percent[operation] = chance;
}

unsigned fault_hits(int operation) { return hits[operation]; }

static int strikes(int operation, const char *path) {
    if (!percent[operation] || !root[0] || strncmp(path, root, strlen(root)))
        return 0;
    if ((int)(rand_r(&state) % 100) >= percent[operation])
        return 0;
    __atomic_add_fetch(&hits[operation], 1, __ATOMIC_RELAXED);
    return 1;
}

static int strikes_fd(int operation, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strikes(operation, path);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(operation) return errno = error_of[operation], -1

int unlink(const char *path) {
    if (strikes(UNLINK, path))
        FAIL(UNLINK);
    return REAL(unlink)(path);
}

int rename(const char *from, const char *to) {
    if (strikes(RENAME, to))
        FAIL(RENAME);
    return REAL(rename)(from, to);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (count > 0 && strikes_fd(WRITE, fd)) {
        if (error_of[WRITE])
            FAIL(WRITE);
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2 + 1};
        return REAL(writev)(fd, &half, 1);
    }
    return REAL(writev)(fd, parts, count);
}

int fsync(int fd) {
    if (strikes_fd(FSYNC, fd))
        FAIL(FSYNC);
    return REAL(fsync)(fd);
}

int mkdir(const char *path, mode_t mode) {
    if (strikes(MKDIR, path))
        FAIL(MKDIR);
    return REAL(mkdir)(path, mode);
}

#define OPEN_LIKE(name)                                                                                                \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        if (flags & O_CREAT && strikes(OPEN, path))                                                                    \
            FAIL(OPEN);                                                                                                \
        return REAL(name)(path, flags, mode);                                                                          \
    }

OPEN_LIKE(open)
OPEN_LIKE(open64)
