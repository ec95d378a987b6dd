/* Pools as an orderly server leaves them at any moment, by a seed, and exactly what the next one must make of them. */
#ifndef ADOPTION_ORDERLY_H
#define ADOPTION_ORDERLY_H

#include "adoption_rig.h"

enum { PAGE = ADOPTION_PAGE, WORKERS = 5, LAYOUTS = 12, ENTRIES = 256, CLASSES = 7 };

/* unit, least slab, data, largest object; entries, layouts, workers. The crafted images are of the first. */
static const shape SHAPES[] = {
    /* the last unit is short, and no whole row */
    {16 * PAGE, 4 * PAGE, 165 * PAGE, 20 * PAGE, ENTRIES, LAYOUTS, WORKERS},
    {8 * PAGE, 8 * PAGE, 163 * PAGE, 20 * PAGE, ENTRIES, CLASSES + 1, 1},
    {16 * PAGE, 2 * PAGE, 39 * PAGE, 17 * PAGE, INDEX_WINDOW, CLASSES + 1, 0},
    {16 * PAGE, 4 * PAGE, 3 * PAGE, 17 * PAGE, INDEX_WINDOW, LAYOUTS, 300}, /* less than a unit */
};
enum { SHAPES_COUNT = sizeof SHAPES / sizeof *SHAPES, PAGES_MAX = 165 };

enum { KIND_NO_SLOT, KIND_FREE, KIND_OBJECT, KIND_WAITING };

typedef struct {
    struct {
        unsigned char kind;
        uint32_t state, row;              /* of one that waits */
        uint64_t number, layout, stored_s; /* of an object */
    } pages[PAGES_MAX];
    adopted_slab slabs[PAGES_MAX];
    uint64_t slab_count, objects, gone, dropped[DROP_CAUSES], last_stored_s, last_offset;
    struct {
        uint64_t at;
        bool removed;
    } later[PAGES_MAX];
    uint64_t later_count, numbers;
    const image *im;
    bool by_age;
} expectation;

static void make_slot(image *im, expectation *e, uint64_t *dice, uint64_t offset, uint64_t layout, bool anyone) {
    static const unsigned char COPYING[] = {SLOT_WRITING, SLOT_LOADING, SLOT_QUARANTINED};
    uint64_t page = (offset - im->in.view.data_offset) / PAGE, what = rig_random(dice) % 16;
    uint64_t number = e->numbers++ | layout << IMAGE_SPACE_SHIFT; /* a namespace of its own for each layout */
    uint64_t workers = im->in.worker_rows, row = rig_random(dice) % (workers + 1);
    uint64_t stored_s = rig_random(dice) >> rig_random(dice) % 64;
    uint64_t high = rig_random(dice) << 24; /* nobody promised that the rest of the word is 0 */
    e->pages[page].kind = KIND_FREE;
    if (what < 6) {
        put_slot(im, offset, SLOT_READY, rig_random(dice));
        put_entry(im, number, offset, layout, stored_s);
        e->objects++;
        e->pages[page].kind = KIND_OBJECT;
        e->pages[page].number = number;
        e->pages[page].layout = layout;
        e->pages[page].stored_s = stored_s < UINT32_MAX ? stored_s : UINT32_MAX;
    } else if (what == 6) { /* committed, and not published */
        put_slot(im, offset, SLOT_READY, ADOPTION_NO_ROW);
        e->dropped[DROP_UNINDEXED]++;
    } else if (what < 9) { /* on its way out of the index, or being changed there */
        put_slot(im, offset, SLOT_READY, ADOPTION_NO_ROW);
        e->later[e->later_count].at = put_entry(im, number, offset, layout, stored_s);
        e->later[e->later_count++].removed = what == 7;
        e->dropped[DROP_UNINDEXED]++;
        e->dropped[DROP_HALF_CHANGED] += what == 8;
        e->gone++;
    } else if (what < 12) { /* somebody copies, or did */
        row = rig_random(dice) % 5 ? row : ADOPTION_NO_ROW;
        put_slot(im, offset, COPYING[what - 9], row | high);
        if (row < workers && im->living[row]) {
            e->pages[page].kind = KIND_WAITING;
            e->pages[page].state = SLOT_QUARANTINED;
            e->pages[page].row = (uint32_t)row;
        } else {
            e->dropped[DROP_UNFINISHED]++;
        }
    } else if (what == 12) {
        put_slot(im, offset, SLOT_DOOMED, row | high);
        e->pages[page].kind = anyone ? KIND_WAITING : KIND_FREE;
        e->pages[page].state = SLOT_DOOMED;
        e->pages[page].row = ADOPTION_NO_ROW;
    } else if (what == 13) { /* evicted: the slot first, then the entry */
        put_slot(im, offset, SLOT_FREE, 0);
        put_entry(im, number, offset, layout, stored_s);
        e->dropped[DROP_NOT_READY]++;
        e->gone++;
    } else if (what == 14) {
        put_slot(im, offset, 6 + rig_random(dice) % 250, row | high);
    }
}

