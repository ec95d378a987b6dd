/* What the tests of adoption share: images of pools that a dead server might have left, and what must hold after every
 * adoption, whatever stood there.
 *
 * Each table ends where a page begins that nobody may touch, and so do the index and, as a whole, the data: adoption
 * needs none of it. What is left over in front of a table, and the marks, hold a pattern that must still be there. */
#ifndef ADOPTION_RIG_H
#define ADOPTION_RIG_H

#include "adoption.h"
#include "index_rig.h"

enum { PATTERN = 0xA5 };

typedef struct {
    uint64_t unit_bytes, slab_bytes_min, data_bytes, object_bytes_max;
    uint64_t entries, layout_rows, worker_rows;
} shape;

typedef struct {
    adoption_input in;
    index_writer writer;
    unsigned char *mapped, *living;
    uint64_t mapped_bytes;
    struct {
        uint64_t offset, nbytes;
    } regions[4]; /* layouts, slabs, slots, entries */
    struct {
        uint64_t offset, nbytes;
    } patterned[5]; /* the header's page, in front of each table, the marks */
} image;

static const char *now = ""; /* what is being tried, for the words of a check */

/* The key of a number: what stands above its low 32 bits is the namespace. */
enum { IMAGE_SPACES = 8, IMAGE_SPACE_SHIFT = 32 };

static inline index_key image_key(uint64_t number) {
    index_key key = rig_key(number);
    key.space += number >> IMAGE_SPACE_SHIFT;
    return key;
}

/* --- making one ---------------------------------------------------------------------------------------------- */

static inline void image_clear(image *im) {
    for (int i = 0; i < 4; i++)
        memset(im->in.base + im->regions[i].offset, 0, im->regions[i].nbytes);
    for (int i = 0; i < 5; i++)
        memset(im->in.base + im->patterned[i].offset, PATTERN, im->patterned[i].nbytes);
    memset(im->living, 0, im->in.worker_rows);
    im->writer = (index_writer){.view = im->in.view};
}

