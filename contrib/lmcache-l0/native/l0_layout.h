/* The table file: its layout, and the checks before anything in it is trusted.
 *
 *   header (4 KiB) | writer rows (64 B each) | meta (64 B a slot) | stripes (64 B each) | buffers (fixed size)
 *
 * Meta and buffers are separate so that a probe walks 64-byte neighbours, not pages. All zero is an empty table: a new
 * file needs only a header, and pages that no key has touched cost nothing if files can be sparse.
 *
 * A stripe is a run of slots that share their buffers: one per slot, plus `spares` for all of them. Every slot always
 * owns exactly one buffer, whatever its state; the spares are the others. The two kinds of table differ only in the
 * length of the run: 64 slots with 2 spares (4.5 KiB per slot of 4 KiB values), or, if `versions` is given, 1 slot with
 * `versions` spares, so that only writes of the key itself end its views.
 *
 * The geometry is copied out of the header once, after it was checked against the file's size, and never read from
 * shared memory again: whatever is written into the file later, no offset leaves the mapping.
 */
#ifndef L0_LAYOUT_H
#define L0_LAYOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define L0_MAGIC UINT64_C(0x4c4243414c304c31)
#define L0_LAYOUT_VERSION 3u
#define L0_BYTE_ORDER 0x01020304u
#define L0_HEADER_BYTES 4096u
#define L0_WRITERS_MAX 1024u          /* processes that write at one time; more are refused, not harmed */
#define L0_LINE_BYTES 64u
#define L0_KEY_BYTES_MAX 256u
#define L0_VALUE_BYTES_MAX (1u << 30) /* lengths are 32 bits */
#define L0_VERSIONS_MAX 64u
#define L0_STRIPE_SLOTS 64u
#define L0_STRIPE_SHIFT 6
#define L0_SPARES 2u                  /* per stripe, by default */
#define L0_SPARES_MAX 7u              /* the ring of a stripe is one word: see l0_stripe.h */
#define L0_SLOTS_MAX (UINT64_C(1) << 40)
#define L0_FILE_BYTES_MAX (UINT64_C(1) << 46)
#define L0_PROBE_MAX 16384u           /* a longer probe means a full table: at 70 % load the longest is far below */

/* One line per slot. `bound` belongs to the keys whose home is this slot; the rest to the key in it. */
typedef struct l0_meta {
    _Atomic uint64_t bound;    /* moves << 24 | distance of the farthest key of this home; see l0_probe.h */
    _Atomic uint64_t lock;     /* 0, or the writer that owns the slot: row << 48 | epoch */
    _Atomic uint64_t current;  /* generation, buffer, state: the one word that makes a write visible */
    _Atomic uint64_t hash;
    _Atomic uint32_t hits;     /* one read in L0_HIT_SAMPLE is counted here */
    uint32_t reserved32;
    uint64_t reserved[3];
} l0_meta;

/* One line per stripe; unused if a stripe is one slot, whose own lock and order of buffers are enough. */
typedef struct l0_stripe {
    _Atomic uint64_t lock;     /* as a slot's; held from choosing a buffer until the one it replaces is retired */
    _Atomic uint64_t ring;     /* the spare buffers, oldest first; see l0_stripe.h */
    uint64_t reserved[6];
} l0_stripe;

/* L0_ARRIVING: live, and perhaps also in a slot farther from its home, from which it was being moved: l0_move.h. */
enum { L0_FREE = 0, L0_CLAIMED = 1, L0_LIVE = 2, L0_ARRIVING = 3 };

/* The parts of `current`. The buffer is counted within the stripe. An all-zero word is a slot that was never used: it
 * owns the buffer of its own place. */
#define L0_GENERATION_SHIFT 9
static inline uint64_t l0_word(uint64_t generation, uint64_t buffer, uint64_t state) {
    return generation << L0_GENERATION_SHIFT | buffer << 2 | state;
}
static inline uint64_t l0_state(uint64_t word) { return word & 3; }
static inline bool l0_there(uint64_t word) { return l0_state(word) >= L0_LIVE; }
static inline uint64_t l0_generation(uint64_t word) { return word >> L0_GENERATION_SHIFT; }

