/* Objects between slots of the pool and an engine's pages.
 *
 * An engine's memory is regions of pages, each with its own stride, in groups. An object of a group has a number of
 * pages in each of its regions, in order; `pages_per_object` ids name them. In a slot, all of this is contiguous. What
 * is contiguous on both sides is one copy: consecutive pages of a region without gaps, or the pages of regions that
 * follow each other.
 *
 * A job is a list of items. Each is a range of bytes of some objects, and they are begun in order, by any free thread.
 * A checksum reads an object from start to end, so such an object is one range. Others are cut into pieces, by region
 * if the regions should be ready one after another. Threads check `stop` before each piece.
 *
 * For an object found in the index, the entry is checked again after each range (index_find.h says why that is enough).
 * If it moved, this range and all earlier ones are worthless.
 *
 * Pages on a device are copied by the device. A thread of the job queues all copies of an item on a stream, waits for
 * them once, and only then sums and judges: what is true of a copy by the processor when it returns is true of these when
 * the stream was waited for. If the device refuses, the job stops with its `fault`.
 */
#ifndef LMCACHE_CORE_PAGES_H
#define LMCACHE_CORE_PAGES_H

#include "device.h"
#include "index_find.h"
#include "team.h"
#include "xxh3_pieces.h"

/* A thread takes about this many bytes at once, and checks for a stop as often. */
#define PAGES_PIECE_BYTES ((uint64_t)1 << 20)
#define PAGES_UNTOUCHED ((int64_t)-1) /* instead of a page id: the page is neither read nor written */

enum { PAGES_WRITTEN = 1, PAGES_MISSED = 2, PAGES_CHANGED = 4, PAGES_DAMAGED = 8 };

typedef struct {
    unsigned char *base;
    uint64_t page_bytes, page_stride;
    uint64_t slot_at;    /* where this region's part begins in the slot */
    uint64_t allocation; /* of a device, which copies nothing that lies in two of them; host memory: all the same */
} pages_region;

typedef struct {
    const pages_region *regions;
    size_t count;
    size_t first; /* index of its first region among those of all groups */
    uint64_t pages, pages_per_object, object_bytes;
    int64_t null_page;
    bool has_null;
    uint64_t alias; /* groups with the same number may share memory */
    bool exact;     /* … but equal ids do not tell whether two pages do: their places do */
} pages_group;

typedef struct {
    const pages_group *group;
    const int64_t *ids;     /* pages_per_object of them */
    unsigned char *slot;    /* NULL: the object is not there */
    const index_view *view; /* NULL: a lease holds the slot */
    index_place place;
    _Atomic uint32_t *verified; /* where to note that this process has verified the bytes, or NULL */
    bool check;
    uint64_t checksum;     /* of the bytes, known or expected */
    uint64_t incarnation;  /* of the object found, 0: unknown */
    _Atomic uint32_t left; /* items not finished */
    _Atomic unsigned found;
} pages_object;

typedef struct {
    size_t object, count;
    uint64_t from, to;      /* bytes of each object */
    size_t region, regions; /* regions in that range, counted over all groups */
} pages_item;

typedef struct {
    pages_object *objects;
    size_t count;
    pages_item *items;
    size_t items_count, items_room;
    _Atomic size_t *regions_left; /* items left for each region */
    size_t regions;
    _Atomic size_t left; /* items left */
    _Atomic bool stop;
    bool gather; /* from pages into slots */
    const device *device; /* the device with the pages; NULL: host memory */
    void *event;          /* of the device: no page is touched before it; NULL: none */
    _Atomic int fault;    /* the device's error when it refused */
    _Atomic uint64_t device_ns; /* what its threads have spent on copies of a device and their sums, behind the event */
    uint64_t bytes;
    pthread_mutex_t lock; /* only for waiting on `moved` */
    pthread_cond_t moved; /* a region, or all of it, is done */
} pages_job;

/* --- which bytes ------------------------------------------------------------------------------------------- */

typedef struct {
    size_t region;
    uint64_t page, in_page;
    uint64_t at;
} pages_cursor;

typedef struct {
    unsigned char *memory; /* NULL: pages that are not touched */
    uint64_t at, n;        /* bytes of the slot */
} pages_piece;

