/* Stops a process at each of its messages and copies, by LD_PRELOAD. A test names one process (engine, copier, server) and
 * a number; the thread of it that comes to its step of that number says so into one FIFO and waits for the other. The page
 * that STEPS names is shared by all of them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static struct page {
    _Atomic uint64_t armed; /* whose steps, << 32, and how many until it stops; 0: nobody's */
} *page;
static unsigned role; /* of this process */
static char reached[4096], release[4096];

void steps_attach(const char *path, unsigned as) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (at == MAP_FAILED)
        return;
    snprintf(reached, sizeof reached, "%s.reached", path);
    snprintf(release, sizeof release, "%s.release", path);
    role = as;
    page = at;
}

/* The copier is executed by the server: its role comes with its environment. The others are forked, and call. */
__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("STEPS"), *as = getenv("STEPS_ROLE");
    char command[4096];
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, command, sizeof command);
    if (fd >= 0)
        close(fd);
    for (ssize_t at = 0; at < length; at++)
        if (command[at] == 0)
            command[at] = ' ';
    if (path && as && length > 0 && memmem(command, (size_t)length, " -m lmcache_copier ", 19) &&
        !memmem(command, (size_t)length, "prctl", 5)) /* what the server runs before it */
        steps_attach(path, (unsigned)atoi(as));
}

void steps_arm(unsigned whose, unsigned number) {
    atomic_store(&page->armed, (uint64_t)whose << 32 | number);
}

/* Whether somebody has stopped, or will in a moment. */
int steps_disarm(void) {
    uint64_t left = atomic_exchange(&page->armed, 0);
    return left >> 32 && !(uint32_t)left;
}

static void step(const char *what) {
    if (!page || !role)
        return;
    uint64_t armed = atomic_load(&page->armed);
    do
        if (armed >> 32 != role || !(uint32_t)armed)
            return;
    while (!atomic_compare_exchange_weak(&page->armed, &armed, armed - 1));
    if ((uint32_t)armed != 1)
        return;
    int before = errno, fd = open(reached, O_WRONLY | O_CLOEXEC);
    char byte;
    if (write(fd, what, strlen(what)) < 0)
        abort();
    close(fd);
    fd = open(release, O_RDONLY | O_CLOEXEC);
    if (read(fd, &byte, 1) < 0 && errno != EINTR)
        abort();
    close(fd);
    errno = before;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* One byte is what event loops wake themselves with. */
ssize_t send(int fd, const void *bytes, size_t count, int flags) {
    REAL(send);
    if (count > 1)
        step("is to send\n");
    return real(fd, bytes, count, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    step("is to send\n");
    return real(fd, message, flags);
}

ssize_t recv(int fd, void *bytes, size_t count, int flags) {
    REAL(recv);
    ssize_t done = real(fd, bytes, count, flags);
    if (done > 1)
        step("has received\n");
    return done;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    ssize_t done = real(fd, message, flags);
    if (done > 1)
        step("has received\n");
    return done;
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *ours, unsigned long count, const struct iovec *theirs,
                         unsigned long their_count, unsigned long flags) {
    REAL(process_vm_readv);
    step("is to read\n");
    ssize_t done = real(pid, ours, count, theirs, their_count, flags);
    step("has read\n");
    return done;
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *ours, unsigned long count, const struct iovec *theirs,
                          unsigned long their_count, unsigned long flags) {
    REAL(process_vm_writev);
    step("is to write\n");
    ssize_t done = real(pid, ours, count, theirs, their_count, flags);
    step("has written\n");
    return done;
}