typedef struct l0_writer_row {
    _Atomic uint64_t epoch;    /* moves each time a writer takes the row, before it takes any slot */
    _Atomic uint64_t pid;      /* for people; proves nothing (see l0_owner.h) */
    uint64_t reserved[6];
} l0_writer_row;

/* Before each buffer: this header, then the key, then the value on a line of its own. */
typedef struct l0_buffer_head {
    _Atomic uint64_t stamp;    /* the version of the bytes: generation << 6 | slot within the stripe; 0 meanwhile */
    _Atomic uint64_t bytes;    /* of the key << 32 | of the value */
    _Atomic uint64_t tag;      /* the type of the value; 0: just bytes */
} l0_buffer_head;

typedef struct l0_header {
    uint64_t magic;
    uint32_t layout_version, byte_order;
    uint64_t file_bytes, slots;
    uint32_t value_bytes_max, key_bytes_max, versions, spares, writers_max, reserved32;
    uint64_t hash_seed, table_id, created_unix_s;
    uint64_t checksum;                              /* of everything above */
    _Alignas(64) _Atomic uint64_t ready;            /* equals table_id once the file is complete */
    _Alignas(64) _Atomic uint64_t switched_off;     /* the switch: gets miss and sets store nothing, everywhere */
    _Alignas(64) _Atomic uint64_t keys;             /* live keys; a killed writer may leave it off by one */
    _Atomic uint64_t recovered;                     /* slots taken back from dead writers */
} l0_header;

_Static_assert(sizeof(l0_meta) == L0_LINE_BYTES, "a slot's meta is one cache line");
_Static_assert(sizeof(l0_stripe) == L0_LINE_BYTES, "a stripe is one cache line");
_Static_assert(sizeof(l0_writer_row) == L0_LINE_BYTES, "a writer's row is one cache line");
_Static_assert(sizeof(l0_header) <= L0_HEADER_BYTES, "the header fits its page");
_Static_assert(sizeof(_Atomic uint64_t) == 8, "atomics have no lock beside them: they are shared by processes");

/* A process's view of a table: checked once, then constant. `versions` 0: stripes of 64 slots. */
typedef struct l0_geometry {
    uint64_t slots, buffers, key_offset, value_offset, buffer_bytes, stripe_bytes, buffers_bytes;
    uint64_t meta_offset, stripes_offset, buffers_offset, file_bytes, hash_seed, table_id, created_unix_s;
    uint32_t value_bytes_max, key_bytes_max, versions, spares, stripe_shift, stripe_buffers, probe_max;
} l0_geometry;

