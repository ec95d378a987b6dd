/* The pool of a dead server, as an orderly one left it and as nobody would: exactly what is whole is kept, all else is
 * dropped for its cause, nothing is read or written outside of the tables and the index, and each object is given
 * once. Arguments: rounds. */
#include "adoption_orderly.h"

/* --- what nobody would leave --------------------------------------------------------------------------------- */

typedef struct {
    uint64_t slabs, objects, waiting, gone, dropped[DROP_CAUSES];
} sums;

static void none_is_lost(void *context, const adopted_object *object) {
    (void)context;
    CHECK(!object->lost, "%s: lost", now);
}

static void expect(const image *im, const char *name, sums expected) {
    adoption a;
    uint64_t dice = 1;
    now = name;
    adopt(im, &a);
    for (int cause = 0; cause < DROP_CAUSES; cause++)
        CHECK(a.dropped[cause] == expected.dropped[cause], "%s: cause %d, %llu and not %llu", now, cause,
              (unsigned long long)a.dropped[cause], (unsigned long long)expected.dropped[cause]);
    CHECK(a.slab_count == expected.slabs && a.objects == expected.objects && a.wait_count == expected.waiting &&
              a.gone == expected.gone,
          "%s: %llu slabs, %llu objects, %llu wait, %llu gone", now, (unsigned long long)a.slab_count,
          (unsigned long long)a.objects, (unsigned long long)a.wait_count, (unsigned long long)a.gone);
    check_again(im, &a);
    take_all(im, &a, &dice, 64, none_is_lost, NULL);
    adoption_free(&a);
}

/* Two slabs, of one page a slot and of three; in each a whole object beside what is tried. */
enum { SMALL = 1, LARGE = 2, LARGE_UNIT = 2, LARGE_BYTES = 3 * PAGE - 100 };

static uint64_t small_slot(const image *im, uint64_t i) { return image_unit(im, 0) + i * PAGE; }
static uint64_t large_slot(const image *im, uint64_t i) { return image_unit(im, LARGE_UNIT) + i * 3 * PAGE; }

static void begin(image *im) {
    image_clear(im);
    put_layout(im, SMALL, PAGE, 1);
    put_layout(im, LARGE, LARGE_BYTES, 1);
    put_slab(im, 0, 1, 1);
    put_slab(im, LARGE_UNIT, 1, 3);
    put_object(im, 50 | UINT64_C(1) << IMAGE_SPACE_SHIFT, small_slot(im, 7), SMALL);
    put_object(im, 51, large_slot(im, 3), LARGE);
}

/* An entry where the server would not put it. */
static void place_entry(image *im, uint64_t at, uint64_t number, uint64_t offset, uint64_t layout, uint64_t nbytes) {
    index_object object = {image_key(number), offset, layout, nbytes, 0, 0, 0};
    index_make_ready(&im->writer, at & im->in.view.mask, &object, 5);
}

/* A key whose home has `n` EMPTY entries from it on. */
static uint64_t number_with_room(const image *im, uint64_t n, uint64_t *home) {
    for (uint64_t number = 100;; number++) {
        index_key key = image_key(number);
        uint64_t d = 0;
        *home = index_home(&im->in.view, &key);
        while (d < n && index_load(&im->in.view.entries[(*home + d) & im->in.view.mask].sequence) == 0)
            d++;
        if (d == n)
            return number;
    }
}

static void try_offsets(image *im) {
    const uint64_t data = im->in.view.data_offset, end = im->in.view.segment_bytes;
    const uint64_t outside[] = {0,
                                PAGE,
                                data - PAGE,
                                data - 1,
                                small_slot(im, 1) + 8,
                                large_slot(im, 1) + PAGE,                    /* inside a slot */
                                large_slot(im, 5),                           /* behind the last slot of its slab */
                                image_unit(im, 1),                           /* no slab */
                                image_unit(im, LARGE_UNIT + 1) - 1,
                                end - PAGE,
                                end,
                                end + PAGE,
                                UINT64_C(1) << 63,
                                (UINT64_C(1) << 63) + large_slot(im, 1),
                                UINT64_MAX - PAGE + 1,
                                UINT64_MAX};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        begin(im);
        index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->offset, outside[i]);
        expect(im, "offset outside of the slots", (sums){.slabs = 2, .objects = 2, .gone = 1,
                .dropped = {[DROP_MISPLACED] = 1, [DROP_UNINDEXED] = 1}});
    }
    begin(im);
    index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->offset, small_slot(im, 0));
    expect(im, "slot of another class", (sums){.slabs = 2, .objects = 2, .gone = 1,
            .dropped = {[DROP_LAYOUT] = 1, [DROP_UNINDEXED] = 1}});
    begin(im);
    index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->offset, large_slot(im, 2));
    expect(im, "slot that is free", (sums){.slabs = 2, .objects = 2, .gone = 1,
            .dropped = {[DROP_NOT_READY] = 1, [DROP_UNINDEXED] = 1}});
}

