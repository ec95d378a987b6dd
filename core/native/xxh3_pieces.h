/* xxh3_64 of an object that comes in pieces, from start to end: the pages of an engine, which are not contiguous.
 *
 * Whole blocks go straight through the long loop, which can also write their bytes to a target. Partial blocks at the
 * start or end of a piece are collected in a buffer. Each byte is loaded once: the checksum covers exactly what arrives
 * at the target, even if the source changes meanwhile.
 */
#ifndef LMCACHE_CORE_XXH3_PIECES_H
#define LMCACHE_CORE_XXH3_PIECES_H

#include "copy.h"

typedef struct {
    size_t total, at;
    uint64_t lanes[8];
    unsigned char block[XXH3_BLOCK_BYTES];       /* the one being collected */
    unsigned char last[XXH3_STRIPE_BYTES];       /* of the whole object */
} xxh3_pieces;

static inline void xxh3_pieces_begin(xxh3_pieces *p, size_t total) {
    static const uint64_t lanes[8] = {XXH3_P32_3, XXH3_P64_1, XXH3_P64_2, XXH3_P64_3,
                                      XXH3_P64_4, XXH3_P32_2, XXH3_P64_5, XXH3_P32_1};
    p->total = total;
    p->at = 0;
    memcpy(p->lanes, lanes, sizeof lanes);
}

/* Keep those of the object's last 64 bytes that are in these n, which begin at `at`. */
static inline void xxh3_pieces_keep_last(xxh3_pieces *p, size_t at, const unsigned char *bytes, size_t n) {
    if (p->total < XXH3_STRIPE_BYTES || at + n <= p->total - XXH3_STRIPE_BYTES)
        return;
    size_t last_at = p->total - XXH3_STRIPE_BYTES, skipped = at < last_at ? last_at - at : 0;
    memcpy(p->last + (at + skipped - last_at), bytes + skipped, n - skipped);
}

/* The next n bytes; they are also written to `to`, unless that is NULL. `how`: XXH3_COPY or XXH3_STREAM. */
static inline void xxh3_pieces_add(xxh3_pieces *p, unsigned char *to, const unsigned char *from, size_t n, int how) {
    const size_t blocks = (p->total - 1) / XXH3_BLOCK_BYTES * XXH3_BLOCK_BYTES; /* what follows is not scrambled */
    while (n) {
        size_t in_block = p->at % XXH3_BLOCK_BYTES, taken;
#ifndef COPY_WITNESSED
        if (in_block == 0 && n >= XXH3_BLOCK_BYTES && p->at < blocks) {
            taken = (n < blocks - p->at ? n : blocks - p->at) / XXH3_BLOCK_BYTES * XXH3_BLOCK_BYTES;
            xxh3_chosen(to ? how : XXH3_HASH, to)(p->lanes, from, taken / XXH3_STRIPE_BYTES, to);
            xxh3_pieces_keep_last(p, p->at, to ? to : from, taken);
        } else
#endif
        {
            taken = n < XXH3_BLOCK_BYTES - in_block ? n : XXH3_BLOCK_BYTES - in_block;
            copy_bytes(p->block + in_block, from, taken);
            if (to)
                memcpy(to, p->block + in_block, taken);
            xxh3_pieces_keep_last(p, p->at, p->block + in_block, taken);
            if (in_block + taken == XXH3_BLOCK_BYTES && p->at - in_block < blocks)
                xxh3_chosen(XXH3_HASH, NULL)(p->lanes, p->block, XXH3_STRIPES, NULL);
        }
        p->at += taken;
        from += taken;
        n -= taken;
        if (to)
            to += taken;
    }
    (void)how;
}

/* The checksum, once all bytes have come. */
static inline uint64_t xxh3_pieces_end(xxh3_pieces *p) {
    if (p->total <= XXH3_SHORT_MAX)
        return xxh3_short(p->block, p->total);
    size_t begun = (p->total - 1) % XXH3_BLOCK_BYTES / XXH3_STRIPE_BYTES; /* stripes of the partial block */
    xxh3_chosen(XXH3_HASH, NULL)(p->lanes, p->block, begun, NULL);
    return xxh3_finished(p->lanes, p->last, p->total);
}

#endif
