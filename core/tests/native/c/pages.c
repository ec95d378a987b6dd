/* Objects between slots and pages: a checksum that comes in pieces is the checksum; what is gathered and scattered, by
 * any regions, ids and threads, is what a loop over bytes gives, and nothing beside it is touched; after team_shut nobody
 * writes; a reader of pages that the index found gets whole objects, or hears that they changed, beside a writer.
 * Arguments: rounds. */
#include "index_rig.h"
#include "pages.h"

enum { REGIONS_MAX = 5, PAGES_MAX = 12, OBJECTS_MAX = 6, PER_OBJECT_MAX = 3, ROOM = 128 << 10, SLOT_ROOM = 32 << 10 };

/* --- checksums -------------------------------------------------------------------------------------------------- */

static void check_pieces(uint64_t *dice, size_t n) {
    unsigned char *from = malloc(n), *to = aligned_alloc(64, (n + 63) / 64 * 64);
    CHECK(from && to, "memory");
    for (size_t i = 0; i < n; i++)
        from[i] = (unsigned char)rig_random(dice);
    for (int how = XXH3_HASH; how <= XXH3_STREAM; how++) {
        xxh3_pieces sum;
        memset(to, 0, n);
        xxh3_pieces_begin(&sum, n);
        for (size_t at = 0; at < n;) {
            size_t most = rig_random(dice) % 3 ? 3000 : 70, piece = 1 + rig_random(dice) % most;
            if (piece > n - at)
                piece = n - at;
            xxh3_pieces_add(&sum, how == XXH3_HASH ? NULL : to + at, from + at, piece, how);
            at += piece;
        }
        CHECK(xxh3_pieces_end(&sum) == xxh3_64(from, n), "%zu bytes, how %d", n, how);
        CHECK(how == XXH3_HASH || memcmp(to, from, n) == 0, "%zu bytes, how %d", n, how);
    }
    free(from);
    free(to);
}

/* --- one job against bytes -------------------------------------------------------------------------------------- */

typedef struct {
    pages_region regions[REGIONS_MAX];
    pages_group group;
    pages_object objects[OBJECTS_MAX];
    int64_t ids[OBJECTS_MAX * PER_OBJECT_MAX];
    _Atomic size_t regions_left[REGIONS_MAX + 1];
    pages_job job;
} trial;

static void job_open(trial *t, size_t objects, bool gather) {
    memset(&t->job, 0, sizeof t->job);
    for (size_t i = 0; i < REGIONS_MAX; i++)
        atomic_store(&t->regions_left[i], 0);
    t->job.objects = t->objects;
    t->job.count = objects;
    t->job.regions = t->group.count;
    t->job.regions_left = t->regions_left;
    t->job.gather = gather;
    pthread_mutex_init(&t->job.lock, NULL);
    pthread_cond_init(&t->job.moved, NULL);
}

static void job_close(trial *t) {
    free(t->job.items);
    pthread_mutex_destroy(&t->job.lock);
    pthread_cond_destroy(&t->job.moved);
}

static void job_run(trial *t, bool by_region, unsigned threads) {
    CHECK(pages_plan(&t->job, by_region), "memory");
    team_run(t->job.items_count, threads, pages_do_item, &t->job);
    CHECK(pages_done(&t->job, t->group.count), "not done");
    for (size_t i = 0; i < t->group.count; i++)
        CHECK(pages_done(&t->job, i), "region %zu is not done", i);
}

/* Regions beside or behind one another in `memory`, whose last byte is the last of the room. */
static void make_group(trial *t, uint64_t *dice, unsigned char *memory) {
    static const uint64_t sizes[] = {1, 7, 64, 100, 512, 1024, 1500};
    pages_group *group = &t->group;
    *group = (pages_group){.regions = t->regions, .count = 1 + rig_random(dice) % REGIONS_MAX,
                           .pages = 1 + rig_random(dice) % PAGES_MAX,
                           .pages_per_object = 1 + rig_random(dice) % PER_OBJECT_MAX};
    bool beside = rig_random(dice) % 2;
    uint64_t gap = rig_random(dice) % 3 ? 0 : rig_random(dice) % 50, row = gap, end = 0;
    for (size_t r = 0; r < group->count; r++) {
        t->regions[r].page_bytes = sizes[rig_random(dice) % (sizeof sizes / sizeof *sizes)];
        row += t->regions[r].page_bytes;
    }
    uint64_t at = 0;
    for (size_t r = 0; r < group->count; r++) {
        pages_region *region = &t->regions[r];
        region->page_stride = beside ? row : region->page_bytes + gap;
        region->slot_at = group->object_bytes;
        region->base = memory + at;
        group->object_bytes += region->page_bytes * group->pages_per_object;
        end = at + (group->pages - 1) * region->page_stride + region->page_bytes;
        at += beside ? region->page_bytes : group->pages * region->page_stride;
    }
    CHECK(end <= ROOM && group->object_bytes <= SLOT_ROOM, "the room");
    for (size_t r = 0; r < group->count; r++)
        t->regions[r].base += ROOM - end;
}