static void try_claims(image *im) {
    for (uint64_t keys = 2; keys <= 40; keys++) {
        begin(im);
        for (uint64_t number = 1; number <= keys; number++)
            put_object(im, number, large_slot(im, 1), LARGE);
        expect(im, "many keys for one slot", (sums){.slabs = 2, .objects = 2, .gone = keys,
            .dropped = {[DROP_DUPLICATE] = keys}});
    }
    uint64_t home, number;
    for (uint64_t apart = 1; apart < INDEX_WINDOW; apart++)
        for (int other_slot = 0; other_slot < 2; other_slot++) {
            begin(im);
            number = number_with_room(im, apart + 1, &home);
            for (uint64_t d = 0; d < apart; d++)
                index_make_gone(&im->writer, (home + d) & im->in.view.mask, 2, 2000);
            place_entry(im, home, number, large_slot(im, 1), LARGE, LARGE_BYTES);
            place_entry(im, home + apart, number, large_slot(im, other_slot ? 2 : 1), LARGE, LARGE_BYTES);
            put_slot(im, large_slot(im, 1), SLOT_READY, 0);
            put_slot(im, large_slot(im, 2), other_slot ? SLOT_READY : SLOT_FREE, 0);
            expect(im, "one key twice", (sums){.slabs = 2, .objects = 3, .gone = apart,
                    .dropped = {[DROP_DUPLICATE] = 1, [DROP_UNINDEXED] = other_slot}});
        }
    begin(im);
    put_slot(im, large_slot(im, 1), SLOT_WRITING, 3);
    put_entry(im, 1, large_slot(im, 1), LARGE, 5);
    im->living[3] = 1;
    expect(im, "entry of a slot that waits", (sums){.slabs = 2, .objects = 2, .waiting = 1, .gone = 1,
        .dropped = {[DROP_NOT_READY] = 1}});
}

static void try_windows(image *im) {
    for (uint64_t distance = 1; distance < ENTRIES; distance++)
        for (int gap = 0; gap < 2; gap++) {
            uint64_t home, number;
            image_clear(im);
            put_layout(im, LARGE, LARGE_BYTES, 1);
            put_slab(im, LARGE_UNIT, 1, 3);
            number = number_with_room(im, distance, &home);
            for (uint64_t d = 0; d < distance; d++)
                if (!gap || d != distance / 2)
                    index_make_gone(&im->writer, (home + d) & im->in.view.mask, 2, 2000);
            place_entry(im, home + distance, number, large_slot(im, 1), LARGE, LARGE_BYTES);
            put_slot(im, large_slot(im, 1), SLOT_READY, 0);
            bool kept = !gap && distance < INDEX_WINDOW;
            expect(im, kept ? "entry in its window" : "entry that no probe reaches",
                   (sums){.slabs = 1, .objects = kept, .gone = distance - (uint64_t)gap + !kept,
                          .dropped = {[DROP_MISPLACED] = !kept, [DROP_UNINDEXED] = !kept}});
        }
}

