/* One writer against a model: every operation's result, every key's value, after every step; then damaged files. */
#include "rig.h"

enum { SLOTS = 13, KEYS = 20, VALUE = 200 };

typedef struct model {
    bool there;
    size_t n;
    uint64_t stamp;
} model;

static unsigned live(const model *m) {
    unsigned n = 0;
    for (int i = 0; i < KEYS; i++)
        n += m[i].there;
    return n;
}

static void check_key(const l0_table *t, const model *m, uint64_t number) {
    unsigned char key_bytes[16], value[VALUE], expected[VALUE];
    l0_found found;
    l0_key key = numbered_key(t, key_bytes, number);
    l0_result result = l0_find(t, key, &found);
    CHECK(result == (m[number].there ? L0_DONE : L0_MISS), "key %llu", (unsigned long long)number);
    if (result != L0_DONE)
        return;
    CHECK(found.n == m[number].n, "%zu bytes", found.n);
    CHECK(l0_get_exactly(t, key, value, found.n, 0, &found) == L0_DONE, "copy");
    CHECK(l0_get_exactly(t, key, value, found.n - 1, 0, &found) == L0_OTHER_SIZE, "size");
    value_fill(expected, found.n, number, m[number].stamp);
    CHECK(memcmp(value, expected, found.n) == 0, "bytes of key %llu", (unsigned long long)number);
}

/* Every buffer is owned by exactly one slot, or is a spare. */
static void check_buffers(const l0_table *t) {
    unsigned seen[128] = {0};
    if (t->g.versions)
        return;
    for (uint64_t slot = 0; slot < SLOTS; slot++)
        seen[l0_buffer_of(t, slot, atomic_load(&l0_meta_at(t, slot)->current))]++;
    for (uint64_t i = 0, ring = l0_ring(t, 0); i < t->g.spares; i++)
        seen[ring >> (8 * i) & 127]++;
    for (uint64_t buffer = 0; buffer < 128; buffer++)
        CHECK(seen[buffer] == (buffer < t->g.buffers), "buffer %llu: %u", (unsigned long long)buffer, seen[buffer]);
}

/* Nothing more can be moved: no key has a free slot between its home and itself. */
static void check_no_holes(const l0_table *t) {
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        l0_meta *m = l0_meta_at(t, slot);
        if (!l0_there(atomic_load(&m->current)))
            continue;
        uint64_t home = l0_home(t, atomic_load(&m->hash));
        for (uint64_t at = home; at != slot; at = l0_position(t, at, 1))
            CHECK(l0_there(atomic_load(&l0_meta_at(t, at)->current)), "a hole at %llu", (unsigned long long)at);
    }
}

static void against_model(uint64_t seed, int steps) {
    rig r;
    l0_table t;
    rig_open(&r, SLOTS, VALUE, 16, seed % 2 ? 0 : seed / 2, seed % 2 ? 1 + seed / 2 : seed / 2);
    rig_join(&r, &t);
    model m[KEYS] = {0};
    unsigned char key_bytes[16], value[VALUE];
    for (int step = 0; step < steps; step++) {
        uint64_t number = rig_random(&seed) % KEYS, stamp = rig_random(&seed);
        size_t n = 16 + rig_random(&seed) % (VALUE - 15);
        l0_key key = numbered_key(&t, key_bytes, number);
        bool inserted, room = live(m) < SLOTS, was = m[number].there;
        value_fill(value, n, number, stamp);
        l0_value v = {value, n, 0};
        if (rig_random(&seed) % 4 == 0) {
            while (l0_rehash(&t, 0, SLOTS))
                ;
            check_no_holes(&t);
        }
        switch (rig_random(&seed) % 4) {
        case 0:
            CHECK(l0_delete(&t, key, 1) == (was ? L0_DONE : L0_MISS), "delete");
            m[number].there = false;
            break;
        case 1: {
            uint64_t ticket = l0_ticket(&t, key);
            bool old = rig_random(&seed) % 2;
            if (old)
                l0_delete(&t, key, 1), was = m[number].there = false;
            l0_result result = l0_insert(&t, key, v, ticket, 1), wanted = L0_DONE;
            room = live(m) < SLOTS;
            if (was || (old && room))
                wanted = L0_MOVED;
            else if (!room)
                wanted = L0_FULL;
            CHECK(result == wanted, "insert: %d, not %d", result, wanted);
            if (result == L0_DONE)
                m[number] = (model){true, n, stamp};
            break;
        }
        default: {
            l0_result result = l0_put(&t, key, v, 1, &inserted);
            CHECK(result == (was || room ? L0_DONE : L0_FULL), "put");
            if (result == L0_DONE) {
                CHECK(inserted == !was, "inserted");
                m[number] = (model){true, n, stamp};
            }
        }
        }
        for (uint64_t i = 0; i < KEYS; i++)
            check_key(&t, m, i);
        l0_survey s = {0};
        l0_survey_add(&t, 0, SLOTS, &s);
        CHECK(s.keys == live(m) && s.claimed == 0 && s.locked == 0, "survey");
        CHECK(atomic_load(&l0_head(&t)->keys) == s.keys, "count");
        check_buffers(&t);
    }
    for (uint64_t i = 0; i < KEYS; i++)
        l0_delete(&t, numbered_key(&t, key_bytes, i), 1);
    /* Nothing piles up: an empty table's probes are as short as a new one's. */
    l0_survey s = {0};
    l0_survey_add(&t, 0, SLOTS, &s);
    CHECK(s.keys == 0 && s.miss_probes == SLOTS, "%llu probes", (unsigned long long)s.miss_probes);
    rig_leave(&t);
    rig_close(&r);
}

