/* CUDA's driver over host memory, for machines without a GPU: the calls that core makes, as CUDA's manual has them, and
 * each at the last moment that it allows. A copy is made when its stream is waited for, and no sooner. What a device has
 * cannot be touched at its address, by nobody: the bytes lie at another one, `host_bytes`.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700, ALLOCATIONS = 64 };

typedef struct copy {
    void *to;
    const void *from;
    size_t n;
    struct copy *next;
} copy;

typedef struct {
    pthread_mutex_t lock;
    copy *first, **last;
} stream;

typedef struct {
    uint64_t behind;
} event;

static struct {
    unsigned char *there, *bytes;
    size_t n;
    uint64_t number;
} allocations[ALLOCATIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static uint64_t numbers, given, ended; /* allocations; work of the engine */
static int gate_shut, at_the_gate, copies_until_fault = -1;
static void *last_recorded;
static atomic_long contexts, queued;
static _Thread_local int depth;

#define CAPTURED ((void *)(uintptr_t)0xca97)

static unsigned char *bytes_at(uint64_t address, size_t n) {
    for (int i = 0; i < ALLOCATIONS; i++) {
        uint64_t start = (uint64_t)(uintptr_t)allocations[i].there;
        if (start && address >= start && address + n <= start + allocations[i].n)
            return allocations[i].bytes + (address - start);
    }
    return NULL;
}

/* --- what tests ask --- */

void *host_allocate(size_t n, void *there) {
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)n) != 0)
        return NULL;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < ALLOCATIONS - 1 && allocations[i].there)
        i++;
    allocations[i].there = mmap(there, n, PROT_NONE, MAP_SHARED | (there ? MAP_FIXED : 0), fd, 0);
    allocations[i].bytes = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    allocations[i].n = n;
    allocations[i].number = ++numbers;
    void *made = allocations[i].there;
    pthread_mutex_unlock(&lock);
    close(fd);
    return made;
}

/* The address stays taken, as by an engine that sleeps. */
void host_give_back(void *there) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].there == there) {
            munmap(allocations[i].bytes, allocations[i].n);
            allocations[i].there = NULL;
        }
    pthread_mutex_unlock(&lock);
}

void *host_bytes(void *there) { return bytes_at((uint64_t)(uintptr_t)there, 1); }
long host_contexts(void) { return contexts; }
long host_queued(void) { return queued; }
void *host_last_recorded(void) { return last_recorded; }
void host_fail_after(int copies) { copies_until_fault = copies; }

static void set(uint64_t *word, uint64_t value) {
    pthread_mutex_lock(&lock);
    *word = value;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

void host_engine_begins(void) { set(&given, given + 1); }
void host_engine_ends(void) { set(&ended, given); }

void host_gate(int shut) {
    pthread_mutex_lock(&lock);
    gate_shut = shut;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

int host_at_the_gate(void) { return at_the_gate; }

/* --- the driver --- */

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(device + 1), 0; }

int cuCtxPushCurrent_v2(void *context) {
    depth++;
    contexts++;
    return context ? 0 : INVALID_CONTEXT;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = NULL;
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    contexts--;
    return 0;
}

int cuStreamCreate(void **made, unsigned flags) {
    stream *self = calloc(1, sizeof *self);
    pthread_mutex_init(&self->lock, NULL);
    self->last = &self->first;
    *made = self;
    return !depth ? INVALID_CONTEXT : flags == 1 ? 0 : INVALID_VALUE;
}

static int queue(stream *self, void *to, const void *from, size_t n) {
    if (!depth)
        return INVALID_CONTEXT;
    if (!to || !from)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int fault = copies_until_fault == 0 ? ILLEGAL_ADDRESS : 0;
    copies_until_fault -= copies_until_fault > 0;
    pthread_mutex_unlock(&lock);
    if (fault)
        return fault;
    copy *made = malloc(sizeof *made);
    *made = (copy){.to = to, .from = from, .n = n};
    pthread_mutex_lock(&self->lock);
    *self->last = made;
    self->last = &made->next;
    queued++;
    pthread_mutex_unlock(&self->lock);
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *self) {
    return queue(self, bytes_at(to, n), from, n);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *self) {
    return queue(self, to, bytes_at(from, n), n);
}

int cuStreamSynchronize(void *given_stream) {
    stream *self = given_stream;
    if (!depth)
        return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    at_the_gate++;
    while (gate_shut)
        pthread_cond_wait(&moved, &lock);
    at_the_gate--;
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&self->lock);
    for (copy *each = self->first, *next; each; each = next) {
        next = each->next;
        memcpy(each->to, each->from, each->n);
        free(each);
        queued--;
    }
    self->first = NULL;
    self->last = &self->first;
    pthread_mutex_unlock(&self->lock);
    return 0;
}

int cuEventCreate(void **made, unsigned flags) {
    *made = calloc(1, sizeof(event));
    return !depth ? INVALID_CONTEXT : flags == 3 ? 0 : INVALID_VALUE;
}

int cuEventRecord(void *self, void *behind) {
    pthread_mutex_lock(&lock);
    ((event *)self)->behind = given;
    last_recorded = behind;
    pthread_mutex_unlock(&lock);
    return depth ? 0 : INVALID_CONTEXT;
}

int cuStreamIsCapturing(void *self, int *status) { return *status = self == CAPTURED, 0; }

int cuEventSynchronize(void *self) {
    pthread_mutex_lock(&lock);
    while (ended < ((event *)self)->behind)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return depth ? 0 : INVALID_CONTEXT;
}

int cuPointerGetAttribute(void *found, int attribute, uint64_t address) {
    int fault = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS; i++) {
        uint64_t start = (uint64_t)(uintptr_t)allocations[i].there;
        if (!start || address < start || address >= start + allocations[i].n)
            continue;
        fault = 0;
        if (attribute == 2)
            *(unsigned *)found = 2;
        else if (attribute == 9)
            *(int *)found = 0;
        else if (attribute == 7)
            *(uint64_t *)found = allocations[i].number;
        else
            fault = INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return fault;
}

int cuGetErrorString(int error, const char **words) {
    *words = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : NULL;
    return *words ? 0 : INVALID_VALUE;
}