static void try_layouts(image *im) {
    const uint64_t rows[] = {0, SMALL, 5, LAYOUTS - 1, LAYOUTS, LAYOUTS + 1, UINT64_C(1) << 59, UINT64_MAX};
    const uint64_t sizes[] = {0, 1, LARGE_BYTES - 1, LARGE_BYTES + 1, 3 * PAGE, LARGE_BYTES + (UINT64_C(1) << 32),
        UINT64_MAX};
    const sums dropped = {.slabs = 2, .objects = 2, .gone = 1, .dropped = {[DROP_LAYOUT] = 1, [DROP_UNINDEXED] = 1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        begin(im);
        index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->layout, rows[i]);
        expect(im, "entry of a layout that is not there, or of another size", dropped);
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        begin(im);
        index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->nbytes, sizes[i]);
        expect(im, "entry of another size than its layout", dropped);
    }
    /* Row and entry agree, and yet it is no object's: never used, too long, no size, not of the slot's class. */
    const uint64_t bad[][2] = {{LARGE_BYTES, 0}, {LARGE_BYTES, 2}, {LARGE_BYTES, UINT64_MAX}, {0, 1},
                               {20 * PAGE + 1, 1}, {UINT64_MAX, 1}, {3 * PAGE + 1, 1}, {2 * PAGE, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        begin(im);
        index_entry *entry = put_object(im, 1, large_slot(im, 1), LARGE);
        put_layout(im, 5, bad[i][0], bad[i][1]);
        index_store(&entry->layout, 5);
        index_store(&entry->nbytes, bad[i][0]);
        expect(im, "bad row of the table of layouts", dropped);
    }
    begin(im);
    put_layout(im, 0, LARGE_BYTES, 1); /* 0 means any */
    index_store(&put_object(im, 1, large_slot(im, 1), LARGE)->layout, 0);
    expect(im, "layout 0", dropped);
}

/* A namespace whose entries speak of two layouts has that of the first; and says so until its objects are taken. */
static void try_spaces(image *im) {
    const uint64_t space = UINT64_C(5) << IMAGE_SPACE_SHIFT;
    for (int large_first = 0; large_first < 2; large_first++) {
        adoption a;
        adopted_object object;
        uint64_t homes[2] = {0, 0}, numbers[2], found = 0;
        begin(im);
        for (uint64_t number = space; found < 2; number++) {
            index_key key = image_key(number);
            uint64_t home = index_home(&im->in.view, &key);
            if (index_load(&im->in.view.entries[home].sequence) == 0 && (found == 0 || home > homes[0])) {
                homes[found] = home;
                numbers[found++] = number;
            }
        }
        for (int i = 0; i < 2; i++) {
            bool large = i == !large_first;
            uint64_t slot = large ? large_slot(im, 1) : small_slot(im, 1);
            place_entry(im, homes[i], numbers[i], slot, large ? LARGE : SMALL, large ? LARGE_BYTES : PAGE);
            put_slot(im, slot, SLOT_READY, ADOPTION_NO_ROW);
        }
        expect(im, "two layouts of one namespace", (sums){.slabs = 2, .objects = 3, .gone = 1,
                .dropped = {[DROP_LAYOUT] = 1, [DROP_UNINDEXED] = 1}});
        adopt(im, &a);
        index_key key = image_key(numbers[0]);
        CHECK(adoption_layout_of(&a, key.space) == (large_first ? LARGE : SMALL), "%s: not the first", now);
        CHECK(adoption_layout_of(&a, key.space + 1) == 0, "%s: of another one", now);
        CHECK(adoption_touch(&a, &key, &object) && !object.lost, "%s: it is not there", now);
        CHECK(adoption_layout_of(&a, key.space) == 0, "%s: taken, and still there", now);
        adoption_free(&a);
    }
}

static void try_slabs(image *im) {
    const uint64_t rows = im->in.slab_rows; /* four a unit */
    const struct {
        uint64_t row, rows, slot_pages;
        bool good;
    } words[] = {{4, 4, 1, true},           {1, 4, 1, false},        {5, 4, 1, false},   {4, 4, 0, true},  {4, 0, 1,
        false},
                 {4, 4, 16, true},          {4, 4, 17, false},       {12, 8, 20, true},  {12, 8, 21, false}, {12, 4,
                     20, false},
                 {4, 3, 1, false},          {12, 5, 1, false},       {4, 5, 1, false},   {12, 4000, 1, false},
                 {4, UINT32_MAX, 1, false}, {4, 4, UINT32_MAX, false}, {4, UINT32_MAX, UINT32_MAX, false},
                 {40, 2, 5, true},          {40, 2, 1, true},        {40, 2, 6, false},  {40, 1, 1, false}, {40, 3, 1,
                     false},
                 {40, 4, 1, false},         {36, 6, 1, true},        {36, 5, 1, false},  {36, 7, 1, false}, {rows - 1,
                     1, 1, false},
                 {rows - 1, 4, 1, false}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        begin(im);
        put_slab_word(im, words[i].row, words[i].rows, words[i].slot_pages);
        bool counts = words[i].good && words[i].slot_pages != 0;
        expect(im, "slab word", (sums){.slabs = 2 + counts, .objects = 2, .dropped = {[DROP_SLABS] = !words[i].good}});
    }
    begin(im);
    put_slab_word(im, 4, 8, 1); /* into the slab of the large ones, which begins later */
    expect(im, "slabs that overlap", (sums){.slabs = 2, .objects = 1, .gone = 1,
            .dropped = {[DROP_SLABS] = 1, [DROP_LAYOUT] = 1, [DROP_UNINDEXED] = 1}});
    begin(im);
    put_slab(im, LARGE_UNIT, 3, 3);
    put_slab(im, LARGE_UNIT + 1, 1, 1);
    put_slab(im, LARGE_UNIT + 2, 4, 3);
    expect(im, "slabs inside a slab", (sums){.slabs = 2, .objects = 2, .dropped = {[DROP_SLABS] = 2}});
    begin(im);
    for (uint64_t row = 0; row < rows; row++)
        index_store(image_word(im, im->in.slabs_offset + row * 8), UINT64_MAX);
    expect(im, "no slab at all", (sums){.gone = 2, .dropped = {[DROP_SLABS] = rows, [DROP_MISPLACED] = 2}});
}