static void check_job(uint64_t *dice, unsigned char *memory) {
    static trial t;
    static unsigned char slots[OBJECTS_MAX][SLOT_ROOM], wanted[OBJECTS_MAX][SLOT_ROOM], after[ROOM];
    make_group(&t, dice, memory);
    size_t objects = t.group.pages / t.group.pages_per_object;
    objects = objects > OBJECTS_MAX ? OBJECTS_MAX : objects;
    int64_t order[PAGES_MAX];
    for (size_t i = 0; i < t.group.pages; i++)
        order[i] = (int64_t)i;
    for (size_t i = t.group.pages; rig_random(dice) % 2 && i > 1; i--) {
        size_t other = rig_random(dice) % i;
        int64_t id = order[i - 1];
        order[i - 1] = order[other];
        order[other] = id;
    }
    for (size_t i = 0; i < objects * t.group.pages_per_object; i++)
        t.ids[i] = rig_random(dice) % 5 ? order[i] : PAGES_UNTOUCHED;
    for (size_t i = 0; i < ROOM; i++)
        memory[i] = (unsigned char)rig_random(dice);
    memset(slots, 0xee, sizeof slots);
    memset(wanted, 0xee, sizeof wanted);
    memcpy(after, memory, ROOM);
    for (size_t i = 0; i < objects; i++) {
        uint64_t to = 0;
        for (size_t r = 0; r < t.group.count; r++)
            for (size_t p = 0; p < t.group.pages_per_object; p++) {
                int64_t id = t.ids[i * t.group.pages_per_object + p];
                const pages_region *region = &t.regions[r];
                for (uint64_t b = 0; b < region->page_bytes; b++, to++)
                    wanted[i][to] = id < 0 ? 0 : region->base[(uint64_t)id * region->page_stride + b];
            }
    }
    for (int pass = 0; pass < 2; pass++) { /* gather, scatter */
        bool check = rig_random(dice) % 2;
        for (size_t i = 0; i < objects; i++)
            t.objects[i] = (pages_object){.group = &t.group, .ids = t.ids + i * t.group.pages_per_object,
                                          .slot = slots[i], .check = pass && check,
                                          .checksum = xxh3_64(wanted[i], t.group.object_bytes)};
        if (pass)
            for (size_t at = 0; at < ROOM; at++)
                memory[at] ^= 0x5a;
        job_open(&t, objects, !pass);
        job_run(&t, rig_random(dice) % 2, 1 + rig_random(dice) % 3);
        job_close(&t);
        for (size_t i = 0; i < objects; i++) {
            CHECK(t.objects[i].checksum == xxh3_64(wanted[i], t.group.object_bytes), "object %zu", i);
            CHECK(atomic_load(&t.objects[i].found) == PAGES_WRITTEN, "object %zu: %u", i, t.objects[i].found);
        }
        CHECK(memcmp(slots, wanted, sizeof slots) == 0, "slots, pass %d", pass);
    }
    for (size_t i = 0; i < ROOM; i++) /* what no object has is as it was left */
        after[i] ^= 0x5a;
    for (size_t i = 0; i < objects * t.group.pages_per_object; i++)
        for (size_t r = 0; r < t.group.count && t.ids[i] >= 0; r++)
            for (uint64_t b = 0; b < t.regions[r].page_bytes; b++)
                after[(size_t)(t.regions[r].base - memory) + (uint64_t)t.ids[i] * t.regions[r].page_stride + b] ^= 0x5a;
    CHECK(memcmp(memory, after, ROOM) == 0, "memory");
}

/* --- stopping --------------------------------------------------------------------------------------------------- */

enum { STOP_OBJECTS = 6, STOP_PAGE = 1 << 20 };

static void check_stop(uint64_t *dice, unsigned char *memory, unsigned char *slot) {
    static trial t;
    t.regions[0] = (pages_region){memory, STOP_PAGE, STOP_PAGE, 0, 0};
    t.group = (pages_group){.regions = t.regions, .count = 1, .pages = STOP_OBJECTS, .pages_per_object = 1,
                            .object_bytes = STOP_PAGE};
    for (int i = 0; i < STOP_OBJECTS; i++) {
        t.ids[i] = i;
        t.objects[i] = (pages_object){.group = &t.group, .ids = &t.ids[i], .slot = slot};
    }
    job_open(&t, STOP_OBJECTS, false);
    CHECK(pages_plan(&t.job, true), "memory");
    team_job *team = team_open(t.job.items_count, pages_do_item, &t.job);
    CHECK(team, "memory");
    team_call_up(team, 2);
    for (uint64_t i = rig_random(dice) % 2000; i; i--)
        sched_yield();
    atomic_store(&t.job.stop, true);
    team_shut(team);
    memset(memory, 7, STOP_OBJECTS * (size_t)STOP_PAGE); /* a thread that still wrote would race with this */
    CHECK(!team_enter(team), "a closed job lets nobody in");
    team_close(team);
    job_close(&t);
}

/* --- beside a writer -------------------------------------------------------------------------------------------- */

enum { RACE_KEYS = 8, RACE_BYTES = 4096, RACE_SLOTS = 12, RACE_PAGES = 2 };