static inline size_t pages_region_at(const pages_group *group, uint64_t at) {
    size_t low = 0, high = group->count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (group->regions[middle].slot_at <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static inline pages_cursor pages_seek(const pages_group *group, uint64_t at) {
    pages_cursor cursor = {.region = pages_region_at(group, at), .at = at};
    const pages_region *region = &group->regions[cursor.region];
    cursor.page = (at - region->slot_at) / region->page_bytes;
    cursor.in_page = (at - region->slot_at) % region->page_bytes;
    return cursor;
}

/* The next bytes up to `to` that are contiguous on both sides, and in one allocation. False: there are none. */
static inline bool pages_next(const pages_group *group, const int64_t *ids, pages_cursor *cursor, uint64_t to,
                              pages_piece *piece) {
    uint64_t allocation = 0;
    *piece = (pages_piece){.at = cursor->at};
    while (cursor->at < to && piece->n < PAGES_PIECE_BYTES) {
        const pages_region *region = &group->regions[cursor->region];
        int64_t id = ids[cursor->page];
        unsigned char *here = NULL;
        if (id != PAGES_UNTOUCHED)
            here = region->base + (uint64_t)id * region->page_stride + cursor->in_page;
        if (piece->n && (here ? !piece->memory || here != piece->memory + piece->n || region->allocation != allocation
                              : piece->memory != NULL))
            break;
        uint64_t n = region->page_bytes - cursor->in_page;
        if (n > to - cursor->at)
            n = to - cursor->at;
        if (n > PAGES_PIECE_BYTES - piece->n)
            n = PAGES_PIECE_BYTES - piece->n;
        if (!piece->n) {
            piece->memory = here;
            allocation = region->allocation;
        }
        piece->n += n;
        cursor->at += n;
        cursor->in_page += n;
        if (cursor->in_page == region->page_bytes) {
            cursor->in_page = 0;
            if (++cursor->page == group->pages_per_object) {
                cursor->page = 0;
                cursor->region++;
            }
        }
    }
    return piece->n != 0;
}

/* --- copies ------------------------------------------------------------------------------------------------ */

static inline void pages_copy(const pages_job *job, const pages_object *object, const pages_piece *piece,
                              xxh3_pieces *sum) {
    unsigned char *slot = object->slot + piece->at, *to = job->gather ? slot : piece->memory;
    const unsigned char *from = job->gather ? piece->memory : slot;
    int how = job->bytes >= COPY_STREAM_BYTES ? XXH3_STREAM : XXH3_COPY;
    if (job->gather && !piece->memory) { /* nobody may read what the slot contained before */
        memset(slot, 0, piece->n);
        from = slot;
        to = NULL;
    }
    if (sum)
        xxh3_pieces_add(sum, to, from, piece->n, how);
    else if (to && from)
        copy_bytes_of(to, from, piece->n, job->bytes);
}

static inline bool pages_copy_by_processor(const pages_job *job, pages_object *object, uint64_t from, uint64_t to,
                                           xxh3_pieces *sum) {
    pages_cursor cursor = pages_seek(object->group, from);
    pages_piece piece;
    while (pages_next(object->group, object->ids, &cursor, to, &piece)) {
        if (atomic_load_explicit(&job->stop, memory_order_relaxed))
            return false;
        pages_copy(job, object, &piece, sum);
    }
    return true;
}

/* The sum of an object is known. */
static inline void pages_summed(const pages_job *job, pages_object *object, xxh3_pieces *sum) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    uint64_t checksum = xxh3_pieces_end(sum);
    if (job->gather)
        object->checksum = checksum;
    else if (checksum != object->checksum)
        atomic_fetch_or_explicit(&object->found, PAGES_DAMAGED, memory_order_relaxed);
}

/* Copy a range of one object. False: it was stopped on the way. */
static inline bool pages_copy_range(pages_job *job, pages_object *object, uint64_t from, uint64_t to) {
    bool summed = job->gather || object->check;
    xxh3_pieces sum;
    if (summed)
        xxh3_pieces_begin(&sum, object->group->object_bytes);
    if (!pages_copy_by_processor(job, object, from, to, summed ? &sum : NULL))
        return false;
    if (summed)
        pages_summed(job, object, &sum);
    return true;
}

/* Whether everything read so far belonged to this object. */
static inline bool pages_unchanged(pages_object *object) {
    if (!object->view)
        return true;
#ifdef __x86_64__
    __builtin_ia32_lfence();
#endif
    if (index_unchanged(object->view, &object->place))
        return true;
    atomic_fetch_or_explicit(&object->found, PAGES_CHANGED, memory_order_relaxed);
    return false;
}

/* Whether a range of this object is worth a copy; then its pages count as written to. */
static inline bool pages_begin_range(pages_object *object) {
    if (atomic_load_explicit(&object->found, memory_order_relaxed) & ~PAGES_WRITTEN || !pages_unchanged(object))
        return false;
    atomic_fetch_or_explicit(&object->found, PAGES_WRITTEN, memory_order_relaxed);
    return true;
}

/* The range has been copied: whether the object was there all the time. */
static inline void pages_end_range(pages_object *object) {
    if (pages_unchanged(object) && object->check && object->verified &&
        !(atomic_load_explicit(&object->found, memory_order_relaxed) & PAGES_DAMAGED))
        atomic_store_explicit(object->verified, index_verified_tag(object->place.sequence), memory_order_relaxed);
    atomic_fetch_sub_explicit(&object->left, 1, memory_order_release);
}

static inline bool pages_stopped(const pages_job *job) {
    return atomic_load_explicit(&job->stop, memory_order_relaxed);
}

/* False: it was stopped on the way. */
static inline bool pages_do_objects(pages_job *job, const pages_item *item) {
    for (size_t at = item->object; at < item->object + item->count; at++) {
        pages_object *object = &job->objects[at];
        if (pages_stopped(job))
            return false;
        if (!pages_begin_range(object))
            atomic_fetch_sub_explicit(&object->left, 1, memory_order_release);
        else if (pages_copy_range(job, object, item->from, item->to))
            pages_end_range(object);
        else
            return false;
    }
    return true;
}

/* --- the same by a device ---------------------------------------------------------------------------------- */

static inline void pages_fail(pages_job *job, int fault) {
    int none = 0;
    atomic_compare_exchange_strong(&job->fault, &none, fault);
    atomic_store_explicit(&job->stop, true, memory_order_relaxed);
}

/* Queue the copies of a range; returns the device's error. */
static inline int pages_queue_range(pages_job *job, pages_object *object, uint64_t from, uint64_t to, void *stream) {
    pages_cursor cursor = pages_seek(object->group, from);
    pages_piece piece;
    int fault = 0;
    while (!fault && !pages_stopped(job) && pages_next(object->group, object->ids, &cursor, to, &piece)) {
        unsigned char *slot = object->slot + piece.at;
        if (piece.memory)
            fault = device_copy(job->device, slot, piece.memory, piece.n, job->gather, stream);
        else if (job->gather)
            memset(slot, 0, piece.n);
    }
    return fault;
}

/* The bytes of a range have landed, so they can be summed: in the slot, as a device's memory is not read for it. */
static inline void pages_sum_range(pages_job *job, pages_object *object, uint64_t from, uint64_t to) {
    xxh3_pieces sum;
    xxh3_pieces_begin(&sum, object->group->object_bytes);
    xxh3_pieces_add(&sum, NULL, object->slot + from, to - from, XXH3_COPY);
    pages_summed(job, object, &sum);
}

static inline bool pages_do_objects_on(pages_job *job, const pages_item *item, void *stream) {
    size_t end = item->object + item->count, queued = item->object;
    int fault = 0;
    for (; queued < end && !fault && !pages_stopped(job); queued++)
        if (pages_begin_range(&job->objects[queued]))
            fault = pages_queue_range(job, &job->objects[queued], item->from, item->to, stream);
    /* In any case: what is queued is already running, and slots and pages are somebody else's soon after a stop. */
    int landed = job->device->wait_stream(stream);
    if (fault || landed)
        pages_fail(job, fault ? fault : landed);
    for (size_t at = item->object; at < queued && !pages_stopped(job); at++) {
        pages_object *object = &job->objects[at];
        if (atomic_load_explicit(&object->found, memory_order_relaxed) & ~PAGES_WRITTEN) {
            atomic_fetch_sub_explicit(&object->left, 1, memory_order_release);
            continue;
        }
        if (job->gather || object->check)
            pages_sum_range(job, object, item->from, item->to);
        pages_end_range(object);
    }
    return !pages_stopped(job);
}

static inline uint64_t pages_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The same with the device's context, behind the work that the engine had queued when the job was made. */
static inline bool pages_do_on_device(pages_job *job, const pages_item *item, size_t i) {
    const device *device = job->device;
    void *popped;
    int fault = device->push(device->context);
    if (fault) {
        pages_fail(job, fault);
        return false;
    }
    bool done = false;
    fault = job->event && !pages_stopped(job) ? device->wait_event(job->event) : 0;
    if (fault)
        pages_fail(job, fault);
    else {
        uint64_t began_ns = pages_now_ns();
        done = pages_do_objects_on(job, item, device->streams[i % device->streams_count]);
        atomic_fetch_add_explicit(&job->device_ns, pages_now_ns() - began_ns, memory_order_relaxed);
    }
    device->pop(&popped);
    return done;
}

static inline void pages_tell(pages_job *job) {
    pthread_mutex_lock(&job->lock);
    pthread_cond_broadcast(&job->moved);
    pthread_mutex_unlock(&job->lock);
}

static inline void pages_do_item(void *ctx, size_t i) {
    pages_job *job = ctx;
    const pages_item *item = &job->items[i];
    if (!(job->device ? pages_do_on_device(job, item, i) : pages_do_objects(job, item))) {
        pages_tell(job);
        return;
    }
    bool tell = false;
    for (size_t region = item->region; region < item->region + item->regions; region++)
        tell |= atomic_fetch_sub_explicit(&job->regions_left[region], 1, memory_order_acq_rel) == 1;
    if (atomic_fetch_sub_explicit(&job->left, 1, memory_order_acq_rel) == 1 || tell)
        pages_tell(job);
}

/* --- which items ------------------------------------------------------------------------------------------- */

/* Add an item; false: no memory. Small ranges of neighbours become one. */
static inline bool pages_add_item(pages_job *job, size_t object, uint64_t from, uint64_t to) {
    const pages_group *group = job->objects[object].group;
    pages_item *before = job->items_count ? &job->items[job->items_count - 1] : NULL;
    job->bytes += to - from;
    atomic_fetch_add_explicit(&job->objects[object].left, 1, memory_order_relaxed);
    if (before && before->object + before->count == object && before->from == from && before->to == to &&
        job->objects[before->object].group == group && (before->count + 1) * (to - from) <= PAGES_PIECE_BYTES) {
        before->count++;
        return true;
    }
    if (job->items_count == job->items_room) {
        size_t room = job->items_room ? 2 * job->items_room : 64;
        pages_item *items = realloc(job->items, room * sizeof *items);
        if (!items)
            return false;
        job->items = items;
        job->items_room = room;
    }
    size_t first = pages_region_at(group, from), last = pages_region_at(group, to - 1);
    job->items[job->items_count++] = (pages_item){.object = object, .count = 1, .from = from, .to = to,
                                                  .region = group->first + first, .regions = last - first + 1};
    return true;
}

static inline bool pages_add_pieces(pages_job *job, size_t object, uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; at += PAGES_PIECE_BYTES)
        if (!pages_add_item(job, object, at, to - at < PAGES_PIECE_BYTES ? to : at + PAGES_PIECE_BYTES))
            return false;
    return true;
}