static inline uint64_t l0_round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* Fill `g` from the five figures that determine it. False: a figure is outside its limits. */
static inline bool l0_plan(l0_geometry *g, uint64_t slots, uint64_t value_bytes_max, uint64_t key_bytes_max,
                           uint64_t versions, uint64_t spares) {
    memset(g, 0, sizeof *g);
    if (slots < 1 || slots > L0_SLOTS_MAX || value_bytes_max < 1 || value_bytes_max > L0_VALUE_BYTES_MAX ||
        key_bytes_max < 1 || key_bytes_max > L0_KEY_BYTES_MAX || versions > L0_VERSIONS_MAX ||
        (versions ? spares != versions : spares < 1 || spares > L0_SPARES_MAX))
        return false;
    g->slots = slots;
    g->value_bytes_max = (uint32_t)value_bytes_max;
    g->key_bytes_max = (uint32_t)key_bytes_max;
    g->versions = (uint32_t)versions;
    g->spares = (uint32_t)spares;
    g->stripe_shift = versions ? 0 : L0_STRIPE_SHIFT;
    g->stripe_buffers = (1u << g->stripe_shift) + g->spares;
    g->key_offset = sizeof(l0_buffer_head);
    g->value_offset = l0_round_up(g->key_offset + l0_round_up(key_bytes_max, 8), L0_LINE_BYTES);
    g->buffer_bytes = g->value_offset + l0_round_up(value_bytes_max, L0_LINE_BYTES);
    uint64_t stripes = (slots + (1u << g->stripe_shift) - 1) >> g->stripe_shift;
    g->buffers = slots + stripes * spares;
    if (g->buffers > L0_FILE_BYTES_MAX / (g->buffer_bytes + L0_LINE_BYTES))
        return false;
    g->meta_offset = L0_HEADER_BYTES + (uint64_t)L0_WRITERS_MAX * sizeof(l0_writer_row);
    g->stripes_offset = g->meta_offset + slots * L0_LINE_BYTES;
    g->buffers_offset =
        l0_round_up(g->stripes_offset + (versions ? 0 : stripes * sizeof(l0_stripe)), L0_HEADER_BYTES);
    g->stripe_bytes = g->stripe_buffers * g->buffer_bytes;
    g->buffers_bytes = g->buffers * g->buffer_bytes;
    g->file_bytes = l0_round_up(g->buffers_offset + g->buffers_bytes, L0_HEADER_BYTES);
    g->probe_max = slots < L0_PROBE_MAX ? (uint32_t)slots : L0_PROBE_MAX;
    return true;
}

static inline uint64_t l0_header_checksum(const l0_header *h) {
    const unsigned char *p = (const unsigned char *)h;
    uint64_t sum = UINT64_C(0x9e3779b97f4a7c15);
    for (size_t i = 0; i < offsetof(l0_header, checksum); i++)
        sum = (sum ^ p[i]) * UINT64_C(0x2545f4914f6cdd1d), sum ^= sum >> 29;
    return sum;
}

/* Write the header of a new, all-zero file. Nobody else may use it before `ready` is stored, which comes last. */
static inline void l0_header_write(l0_header *h, const l0_geometry *g, uint64_t seed, uint64_t id, uint64_t now,
                                   bool enabled) {
    atomic_store_explicit(&h->ready, 0, memory_order_relaxed);
    h->magic = L0_MAGIC;
    h->layout_version = L0_LAYOUT_VERSION;
    h->byte_order = L0_BYTE_ORDER;
    h->file_bytes = g->file_bytes;
    h->slots = g->slots;
    h->value_bytes_max = g->value_bytes_max;
    h->key_bytes_max = g->key_bytes_max;
    h->versions = g->versions;
    h->spares = g->spares;
    h->reserved32 = 0;
    h->writers_max = L0_WRITERS_MAX;
    h->hash_seed = seed;
    h->table_id = id | 1; /* never zero: zero means not ready */
    h->created_unix_s = now;
    h->checksum = l0_header_checksum(h);
    atomic_store_explicit(&h->switched_off, !enabled, memory_order_relaxed);
    atomic_store_explicit(&h->ready, h->table_id, memory_order_release);
}

typedef enum l0_verdict {
    L0_OK_HEADER = 0,
    L0_NOT_READY,        /* not finished: still being made, or its maker died */
    L0_NOT_A_TABLE,
    L0_OTHER_VERSION,
    L0_OTHER_BYTE_ORDER,
    L0_DAMAGED_HEADER,
    L0_WRONG_SIZE,       /* the file's length differs from its header's */
} l0_verdict;

