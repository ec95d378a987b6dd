/* A file system that hangs, put between a process and its files by LD_PRELOAD; and an account of what one thread asks
 * of any file system. The page that HUNG_FILES names is shared with the test, which arms and reads it: `files.Page` in
 * hung_files.py has the same fields. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BELOW = 4096, NOTES = 1 << 20 };

static struct page {
    unsigned armed;   /* by the test: calls below `below` hang while it is 1 */
    unsigned hanging; /* how many do */
    unsigned watched; /* by the test: the thread whose calls are noted; 0 for none */
    unsigned noted;   /* bytes of `notes` */
    char below[BELOW];
    char notes[NOTES]; /* a line for each call: what, a space, on which path */
} * page;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("HUNG_FILES");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at != MAP_FAILED)
        page = at;
}

static int asked(void) {
    return page && (__atomic_load_n(&page->armed, __ATOMIC_ACQUIRE) ||
                    __atomic_load_n(&page->watched, __ATOMIC_ACQUIRE) == (unsigned)syscall(SYS_gettid));
}

static void meet(const char *what, const char *path) {
    if (__atomic_load_n(&page->watched, __ATOMIC_ACQUIRE) == (unsigned)syscall(SYS_gettid)) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %s\n", what, path);
        unsigned at = __atomic_fetch_add(&page->noted, (unsigned)length, __ATOMIC_RELAXED);
        if (at + (unsigned)length <= NOTES)
            memcpy(page->notes + at, line, (size_t)length);
    }
    if (!__atomic_load_n(&page->armed, __ATOMIC_ACQUIRE) || strncmp(path, page->below, strlen(page->below)))
        return;
    __atomic_fetch_add(&page->hanging, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&page->armed, __ATOMIC_ACQUIRE)) {
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
    }
    __atomic_fetch_sub(&page->hanging, 1, __ATOMIC_RELEASE);
}

static void meet_fd(const char *what, int fd, const char *rest) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (length < 0)
        return;
    path[length] = 0;
    if (rest && *rest && strlen(path) + strlen(rest) + 2 < sizeof path) {
        strcat(path, "/");
        strcat(path, rest);
    }
    meet(what, path);
}

