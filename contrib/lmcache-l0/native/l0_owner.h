/* Who writes, and who is dead: writer rows, life locks, and the lock of a slot or a stripe.
 *
 * A process that writes owns one row of the writer table. It holds a lock on that row's byte of the file, taken on an
 * open file description of its own. A descriptor does not keep that description, because anything in the process may
 * close it (a daemon closes them all). A mapping of one page does, and no child has it after a fork (MADV_DONTFORK).
 * The operating system frees the lock with the mapping: when the process ends, in any way, or replaces itself. So "the
 * byte can be locked" is proof of death, in any pid namespace; a process id proves nothing, and is soon reused.
 *
 * A lock word names its owner as row << 48 | epoch. The epoch moves each time a row is taken, before its new owner
 * takes any slot. So an owner is dead if its row's epoch has moved on (whoever moved it held the life lock, so the
 * former owner had lost it), or if the row's life lock is free. Only then may its locks be taken, by one
 * compare-and-swap from exactly that owner.
 */
#ifndef L0_OWNER_H
#define L0_OWNER_H

#include "l0_layout.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif

#if defined(F_OFD_SETLK) && defined(MADV_DONTFORK)
#define L0_OWN_LOCKS 1
#define L0_SETLK F_OFD_SETLK
#define L0_GETLK F_OFD_GETLK
#else
/* Without open-file-description locks the lock belongs to the process. That is as good a proof of death between
 * processes, but two handles of one process do not see each other's lock, and closing any descriptor of the file drops
 * the lock of all. There, use one handle of a table per process (docs/l0/table.md says so). */
#define L0_OWN_LOCKS 0
#define L0_SETLK F_SETLK
#define L0_GETLK F_GETLK
#endif

static inline void l0_row_range(struct flock *range, uint64_t row) {
    memset(range, 0, sizeof *range);
    range->l_type = F_WRLCK;
    range->l_whence = SEEK_SET;
    range->l_start = (off_t)(L0_HEADER_BYTES + row * sizeof(l0_writer_row));
    range->l_len = 1;
}

/* Is `fd` still a descriptor of this table's file? */
static inline bool l0_same_file(const l0_table *t, int fd) {
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 && (uint64_t)st.st_dev == t->dev && (uint64_t)st.st_ino == t->ino;
}

/* Mappings of this file must be multiples of this: more than a page on a hugetlbfs. */
static inline uint64_t l0_page_bytes(int fd) {
#ifdef __linux__
    struct statfs held;
    if (fstatfs(fd, &held) == 0 && (uint32_t)held.f_type == 0x958458f6u /* HUGETLBFS_MAGIC */)
        return (uint64_t)held.f_bsize;
#else
    (void)fd;
#endif
    return L0_HEADER_BYTES;
}

/* Hand the descriptor's lock over to a mapping, and close it. If the system cannot do that, the descriptor stays. */
static inline int l0_keep_lock(l0_table *t, int fd) {
    t->life_fd = fd;
    t->life = NULL;
#if L0_OWN_LOCKS
    uint64_t bytes = l0_page_bytes(fd);
    void *page = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return errno;
    if (madvise(page, bytes, MADV_DONTFORK) != 0) {
        int failed = errno;
        munmap(page, bytes);
        return failed;
    }
    t->life = page;
    t->life_bytes = bytes;
    t->life_fd = -1;
    close(fd);
#endif
    return 0;
}

/* Take a free row with `fd`, our own open description of the table's file, which is used up on success. 0, or EAGAIN if
 * every row is taken, or the errno of a call that failed. */