static void views_last_as_promised(void) {
    rig r;
    l0_table t;
    unsigned char key_bytes[16], other_bytes[16], value[64];
    bool inserted;
    for (uint64_t versions = 0; versions <= 5; versions++) {
        for (uint64_t spares = versions ? versions : 1; spares <= (versions ? versions : 5); spares++) {
            rig_open(&r, SLOTS, VALUE, 16, versions, spares);
            rig_join(&r, &t);
            l0_key key = numbered_key(&t, key_bytes, 7), other = numbered_key(&t, other_bytes, 8);
            l0_found found = {0};
            value_fill(value, 64, 7, 0);
            l0_put(&t, key, (l0_value){value, 64, 0}, 1, &inserted);
            CHECK(l0_find(&t, key, &found) == L0_DONE, "find");
            value_fill(value, 64, 8, 1);
            for (int i = 0; i < 20; i++) /* writes of others end no view of a key that is not rewritten */
                l0_put(&t, other, (l0_value){value, 64, 0}, 1, &inserted);
            for (uint64_t w = 1; w <= spares; w++) {
                /* Its key once, and then any key of the stripe; where nothing is shared, its key alone. */
                uint64_t number = w == 1 || versions ? 7 : 8;
                value_fill(value, 64, number, w);
                l0_put(&t, number == 7 ? key : other, (l0_value){value, 64, 0}, 1, &inserted);
                CHECK(l0_intact(&found), "after %llu of %llu", (unsigned long long)w, (unsigned long long)spares);
                uint64_t stamp;
                memcpy(&stamp, found.bytes + 8, 8);
                CHECK(stamp == 0 && value_whole(found.bytes, found.n, 7), "the view's bytes moved");
            }
            l0_put(&t, key, (l0_value){value, 64, 0}, 1, &inserted);
            CHECK(!l0_intact(&found), "one more write ends the view");
            rig_leave(&t);
            rig_close(&r);
        }
    }
}