/* Check the header of a file of `file_bytes` (at least L0_HEADER_BYTES, which the caller has checked). */
static inline l0_verdict l0_header_check(const l0_header *shared, uint64_t file_bytes, l0_geometry *g) {
    uint64_t ready = atomic_load_explicit(&shared->ready, memory_order_acquire);
    l0_header h; /* a private copy: what is checked is what is used */
    memcpy(&h, shared, offsetof(l0_header, ready));
    if (ready == 0)
        return h.magic == 0 || h.magic == L0_MAGIC ? L0_NOT_READY : L0_NOT_A_TABLE;
    if (h.magic != L0_MAGIC)
        return L0_NOT_A_TABLE;
    if (h.byte_order != L0_BYTE_ORDER)
        return L0_OTHER_BYTE_ORDER;
    if (h.layout_version != L0_LAYOUT_VERSION)
        return L0_OTHER_VERSION;
    if (h.checksum != l0_header_checksum(&h) || ready != h.table_id || h.writers_max != L0_WRITERS_MAX ||
        !l0_plan(g, h.slots, h.value_bytes_max, h.key_bytes_max, h.versions, h.spares) || g->file_bytes != h.file_bytes)
        return L0_DAMAGED_HEADER;
    if (file_bytes < g->file_bytes)
        return L0_WRONG_SIZE;
    g->hash_seed = h.hash_seed;
    g->table_id = h.table_id;
    g->created_unix_s = h.created_unix_s;
    return L0_OK_HEADER;
}

/* A mapped table. `base` is the mapping, at least `g.file_bytes` long. `me` is this handle's writer id, 0 for none.
 * `ask_fd` is a descriptor of the file, to ask about locks. The process may have closed or reused it, so it is trusted
 * only while it is still the file `dev`, `ino`. `life` holds the life lock: l0_owner.h. */
typedef struct l0_table {
    unsigned char *base;
    l0_geometry g;
    uint64_t me, dev, ino;
    int ask_fd, life_fd;
    void *life;
    uint64_t life_bytes;
} l0_table;

static inline l0_header *l0_head(const l0_table *t) { return (l0_header *)t->base; }
static inline l0_writer_row *l0_row(const l0_table *t, uint64_t row) {
    return (l0_writer_row *)(t->base + L0_HEADER_BYTES) + row % L0_WRITERS_MAX;
}
static inline l0_meta *l0_meta_at(const l0_table *t, uint64_t slot) {
    return (l0_meta *)(t->base + t->g.meta_offset) + slot;
}
static inline l0_stripe *l0_stripe_of(const l0_table *t, uint64_t slot) {
    return (l0_stripe *)(t->base + t->g.stripes_offset) + (slot >> t->g.stripe_shift);
}
/* The slot's place within its stripe. */
static inline uint64_t l0_place(const l0_table *t, uint64_t slot) {
    return slot & ((UINT64_C(1) << t->g.stripe_shift) - 1);
}
/* The buffer that the slot owns, by its word. */
static inline uint64_t l0_buffer_of(const l0_table *t, uint64_t slot, uint64_t word) {
    return word == 0 ? l0_place(t, slot) : word >> 2 & 127;
}
/* A buffer of the slot's stripe: always inside the file, whatever number was found. */
static inline l0_buffer_head *l0_buffer_at(const l0_table *t, uint64_t slot, uint64_t buffer) {
    /* The two products do not wait for each other: the first is known before the slot's word is. */
    uint64_t first = (slot >> t->g.stripe_shift) * t->g.stripe_bytes, at = first + buffer * t->g.buffer_bytes;
    if (buffer >= t->g.stripe_buffers || at >= t->g.buffers_bytes)
        at = first;
    return (l0_buffer_head *)(t->base + t->g.buffers_offset + at);
}
static inline unsigned char *l0_key_at(const l0_table *t, l0_buffer_head *head) {
    return (unsigned char *)head + t->g.key_offset;
}
static inline unsigned char *l0_value_at(const l0_table *t, l0_buffer_head *head) {
    return (unsigned char *)head + t->g.value_offset;
}
static inline uint64_t l0_stamp(const l0_table *t, uint64_t slot, uint64_t generation) {
    return generation << L0_STRIPE_SHIFT | l0_place(t, slot);
}
static inline bool l0_enabled(const l0_table *t) {
    return atomic_load_explicit(&l0_head(t)->switched_off, memory_order_relaxed) == 0;
}

#endif