static void make_orderly(image *im, expectation *e, uint64_t seed) {
    static const unsigned char CLASS_PAGES[CLASSES + 1] = {0, 1, 2, 3, 3, 5, 17, 4};
    uint64_t dice = seed, units = (im->in.data_bytes + im->in.unit_bytes - 1) / im->in.unit_bytes;
    bool anyone = false;
    memset(e, 0, sizeof *e);
    image_clear(im);
    e->im = im;
    for (uint64_t row = 0; row < im->in.worker_rows && seed % 4 != 0; row++)
        anyone |= im->living[row] = rig_random(&dice) % 2;
    for (uint64_t row = 1; row <= CLASSES; row++)
        put_layout(im, row, CLASS_PAGES[row] * PAGE - rig_random(&dice) % PAGE, 1);
    for (uint64_t unit = 0, taken = 0; unit < units; unit += taken) {
        uint64_t layout = 1 + rig_random(&dice) % CLASSES, slot_bytes = CLASS_PAGES[layout] * (uint64_t)PAGE;
        uint64_t room = im->in.data_bytes - unit * im->in.unit_bytes;
        taken = 1 + rig_random(&dice) % 3;
        if (taken > units - unit)
            taken = units - unit;
        uint64_t start = image_unit(im, unit), nbytes = taken * im->in.unit_bytes;
        if ((nbytes < room ? nbytes : room) < slot_bytes || rig_random(&dice) % 5 == 0) {
            put_slab_word(im, unit * im->in.unit_bytes / im->in.slab_bytes_min, taken, 0); /* given back */
            continue;
        }
        nbytes = put_slab(im, unit, taken, slot_bytes / PAGE);
        e->slabs[e->slab_count++] = (adopted_slab){.start = start, .nbytes = nbytes, .slot_bytes = slot_bytes};
        for (uint64_t slot = 0; slot < nbytes / slot_bytes; slot++)
            make_slot(im, e, &dice, start + slot * slot_bytes, layout, anyone);
    }
    for (uint64_t i = 0; i < e->later_count; i++) {
        if (e->later[i].removed)
            index_make_gone(&im->writer, e->later[i].at, 2, 2000);
        else
            index_begin(&im->writer, e->later[i].at);
    }
}

static void expected_one(void *context, const adopted_object *object) {
    expectation *e = context;
    uint64_t page = (object->offset - e->im->in.view.data_offset) / PAGE, number = e->pages[page].number;
    uint64_t stored_s = e->pages[page].stored_s;
    index_key key = image_key(number);
    CHECK(e->pages[page].kind == KIND_OBJECT && !object->lost, "%s: page %llu", now, (unsigned long long)page);
    CHECK(memcmp(&object->key, &key, sizeof key) == 0 && object->layout == e->pages[page].layout, "%s: page %llu", now,
          (unsigned long long)page);
    CHECK(object->checksum == ~number && object->has_checksum == (number % 2 == 1), "%s: page %llu", now, (unsigned long long)page);
    CHECK(object->incarnation == 3 * number, "%s: incarnation of page %llu", now, (unsigned long long)page);
    if (!e->by_age)
        return;
    CHECK(stored_s > e->last_stored_s || (stored_s == e->last_stored_s && object->offset > e->last_offset),
          "%s: page %llu is not the oldest", now, (unsigned long long)page);
    e->last_stored_s = stored_s;
    e->last_offset = object->offset;
}

static void check_orderly(const image *im, expectation *e, uint64_t seed) {
    adoption a;
    uint64_t dice = ~seed, waits = 0;
    adopt(im, &a);
    CHECK(a.slab_count == e->slab_count && a.objects == e->objects && a.gone == e->gone, "%s: sums", now);
    for (uint64_t s = 0; s < e->slab_count; s++)
        CHECK(a.slabs[s].start == e->slabs[s].start && a.slabs[s].nbytes == e->slabs[s].nbytes &&
                  a.slabs[s].slot_bytes == e->slabs[s].slot_bytes,
              "%s: slab %llu", now, (unsigned long long)s);
    for (int cause = 0; cause < DROP_CAUSES; cause++)
        CHECK(a.dropped[cause] == e->dropped[cause], "%s: cause %d, %llu and not %llu", now, cause,
              (unsigned long long)a.dropped[cause], (unsigned long long)e->dropped[cause]);
    for (uint64_t page = 0; page < im->in.slot_rows; page++) {
        uint64_t offset = im->in.view.data_offset + page * PAGE, number;
        adopted_slab *slab;
        int kind = KIND_NO_SLOT;
        if (adoption_slot_at(&a, offset, &number, &slab))
            kind = a.claim[number] == CLAIM_NONE ? KIND_FREE : a.claim[number] == CLAIM_WAITING ? KIND_WAITING : KIND_OBJECT;
        CHECK(kind == e->pages[page].kind, "%s: page %llu is %d", now, (unsigned long long)page, kind);
        if (kind == KIND_WAITING) {
            const adopted_wait *wait = &a.waits[waits++];
            CHECK(wait->state == e->pages[page].state && wait->row == e->pages[page].row, "%s: page %llu waits for %u", now,
                  (unsigned long long)page, wait->row);
        }
    }
    check_again(im, &a);
    e->by_age = seed % 3 == 0;
    if (e->by_age) {
        adopted_object object;
        while (adoption_next(&a, &object))
            expected_one(e, &object);
        CHECK(a.pending == 0, "%s: %llu are left", now, (unsigned long long)a.pending);
    } else {
        take_all(im, &a, &dice, e->numbers, expected_one, e);
    }
    adoption_free(&a);
}

#endif