/* A writer that stops for ever at every step of a write, seen by one that comes after it. */
static void dead_owner_is_relieved(uint64_t versions, int stop) {
    rig r;
    l0_table dead, alive;
    unsigned char key_bytes[16], other_bytes[16], value[64];
    bool inserted;
    rig_open(&r, SLOTS, VALUE, 16, versions, 2);
    rig_join(&r, &dead);
    rig_join(&r, &alive);
    l0_key key = numbered_key(&dead, key_bytes, 3), other = numbered_key(&dead, other_bytes, 5);
    value_fill(value, 64, 3, 1);
    l0_value v = {value, 64, 0};
    CHECK(l0_put(&dead, key, v, 1, &inserted) == L0_DONE, "put");
    l0_found found = {0};
    CHECK(l0_find(&dead, key, &found) == L0_DONE, "find");
    CHECK(l0_lock(&dead, &found.meta->lock, 0) == L0_LOCKED, "lock");
    uint64_t word = atomic_load(&found.meta->current), owned = l0_buffer_of(&dead, found.slot, word), buffer;
    uint64_t generation = l0_generation(word) + 1;
    if (stop > 0)
        CHECK(l0_take(&dead, found.slot, owned, 0, &buffer), "take");
    if (stop > 1) {
        l0_buffer_head *head = l0_buffer_at(&dead, found.slot, buffer);
        atomic_store(&head->stamp, 0);
        memset(l0_value_at(&dead, head), 0xee, 64);
        if (stop > 2) {
            value_fill(value, 64, 3, 9);
            l0_fill(&dead, head, l0_stamp(&dead, found.slot, generation), key, v);
        }
        if (stop > 3)
            atomic_store(&found.meta->current, l0_word(generation, buffer, L0_LIVE));
    }
    CHECK(l0_put(&alive, key, v, 1000000, &inserted) == L0_BUSY, "a living owner is waited for");
    CHECK(l0_get_exactly(&alive, key, value, 64, 0, &found) == L0_DONE && value_whole(value, 64, 3), "whole");
    rig_leave(&dead);
    CHECK(l0_get_exactly(&alive, key, value, 64, 0, &found) == L0_DONE && value_whole(value, 64, 3), "whole");
    uint64_t stamp;
    memcpy(&stamp, value + 8, 8);
    CHECK(stamp == (stop > 3 ? 9 : 1), "the old value, or the new one once it was current");
    value_fill(value, 64, 5, 3); /* another key of the stripe first: what the dead one held of it is freed */
    CHECK(l0_put(&alive, other, v, 1000000, &inserted) == L0_DONE && inserted, "another key of the stripe");
    check_buffers(&alive);
    value_fill(value, 64, 3, 2);
    CHECK(l0_put(&alive, key, v, 1000000, &inserted) == L0_DONE && !inserted, "the slot can be written");
    check_buffers(&alive);
    CHECK(l0_get_exactly(&alive, other, value, 64, 0, &found) == L0_DONE && value_whole(value, 64, 5), "whole");
    CHECK(l0_delete(&alive, other, 1) == L0_DONE, "delete");
    value_fill(value, 64, 3, 2);

    /* A claim of a dead writer, whose row somebody else has by now. */
    rig_join(&r, &dead);
    other = numbered_key(&dead, other_bytes, 4);
    uint64_t distance, home = l0_home(&dead, other.hash);
    CHECK(l0_lock_free(&dead, home, 1, &distance) == L0_DONE, "free slot");
    uint64_t claimed = l0_position(&dead, home, distance);
    atomic_store(&l0_meta_at(&dead, claimed)->hash, other.hash);
    l0_turn(&dead, claimed, L0_CLAIMED);
    l0_bound_raise(&dead, home, distance);
    uint64_t row = dead.me >> 48;
    rig_leave(&dead);
    rig_join(&r, &dead);
    CHECK(dead.me >> 48 == row, "the row is taken again");
    CHECK(l0_put(&alive, other, v, 1000000, &inserted) == L0_DONE && inserted, "the claim is cleared");
    CHECK(l0_delete(&alive, other, 1) == L0_DONE, "and whole");
    l0_survey s = {0};
    l0_survey_add(&alive, 0, SLOTS, &s);
    CHECK(s.claimed == 0 && s.locked == 0 && s.keys == 1, "nothing is left behind");
    rig_leave(&dead);
    rig_leave(&alive);
    rig_close(&r);
}

/* A mover that stops for ever at every step of a move. Key 1 has its home in front of key 2's slot, or the same. */
static void dead_mover_is_relieved(int stop, bool deletes) {
    rig r;
    l0_table dead, alive;
    unsigned char bytes[16], value[64];
    bool inserted;
    rig_open(&r, SLOTS, VALUE, 16, 0, 2);
    rig_join(&r, &dead);
    rig_join(&r, &alive);
    l0_found found;
    uint64_t number = 100, home;
    l0_key key = numbered_key(&dead, bytes, 1);
    home = l0_home(&dead, key.hash);
    unsigned char other_bytes[16];
    l0_key other = numbered_key(&dead, other_bytes, number); /* another one of this home, which is there before */
    while (l0_home(&dead, other.hash) != home)
        other = numbered_key(&dead, other_bytes, ++number);
    value_fill(value, 64, 1, 1);
    l0_value v = {value, 64, 0};
    CHECK(l0_put(&dead, other, v, 1, &inserted) == L0_DONE && l0_put(&dead, key, v, 1, &inserted) == L0_DONE, "put");
    CHECK(l0_delete(&dead, other, 1) == L0_DONE, "delete");
    CHECK(l0_find(&dead, key, &found) == L0_DONE && found.slot == l0_position(&dead, home, 1), "not at home");
    uint64_t from = found.slot, word = atomic_load(&l0_meta_at(&dead, home)->current), buffer;
    l0_meta *left = l0_meta_at(&dead, from), *taken = l0_meta_at(&dead, home);
    CHECK(l0_lock_try(&dead, &left->lock) && l0_lock_try(&dead, &taken->lock), "locks");
    uint64_t owned = l0_buffer_of(&dead, home, word), generation = l0_generation(word) + 1;
    if (stop > 0)
        CHECK(l0_take(&dead, home, owned, 0, &buffer), "take");
    if (stop > 1) {
        l0_buffer_head *source = l0_buffer_at(&dead, from, l0_buffer_of(&dead, from, atomic_load(&left->current)));
        l0_fill_from(&dead, l0_buffer_at(&dead, home, buffer), l0_stamp(&dead, home, generation), source);
        atomic_store(&taken->hash, key.hash);
        atomic_store(&taken->current, l0_word(generation, buffer, L0_ARRIVING));
    }
    if (stop > 2)
        l0_retire(&dead, home, owned);
    if (stop > 3)
        l0_bound_raise(&dead, home, 0);
    if (stop > 4)
        l0_turn(&dead, from, L0_FREE);
    rig_leave(&dead);
    CHECK(l0_get_exactly(&alive, key, value, 64, 0, &found) == L0_DONE && value_whole(value, 64, 1), "read");
    if (stop > 1)
        CHECK(l0_rehash(&alive, 0, SLOTS) == 0, "a copy is not moved");
    if (!deletes) {
        value_fill(value, 64, 1, 2);
        CHECK(l0_put(&alive, key, v, 1000000, &inserted) == L0_DONE && !inserted, "write");
        CHECK(l0_get_exactly(&alive, key, value, 64, 0, &found) == L0_DONE, "read again");
        uint64_t stamp;
        memcpy(&stamp, value + 8, 8);
        CHECK(stamp == 2, "the old value is there again");
    }
    CHECK(l0_delete(&alive, key, 1000000) == L0_DONE, "delete");
    CHECK(l0_find(&alive, key, &found) == L0_MISS, "the key is there again");
    CHECK(l0_delete(&alive, key, 1000000) == L0_MISS, "twice");
    for (uint64_t i = 0; i < SLOTS; i++) { /* what it had locked can be used again */
        CHECK(l0_put(&alive, numbered_key(&alive, other_bytes, i), v, 1000000, &inserted) == L0_DONE, "fill");
    }
    check_buffers(&alive);
    l0_survey s = {0};
    l0_survey_add(&alive, 0, SLOTS, &s);
    CHECK(s.keys == SLOTS && s.locked == 0 && s.claimed == 0, "%llu keys, %llu locks", (unsigned long long)s.keys,
          (unsigned long long)s.locked);
    rig_leave(&alive);
    rig_close(&r);
}