static void try_slots(image *im) {
    for (uint64_t state = 0; state < 256; state++)
        for (int way = 0; way < 8; way++) {
            const uint64_t rows[] = {0, 1, WORKERS - 1, WORKERS, WORKERS + 1, 0x7FFF, ADOPTION_NO_ROW,
                UINT64_C(0xABCDEF) << 16};
            uint64_t row = rows[way] & 0xFFFF;
            bool copying = state == SLOT_WRITING || state == SLOT_LOADING || state == SLOT_QUARANTINED;
            begin(im);
            im->living[0] = im->living[WORKERS - 1] = 1;
            put_slot(im, large_slot(im, 1), state, rows[way]);
            put_slot(im, large_slot(im, 1) + PAGE, state, rows[way]); /* no slot's words: nothing of them counts */
            put_slot(im, large_slot(im, 5), state, rows[way]);
            put_slot(im, image_unit(im, 1), state, rows[way]);
            bool waits = state == SLOT_DOOMED || (copying && (row == 0 || row == WORKERS - 1));
            expect(im, "words of slots", (sums){.slabs = 2, .objects = 2, .waiting = waits,
                    .dropped = {[DROP_UNFINISHED] = copying && !waits, [DROP_UNINDEXED] = state == SLOT_READY}});
        }
}

static void try_whole_indexes(image *im) {
    uint64_t home, number;
    const unsigned states[] = {INDEX_EMPTY, INDEX_BUSY, INDEX_GONE};
    for (int i = 0; i < 3; i++) {
        begin(im);
        for (uint64_t at = 0; at < ENTRIES; at++)
            index_store(&im->in.view.entries[at].sequence,
                UINT64_MAX << 2 | states[i]); /* and the generation goes round */
        expect(im, "all entries in one state", (sums){.slabs = 2, .gone = states[i] == INDEX_EMPTY ? 0 : ENTRIES,
                .dropped = {[DROP_HALF_CHANGED] = states[i] == INDEX_BUSY ? ENTRIES : 0, [DROP_UNINDEXED] = 2}});
    }
    for (int slots = 1; slots <= 5; slots += 4) { /* of one slot, or of five in turn */
        image_clear(im);
        put_layout(im, LARGE, LARGE_BYTES, 1);
        put_slab(im, LARGE_UNIT, 1, 3);
        number = number_with_room(im, 1, &home);
        for (uint64_t at = 0; at < ENTRIES; at++) {
            place_entry(im, home + at, number, large_slot(im, at % (uint64_t)slots), LARGE, LARGE_BYTES);
            index_store(&im->in.view.entries[(home + at) & im->in.view.mask].sequence, UINT64_MAX << 2 | INDEX_READY);
        }
        for (int slot = 0; slot < slots; slot++)
            put_slot(im, large_slot(im, (uint64_t)slot), SLOT_READY, 0);
        expect(im, "the same key everywhere", (sums){.slabs = 1, .objects = 1, .gone = ENTRIES - 1,
                .dropped = {[DROP_DUPLICATE] = INDEX_WINDOW - 1, [DROP_MISPLACED] = ENTRIES - INDEX_WINDOW,
                            [DROP_UNINDEXED] = (uint64_t)slots - 1}});
    }
}

