/* The torn-read hunt: a server, workers that write, and readers, each a process of its own over shared memory.
 *
 * The server takes an object out of the index, grants its slot to a worker by a message, and publishes what the worker
 * says it has written, as fast as all of them can. Readers copy and check: every object must be whole and belong to
 * the key that was asked for. Ends with 3 if one was not (what the build without the validation must do).
 * Arguments: rewrites. */
#include "index_rig.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZES = 4, SLOTS = 6, KEYS = 16, WORKERS = 2, READERS = 2, ENTRIES = 256, BATCH = 4 };

static const uint64_t sizes[SIZES] = {64, 4096, 65536, 1 << 20};

typedef struct {
    atomic_bool over;
    atomic_ullong whole[SIZES], torn, changed;
} board;

typedef struct {
    uint64_t number, stamp, slot, size;
} grant;

static rig pool;
static board *shared;

static uint64_t slot_offset(uint64_t size, uint64_t slot) {
    uint64_t offset = pool.writer.view.data_offset;
    for (uint64_t s = 0; s < size; s++)
        offset += SLOTS * (sizes[s] < INDEX_PAGE_BYTES ? INDEX_PAGE_BYTES : sizes[s]);
    return offset + slot * (sizes[size] < INDEX_PAGE_BYTES ? INDEX_PAGE_BYTES : sizes[size]);
}

/* Numbers tell keys of different sizes apart. */
static uint64_t key_number(uint64_t size, uint64_t key) { return size * KEYS + key; }

/* Fill memory of its own and copy that in, by the same code as a client's store: streaming and checksum included. */
static void work(int channel) {
    unsigned char *mine = malloc(sizes[SIZES - 1]);
    grant given;
    while (read(channel, &given, sizeof given) == (ssize_t)sizeof given) {
        uint64_t n = sizes[given.size];
        object_fill(mine, n, given.number, given.stamp);
        copy_checksum_of(pool.base + slot_offset(given.size, given.slot), mine, n, given.stamp % 2 ? n : 1 << 20);
        if (write(channel, &given, sizeof given) != (ssize_t)sizeof given)
            break;
    }
    free(mine);
}

static void hunt(uint64_t seed) {
    uint64_t dice = seed, numbers[BATCH], targets[BATCH];
    unsigned char row[BATCH * INDEX_KEY_BYTES], *memory = malloc(BATCH * sizes[SIZES - 1]);
    uint8_t statuses[BATCH];
    index_place places[BATCH];
    for (int i = 0; i < BATCH; i++)
        targets[i] = (uint64_t)(uintptr_t)memory + (uint64_t)i * sizes[SIZES - 1];
    while (!atomic_load(&shared->over)) {
        uint64_t size = rig_random(&dice) % SIZES;
        for (int i = 0; i < BATCH; i++) {
            numbers[i] = key_number(size, rig_random(&dice) % KEYS);
            rig_key_bytes(row + i * INDEX_KEY_BYTES, numbers[i]);
        }
        index_batch batch = {.in_a_row = row, .n = BATCH, .space = RIG_SPACE, .layout = RIG_LAYOUT};
        index_reading reading = {.view = &pool.writer.view,
                                 .batch = &batch,
                                 .nbytes = sizes[size],
                                 .targets = targets,
                                 .places = places,
                                 .statuses = statuses};
        uint64_t count = index_read_batch(&reading, 1);
        for (uint64_t i = 0; i < count; i++) {
            if (statuses[i] == INDEX_CHANGED)
                atomic_fetch_add(&shared->changed, 1);
            if (statuses[i] != INDEX_HIT)
                continue;
            if (object_whole((unsigned char *)(uintptr_t)targets[i], sizes[size], numbers[i]))
                atomic_fetch_add(&shared->whole[size], 1);
            else
                atomic_fetch_add(&shared->torn, 1);
        }
        if (atomic_load(&shared->torn))
            atomic_store(&shared->over, true);
    }
    free(memory);
}

static pid_t start(void (*body)(uint64_t), void (*worker)(int), uint64_t seed, int channel) {
    fflush(NULL);
    pid_t child = rig_fork();
    if (child == 0) {
        if (worker)
            worker(channel);
        else
            body(seed);
        _exit(0);
    }
    return child;
}