/* Whatever the file says, no access leaves it and every call comes back. */
static void damaged_files(uint64_t seed, int rounds) {
    for (int round = 0; round < rounds; round++) {
        rig r;
        l0_table t;
        unsigned char key_bytes[16], value[VALUE];
        bool inserted;
        rig_open(&r, SLOTS, VALUE, 16, round % 3 ? 0 : 2, 2);
        rig_join(&r, &t);
        for (uint64_t i = 0; i < 8; i++) {
            value_fill(value, 64, i, i);
            l0_put(&t, numbered_key(&t, key_bytes, i), (l0_value){value, 64, 0}, 1, &inserted);
        }
        uint64_t from = t.g.meta_offset, to = t.g.buffers_offset + t.g.buffers * t.g.buffer_bytes;
        if (round % 2)
            to = t.g.buffers_offset; /* half of the rounds hit only what steers */
        uint64_t hits = 1 + rig_random(&seed) % 200;
        for (uint64_t i = 0; i < hits; i++) {
            uint64_t at = from + rig_random(&seed) % (to - from);
            t.base[at] = rig_random(&seed) % 3 ? (unsigned char)rig_random(&seed) : 0xff;
        }
        for (uint64_t i = 0; i < KEYS; i++) {
            l0_found found;
            l0_resident resident;
            l0_key key = numbered_key(&t, key_bytes, i);
            if (l0_find(&t, key, &found) == L0_DONE)
                l0_copy_out(value, found.bytes, found.n);
            l0_put(&t, key, (l0_value){value, VALUE, 0}, 1000, &inserted);
            l0_insert(&t, key, (l0_value){value, 1, 0}, l0_ticket(&t, key), 1000);
            if (i % 3 == 0)
                l0_delete(&t, key, 1000);
            l0_resident_at(&t, i % SLOTS, &resident);
            l0_rehash(&t, 0, SLOTS);
        }
        l0_survey s = {0};
        l0_survey_add(&t, 0, SLOTS, &s);
        l0_cool(&t, 0, SLOTS);
        /* And headers: any change is refused, or changes nothing that counts. */
        l0_geometry g;
        memset(&g, 0, sizeof g);
        t.base[rig_random(&seed) % (offsetof(l0_header, checksum) + 8)] ^= 1 << rig_random(&seed) % 8;
        CHECK(l0_header_check(l0_head(&t), t.g.file_bytes, &g) != L0_OK_HEADER, "a damaged header was believed");
        rig_leave(&t);
        rig_close(&r);
    }
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 100;
    for (int seed = 1; seed <= 8; seed++)
        against_model((uint64_t)seed, rounds * 10);
    views_last_as_promised();
    for (int stop = 0; stop < 5; stop++) {
        dead_owner_is_relieved(0, stop);
        dead_owner_is_relieved(2, stop);
    }
    for (int stop = 0; stop < 6; stop++) {
        dead_mover_is_relieved(stop, false);
        dead_mover_is_relieved(stop, true);
    }
    damaged_files(99, rounds);
    puts("ok");
    return 0;
}