/* By its key an object is found behind tombstones, also of its own key, as a move leaves them; once. */
static void try_touch(image *im) {
    for (uint64_t distance = 1; distance < INDEX_WINDOW; distance++) {
        adoption a;
        adopted_object object;
        uint64_t home, number;
        now = "an object by its key";
        begin(im);
        number = number_with_room(im, distance + 1, &home);
        for (uint64_t d = 0; d <= distance; d++) {
            place_entry(im, home + d, number, large_slot(im, 1), LARGE, LARGE_BYTES);
            if (d < distance)
                index_make_gone(&im->writer, (home + d) & im->in.view.mask, 0, 0);
        }
        put_slot(im, large_slot(im, 1), SLOT_READY, ADOPTION_NO_ROW);
        adopt(im, &a);
        index_key key = image_key(number), other = image_key(1);
        CHECK(a.objects == 3 && !adoption_touch(&a, &other, &object), "%s: that is nobody's", now);
        CHECK(adoption_touch(&a, &key, &object) && object.offset == large_slot(im, 1) && !object.lost, "%s: not found",
              now);
        CHECK(!adoption_touch(&a, &key, &object) && a.pending == 2, "%s: given again", now);
        key.space++;
        CHECK(!adoption_touch(&a, &key, &object), "%s: of another namespace", now);
        adoption_free(&a);
    }
}

/* --- what changes while objects are taken -------------------------------------------------------------------- */

static void only_the_second_large_is_lost(void *context, const adopted_object *object) {
    uint64_t *lost = context;
    CHECK(object->lost == (object->offset == lost[0]), "%s: at %llu, way %llu", now, (unsigned long long)object->offset,
          (unsigned long long)lost[2]);
    lost[1] += object->lost;
}

/* A worker writes to an entry after the scan: its slot is given all the same, once, as lost, and the entry no longer
 * stands for it. */
static void try_scribbles(image *im) {
    for (int way = 0; way < 11; way++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            adoption a;
            uint64_t dice = seed, lost[3] = {large_slot(im, 1), 0, (uint64_t)way};
            now = "an entry that changes after the scan";
            begin(im);
            uint64_t home, number = number_with_room(im, 2, &home);
            index_entry *first = &im->in.view.entries[home],
                *entry = &im->in.view.entries[(home + 1) & im->in.view.mask];
            index_make_gone(&im->writer, home, 2, 2000);
            place_entry(im, home + 1, number, large_slot(im, 1), LARGE, LARGE_BYTES);
            put_slot(im, large_slot(im, 1), SLOT_READY, ADOPTION_NO_ROW);
            adopt(im, &a);
            const uint64_t outside[] = {0, UINT64_MAX, UINT64_C(1) << 63, small_slot(im, 3), large_slot(im, 1) + 8};
            if (way < 3)
                index_store(&entry->sequence, (uint64_t)(way == 2 ? INDEX_GONE : way));
            else if (way == 3) /* to a slot that another one has */
                index_store(&entry->offset, large_slot(im, 3));
            else if (way == 4)
                index_store(&entry->offset, outside[seed % 5]);
            else if (way == 5)
                index_store(&entry->layout, seed % 2 ? SMALL : UINT64_MAX - seed);
            else if (way == 6)
                index_store(&entry->nbytes, seed);
            else if (way == 7) /* of another key, whose probe does not come here */
                index_store(&entry->key[seed % 4], seed + 1);
            else if (way == 8) /* no probe comes here any more */
                index_store(&first->sequence, INDEX_EMPTY);
            else if (way == 10) /* of another namespace */
                index_store(&entry->space, index_load(&entry->space) + 1 + seed);
            else /* another one is found first */
                place_entry(im, home, number, seed % 2 ? large_slot(im, 1) : outside[seed % 5], LARGE, LARGE_BYTES);
            take_all(im, &a, &dice, number + 1, only_the_second_large_is_lost, lost);
            CHECK(lost[1] == 1, "%s: way %d, seed %llu", now, way, (unsigned long long)seed);
            CHECK(index_load(&entry->offset) != lost[0] || index_state(index_load(&entry->sequence)) != INDEX_READY,
                  "%s: way %d, it still stands", now, way);
            adoption_free(&a);
        }
}

/* --- what chance leaves -------------------------------------------------------------------------------------- */

static _Atomic uint64_t *any_word(const image *im, uint64_t *dice, int region) {
    return image_word(im, im->regions[region].offset + rig_random(dice) % (im->regions[region].nbytes / 8) * 8);
}