static inline void image_open(image *im, const shape *s) {
    uint64_t rows = adoption_round_up(s->data_bytes, s->slab_bytes_min) / s->slab_bytes_min;
    uint64_t nbytes[] = {s->layout_rows * ADOPTION_LAYOUT_ROW, rows * 8, s->data_bytes / ADOPTION_PAGE * 8};
    uint64_t at = 2 * ADOPTION_PAGE; /* the header's page, and one that nobody may touch */
    memset(im, 0, sizeof *im);
    im->patterned[0].nbytes = ADOPTION_PAGE;
    for (int i = 0; i < 3; i++) {
        uint64_t whole = adoption_round_up(nbytes[i], ADOPTION_PAGE);
        im->patterned[i + 1].offset = at;
        im->patterned[i + 1].nbytes = whole - nbytes[i];
        im->regions[i].offset = at + whole - nbytes[i];
        im->regions[i].nbytes = nbytes[i];
        at += whole + ADOPTION_PAGE;
    }
    im->patterned[4].offset = at;
    im->patterned[4].nbytes = index_marks_bytes(s->entries);
    im->regions[3].offset = at + index_marks_bytes(s->entries);
    im->regions[3].nbytes = s->entries * sizeof(index_entry);
    uint64_t data_offset = at + index_bytes(s->entries) + ADOPTION_PAGE;
    im->mapped_bytes = data_offset + s->data_bytes + 2 * RIG_GUARD;
    im->mapped = mmap(NULL, im->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(im->mapped != MAP_FAILED, "address space");
    unsigned char *base = im->mapped + RIG_GUARD;
    for (int i = 0; i < 5; i++) {
        uint64_t start = im->patterned[i].offset, end = start + im->patterned[i].nbytes;
        if (i > 0)
            end = im->regions[i - 1].offset + im->regions[i - 1].nbytes;
        CHECK(mprotect(base + start, end - start, PROT_READ | PROT_WRITE) == 0, "memory");
    }
    im->in = (adoption_input){.base = base,
                              .data_bytes = s->data_bytes,
                              .unit_bytes = s->unit_bytes,
                              .layouts_offset = im->regions[0].offset,
                              .layout_rows = s->layout_rows,
                              .slabs_offset = im->regions[1].offset,
                              .slab_rows = rows,
                              .slots_offset = im->regions[2].offset,
                              .slot_rows = s->data_bytes / ADOPTION_PAGE,
                              .worker_rows = s->worker_rows,
                              .object_bytes_max = s->object_bytes_max,
                              .slab_bytes_min = s->slab_bytes_min};
    im->in.living = im->living = malloc(s->worker_rows); /* exactly: the sanitizer watches its end */
    const char *wrong = index_view_make(&im->in.view, base, data_offset + s->data_bytes, at, s->entries, data_offset,
                                        RIG_SERVING);
    CHECK(wrong == NULL, "%s", wrong);
    image_clear(im);
}

static inline void image_close(image *im) {
    free(im->living);
    munmap(im->mapped, im->mapped_bytes);
}

static inline uint64_t image_unit(const image *im, uint64_t unit) {
    return im->in.view.data_offset + unit * im->in.unit_bytes;
}

static inline _Atomic uint64_t *image_word(const image *im, uint64_t offset) {
    return (_Atomic uint64_t *)(void *)(im->in.base + offset);
}

static inline uint64_t image_slot_word(const image *im, uint64_t offset) {
    return im->in.slots_offset + (offset - im->in.view.data_offset) / ADOPTION_PAGE * 8;
}

static inline void put_layout(image *im, uint64_t row, uint64_t nbytes, uint64_t used) {
    uint64_t at = im->in.layouts_offset + row * ADOPTION_LAYOUT_ROW;
    index_store(image_word(im, at), row * 1000);
    index_store(image_word(im, at + 8), nbytes);
    index_store(image_word(im, at + 16), used);
}

static inline void put_slab_word(image *im, uint64_t row, uint64_t rows, uint64_t slot_pages) {
    index_store(image_word(im, im->in.slabs_offset + row * 8), rows << 32 | slot_pages);
}

/* A slab as a server makes it; returns its bytes: the last one may be shorter than its units. */
static inline uint64_t put_slab(image *im, uint64_t unit, uint64_t units, uint64_t slot_pages) {
    uint64_t room = im->in.data_bytes - unit * im->in.unit_bytes, nbytes = units * im->in.unit_bytes;
    nbytes = nbytes < room ? nbytes : room;
    put_slab_word(im, unit * im->in.unit_bytes / im->in.slab_bytes_min,
                  adoption_round_up(nbytes, im->in.slab_bytes_min) / im->in.slab_bytes_min, slot_pages);
    return nbytes;
}

static inline void put_slot(image *im, uint64_t offset, uint64_t state, uint64_t row) {
    index_store(image_word(im, image_slot_word(im, offset)), row << 8 | state);
}

/* An entry as the server makes it; returns where it stands. */
static inline uint64_t put_entry(image *im, uint64_t number, uint64_t offset, uint64_t layout, uint64_t stored_s) {
    uint64_t nbytes = index_load(image_word(im, im->in.layouts_offset + layout * ADOPTION_LAYOUT_ROW + 8)), place = 0;
    index_object object = {image_key(number), offset, layout, nbytes, ~number,
                           number % 2 ? INDEX_CHECKSUM_KNOWN : 0, 3 * number};
    CHECK(index_publish(&im->writer, &object, index_home(&im->in.view, &object.key), stored_s), "%s: full", now);
    CHECK(index_entry_of(&im->writer, &object.key, &place), "%s: key %llu", now, (unsigned long long)number);
    return place;
}

static inline index_entry *put_object(image *im, uint64_t number, uint64_t offset, uint64_t layout) {
    put_slot(im, offset, SLOT_READY, ADOPTION_NO_ROW);
    return &im->in.view.entries[put_entry(im, number, offset, layout, 1000 + number)];
}

/* --- after an adoption --------------------------------------------------------------------------------------- */

static inline uint64_t sum_of(const adoption *a, int first, int last) {
    uint64_t sum = 0;
    for (int cause = first; cause <= last; cause++)
        sum += a->dropped[cause];
    return sum;
}

static inline void count_states(const image *im, uint64_t states[4]) {
    memset(states, 0, 4 * sizeof *states);
    for (uint64_t at = 0; at <= im->in.view.mask; at++)
        states[index_state(index_load(&im->in.view.entries[at].sequence))]++;
}

/* Every word of the table of slots says what is believed of its page. */
static inline void check_slot_words(const image *im, const adoption *a) {
    uint64_t waits = 0;
    for (uint64_t i = 0; i < im->in.slot_rows; i++) {
        uint64_t offset = im->in.view.data_offset + i * ADOPTION_PAGE, number = 0, expected = SLOT_FREE;
        adopted_slab *slab;
        uint32_t claim = adoption_slot_at(a, offset, &number, &slab) ? a->claim[number] : (uint32_t)CLAIM_NONE;
        if (claim == CLAIM_WAITING) {
            const adopted_wait *wait = &a->waits[waits++];
            CHECK(waits <= a->wait_count && wait->offset == offset, "%s: who waits is not listed by offset", now);
            CHECK(wait->state == SLOT_DOOMED ? wait->row == ADOPTION_NO_ROW
                                             : wait->state == SLOT_QUARANTINED && wait->row < im->in.worker_rows &&
                                                   im->living[wait->row],
                  "%s: waits for nobody, state %u, row %u", now, wait->state, wait->row);
            expected = wait->state | (uint64_t)wait->row << 8;
        } else if (claim != CLAIM_NONE) {
            CHECK(claim <= im->in.view.mask, "%s: slot %llu has claim %x", now, (unsigned long long)number, claim);
            expected = SLOT_READY | (uint64_t)ADOPTION_NO_ROW << 8;
        }
        CHECK(index_load(image_word(im, image_slot_word(im, offset))) == expected, "%s: page %llu", now,
              (unsigned long long)i);
    }
    CHECK(waits == a->wait_count, "%s: %llu wait", now, (unsigned long long)a->wait_count);
}

/* Readers find what is kept, where it is kept. */
static inline void check_entry(const image *im, const adoption *a, uint32_t claim, uint64_t start) {
    const index_entry *entry = &im->in.view.entries[claim];
    uint64_t layout = index_load(&entry->layout);
    index_key key = index_key_at(entry);
    index_place place = {0, 0, 0};
    int found = index_find(&im->in.view, &key, index_home(&im->in.view, &key), layout, &place);
    CHECK(found == INDEX_HIT && place.at == claim && place.offset == start, "%s: entry %u is not found", now, claim);
    CHECK(layout < im->in.layout_rows && a->layouts[layout].nbytes == index_load(&entry->nbytes), "%s: layout", now);
}

static inline void check_slabs(const image *im, const adoption *a) {
    uint64_t first = 0, objects = 0, nbytes = 0, waiting = 0, end = im->in.view.data_offset;
    uint64_t *words = calloc(im->in.slab_rows, sizeof *words);
    for (uint64_t s = 0; s < a->slab_count; s++) {
        const adopted_slab *slab = &a->slabs[s];
        uint64_t used = 0, free_slots = 0, fresh = slab->start, inside = slab->start - im->in.view.data_offset;
        CHECK(slab->start >= end && inside % im->in.unit_bytes == 0, "%s: slab %llu overlaps", now,
              (unsigned long long)s);
        end = slab->start + slab->nbytes;
        CHECK(slab->nbytes > 0 && end <= im->in.view.segment_bytes, "%s: slab %llu ends outside", now,
              (unsigned long long)s);
        CHECK(slab->slots > 0 && slab->slots == slab->nbytes / slab->slot_bytes && slab->first == first, "%s: slots",
              now);
        first += slab->slots;
        for (uint64_t slot = 0; slot < slab->slots; slot++) {
            uint64_t start = slab->start + slot * slab->slot_bytes;
            uint32_t claim = a->claim[slab->first + slot];
            free_slots += claim == CLAIM_NONE;
            if (claim == CLAIM_NONE)
                continue;
            used++;
            fresh = start + slab->slot_bytes;
            waiting += claim == CLAIM_WAITING;
            if (claim == CLAIM_WAITING)
                continue;
            objects++;
            nbytes += slab->slot_bytes;
            check_entry(im, a, claim, start);
        }
        CHECK(used == slab->used && used + free_slots == slab->slots && fresh == slab->fresh, "%s: sums of slab %llu",
              now,
              (unsigned long long)s);
        uint64_t rows = adoption_round_up(slab->nbytes, im->in.slab_bytes_min) / im->in.slab_bytes_min;
        words[inside / im->in.slab_bytes_min] = used ? rows << 32 | slab->slot_bytes / ADOPTION_PAGE : 0;
    }
    for (uint64_t row = 0; row < im->in.slab_rows; row++)
        CHECK(index_load(image_word(im, im->in.slabs_offset + row * 8)) == words[row], "%s: slab row %llu", now,
              (unsigned long long)row);
    free(words);
    CHECK(first == a->slot_count && objects == a->objects && objects == a->ready && objects == a->pending &&
              nbytes == a->nbytes && waiting == a->wait_count,
          "%s: sums", now);
}

static inline void check_layouts(const image *im, const adoption *a) {
    for (uint64_t row = 0; row < im->in.layout_rows; row++) {
        uint64_t at = im->in.layouts_offset + row * ADOPTION_LAYOUT_ROW;
        bool used = index_load(image_word(im, at + 16)) != 0;
        CHECK(used == (a->layouts[row].nbytes != 0), "%s: layout row %llu", now, (unsigned long long)row);
        CHECK(!used || index_load(image_word(im, at + 8)) == a->layouts[row].nbytes, "%s: layout row %llu", now,
              (unsigned long long)row);
    }
}

static inline void check_patterns(const image *im) {
    for (int i = 0; i < 5; i++)
        for (uint64_t at = 0; at < im->patterned[i].nbytes; at++)
            CHECK(im->in.base[im->patterned[i].offset + at] == PATTERN, "%s: wrote beside a table, at %llu", now,
                  (unsigned long long)(im->patterned[i].offset + at));
}

/* Adopt, and look at everything that the new server will believe. */
static inline void adopt(const image *im, adoption *a) {
    uint64_t before[4], after[4];
    memset(im->in.base + im->patterned[4].offset, PATTERN, im->patterned[4].nbytes); /* whoever published was there */
    count_states(im, before);
    CHECK(adoption_scan(a, &im->in), "%s: memory", now);
    count_states(im, after);
    uint64_t entries_dropped = sum_of(a, DROP_HALF_CHANGED, DROP_DUPLICATE);
    CHECK(after[INDEX_EMPTY] == before[INDEX_EMPTY] && after[INDEX_BUSY] == 0, "%s: states of entries", now);
    CHECK(after[INDEX_READY] == a->ready && after[INDEX_GONE] == a->gone, "%s: entries by state", now);
    CHECK(before[INDEX_READY] + before[INDEX_BUSY] == a->ready + entries_dropped, "%s: an entry has no cause", now);
    CHECK(before[INDEX_BUSY] == a->dropped[DROP_HALF_CHANGED], "%s: half changed", now);
    check_slabs(im, a);
    check_slot_words(im, a);
    check_layouts(im, a);
    check_patterns(im);
}

/* A server that dies at once after its adoption leaves what it found, put right: the next one drops nothing. */
static inline void check_again(const image *im, const adoption *a) {
    adoption again;
    adopt(im, &again);
    CHECK(sum_of(&again, 0, DROP_CAUSES - 1) == 0, "%s: dropped at the second time", now);
    CHECK(again.objects == a->objects && again.wait_count == a->wait_count && again.nbytes == a->nbytes,
          "%s: other sums", now);
    for (uint64_t i = 0; i < a->objects; i++) {
        uint32_t claim = a->claim[a->order[i]];
        CHECK(again.claim[again.order[i]] == claim, "%s: another object than that of entry %u", now, claim);
    }
    adoption_free(&again);
}

/* --- taking objects ------------------------------------------------------------------------------------------ */

typedef void taker(void *context, const adopted_object *object);

/* All objects of the slab at an offset, as the binding takes them. */
static inline uint64_t take_slab(adoption *a, uint64_t offset, adopted_object *objects) {
    const adopted_slab *slab = adoption_slab_at(a, offset);
    uint64_t count = 0;
    for (uint64_t slot = 0; slab != NULL && slot < slab->slots; slot++) {
        uint64_t number = slab->first + slot;
        if (a->claim[number] < CLAIM_ENTRIES_MAX)
            adoption_take_slot(a, number, slab->start + slot * slab->slot_bytes, &objects[count++]);
    }
    return count;
}

/* Take everything, by age, by slab and by any of `keys` keys, in a mixture; each object once. */
static inline void take_all(const image *im, adoption *a, uint64_t *dice, uint64_t keys, taker *each, void *context) {
    adopted_object *objects = malloc((a->slot_count + 1) * sizeof *objects);
    bool *given = calloc(a->slot_count + 1, sizeof *given);
    uint64_t total = a->pending, taken = 0;
    for (bool over = false; !over;) {
        uint64_t count = 0;
        if (keys != 0 && rig_random(dice) % 3 != 0) {
            uint64_t number = rig_random(dice) % keys;
            index_key key = image_key(number);
            for (uint64_t space = 0; space < IMAGE_SPACES && !count; space++) {
                key = image_key(number | space << IMAGE_SPACE_SHIFT);
                count = adoption_touch(a, &key, objects);
            }
            CHECK(!count || objects->lost || memcmp(&objects->key, &key, sizeof key) == 0, "%s: another key's", now);
        } else if (rig_random(dice) % 4 == 0) {
            count = take_slab(a, im->in.view.data_offset + rig_random(dice) % (im->in.data_bytes + 9999), objects);
        } else {
            count = adoption_next(a, objects);
            over = count == 0;
        }
        for (uint64_t i = 0; i < count; i++) {
            adopted_slab *slab;
            uint64_t number = 0;
            CHECK(adoption_slot_at(a, objects[i].offset, &number, &slab), "%s: given outside of the slots", now);
            CHECK(slab->start + (number - slab->first + 1) * slab->slot_bytes <= im->in.view.segment_bytes,
                  "%s: ends outside", now);
            CHECK(!given[number], "%s: slot %llu is given twice", now, (unsigned long long)number);
            CHECK(objects[i].lost || objects[i].layout < im->in.layout_rows, "%s: layout", now);
            given[number] = true;
            taken++;
            each(context, &objects[i]);
        }
        CHECK(a->pending == total - taken, "%s: %llu are pending", now, (unsigned long long)a->pending);
    }
    CHECK(a->pending == 0 && taken == total, "%s: %llu of %llu were given", now, (unsigned long long)taken,
          (unsigned long long)total);
    for (uint64_t offset = im->in.view.data_offset; offset < im->in.view.segment_bytes; offset += im->in.unit_bytes)
        CHECK(take_slab(a, offset, objects) == 0, "%s: given after the last", now);
    free(given);
    free(objects);
}

#endif
