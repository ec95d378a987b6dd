/* Several writers and readers on a few keys of a small table. Every value that is read must be whole and belong to its
 * key; no key may be in two slots; nothing may be left locked; and key 0, which nobody deletes, is always there, wherever
 * it is moved. Exit 3: a torn value was read, 4: key 0 was missed (what the negative controls must end with). */
#include "rig.h"

#include <pthread.h>

enum { SLOTS = 11, KEYS = 6, VALUE = 2048, WRITERS = 3, READERS = 2 };

typedef struct worker {
    rig *r;
    l0_table t;
    uint64_t seed;
    long steps, done;
} worker;

static atomic_long torn, missed, reads, writes_left;

/* Move a key away from its home, so that there is something to move back. Nobody dies here, so nobody sees what a mover
 * leaves that dies, and a reader who comes too late to one slot finds the key in a later one. */
static void push_out(const l0_table *t, l0_key key) {
    uint64_t home = l0_home(t, key.hash), from, to;
    l0_found found;
    if (l0_look(t, key, &found) != L0_DONE || !l0_lock_try(t, &found.meta->lock))
        return;
    from = found.slot;
    if (l0_look_at(t, from, key, &found) == L0_DONE)
        for (uint64_t far = SLOTS - 1; far > 0; far--) {
            to = l0_position(t, home, far);
            l0_meta *m = l0_meta_at(t, to);
            if (to == from)
                break;
            if (l0_state(atomic_load(&m->current)) != L0_FREE || !l0_lock_try(t, &m->lock))
                continue;
            bool moved = l0_state(atomic_load(&m->current)) == L0_FREE && l0_move_locked(t, home, from, to, far);
            l0_unlock(&m->lock);
            if (moved)
                break;
        }
    l0_unlock(&l0_meta_at(t, from)->lock);
}

static void *write_keys(void *argument) {
    worker *w = argument;
    unsigned char key_bytes[16], value[VALUE];
    while (atomic_fetch_sub(&writes_left, 1) > 0 && atomic_load(&torn) == 0 && atomic_load(&missed) == 0) {
        uint64_t number = rig_random(&w->seed) % KEYS;
        l0_key key = numbered_key(&w->t, key_bytes, number);
        size_t n = 16 + rig_random(&w->seed) % (VALUE - 15);
        bool inserted;
        l0_result result;
        value_fill(value, n, number, rig_random(&w->seed));
        switch (rig_random(&w->seed) % 8) {
        case 0:
        case 1:
            if (number == 0)
                break;
            result = l0_delete(&w->t, key, 60000000000u);
            CHECK(result == L0_DONE || result == L0_MISS, "delete: %d", result);
            break;
        case 3:
            push_out(&w->t, key);
            l0_rehash(&w->t, 0, SLOTS);
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
    while (atomic_load(&writes_left) > 0 && atomic_load(&torn) == 0 && atomic_load(&missed) == 0) {
        uint64_t number = rig_random(&w->seed) % KEYS;
        l0_key key = numbered_key(&w->t, key_bytes, number);
        l0_found found;
        l0_result result = l0_look(&w->t, key, &found);
        if (number == 0 && result == L0_MISS)
            atomic_fetch_add(&missed, 1);
        if (result != L0_DONE)
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
    for (long round = 0; round < rounds && atomic_load(&torn) == 0 && atomic_load(&missed) == 0; round++) {
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
        unsigned char key_bytes[16], value[16];
        bool inserted;
        value_fill(value, 16, 0, 0);
        l0_key always = numbered_key(&workers[0].t, key_bytes, 0);
        CHECK(l0_put(&workers[0].t, always, (l0_value){value, 16, 0}, 1, &inserted) == L0_DONE, "key 0");
        for (int i = 0; i < WRITERS + READERS; i++)
            pthread_create(&threads[i], NULL, i < WRITERS ? write_keys : read_keys, &workers[i]);
        for (int i = 0; i < WRITERS + READERS; i++)
            pthread_join(threads[i], NULL);
        check_rest(&workers[0].t);
        for (int i = 0; i < WRITERS; i++)
            rig_leave(&workers[i].t);
        rig_close(&r);
    }
    printf("%ld reads, %ld torn, %ld missed\n", atomic_load(&reads), atomic_load(&torn), atomic_load(&missed));
    return atomic_load(&torn) ? 3 : atomic_load(&missed) ? 4 : 0;
}
