/* Several writers and readers on a few keys of a small table. Every value that is read must be whole and belong to its
 * key; no key may be in two slots; nothing may be left locked. Exit 3: a torn value was read (what the negative
 * control must end with). */
#include "rig.h"

#include <pthread.h>

enum { SLOTS = 11, KEYS = 6, VALUE = 2048, WRITERS = 3, READERS = 2 };

typedef struct worker {
    rig *r;
    l0_table t;
    uint64_t seed;
    long steps, done;
} worker;

static atomic_long torn, reads, writes_left;

static void *write_keys(void *argument) {
    worker *w = argument;
    unsigned char key_bytes[16], value[VALUE];
    while (atomic_fetch_sub(&writes_left, 1) > 0 && atomic_load(&torn) == 0) {
        uint64_t number = rig_random(&w->seed) % KEYS;
        l0_key key = numbered_key(&w->t, key_bytes, number);
        size_t n = 16 + rig_random(&w->seed) % (VALUE - 15);
        bool inserted;
        l0_result result;
        value_fill(value, n, number, rig_random(&w->seed));
        switch (rig_random(&w->seed) % 8) {
        case 0:
        case 1:
            result = l0_delete(&w->t, key, 60000000000u);
            CHECK(result == L0_DONE || result == L0_MISS, "delete: %d", result);
            break;
        case 2:
            result = l0_insert(&w->t, key, (l0_value){value, n, 0}, l0_ticket(&w->t, key), 60000000000u);
            CHECK(result == L0_DONE || result == L0_MOVED, "insert: %d", result);
            break;
        default:
            result = l0_put(&w->t, key, (l0_value){value, n, 0}, 60000000000u, &inserted);
            CHECK(result == L0_DONE, "put: %d", result);
        }
    }
    return NULL;
}

static void *read_keys(void *argument) {
    worker *w = argument;
    unsigned char key_bytes[16], value[VALUE];
    while (atomic_load(&writes_left) > 0 && atomic_load(&torn) == 0) {
        uint64_t number = rig_random(&w->seed) % KEYS;
        l0_key key = numbered_key(&w->t, key_bytes, number);
        l0_found found;
        if (l0_look(&w->t, key, &found) != L0_DONE)
            continue;
        /* Stop in the middle now and then: that is when writers overtake a reader. */
        size_t half = found.n / 16 * 8;
        l0_copy_out(value, found.bytes, half);
        if (rig_random(&w->seed) % 16 == 0)
            sched_yield();
        l0_copy_out(value + half, found.bytes + half, found.n - half);
        if (!l0_intact(&found))
            continue;
        atomic_fetch_add(&reads, 1);
        if (!value_whole(value, found.n, number))
            atomic_fetch_add(&torn, 1);
    }
    return NULL;
}

static void check_rest(l0_table *t) {
    unsigned seen[KEYS] = {0};
    l0_survey s = {0};
    l0_survey_add(t, 0, SLOTS, &s);
    CHECK(s.claimed == 0 && s.locked == 0, "left behind: %llu claims, %llu locks", (unsigned long long)s.claimed,
          (unsigned long long)s.locked);
    CHECK(s.keys == atomic_load(&l0_head(t)->keys), "count");
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        l0_resident resident;
        uint64_t number;
        if (!l0_resident_at(t, slot, &resident))
            continue;
        memcpy(&number, resident.key, 8);
        CHECK(number < KEYS && ++seen[number] == 1, "key %llu stands twice", (unsigned long long)number);
        unsigned char key_bytes[16];
        l0_found found;
        CHECK(l0_find(t, numbered_key(t, key_bytes, number), &found) == L0_DONE && found.slot == slot,
              "key %llu is out of reach", (unsigned long long)number);
    }
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 20, writes = argc > 2 ? atol(argv[2]) : 2000;
    for (long round = 0; round < rounds && atomic_load(&torn) == 0; round++) {
        rig r;
        worker workers[WRITERS + READERS];
        pthread_t threads[WRITERS + READERS];
        /* Stripes with 1 and 2 spares, and 1 and 2 versions. */
        rig_open(&r, SLOTS, VALUE, 16, round % 4 < 2 ? 0 : 1 + (uint64_t)round % 2, 1 + (uint64_t)round % 2);
        atomic_store(&writes_left, writes);
        for (int i = 0; i < WRITERS + READERS; i++) {
            workers[i] = (worker){.r = &r, .seed = (uint64_t)(round * 97 + i)};
            workers[i].t = r.table;
            if (i < WRITERS)
                rig_join(&r, &workers[i].t);
        }
        for (int i = 0; i < WRITERS + READERS; i++)
            pthread_create(&threads[i], NULL, i < WRITERS ? write_keys : read_keys, &workers[i]);
        for (int i = 0; i < WRITERS + READERS; i++)
            pthread_join(threads[i], NULL);
        check_rest(&workers[0].t);
        for (int i = 0; i < WRITERS; i++)
            rig_leave(&workers[i].t);
        rig_close(&r);
    }
    printf("%ld reads, %ld torn\n", atomic_load(&reads), atomic_load(&torn));
    return atomic_load(&torn) ? 3 : 0;
}
