/* A job of many items, done by several threads.
 *
 * The threads are made for the job and end with it: no thread stays that a fork could break or that could keep a
 * process from ending. Making one costs the caller 30 µs, and waking a parked one 12, so keeping them would gain
 * little. Jobs that are too small for either are done alone (`team_size`). The calling thread works as well, and does
 * everything if no thread can be made.
 *
 * Nobody waits for a thread that a busy machine starts late: whenever it comes, it finds the job closed and leaves. So
 * a team is never much slower than the caller alone.
 */
#ifndef LMCACHE_CORE_TEAM_H
#define LMCACHE_CORE_TEAM_H

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEAM_THREADS_MAX = 64, /* more have never copied faster: a few saturate any machine's memory bus */
    TEAM_STACK_BYTES = 256 << 10,
    TEAM_FREE = 1 << 16, /* added to the maximum of threads: use no more than there are idle processors */
};

/* Bytes per thread that make it worth starting: of anything smaller, a late thread loses its share to the others. */
#define TEAM_BYTES_PER_THREAD ((size_t)4 << 20)

typedef struct {
    void (*item)(void *ctx, size_t i);
    void *ctx;
    size_t items;
    atomic_size_t next;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t left;
    unsigned holders; /* users of this memory: the caller, and every thread made */
    unsigned working; /* threads that may be inside an item: in team_run, all but the caller */
    int closed;       /* the caller has no more work: late threads may not touch `ctx` */
} team_job;

static inline void team_work(team_job *job) {
    for (size_t i; (i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->items;)
        job->item(job->ctx, i);
}

/* Give up one hold, with the lock held; the last one frees. */
static inline void team_release(team_job *job) {
    unsigned holders = --job->holders;
    pthread_mutex_unlock(&job->lock);
    if (holders == 0) {
        pthread_mutex_destroy(&job->lock);
        pthread_cond_destroy(&job->left);
        free(job);
    }
}

static inline void *team_member(void *given) {
    team_job *job = given;
    pthread_mutex_lock(&job->lock);
    if (!job->closed) {
        job->working++;
        pthread_mutex_unlock(&job->lock);
        team_work(job);
        pthread_mutex_lock(&job->lock);
        if (--job->working == 0)
            pthread_cond_broadcast(&job->left);
    }
    team_release(job);
    return NULL;
}

/* Let new threads start on any of our processors except the caller's. The scheduler often puts a thread where it was
 * made, and there it waits for the caller's time slice to end: 4 ms, when a whole job takes 2. */
static inline void team_elsewhere(pthread_attr_t *attributes) {
#if defined(__GLIBC__) && defined(CPU_SETSIZE) /* with _GNU_SOURCE */
    cpu_set_t others;
    int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof others, &others) != 0)
        return; /* more processors than the set can hold, or no answer: leave it to the scheduler */
    CPU_CLR((size_t)here, &others);
    if (CPU_COUNT(&others))
        pthread_attr_setaffinity_np(attributes, sizeof others, &others);
#else
    (void)attributes;
#endif
}

/* Make up to `count` threads that work on the job. Returns how many were made. */
static inline unsigned team_call_up(team_job *job, unsigned count) {
    pthread_attr_t attributes;
    pthread_t made;
    sigset_t all, before;
    unsigned called = 0;
    if (pthread_attr_init(&attributes) != 0)
        return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, TEAM_STACK_BYTES);
    team_elsewhere(&attributes);
    /* Signals belong to the threads that the process knows: Python's handlers, or another library's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; called < count; called++) {
        pthread_mutex_lock(&job->lock);
        job->holders++;
        pthread_mutex_unlock(&job->lock);
        if (pthread_create(&made, &attributes, team_member, job) != 0) {
            pthread_mutex_lock(&job->lock);
            job->holders--; /* never the last one: the caller has its own */
            pthread_mutex_unlock(&job->lock);
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return called;
}