/* Words that might mean something there: those of other places, and their neighbours. */
static uint64_t likely_word(const image *im, uint64_t *dice) {
    uint64_t word = index_load(any_word(im, dice, (int)(rig_random(dice) % 4)));
    switch (rig_random(dice) % 6) {
    case 0:
        return word + rig_random(dice) % 3 - 1;
    case 1:
        return word + (rig_random(dice) % 7 - 3) * PAGE;
    case 2:
        return im->in.view.data_offset + rig_random(dice) % (im->in.slot_rows + 2) * PAGE;
    case 3:
        return rig_random(dice) % 20 << 32 | rig_random(dice) % 20;
    case 4:
        return rig_random(dice) % 2 ? UINT64_MAX >> rig_random(dice) % 64 : rig_random(dice) % 70000;
    default:
        return word;
    }
}

static void damage(const image *im, uint64_t *dice) {
    int region = (int)(rig_random(dice) % 4);
    uint64_t kind = rig_random(dice) % 5, words = im->regions[region].nbytes / 8;
    if (kind == 4 && rig_random(dice) % 8 == 0) {
        for (uint64_t i = 0; i < words; i++)
            index_store(image_word(im, im->regions[region].offset + i * 8), rig_random(dice));
        return;
    }
    for (uint64_t i = UINT64_C(1) << rig_random(dice) % 9; i; i--) {
        _Atomic uint64_t *word = any_word(im, dice, region);
        uint64_t to = rig_random(dice) & im->in.view.mask, from = rig_random(dice) & im->in.view.mask;
        if (kind == 0)
            index_store(word, rig_random(dice));
        else if (kind == 1)
            index_store(word, index_load(word) ^ UINT64_C(1) << rig_random(dice) % 64);
        else if (kind == 2)
            index_store(word, likely_word(im, dice));
        else if (kind == 3) /* one entry's words in another's place, near by most of the time */
            memcpy(&im->in.view.entries[rig_random(dice) % 4 ? (from + to % 8) & im->in.view.mask : to],
                   &im->in.view.entries[from], sizeof(index_entry));
        else
            index_store(&im->in.view.entries[to].offset, index_load(&im->in.view.entries[from].offset));
    }
}

typedef struct {
    const image *im;
    uint64_t *dice;
    bool goes_on;
} vandal;

static void damage_on(void *context, const adopted_object *object) {
    vandal *v = context;
    CHECK(index_in_data(&v->im->in.view, object->offset, 1), "%s: given outside of the data", now);
    if (v->goes_on && rig_random(v->dice) % 8 == 0)
        damage(v->im, v->dice);
}

static void check_damaged(image *im, expectation *e, uint64_t seed, uint64_t *objects) {
    adoption a;
    uint64_t dice = ~seed << 8;
    make_orderly(im, e, seed);
    for (uint64_t times = 1 + rig_random(&dice) % 3; times; times--)
        damage(im, &dice);
    adopt(im, &a);
    check_again(im, &a);
    *objects += a.objects;
    vandal v = {im, &dice, rig_random(&dice) % 2};
    take_all(im, &a, &dice, e->numbers, damage_on, &v);
    if (v.goes_on)
        check_patterns(im);
    adoption_free(&a);
}

int main(int argc, char **argv) {
    uint64_t rounds = argc > 1 ? (uint64_t)atoll(argv[1]) : RIG_SHARE(2000), kept = 0, objects = 0;
    void (*const crafted[])(image *) = {try_offsets, try_claims,        try_windows,  try_layouts,
                                        try_slabs,   try_slots, try_whole_indexes, try_touch,
                                        try_scribbles, try_spaces};
    static expectation e;
    char name[80];
    image im;
    for (int s = 0; s < SHAPES_COUNT; s++) {
        image_open(&im, &SHAPES[s]);
        for (size_t i = 0; s == 0 && i < sizeof crafted / sizeof *crafted; i++)
            crafted[i](&im);
        now = name;
        for (uint64_t seed = 0; seed < rounds; seed++) {
            snprintf(name, sizeof name, "shape %d, seed %llu", s, (unsigned long long)seed);
            if (seed < rounds / 5) {
                make_orderly(&im, &e, seed);
                check_orderly(&im, &e, seed);
                kept += e.objects;
            }
            check_damaged(&im, &e, seed, &objects);
        }
        image_close(&im);
    }
    CHECK(kept > rounds && objects > rounds, "too little was kept to say anything: %llu, %llu",
          (unsigned long long)kept,
          (unsigned long long)objects);
    printf("%llu objects kept in order, %llu despite damage\n", (unsigned long long)kept, (unsigned long long)objects);
    return 0;
}
