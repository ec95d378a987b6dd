/* Regions in which anything may stand: neither readers nor the writer may crash, leave the pool, or loop, and readers
 * may bring back bytes of the data only. Arguments: rounds. */
#include "index_rig.h"

enum { ENTRIES = 128, KEYS = 96, PAGES = 8, NBYTES = 3 * INDEX_PAGE_BYTES };

/* Bytes of the data have the top bit; nothing else in the pool that a reader could bring back is made to. */
enum { DATA_BYTE = 0xd5 };

static void random_bytes(rig *r, uint64_t *dice) {
    uint64_t *words = (uint64_t *)(void *)(r->base + INDEX_PAGE_BYTES);
    for (uint64_t i = 0; i < index_bytes(ENTRIES) / 8; i++)
        words[i] = rig_random(dice);
}

static void flip_bits(rig *r, uint64_t *dice) {
    for (uint64_t number = 0; number < PAGES; number++)
        rig_publish(r, number, r->writer.view.data_offset + number % 4 * INDEX_PAGE_BYTES, NBYTES, 0);
    for (uint64_t i = rig_random(dice) % 400; i; i--) {
        uint64_t at = rig_random(dice) % index_bytes(ENTRIES);
        r->base[INDEX_PAGE_BYTES + at] ^= (unsigned char)(1 << rig_random(dice) % 8);
    }
}

/* Entries that nearly make sense: the right keys, in reach, with a place at the borders. */
static void craft(rig *r, uint64_t *dice) {
    const index_view *view = &r->writer.view;
    const uint64_t offsets[] = {0,
                                INDEX_PAGE_BYTES,
                                view->data_offset - INDEX_PAGE_BYTES,
                                view->data_offset,
                                view->data_offset + 8,
                                r->nbytes - NBYTES,
                                r->nbytes - NBYTES + INDEX_PAGE_BYTES,
                                r->nbytes - INDEX_PAGE_BYTES,
                                r->nbytes,
                                r->nbytes + INDEX_PAGE_BYTES,
                                UINT64_MAX - INDEX_PAGE_BYTES + 1,
                                UINT64_MAX,
                                UINT64_C(1) << 63};
    const uint64_t lengths[] = {0, 1, NBYTES - 1, NBYTES, NBYTES + 1, r->nbytes, UINT64_MAX, UINT64_MAX - NBYTES + 1};
    const uint64_t generations[] = {0, 1, UINT64_MAX >> 2, (UINT64_MAX >> 2) - 1, 1u << 31};
    uint64_t kind = rig_random(dice) % 4;
    for (uint64_t at = 0; at < ENTRIES; at++) {
        index_entry *entry = &view->entries[at];
        uint64_t number = kind == 0 ? 3 : rig_random(dice) % KEYS; /* all the same key, or any */
        index_key key = rig_key(number);
        unsigned state = kind == 1 ? INDEX_BUSY : kind == 2 ? INDEX_GONE : (unsigned)(rig_random(dice) % 4);
        for (int i = 0; i < 4; i++)
            index_store(&entry->key[i], key.word[i]);
        index_store(&entry->space, RIG_SPACE);
        index_store(&entry->offset, offsets[rig_random(dice) % (sizeof offsets / 8)]);
        index_store(&entry->layout, RIG_LAYOUT);
        index_store(&entry->nbytes, lengths[rig_random(dice) % (sizeof lengths / 8)]);
        index_store(&entry->flags, rig_random(dice));
        index_store(&entry->sequence, generations[rig_random(dice) % 5] << 2 | (kind == 0 ? INDEX_READY : state));
    }
}

static void read_all(rig *r, uint64_t *dice, _Atomic uint32_t *verified) {
    static unsigned char row[KEYS * INDEX_KEY_BYTES];
    unsigned char *memory = malloc(KEYS * (size_t)NBYTES); /* exactly: the sanitizer watches its end */
    uint8_t statuses[KEYS];
    uint64_t targets[KEYS];
    index_place places[KEYS];
    memset(memory, 0x11, KEYS * (size_t)NBYTES);
    for (uint64_t i = 0; i < KEYS; i++) {
        rig_key_bytes(row + i * INDEX_KEY_BYTES, i);
        targets[i] = (uint64_t)(uintptr_t)memory + i * NBYTES;
    }
    index_batch batch = {.in_a_row = row,
                         .n = KEYS,
                         .space = RIG_SPACE,
                         .layout = RIG_LAYOUT,
                         .prefix = rig_random(dice) % 3 == 0};
    index_reading reading = {.view = &r->writer.view,
                             .batch = &batch,
                             .nbytes = NBYTES,
                             .targets = targets,
                             .verify = (int)(rig_random(dice) % 3),
                             .verified = verified,
                             .places = places,
                             .statuses = statuses};
    uint64_t count = index_read_batch(&reading, 1 + (unsigned)(rig_random(dice) % 2));
    CHECK(count <= KEYS, "count");
    for (uint64_t i = 0; i < KEYS * (uint64_t)NBYTES; i++)
        CHECK(memory[i] == 0x11 || memory[i] == DATA_BYTE, "byte %llu is 0x%x", (unsigned long long)i, memory[i]);
    for (uint64_t i = 0; i < count; i++) {
        if (statuses[i] != INDEX_HIT)
            continue;
        CHECK(memory[i * NBYTES] == DATA_BYTE, "hit %llu was not copied", (unsigned long long)i);
        CHECK(places[i].offset % INDEX_PAGE_BYTES == 0, "hit %llu starts inside a page", (unsigned long long)i);
        CHECK(index_load(&r->writer.view.entries[places[i].at].nbytes) == NBYTES, "hit %llu has another size",
              (unsigned long long)i);
    }
    free(memory);
}

static void change_all(rig *r, uint64_t *dice) {
    index_recount(&r->writer);
    uint64_t offset = r->writer.view.data_offset, left = ENTRIES, place = 0;
    uint16_t mark;
    for (int i = 0; i < 200; i++) {
        uint64_t number = rig_random(dice) % KEYS;
        if (i % 3)
            rig_publish(r, number, offset, NBYTES, 0);
        else
            rig_remove(r, number, offset);
        if (i % 5 == 0)
            index_tidy(&r->writer, 1 + rig_random(dice) % ENTRIES);
        index_key key = rig_key(number);
        if (index_entry_of(&r->writer, &key, &place))
            CHECK(place < ENTRIES, "place");
    }
    while (index_next_mark(&r->writer, &left, &place, &mark))
        CHECK(place < ENTRIES && mark, "mark");
}

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : RIG_SHARE(200);
    _Atomic uint32_t *verified = calloc(ENTRIES, sizeof *verified);
    for (long round = 0; round < rounds; round++) {
        uint64_t dice = (uint64_t)round;
        rig r;
        rig_open(&r, ENTRIES, PAGES * INDEX_PAGE_BYTES);
        memset(r.base + r.writer.view.data_offset, DATA_BYTE, PAGES * INDEX_PAGE_BYTES);
        void (*const damages[])(rig *, uint64_t *) = {random_bytes, flip_bits, craft};
        damages[round % 3](&r, &dice);
        read_all(&r, &dice, verified);
        change_all(&r, &dice);
        read_all(&r, &dice, verified);
        for (uint64_t i = 0; i < PAGES * INDEX_PAGE_BYTES; i++)
            CHECK(r.base[r.writer.view.data_offset + i] == DATA_BYTE, "the writer wrote to the data");
        rig_close(&r);
    }
    free((void *)verified);
    printf("ok\n");
    return 0;
}