/* A new job that only the caller holds; it ends it with team_close. NULL: no memory. */
static inline team_job *team_open(size_t items, void (*item)(void *ctx, size_t i), void *ctx) {
    team_job *job = malloc(sizeof *job);
    if (!job)
        return NULL;
    *job = (team_job){.item = item, .ctx = ctx, .items = items, .holders = 1};
    atomic_init(&job->next, 0);
    pthread_mutex_init(&job->lock, NULL); /* with default attributes, neither can fail */
    pthread_cond_init(&job->left, NULL);
    return job;
}

/* Do one item, if there is one that nobody has begun. */
static inline int team_work_on_one(team_job *job) {
    size_t i = atomic_load_explicit(&job->next, memory_order_relaxed);
    if (i >= job->items || (i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) >= job->items)
        return 0;
    job->item(job->ctx, i);
    return 1;
}

/* Begin no more items. Items in progress go on. */
static inline void team_stop(team_job *job) {
    atomic_store_explicit(&job->next, job->items, memory_order_relaxed);
}

/* Take part as one of the threads; false if the job is closed. The caller holds the job. */
static inline int team_enter(team_job *job) {
    pthread_mutex_lock(&job->lock);
    int open = !job->closed;
    job->working += (unsigned)open;
    job->holders += (unsigned)open;
    pthread_mutex_unlock(&job->lock);
    return open;
}

static inline void team_leave(team_job *job) {
    pthread_mutex_lock(&job->lock);
    if (--job->working == 0)
        pthread_cond_broadcast(&job->left);
    team_release(job);
}

/* Wait until nobody is inside an item, and let nobody start another. The caller, who holds the job, then sees all that
 * was written, and nobody uses `ctx`. */
static inline void team_shut(team_job *job) {
    team_stop(job);
    pthread_mutex_lock(&job->lock);
    job->closed = 1;
    job->holders++;
    while (job->working)
        pthread_cond_wait(&job->left, &job->lock);
    team_release(job);
}

/* The same, and release the caller's own hold. */
static inline void team_close(team_job *job) {
    team_shut(job);
    pthread_mutex_lock(&job->lock);
    team_release(job);
}

/* How many tasks of this machine want a processor, including the caller, from the text of /proc/loadavg; 0 if it does
 * not say. */
static inline unsigned team_running(const char *loadavg) {
    unsigned running, all;
    return sscanf(loadavg, "%*s %*s %*s %u/%u", &running, &all) == 2 ? running : 0;
}

/* Number of idle processors, including the caller's own; all of them if that is unknown. It takes some µs, and is only
 * asked for work that takes hundreds. */
static inline unsigned team_free_processors(void) {
    char text[128];
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    unsigned others = team_running(text);
    others -= others > 0;
    return processors > (long)others ? (unsigned)processors - others : 1;
}

/* How many threads to use for `bytes`, of at most `threads` (0 counts as 1; see TEAM_FREE). */
static inline unsigned team_size(size_t bytes, unsigned threads) {
    size_t worth = bytes / TEAM_BYTES_PER_THREAD;
    bool look = threads >= TEAM_FREE && threads < 2 * TEAM_FREE;
    if (look)
        threads -= TEAM_FREE;
    if (threads > TEAM_THREADS_MAX)
        threads = TEAM_THREADS_MAX;
    if (worth < threads)
        threads = (unsigned)worth;
    if (look && threads > 1) {
        unsigned unused = team_free_processors();
        threads = unused < threads ? unused : threads;
    }
    return threads ? threads : 1;
}

/* Call item(ctx, i) once for each i below `items`, in any order, from at most `threads` threads, including the caller.
 * Returns when all calls have returned; the caller then sees all that they wrote, and nobody uses `ctx`. */
static inline void team_run(size_t items, unsigned threads, void (*item)(void *ctx, size_t i), void *ctx) {
    team_job *job = NULL;
    if (threads > TEAM_THREADS_MAX)
        threads = TEAM_THREADS_MAX;
    if (threads > items)
        threads = (unsigned)items;
    if (threads > 1)
        job = team_open(items, item, ctx);
    if (!job) {
        for (size_t i = 0; i < items; i++)
            item(ctx, i);
        return;
    }
    team_call_up(job, threads - 1);
    team_work(job);
    team_close(job);
}

#endif