/* All items of the job, in the order in which they begin. False: no memory. */
static inline bool pages_plan(pages_job *job, bool by_region) {
    for (size_t i = 0; i < job->count; i++) {
        pages_object *object = &job->objects[i];
        if (!object->slot)
            atomic_fetch_or_explicit(&object->found, PAGES_MISSED, memory_order_relaxed);
        else if (job->gather || object->check) { /* first, because all regions wait for these */
            if (!pages_add_item(job, i, 0, object->group->object_bytes))
                return false;
        } else if (!by_region && !pages_add_pieces(job, i, 0, object->group->object_bytes))
            return false;
    }
    for (size_t number = 0; by_region && number < job->regions; number++)
        for (size_t i = 0; i < job->count; i++) {
            pages_object *object = &job->objects[i];
            const pages_group *group = object->group;
            if (!object->slot || job->gather || object->check || number < group->first ||
                number >= group->first + group->count)
                continue;
            const pages_region *region = &group->regions[number - group->first];
            uint64_t end = region->slot_at + region->page_bytes * group->pages_per_object;
            if (!pages_add_pieces(job, i, region->slot_at, end))
                return false;
        }
    for (size_t i = 0; i < job->items_count; i++)
        for (size_t at = 0; at < job->items[i].regions; at++)
            atomic_fetch_add_explicit(&job->regions_left[job->items[i].region + at], 1, memory_order_relaxed);
    atomic_store_explicit(&job->left, job->items_count, memory_order_relaxed);
    return true;
}

/* Whether a region (or all of it, if `region` is their number) is done; then the caller sees what was written. */
static inline bool pages_done(pages_job *job, size_t region) {
    if (region < job->regions)
        return atomic_load_explicit(&job->regions_left[region], memory_order_acquire) == 0;
    return atomic_load_explicit(&job->left, memory_order_acquire) == 0;
}

/* --- pages that two objects write to ----------------------------------------------------------------------- */

typedef struct {
    uintptr_t from, to;
} pages_span;

static inline int pages_span_order(const void *a, const void *b) {
    uintptr_t left = ((const pages_span *)a)->from, right = ((const pages_span *)b)->from;
    return (left > right) - (left < right);
}

/* Whether any two of these spans overlap. */
static inline bool pages_spans_meet(pages_span *spans, size_t count) {
    if (count)
        qsort(spans, count, sizeof *spans, pages_span_order);
    for (size_t i = 1; i < count; i++)
        if (spans[i].from < spans[i - 1].to)
            return true;
    return false;
}

#endif