static inline int l0_writer_join(l0_table *t, int fd) {
    uint64_t start = (uint64_t)getpid();
    for (uint64_t i = 0; i < L0_WRITERS_MAX; i++) {
        uint64_t row = (start + i) % L0_WRITERS_MAX;
        struct flock range;
        l0_row_range(&range, row);
        if (fcntl(fd, L0_SETLK, &range) != 0) {
            if (errno == EAGAIN || errno == EACCES)
                continue;
            return errno;
        }
        int failed = l0_keep_lock(t, fd);
        if (failed)
            return failed;
        l0_writer_row *r = l0_row(t, row);
        uint64_t epoch = (atomic_load(&r->epoch) + 1) & ((UINT64_C(1) << 48) - 1);
        if (epoch == 0)
            epoch = 1;
        atomic_store(&r->pid, (uint64_t)getpid());
        atomic_store(&r->epoch, epoch); /* seq_cst, before the first lock word that carries it */
        t->me = row << 48 | epoch;
        return 0;
    }
    return EAGAIN;
}

static inline void l0_writer_leave(l0_table *t) {
    if (t->life != NULL)
        munmap(t->life, t->life_bytes);
    if (t->life_fd >= 0)
        close(t->life_fd);
    t->life = NULL;
    t->life_fd = -1;
    t->me = 0;
}

/* In a forked child: the lock belongs to the parent alone. Nothing to unmap: the child does not have the page. */
static inline void l0_writer_forked(l0_table *t) {
    if (t->life_fd >= 0)
        close(t->life_fd);
    t->life = NULL;
    t->life_fd = -1;
    t->me = 0;
}

static inline bool l0_owner_dead(const l0_table *t, uint64_t owner) {
    uint64_t row = owner >> 48;
    if (row >= L0_WRITERS_MAX)
        return true; /* no writer ever had this name: the file was damaged */
    if (atomic_load(&l0_row(t, row)->epoch) != (owner & ((UINT64_C(1) << 48) - 1)))
        return true;
    if (row == t->me >> 48)
        return false; /* our own row: another thread of this handle */
    struct flock range;
    l0_row_range(&range, row);
    if (!l0_same_file(t, t->ask_fd) || fcntl(t->ask_fd, L0_GETLK, &range) != 0)
        return false; /* not proven */
    return range.l_type == F_UNLCK;
}

static inline void l0_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

static inline uint64_t l0_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef enum l0_locked { L0_LOCKED = 0, L0_LOCKED_FROM_DEAD, L0_LOCK_BUSY } l0_locked;

static inline bool l0_lock_try(const l0_table *t, _Atomic uint64_t *lock) {
    uint64_t free = 0;
    return atomic_compare_exchange_strong_explicit(lock, &free, t->me, memory_order_acquire, memory_order_relaxed);
}

static inline void l0_unlock(_Atomic uint64_t *lock) { atomic_store_explicit(lock, 0, memory_order_release); }

#define L0_SPINS 200u

/* Take a lock, from a dead owner if need be. With wait_ns 0 it only spins for a moment and asks nobody. */
static inline l0_locked l0_lock(const l0_table *t, _Atomic uint64_t *lock, uint64_t wait_ns) {
    for (unsigned i = 0; i < L0_SPINS; i++) {
        if (atomic_load_explicit(lock, memory_order_relaxed) == 0 && l0_lock_try(t, lock))
            return L0_LOCKED;
        l0_pause();
    }
    if (wait_ns == 0)
        return L0_LOCK_BUSY;
    uint64_t until = l0_now_ns() + wait_ns;
    for (long nap_ns = 20000;; nap_ns = nap_ns < 1000000 ? nap_ns * 2 : nap_ns) {
        uint64_t owner = atomic_load_explicit(lock, memory_order_relaxed);
        if (owner == 0) {
            if (l0_lock_try(t, lock))
                return L0_LOCKED;
            continue;
        }
        if (l0_owner_dead(t, owner)) {
            if (atomic_compare_exchange_strong_explicit(lock, &owner, t->me, memory_order_acquire,
                                                        memory_order_relaxed))
                return L0_LOCKED_FROM_DEAD;
            continue;
        }
        if (l0_now_ns() >= until)
            return L0_LOCK_BUSY;
        struct timespec nap = {0, nap_ns};
        nanosleep(&nap, NULL);
    }
}

#endif
