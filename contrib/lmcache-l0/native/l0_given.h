/* Memory that a caller has given: whether it is there is the system's to say, before a signal does. */
#ifndef L0_GIVEN_H
#define L0_GIVEN_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* A futex operation that wakes nobody and adds 0: the system looks at the word as we would, and answers EFAULT where we
 * would get a signal. */
static inline bool l0_reaches_word(uintptr_t at, bool writes) {
    static uint32_t own;
    void *word = (void *)(at & ~(uintptr_t)3);
    const long answer = writes ? syscall(SYS_futex, &own, FUTEX_WAKE_OP_PRIVATE, 0, NULL, word,
                                         FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0))
                               : syscall(SYS_futex, word, FUTEX_CMP_REQUEUE_PRIVATE, 0, NULL, &own, 0);
    return answer >= 0 || errno != EFAULT;
}

/* Touch every page as the copy will, also those that have to be allocated first. Where the system refuses to (a mapping
 * without the permission, Linux before 5.14), it looks at a word of each. */
static inline bool l0_reaches(const void *from, size_t n, bool writes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)from & ~(page - 1);
    const uintptr_t last = (uintptr_t)from + n - 1;
    const int kept = errno;
    bool there = madvise((void *)first, last - first + 1, writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0;
    if (!there && errno != EINVAL)
        there = errno != EFAULT && errno != ENOMEM;
    else if (!there) {
        there = true;
        for (uintptr_t at = (uintptr_t)from; there && at <= last; at = (at & ~(page - 1)) + page)
            there = l0_reaches_word(at, writes);
    }
    errno = kept;
    return there;
}

#else /* nobody to ask */

static inline bool l0_reaches(const void *from, size_t n, bool writes) {
    (void)from, (void)n, (void)writes;
    return true;
}

#endif
#endif