/* One slot of every worker is always being written; the rest is being read. */
static uint64_t serve(const int *channels, uint64_t rewrites) {
    static uint64_t owner[SIZES][SLOTS], slot_of[SIZES][KEYS];
    static bool writing[SIZES][SLOTS];
    static grant given[WORKERS];
    uint64_t dice = 4711, done = 0;
    memset(owner, 0xff, sizeof owner);
    memset(slot_of, 0xff, sizeof slot_of);
    for (uint64_t turn = 0; turn < rewrites + WORKERS && !atomic_load(&shared->over); turn++) {
        int w = (int)(turn % WORKERS);
        grant *g = &given[w];
        if (turn >= WORKERS) {
            ssize_t got;
            while ((got = read(channels[w], g, sizeof *g)) < 0 && errno == EINTR)
                ;
            CHECK(got == (ssize_t)sizeof *g, "worker %d is gone", w);
            CHECK(rig_publish(&pool, g->number, slot_offset(g->size, g->slot), sizes[g->size], 0), "room");
            owner[g->size][g->slot] = g->number;
            slot_of[g->size][g->number % KEYS] = g->slot;
            writing[g->size][g->slot] = false;
            done++;
        }
        do {
            g->size = rig_random(&dice) % SIZES;
            g->slot = rig_random(&dice) % SLOTS;
            g->number = key_number(g->size, rig_random(&dice) % KEYS);
        } while (writing[g->size][g->slot] || slot_of[g->size][g->number % KEYS] != UINT64_MAX);
        uint64_t before = owner[g->size][g->slot];
        if (before != UINT64_MAX) {
            CHECK(rig_remove(&pool, before, slot_offset(g->size, g->slot)), "key %llu", (unsigned long long)before);
            slot_of[g->size][before % KEYS] = UINT64_MAX;
        }
        owner[g->size][g->slot] = UINT64_MAX;
        writing[g->size][g->slot] = true;
        slot_of[g->size][g->number % KEYS] = g->slot; /* being written: nobody else gets the key */
        g->stamp = turn << 20;
        if (rig_random(&dice) % 2)
            g->stamp++;
        CHECK(write(channels[w], g, sizeof *g) == (ssize_t)sizeof *g, "worker %d is gone", w);
        if (turn % 8 == 0)
            index_tidy(&pool.writer, 32);
    }
    return done;
}

static bool all_seen(void) {
    for (int size = 0; size < SIZES; size++)
        if (atomic_load(&shared->whole[size]) == 0)
            return false;
    return true;
}

int main(int argc, char **argv) {
    uint64_t rewrites = argc > 1 ? (uint64_t)atoll(argv[1]) : RIG_SHARE(2000), done;
    pid_t children[WORKERS + READERS];
    int channels[WORKERS], failed = 0;
    signal(SIGPIPE, SIG_IGN);
    rig_open(&pool, ENTRIES, UINT64_C(8) << 20);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED, "memory");
    for (int i = 0; i < WORKERS; i++) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "socketpair");
        channels[i] = pair[0];
        children[i] = start(NULL, work, 0, pair[1]);
        close(pair[1]);
    }
    for (int i = 0; i < READERS; i++)
        children[WORKERS + i] = start(hunt, NULL, (uint64_t)i, -1);
    done = serve(channels, rewrites);
    while (!atomic_load(&shared->over) && !all_seen())
        usleep(100);
    atomic_store(&shared->over, true);
    for (int i = 0; i < WORKERS; i++)
        shutdown(channels[i], SHUT_RDWR);
    for (int i = 0; i < WORKERS + READERS; i++) {
        int status;
        CHECK(waitpid(children[i], &status, 0) == children[i], "child %d", i);
        failed |= status;
    }
    printf("%llu rewrites; whole:", (unsigned long long)done);
    for (int size = 0; size < SIZES; size++)
        printf(" %llu of %llu bytes,", atomic_load(&shared->whole[size]), (unsigned long long)sizes[size]);
    printf(" given up: %llu, torn: %llu\n", atomic_load(&shared->changed), atomic_load(&shared->torn));
    CHECK(failed == 0, "a child failed");
    return atomic_load(&shared->torn) ? RIG_TORN : 0;
}
