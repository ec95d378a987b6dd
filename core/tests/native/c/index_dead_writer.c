/* Writers that are killed at any moment, each followed by another on the same memory, while a reader goes on reading:
 * never a wrong byte, never an endless wait, and nothing that the dead one left keeps the next one from working.
 * Arguments: deaths. */
#include "index_rig.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ENTRIES = 128, KEYS = 48, SLOTS = 40, NBYTES = 4096 };

typedef struct {
    atomic_bool over;
    atomic_ullong changes, whole, torn, stamp;
} board;

static rig pool;
static board *shared;

static uint64_t slot_offset(uint64_t slot) { return pool.writer.view.data_offset + slot * INDEX_PAGE_BYTES; }

static void reads(void) {
    uint64_t dice = 5, target;
    unsigned char row[INDEX_KEY_BYTES], *memory = malloc(NBYTES);
    uint8_t status;
    index_place place;
    target = (uint64_t)(uintptr_t)memory;
    while (!atomic_load(&shared->over)) {
        uint64_t number = rig_random(&dice) % KEYS;
        rig_key_bytes(row, number);
        index_batch batch = {.in_a_row = row, .n = 1, .space = RIG_SPACE, .layout = RIG_LAYOUT};
        index_reading reading = {.view = &pool.writer.view,
                                 .batch = &batch,
                                 .nbytes = NBYTES,
                                 .targets = &target,
                                 .places = &place,
                                 .statuses = &status};
        index_read_batch(&reading, 1);
        if (status == INDEX_HIT)
            atomic_fetch_add(object_whole(memory, NBYTES, number) ? &shared->whole : &shared->torn, 1);
    }
    free(memory);
}

/* What the dead one left: entries that stand twice agree about the slot, and BUSY ones are nobody's. */
static void take_over(uint64_t *owner, uint64_t *slot_of) {
    memset(owner, 0xff, SLOTS * sizeof *owner);
    memset(slot_of, 0xff, KEYS * sizeof *slot_of);
    index_recount(&pool.writer);
    for (uint64_t number = 0; number < KEYS; number++) {
        index_key key = rig_key(number);
        for (uint64_t at = 0; at < ENTRIES; at++) {
            const index_entry *entry = &pool.writer.view.entries[at];
            if (index_state(index_sequence(&pool.writer, at)) != INDEX_READY || !index_same_key(entry, &key))
                continue;
            uint64_t slot = (index_load(&entry->offset) - pool.writer.view.data_offset) / INDEX_PAGE_BYTES;
            CHECK(slot < SLOTS, "slot %llu", (unsigned long long)slot);
            CHECK(slot_of[number] == UINT64_MAX || slot_of[number] == slot, "key %llu stands in two slots",
                  (unsigned long long)number);
            CHECK(owner[slot] == UINT64_MAX || owner[slot] == number, "slot %llu has two keys",
                  (unsigned long long)slot);
            slot_of[number] = slot;
            owner[slot] = number;
        }
        index_place place;
        int found = rig_find(&pool.writer.view, number, &place);
        CHECK((found == INDEX_HIT) == (slot_of[number] != UINT64_MAX), "key %llu stands out of reach",
              (unsigned long long)number);
    }
}

static void writes(uint64_t seed) {
    static uint64_t owner[SLOTS], slot_of[KEYS];
    uint64_t dice = seed;
    take_over(owner, slot_of);
    for (;;) {
        uint64_t slot = rig_random(&dice) % SLOTS, number = rig_random(&dice) % KEYS;
        if (slot_of[number] != UINT64_MAX)
            continue;
        if (owner[slot] != UINT64_MAX) {
            CHECK(rig_remove(&pool, owner[slot], slot_offset(slot)), "key %llu", (unsigned long long)owner[slot]);
            slot_of[owner[slot]] = UINT64_MAX;
            owner[slot] = UINT64_MAX;
        }
        object_fill(pool.base + slot_offset(slot), NBYTES, number, atomic_fetch_add(&shared->stamp, 1) << 20);
        if (rig_publish(&pool, number, slot_offset(slot), NBYTES, 0)) {
            owner[slot] = number;
            slot_of[number] = slot;
        }
        index_tidy(&pool.writer, 16);
        atomic_fetch_add(&shared->changes, 1);
    }
}

static pid_t start(void (*body)(uint64_t), void (*reader)(void), uint64_t seed) {
    fflush(NULL);
    pid_t child = rig_fork();
    if (child == 0) {
        if (reader)
            reader();
        else
            body(seed);
        _exit(0);
    }
    return child;
}

int main(int argc, char **argv) {
    uint64_t deaths = argc > 1 ? (uint64_t)atoll(argv[1]) : RIG_SHARE(100), dice = 1;
    int status;
    rig_open(&pool, ENTRIES, SLOTS * INDEX_PAGE_BYTES);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED, "memory");
    pid_t reader = start(NULL, reads, 0);
    for (uint64_t death = 0; death < deaths && atomic_load(&shared->torn) == 0; death++) {
        uint64_t until = atomic_load(&shared->changes) + 1 + rig_random(&dice) % 400;
        pid_t writer = start(writes, NULL, death);
        /* It dies wherever it happens to be when this many changes are done. */
        while (atomic_load(&shared->changes) < until) {
            CHECK(waitpid(writer, &status, WNOHANG) == 0, "the writer ended by itself after %llu deaths",
                  (unsigned long long)death);
            sched_yield();
        }
        kill(writer, SIGKILL);
        CHECK(waitpid(writer, &status, 0) == writer && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
              "status %d", status);
    }
    while (atomic_load(&shared->whole) == 0 && atomic_load(&shared->torn) == 0)
        sched_yield();
    atomic_store(&shared->over, true);
    CHECK(waitpid(reader, &status, 0) == reader && status == 0, "the reader ended with %d", status);
    printf("%llu deaths, %llu changes, %llu whole, %llu torn\n", (unsigned long long)deaths,
           atomic_load(&shared->changes), atomic_load(&shared->whole), atomic_load(&shared->torn));
    return atomic_load(&shared->torn) ? RIG_TORN : 0;
}
