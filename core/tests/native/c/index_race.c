/* One writer and several readers, as threads of one process: what a thread sanitizer watches. Every object that is
 * read must be whole and belong to its key. Ends with 3 at the first torn one (what the build without the validation
 * must do). Arguments: changes. */
#include "index_rig.h"

#include <pthread.h>
#include <sched.h>

/* Few keys and fewer slots, in a table as small as it may be: everything is being changed all the time. */
enum { ENTRIES = 64, KEYS = 48, SLOTS = 24, READERS = 3, NBYTES = 2048, BATCH = 8 };

static rig pool;
static atomic_bool over;
static atomic_ullong whole, torn, damaged;

typedef struct {
    uint64_t seed;
    int verify;
    unsigned threads;
} reader;

static void *reads(void *argument) {
    reader *self = argument;
    uint64_t dice = self->seed, numbers[BATCH], targets[BATCH];
    unsigned char row[BATCH * INDEX_KEY_BYTES];
    uint8_t statuses[BATCH];
    index_place places[BATCH];
    unsigned char *memory = malloc(BATCH * NBYTES);
    _Atomic uint32_t *verified = calloc(ENTRIES, sizeof *verified);
    for (int i = 0; i < BATCH; i++)
        targets[i] = (uint64_t)(uintptr_t)(memory + i * NBYTES);
    while (!atomic_load(&over)) {
        for (int i = 0; i < BATCH; i++) {
            numbers[i] = rig_random(&dice) % KEYS;
            rig_key_bytes(row + i * INDEX_KEY_BYTES, numbers[i]);
        }
        index_batch batch = {
            .in_a_row = row, .n = BATCH, .space = RIG_SPACE, .layout = RIG_LAYOUT, .prefix = rig_random(&dice) % 4 == 0};
        index_reading reading = {.view = &pool.writer.view,
                                 .batch = &batch,
                                 .nbytes = NBYTES,
                                 .targets = targets,
                                 .verify = self->verify,
                                 .verified = verified,
                                 .places = places,
                                 .statuses = statuses};
        uint64_t count = index_read_batch(&reading, self->threads);
        for (uint64_t i = 0; i < count; i++) {
            if (statuses[i] == INDEX_DAMAGED)
                atomic_fetch_add(&damaged, 1); /* nobody damages anything here */
            if (statuses[i] != INDEX_HIT)
                continue;
            atomic_fetch_add(object_whole(memory + i * NBYTES, NBYTES, numbers[i]) ? &whole : &torn, 1);
        }
        if (atomic_load(&torn) || atomic_load(&damaged))
            atomic_store(&over, true);
    }
    free(memory);
    free((void *)verified);
    return NULL;
}

/* As the server: out of the index first, then the slot has a new owner, then into the index. */
static void writes(uint64_t changes) {
    uint64_t dice = 99, owner[SLOTS], slot_of[KEYS];
    static unsigned char copy[NBYTES];
    for (int i = 0; i < SLOTS; i++)
        owner[i] = UINT64_MAX;
    for (int i = 0; i < KEYS; i++)
        slot_of[i] = UINT64_MAX;
    for (uint64_t change = 0; change < changes && !atomic_load(&over); change++) {
        uint64_t slot = rig_random(&dice) % SLOTS, number = rig_random(&dice) % KEYS;
        uint64_t offset = pool.writer.view.data_offset + slot * INDEX_PAGE_BYTES;
        if (slot_of[number] != UINT64_MAX)
            continue; /* it is there */
        if (owner[slot] != UINT64_MAX) {
            CHECK(rig_remove(&pool, owner[slot], offset), "key %llu", (unsigned long long)owner[slot]);
            slot_of[owner[slot]] = UINT64_MAX;
        }
        object_fill(pool.base + offset, NBYTES, number, change << 20);
        object_fill(copy, NBYTES, number, change << 20);
        CHECK(rig_publish(&pool, number, offset, NBYTES, xxh3_64(copy, NBYTES)), "room");
        owner[slot] = number;
        slot_of[number] = slot;
        if (change % 8 == 0)
            index_tidy(&pool.writer, 16);
    }
}

int main(int argc, char **argv) {
    uint64_t changes = argc > 1 ? (uint64_t)atoll(argv[1]) : RIG_SHARE(30000);
    pthread_t threads[READERS];
    reader readers[READERS] = {{1, INDEX_VERIFY_NEVER, 1}, {2, INDEX_VERIFY_ALWAYS, 1}, {3, INDEX_VERIFY_FIRST, 2}};
    rig_open(&pool, ENTRIES, SLOTS * INDEX_PAGE_BYTES);
    for (int i = 0; i < READERS; i++)
        CHECK(pthread_create(&threads[i], NULL, reads, &readers[i]) == 0, "thread");
    writes(changes);
    while (!atomic_load(&over) && atomic_load(&whole) == 0) /* on one core the readers may not have had a turn */
        sched_yield();
    atomic_store(&over, true);
    for (int i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    printf("%llu whole, %llu torn, %llu damaged\n", atomic_load(&whole), atomic_load(&torn), atomic_load(&damaged));
    rig_close(&pool);
    return atomic_load(&torn) || atomic_load(&damaged) ? RIG_TORN : 0;
}