typedef struct {
    rig *pool;
    size_t rounds;
    atomic_bool over;
} race;

static void *race_write(void *given) {
    race *r = given;
    uint64_t dice = 3, slot_of[RACE_KEYS] = {0}, held[RACE_SLOTS] = {0}; /* held: 1 + the key */
    for (size_t round = 0; round < r->rounds; round++) {
        uint64_t key = rig_random(&dice) % RACE_KEYS, slot;
        do
            slot = rig_random(&dice) % RACE_SLOTS;
        while (held[slot]);
        uint64_t before = slot_of[key], offset = r->pool->writer.view.data_offset;
        if (before) {
            rig_remove(r->pool, key, offset + (before - 1) * RACE_BYTES);
            held[before - 1] = 0;
        }
        object_fill(r->pool->base + offset + slot * RACE_BYTES, RACE_BYTES, key, rig_random(&dice));
        CHECK(rig_publish(r->pool, key, offset + slot * RACE_BYTES, RACE_BYTES, 0), "publish");
        held[slot] = 1 + key;
        slot_of[key] = 1 + slot;
    }
    atomic_store(&r->over, true);
    return NULL;
}

static void check_race(size_t rounds) {
    static trial t;
    static unsigned char memory[RACE_KEYS * RACE_PAGES][RACE_BYTES / RACE_PAGES / 2 * 2];
    rig pool;
    rig_open(&pool, 64, RACE_SLOTS * RACE_BYTES);
    race r = {.pool = &pool, .rounds = rounds};
    pthread_t writer;
    CHECK(pthread_create(&writer, NULL, race_write, &r) == 0, "thread");
    size_t whole = 0, changed = 0;
    uint64_t half = RACE_BYTES / RACE_PAGES / 2;
    for (int region = 0; region < 2; region++) /* halves of each page, as two layers would be */
        t.regions[region] = (pages_region){&memory[0][0] + (size_t)region * half, half, 2 * half,
                                           (uint64_t)region * half * RACE_PAGES, 0};
    t.group = (pages_group){.regions = t.regions, .count = 2, .pages = RACE_KEYS * RACE_PAGES,
                            .pages_per_object = RACE_PAGES, .object_bytes = RACE_BYTES};
    while (!atomic_load(&r.over) || !whole) {
        for (int i = 0; i < OBJECTS_MAX; i++) {
            pages_object *object = &t.objects[i];
            *object = (pages_object){.group = &t.group, .ids = t.ids + i * RACE_PAGES};
            for (int p = 0; p < RACE_PAGES; p++)
                t.ids[i * RACE_PAGES + p] = i * RACE_PAGES + p;
            if (rig_find(&pool.writer.view, (uint64_t)i, &object->place) != INDEX_HIT)
                continue;
            object->view = &pool.writer.view;
            object->slot = pool.base + object->place.offset;
        }
        job_open(&t, OBJECTS_MAX, false);
        job_run(&t, true, 2);
        job_close(&t);
        for (int i = 0; i < OBJECTS_MAX; i++) {
            unsigned found = atomic_load(&t.objects[i].found);
            changed += found & PAGES_CHANGED ? 1 : 0;
            if (found != PAGES_WRITTEN)
                continue;
            unsigned char object[RACE_BYTES];
            for (int region = 0; region < 2; region++)
                for (int p = 0; p < RACE_PAGES; p++)
                    memcpy(object + ((size_t)region * RACE_PAGES + (size_t)p) * half,
                           &memory[0][0] + (size_t)(i * RACE_PAGES + p) * 2 * half + (size_t)region * half, half);
            CHECK(object_whole(object, RACE_BYTES, (uint64_t)i), "key %d is torn", i);
            whole++;
        }
    }
    pthread_join(writer, NULL);
    rig_close(&pool);
    printf("%zu whole, %zu changed\n", whole, changed);
}

int main(int argc, char **argv) {
    size_t rounds = argc > 1 ? (size_t)atoll(argv[1]) : RIG_SHARE(2000);
    uint64_t dice = 1;
    for (size_t n = 1; n <= 1400; n += 1 + (RIG_SHARE(10) == 1 ? 40 : 0))
        check_pieces(&dice, n);
    for (size_t i = 0; i < rounds / 4; i++)
        check_pieces(&dice, 1 + rig_random(&dice) % 20000);
    /* Pages end where nobody may touch: a red zone under a sanitizer, and a wall without one. */
    unsigned char *room = mmap(NULL, ROOM + RIG_GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED && mprotect(room, ROOM, PROT_READ | PROT_WRITE) == 0, "memory");
    for (size_t i = 0; i < rounds; i++)
        check_job(&dice, room);
    unsigned char *memory = malloc(STOP_OBJECTS * (size_t)STOP_PAGE), *slot = aligned_alloc(4096, STOP_PAGE);
    CHECK(memory && slot, "memory");
    memset(slot, 1, STOP_PAGE);
    for (size_t i = 0; i < rounds / 20; i++)
        check_stop(&dice, memory, slot);
    free(memory);
    free(slot);
    check_race(RIG_SHARE(200000) * (rounds / (RIG_SHARE(2000))));
    return 0;
}
