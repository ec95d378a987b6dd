/* The index of the pool: key and namespace → where the bytes are. One writer (the server), any readers, no locks.
 *
 *     index region    marks      one u16 for each entry, padded to whole pages
 *                     entries    128 bytes each, a power of two of them
 *
 * An entry is two cache lines; a lookup touches the first one only. All words are little-endian u64.
 *
 *     line 0   sequence    generation << 2 | state: moves whenever anything else in the entry, or the bytes it
 *                          points to, may change. It never repeats: generations only grow
 *              key         four words
 *              namespace
 *              offset      of the slot, from the start of the segment
 *              layout      the layout's id
 *     line 1   nbytes      of the object (its slot may be longer)
 *              checksum    xxh3_64 of the bytes, if `flags` says that it is known
 *              flags       bit 0: the checksum is known; bit 1: adopted, to be checked by each process once
 *              stored_s    Unix seconds of its publication
 *              reason      of a GONE entry: the kernel's `Reason`
 *              gone_s      Unix seconds; 0: it was moved nearer to its home, and is not gone at all
 *              incarnation the number of the object: no other object of this key ever had it. 0: not known
 *              seal        of the others but reason and gone_s, as they were published: a page that a power cut has
 *                          torn on a disk does not have it
 *
 * A mark says that a reader used the entry since the writer last looked. It is 1 + the key's position in its batch (at
 * most 65,535), so that the writer can tell a prompt's end from its beginning. 0: not used.
 *
 * A key is in one of the INDEX_WINDOW entries from its home on, and no entry between its home and its place is EMPTY. A
 * key whose window is full has no entry, and only the server can serve it.
 *
 * Nothing here trusts the region: any process that maps the pool may have written anything there. Each word is loaded
 * once, into a local, and checked before use (index_find.h); the writer never follows what it finds (index_write.h).
 */
#ifndef LMCACHE_CORE_INDEX_H
#define LMCACHE_CORE_INDEX_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    INDEX_EMPTY = 0, /* never used, or tidied up: a probe ends here */
    INDEX_BUSY = 1,  /* being changed, or its writer died during a change */
    INDEX_READY = 2,
    INDEX_GONE = 3, /* a tombstone: a probe goes on behind it. It says why the key is gone */
};

enum {
    INDEX_WINDOW = 64, /* a key is at most this many entries behind its home: no probe is longer */
    INDEX_KEY_BYTES = 32,
    INDEX_PAGE_BYTES = 4096,
    INDEX_CHECKSUM_KNOWN = 1, /* in `flags` */
    INDEX_UNVERIFIED = 2,     /* in `flags`, too: adopted, and each reader's process must verify it once */
    INDEX_MARK_MAX = 65535,
};

typedef struct {
    _Atomic uint64_t sequence;
    _Atomic uint64_t key[4];
    _Atomic uint64_t space;
    _Atomic uint64_t offset;
    _Atomic uint64_t layout;
    _Atomic uint64_t nbytes;
    _Atomic uint64_t checksum;
    _Atomic uint64_t flags;
    _Atomic uint64_t stored_s;
    _Atomic uint64_t reason;
    _Atomic uint64_t gone_s;
    _Atomic uint64_t incarnation;
    _Atomic uint64_t seal;
} index_entry;

_Static_assert(sizeof(index_entry) == 128, "the layout of the pool says so");
_Static_assert(sizeof(_Atomic uint16_t) == 2, "a mark is two bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the pool's numbers are little-endian");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "processes cannot share a lock that hides in an atomic");

/* The index as one process maps it. */
typedef struct {
    unsigned char *base; /* of the segment */
    index_entry *entries;
    _Atomic uint16_t *marks;
    _Atomic uint64_t *serving; /* the epoch of the serving server, 0: none */
    uint64_t mask;             /* entries - 1 */
    uint64_t data_offset, segment_bytes;
} index_view;

typedef struct {
    uint64_t word[4];
    uint64_t space;
} index_key;

static inline uint64_t index_marks_bytes(uint64_t entries) {
    return (entries * 2 + INDEX_PAGE_BYTES - 1) & ~(uint64_t)(INDEX_PAGE_BYTES - 1);
}

static inline uint64_t index_bytes(uint64_t entries) {
    return index_marks_bytes(entries) + entries * sizeof(index_entry);
}