static void meet_at(const char *what, int fd, const char *path) {
    if (!path || !*path)
        meet_fd(what, fd, NULL);
    else if (*path == '/' || fd == AT_FDCWD)
        meet(what, path);
    else
        meet_fd(what, fd, path);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

#define BY_PATH(type, name, parameters, path, ...)                                                                     \
    type name parameters {                                                                                             \
        if (asked())                                                                                                   \
            meet(#name, path);                                                                                         \
        return REAL(name)(__VA_ARGS__);                                                                                \
    }
#define BY_AT(type, name, parameters, fd, path, ...)                                                                   \
    type name parameters {                                                                                             \
        if (asked())                                                                                                   \
            meet_at(#name, fd, path);                                                                                  \
        return REAL(name)(__VA_ARGS__);                                                                                \
    }
#define BY_FD(type, name, parameters, fd, ...)                                                                         \
    type name parameters {                                                                                             \
        if (asked())                                                                                                   \
            meet_fd(#name, fd, NULL);                                                                                  \
        return REAL(name)(__VA_ARGS__);                                                                                \
    }
#define OPEN_LIKE(name)                                                                                                \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        if (asked())                                                                                                   \
            meet(#name, path);                                                                                         \
        return REAL(name)(path, flags, mode);                                                                          \
    }
#define OPENAT_LIKE(name)                                                                                              \
    int name(int fd, const char *path, int flags, ...) {                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        if (asked())                                                                                                   \
            meet_at(#name, fd, path);                                                                                  \
        return REAL(name)(fd, path, flags, mode);                                                                      \
    }
#define FCNTL_LIKE(name)                                                                                               \
    int name(int fd, int command, ...) {                                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, command);                                                                                       \
        void *argument = va_arg(rest, void *);                                                                         \
        va_end(rest);                                                                                                  \
        if ((command == F_SETLKW || command == F_OFD_SETLKW) && asked())                                               \
            meet_fd(#name, fd, NULL);                                                                                  \
        return REAL(name)(fd, command, argument);                                                                      \
    }

OPEN_LIKE(open)
OPEN_LIKE(open64)
OPENAT_LIKE(openat)
OPENAT_LIKE(openat64)
FCNTL_LIKE(fcntl)
FCNTL_LIKE(fcntl64)
BY_PATH(FILE *, fopen, (const char *path, const char *mode), path, path, mode)
BY_PATH(FILE *, fopen64, (const char *path, const char *mode), path, path, mode)
BY_PATH(int, stat, (const char *restrict path, struct stat *restrict found), path, path, found)
BY_PATH(int, stat64, (const char *restrict path, struct stat64 *restrict found), path, path, found)
BY_PATH(int, lstat, (const char *restrict path, struct stat *restrict found), path, path, found)
BY_PATH(int, lstat64, (const char *restrict path, struct stat64 *restrict found), path, path, found)
BY_AT(int, fstatat, (int fd, const char *restrict path, struct stat *restrict found, int flags), fd, path, fd, path,
      found, flags)
BY_AT(int, fstatat64, (int fd, const char *restrict path, struct stat64 *restrict found, int flags), fd, path, fd, path,
      found, flags)
BY_FD(int, fstat, (int fd, struct stat *found), fd, fd, found)
BY_FD(int, fstat64, (int fd, struct stat64 *found), fd, fd, found)
BY_PATH(int, statvfs, (const char *restrict path, struct statvfs *restrict found), path, path, found)
BY_PATH(int, statvfs64, (const char *restrict path, struct statvfs64 *restrict found), path, path, found)
BY_FD(int, fstatvfs, (int fd, struct statvfs *found), fd, fd, found)
BY_FD(int, fstatvfs64, (int fd, struct statvfs64 *found), fd, fd, found)
BY_PATH(int, access, (const char *path, int mode), path, path, mode)
BY_AT(int, faccessat, (int fd, const char *path, int mode, int flags), fd, path, fd, path, mode, flags)
BY_PATH(int, mkdir, (const char *path, mode_t mode), path, path, mode)
BY_AT(int, mkdirat, (int fd, const char *path, mode_t mode), fd, path, fd, path, mode)
BY_PATH(int, rmdir, (const char *path), path, path)
BY_PATH(int, unlink, (const char *path), path, path)
BY_AT(int, unlinkat, (int fd, const char *path, int flags), fd, path, fd, path, flags)
BY_PATH(int, rename, (const char *from, const char *to), to, from, to)
BY_AT(int, renameat, (int from_fd, const char *from, int fd, const char *to), fd, to, from_fd, from, fd, to)
BY_PATH(int, link, (const char *from, const char *to), to, from, to)
BY_AT(int, linkat, (int from_fd, const char *from, int fd, const char *to, int flags), fd, to, from_fd, from, fd, to,
      flags)
BY_PATH(ssize_t, readlink, (const char *restrict path, char *restrict into, size_t nbytes), path, path, into, nbytes)
BY_PATH(int, chmod, (const char *path, mode_t mode), path, path, mode)
BY_PATH(int, chown, (const char *path, uid_t uid, gid_t gid), path, path, uid, gid)
BY_FD(int, fchmod, (int fd, mode_t mode), fd, fd, mode)
BY_PATH(DIR *, opendir, (const char *path), path, path)
BY_FD(DIR *, fdopendir, (int fd), fd, fd)
BY_FD(int, ftruncate, (int fd, off_t nbytes), fd, fd, nbytes)
BY_FD(int, ftruncate64, (int fd, off64_t nbytes), fd, fd, nbytes)
BY_FD(int, posix_fallocate, (int fd, off_t at, off_t nbytes), fd, fd, at, nbytes)
BY_FD(int, posix_fallocate64, (int fd, off64_t at, off64_t nbytes), fd, fd, at, nbytes)
BY_FD(int, fsync, (int fd), fd, fd)
BY_FD(int, fdatasync, (int fd), fd, fd)
BY_FD(int, flock, (int fd, int how), fd, fd, how)
BY_FD(ssize_t, write, (int fd, const void *from, size_t nbytes), fd, fd, from, nbytes)
BY_FD(ssize_t, writev, (int fd, const struct iovec *parts, int count), fd, fd, parts, count)
BY_FD(ssize_t, pwrite, (int fd, const void *from, size_t nbytes, off_t at), fd, fd, from, nbytes, at)
BY_FD(ssize_t, pwrite64, (int fd, const void *from, size_t nbytes, off64_t at), fd, fd, from, nbytes, at)
BY_FD(ssize_t, read, (int fd, void *into, size_t nbytes), fd, fd, into, nbytes)
BY_FD(ssize_t, pread, (int fd, void *into, size_t nbytes, off_t at), fd, fd, into, nbytes, at)
BY_FD(ssize_t, pread64, (int fd, void *into, size_t nbytes, off64_t at), fd, fd, into, nbytes, at)
BY_PATH(int, getaddrinfo,
        (const char *restrict node, const char *restrict service, const struct addrinfo *restrict hints,
         struct addrinfo **restrict found),
        node ? node : "", node, service, hints, found)
BY_PATH(struct hostent *, gethostbyname, (const char *name), name, name)
