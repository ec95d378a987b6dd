/* Every item is done once, by whom ever; nothing of a job is touched after team_run has returned; jobs of several
 * callers do not meet; a child that forked while jobs ran can run its own; where no thread can be made, the caller does
 * it all. Arguments: rounds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "team.h"

#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

enum { ITEMS_MAX = 300, CALLERS = 3 };

typedef struct {
    unsigned char times[ITEMS_MAX]; /* each by one thread only: plain bytes, so a sanitizer would see a second */
} page;

struct seen {
    pthread_t caller;
};

static void count_it(void *ctx, size_t i) { ((page *)ctx)->times[i]++; }

static void run_jobs(size_t rounds) {
    for (size_t round = 0; round < rounds; round++) {
        page job; /* on the stack: a thread that comes late would write into the next one */
        size_t items = round * 7 % ITEMS_MAX;
        memset(&job, 0, sizeof job);
        team_run(items, (unsigned)(round % 7), count_it, &job);
        for (size_t i = 0; i < ITEMS_MAX; i++)
            CHECK(job.times[i] == (i < items), "item %zu of %zu was done %d times", i, items, job.times[i]);
    }
}

static void *caller(void *rounds) {
    run_jobs(*(size_t *)rounds);
    return NULL;
}

static void check_several_callers(size_t rounds) {
    pthread_t others[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_create(&others[i], NULL, caller, &rounds) == 0, "no thread");
    for (int i = 0; i < CALLERS; i++)
        pthread_join(others[i], NULL);
}

/* Only the plain program forks beside other threads. The sanitizers lock a registry of threads around each
 * pthread_create, and the emulator that runs this for arm64 has such locks too: a child that was forked meanwhile waits
 * for ever for a lock that nobody holds in it. */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(__aarch64__)
#define CAN_FORK

static void check_fork(size_t rounds) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, caller, &rounds) == 0, "no thread");
    for (int i = 0; i < 5; i++) {
        int status = 0;
        pid_t child = fork();
        CHECK(child >= 0, "no child: %s", strerror(errno));
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* not SIGALRM, which a thread that makes others blocks */
            run_jobs(20);
            _exit(0);
        }
        alarm(60); /* if the child hangs, this ends us, and our end ends it */
        CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %d", status);
        alarm(0);
    }
    pthread_join(other, NULL);
}

#endif

/* A signal that a team's thread took would run the process's handler on a thread that nobody knows. */
static void see_mask(void *ctx, size_t i) {
    sigset_t mask;
    struct seen *seen = ctx;
    (void)i;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    if (pthread_equal(pthread_self(), seen->caller))
        CHECK(!sigismember(&mask, SIGUSR1), "the caller's signals are blocked");
    else
        CHECK(sigismember(&mask, SIGUSR1), "a member of the team takes signals");
}

static void check_sizes(void) {
    CHECK(team_size(0, 0) == 1 && team_size(1 << 30, 1) == 1, "at least the caller");
    CHECK(team_size(TEAM_BYTES_PER_THREAD, 8) == 1, "too small to share");
    CHECK(team_size(3 * TEAM_BYTES_PER_THREAD, 8) == 3, "by the bytes");
    CHECK(team_size((size_t)-1, 1000) == TEAM_THREADS_MAX, "bounded");
    CHECK(team_size(0, TEAM_FREE) == 1 && team_size(TEAM_BYTES_PER_THREAD, TEAM_FREE + 8) == 1, "nobody looks");
    unsigned most = team_size(8 * TEAM_BYTES_PER_THREAD, TEAM_FREE + 8);
    CHECK(most >= 1 && most <= 8 && most <= (unsigned)sysconf(_SC_NPROCESSORS_ONLN), "by what is free");
    CHECK(team_free_processors() >= 1, "the caller's own");
    CHECK(team_running("0.20 0.18 0.12 3/80 11206") == 3, "as the kernel says it");
    CHECK(team_running("") == 0 && team_running("0.20 nonsense") == 0, "where it does not");
}

int main(int argc, char **argv) {
#if defined(__aarch64__) /* emulated: making threads is slow there */
    size_t rounds = 20;
#else
    size_t rounds = 200;
#endif
    if (argc > 1)
        rounds = strtoul(argv[1], NULL, 10);
    struct seen seen = {pthread_self()};
    run_jobs(rounds);
    for (size_t round = 0; round < rounds; round++)
        team_run(ITEMS_MAX, 3, see_mask, &seen);
    check_sizes();
    check_several_callers(rounds);
#ifdef CAN_FORK
    check_fork(rounds);
#endif
    struct rlimit none = {1, 1}; /* root is not held to it; everyone else can make no thread from here on */
    CHECK(setrlimit(RLIMIT_NPROC, &none) == 0, "no limit");
    run_jobs(rounds);
    return 0;
}