/* What is wrong with this geometry, or NULL. `base` is where the segment is mapped. */
static inline const char *index_view_make(index_view *view, unsigned char *base, uint64_t segment_bytes,
                                          uint64_t index_offset, uint64_t entries, uint64_t data_offset,
                                          uint64_t serving_offset) {
    if ((uintptr_t)base % 64 != 0)
        return "the segment is not mapped at a page";
    if (entries < INDEX_WINDOW || (entries & (entries - 1)) != 0 || entries > UINT64_C(1) << 40)
        return "entries must be a power of two, 64 or more";
    if (index_offset % INDEX_PAGE_BYTES != 0 || data_offset % INDEX_PAGE_BYTES != 0)
        return "index_offset and data_offset must be whole pages";
    if (data_offset > segment_bytes || index_offset > data_offset || index_bytes(entries) > data_offset - index_offset)
        return "the index must end before the data, and the data begin in the segment";
    if (serving_offset % 8 != 0 || serving_offset >= index_offset)
        return "serving_offset must be a multiple of 8, in front of the index";
    view->base = base;
    view->marks = (_Atomic uint16_t *)(void *)(base + index_offset);
    view->entries = (index_entry *)(void *)(base + index_offset + index_marks_bytes(entries));
    view->serving = (_Atomic uint64_t *)(void *)(base + serving_offset);
    view->mask = entries - 1;
    view->data_offset = data_offset;
    view->segment_bytes = segment_bytes;
    return NULL;
}

static inline index_key index_key_of(const unsigned char *bytes, uint64_t space) {
    index_key key;
    memcpy(key.word, bytes, INDEX_KEY_BYTES);
    key.space = space;
    return key;
}

/* Fold both halves of the product: every bit of `a` reaches every bit of the result. */
static inline uint64_t index_fold(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Keys are opaque. Counters must spread as well as digests, so all words are mixed. The five constants are part of the
 * pool's layout: changing one changes the layout's version. */
static inline uint64_t index_home(const index_view *view, const index_key *key) {
    uint64_t a = index_fold(key->word[0] ^ UINT64_C(0x9fb21c651e98df25), UINT64_C(0xd6e8feb86659fd93));
    uint64_t b = index_fold(key->word[2] ^ UINT64_C(0xa0761d6478bd642f), UINT64_C(0xe7037ed1a0b428db));
    a = index_fold(a ^ key->word[1], UINT64_C(0xd6e8feb86659fd93));
    b = index_fold(b ^ key->word[3], UINT64_C(0xe7037ed1a0b428db));
    a = index_fold(a ^ key->space, UINT64_C(0x8ebc6af09c88c6e3));
    return index_fold(a + (b << 32 | b >> 32), UINT64_C(0x8ebc6af09c88c6e3)) & view->mask;
}

/* --- words of an entry: loaded and stored one by one, relaxed; `sequence` orders them ---------------------- */

static inline uint64_t index_load(const _Atomic uint64_t *word) {
    return atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)word, memory_order_relaxed);
}

static inline void index_store(_Atomic uint64_t *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

static inline unsigned index_state(uint64_t sequence) { return sequence & 3; }

static inline bool index_same_key(const index_entry *entry, const index_key *key) {
    return index_load(&entry->key[0]) == key->word[0] && index_load(&entry->key[1]) == key->word[1] &&
           index_load(&entry->key[2]) == key->word[2] && index_load(&entry->key[3]) == key->word[3] &&
           index_load(&entry->space) == key->space;
}

/* The seal of an entry as it stands: of every word that says what is where. (`flags` changes when it was verified.) It
 * detects accidents; who may write to the pool can make one. */
static inline uint64_t index_seal_of(const index_entry *entry) {
    const _Atomic uint64_t *words[] = {
        &entry->key[0], &entry->key[1], &entry->key[2],   &entry->key[3],   &entry->space,      &entry->offset,
        &entry->layout, &entry->nbytes, &entry->checksum, &entry->stored_s, &entry->incarnation};
    uint64_t seal = UINT64_C(0x9e3779b97f4a7c15) ^ (index_load(&entry->flags) & INDEX_CHECKSUM_KNOWN);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        seal = (seal ^ index_load(words[i])) * UINT64_C(0xff51afd7ed558ccd);
        seal ^= seal >> 32;
    }
    return seal;
}

static inline index_key index_key_at(const index_entry *entry) {
    index_key key;
    for (int i = 0; i < 4; i++)
        key.word[i] = index_load(&entry->key[i]);
    key.space = index_load(&entry->space);
    return key;
}

/* Whether n bytes at `offset` can be an object: from the start of a page, inside the data. */
static inline bool index_in_data(const index_view *view, uint64_t offset, uint64_t n) {
    return offset >= view->data_offset && offset % INDEX_PAGE_BYTES == 0 && n <= view->segment_bytes &&
           offset <= view->segment_bytes - n;
}

#endif
