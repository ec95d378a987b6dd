/* Random changes by one writer, held against a plain array: what is published is found, what is removed is not, also
 * when a writer dies in the middle, tombstones are tidied, and the table is fuller than it was made for.
 * Arguments: rounds. */
#include "index_rig.h"

enum { KEYS_MAX = 1200, STEPS = 1500 };

typedef struct {
    bool there;      /* published and not removed */
    bool indexed;    /* and it got an entry */
    uint64_t offset;
} expected;

static expected model[KEYS_MAX];
static uint64_t generations[1024];

static void check_generations(rig *r) {
    for (uint64_t at = 0; at <= r->writer.view.mask; at++) {
        uint64_t generation = index_sequence(&r->writer, at) >> 2;
        CHECK(generation >= generations[at], "entry %llu went back", (unsigned long long)at);
        generations[at] = generation;
    }
}

static void check_all(rig *r, uint64_t keys) {
    uint64_t ready = 0, gone = 0;
    for (uint64_t number = 0; number < keys; number++) {
        index_place place;
        int status = rig_find(&r->writer.view, number, &place);
        bool wanted = model[number].there && model[number].indexed;
        CHECK(status == (wanted ? INDEX_HIT : INDEX_MISS), "key %llu: %d", (unsigned long long)number, status);
        CHECK(!wanted || place.offset == model[number].offset, "key %llu: offset", (unsigned long long)number);
        CHECK(!wanted || index_load(&r->writer.view.entries[place.at].incarnation) ==
                             rig_incarnation(number, place.offset),
              "key %llu: incarnation", (unsigned long long)number);
    }
    for (uint64_t at = 0; at <= r->writer.view.mask; at++) {
        unsigned state = index_state(index_sequence(&r->writer, at));
        ready += state == INDEX_READY;
        gone += state == INDEX_GONE;
    }
    CHECK(ready == r->writer.ready && gone == r->writer.gone, "counts %llu %llu", (unsigned long long)ready,
          (unsigned long long)gone);
    check_generations(r);
}

/* The batch way says the same, whole and as a prefix. */
static void check_batch(rig *r, uint64_t keys, uint64_t *dice) {
    static unsigned char row[200 * INDEX_KEY_BYTES];
    static uint8_t statuses[200];
    uint64_t n = 1 + rig_random(dice) % 200, hits_in_front = 0, numbers[200];
    for (uint64_t i = 0; i < n; i++) {
        numbers[i] = rig_random(dice) % keys;
        rig_key_bytes(row + i * INDEX_KEY_BYTES, numbers[i]);
    }
    index_batch batch = {.in_a_row = row, .n = n, .space = RIG_SPACE, .layout = RIG_LAYOUT};
    CHECK(index_find_batch(&r->writer.view, &batch, statuses, NULL) == n, "all");
    for (uint64_t i = 0; i < n; i++)
        CHECK(statuses[i] == (model[numbers[i]].there && model[numbers[i]].indexed), "position %llu",
              (unsigned long long)i);
    while (hits_in_front < n && statuses[hits_in_front] == INDEX_HIT)
        hits_in_front++;
    batch.prefix = true;
    CHECK(index_find_batch(&r->writer.view, &batch, statuses, NULL) == hits_in_front, "prefix");
    batch.layout = RIG_LAYOUT + 1;
    CHECK(index_find_batch(&r->writer.view, &batch, statuses, NULL) == 0, "another layout");
}

/* A writer dies: an entry it was changing stays BUSY, or one that it was moving stands twice. */
static void die(rig *r, uint64_t keys, uint64_t *dice) {
    uint64_t number = rig_random(dice) % keys;
    index_place place;
    if (rig_random(dice) % 2) {
        /* In the middle of writing an entry that was free, or of a removal. */
        uint64_t at = rig_random(dice) & r->writer.view.mask;
        if (index_state(index_sequence(&r->writer, at)) == INDEX_EMPTY)
            return; /* a writer never begins with an EMPTY entry that no probe reaches */
        index_begin(&r->writer, at);
        for (number = 0; number < keys; number++) /* a key that stood twice is still there */
            if (model[number].indexed)
                model[number].indexed = rig_find(&r->writer.view, number, &place) == INDEX_HIT;
    } else if (model[number].there && model[number].indexed && rig_find(&r->writer.view, number, &place) == INDEX_HIT) {
        for (uint64_t hole = place.at;; hole--) {
            index_key key = rig_key(number);
            uint64_t home = index_home(&r->writer.view, &key);
            hole &= r->writer.view.mask;
            if (index_state(index_sequence(&r->writer, hole)) == INDEX_GONE) {
                index_object object = {key, place.offset, RIG_LAYOUT, 8, 0, 0, rig_incarnation(number, place.offset)};
                index_make_ready(&r->writer, hole, &object, 1000);
                break;
            }
            if (hole == home)
                break;
        }
    }
    index_recount(&r->writer); /* as its successor does */
}

static void step(rig *r, uint64_t keys, uint64_t slots, uint64_t *dice) {
    uint64_t number = rig_random(dice) % keys;
    expected *e = &model[number];
    uint64_t offset = r->writer.view.data_offset + rig_random(dice) % slots * INDEX_PAGE_BYTES;
    switch (rig_random(dice) % 16) {
    default:
        e->indexed = rig_publish(r, number, offset, 8, 0);
        e->there = true;
        e->offset = offset;
        break;
    case 7:
    case 8:
    case 9:
    case 10:
    case 11:
    case 12:
        if (e->there)
            CHECK(rig_remove(r, number, e->offset) == e->indexed, "key %llu", (unsigned long long)number);
        e->there = false;
        break;
    case 13:
        /* One that stands in another slot is another one. */
        if (e->there && e->indexed && offset != e->offset)
            CHECK(!rig_remove(r, number, offset), "another slot's");
        break;
    case 14:
        index_tidy(&r->writer, 1 + rig_random(dice) % 100);
        break;
    case 15:
        die(r, keys, dice);
    }
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 20;
    for (long round = 0; round < rounds; round++) {
        uint64_t dice = (uint64_t)round, entries = UINT64_C(64) << round % 5;
        uint64_t keys = entries / 4 + rig_random(&dice) % (entries > 900 ? 900 : entries);
        rig r;
        rig_open(&r, entries, 16 * INDEX_PAGE_BYTES);
        memset(model, 0, sizeof model);
        memset(generations, 0, sizeof generations);
        for (int i = 0; i < STEPS; i++) {
            step(&r, keys, 16, &dice);
            if (i % 16 == 0)
                check_all(&r, keys);
            check_batch(&r, keys, &dice);
        }
        /* Everything out, twice round: nothing is left behind. */
        for (uint64_t number = 0; number < keys; number++)
            if (model[number].there)
                rig_remove(&r, number, model[number].offset);
        for (int i = 0; i < 8; i++)
            index_tidy(&r.writer, entries);
        for (uint64_t at = 0; at < entries; at++)
            CHECK(index_state(index_sequence(&r.writer, at)) == INDEX_EMPTY, "entry %llu", (unsigned long long)at);
        check_generations(&r);
        rig_close(&r);
    }
    printf("ok\n");
    return 0;
}
