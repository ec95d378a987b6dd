/* CUDA's driver over host memory, for machines without a GPU: the calls that core makes, as CUDA's manual has them, and
 * each at the last moment that it allows. A copy is made when its stream is waited for, and no sooner. What a device has
 * cannot be touched at its address, by nobody: the bytes lie at another one, `host_bytes`.
 *
 * Allocations and events can be opened by other processes that have this driver. Each allocation knows who has it open,
 * and notes what CUDA leaves undefined: that it is freed while it is open (1), or copied from or to once it is freed (2).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ILLEGAL_ADDRESS = 700, ALLOCATIONS = 64, EVENTS = 256 };
enum { FREED_WHILE_OPEN = 1, USED_AFTER_FREE = 2 };

/* Shared by all processes that have an allocation: the first page of its file. */
typedef struct {
    atomic_int opened_by, freed, faults; /* by a pid, or 0 */
} header;

/* What an engine has given to its device and what of it has ended, for all that wait for its events. */
typedef struct {
    _Atomic uint64_t ended, behind[EVENTS];
} timeline;

typedef union {
    struct {
        int pid, fd;
        uint64_t n, slot;
    };
    char reserved[64];
} handle;

typedef struct copy {
    void *to;
    const void *from;
    size_t n;
    header *of;
    struct copy *next;
} copy;

typedef struct {
    pthread_mutex_t lock;
    copy *first, **last;
} stream;

typedef struct {
    timeline *line;
    size_t slot;
    int pid; /* of the process that records it; 0: this one */
} event;

static struct {
    unsigned char *there, *bytes;
    size_t n;
    uint64_t number;
    header *shared;
    int fd; /* of an allocation that was opened: -1 */
} allocations[ALLOCATIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static uint64_t numbers, given; /* allocations; work of the engine */
static timeline *line;
static int line_fd;
static size_t events;
static int gate_shut, at_the_gate, copies_until_fault = -1;
static void *last_recorded;
static atomic_long contexts, queued;
static _Thread_local int depth;

#define CAPTURED ((void *)(uintptr_t)0xca97)

__attribute__((constructor)) static void begin(void) {
    line_fd = memfd_create("timeline", MFD_CLOEXEC);
    if (line_fd < 0 || ftruncate(line_fd, sizeof *line) != 0)
        abort();
    line = mmap(NULL, sizeof *line, PROT_READ | PROT_WRITE, MAP_SHARED, line_fd, 0);
}

static int number_at(uint64_t address, size_t n) {
    for (int i = 0; i < ALLOCATIONS; i++) {
        uint64_t start = (uint64_t)(uintptr_t)allocations[i].there;
        if (start && address >= start && address + n <= start + allocations[i].n)
            return i;
    }
    return -1;
}

static unsigned char *bytes_at(uint64_t address, size_t n) {
    int i = number_at(address, n);
    return i < 0 ? NULL : allocations[i].bytes + (address - (uint64_t)(uintptr_t)allocations[i].there);
}

static bool has_ended(int pid) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd found = {.fd = fd, .events = POLLIN};
    bool over = fd < 0 || poll(&found, 1, 0) > 0;
    if (fd >= 0)
        close(fd);
    return over;
}

/* An allocation, on a file of this length and a page; under the lock. */
static int allocate(size_t n, void *there, int fd) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int i = 0;
    while (i < ALLOCATIONS - 1 && allocations[i].there)
        i++;
    allocations[i].there = mmap(there, n, PROT_NONE, MAP_SHARED | (there ? MAP_FIXED : 0), fd, (off_t)page);
    allocations[i].bytes = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)page);
    allocations[i].shared = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    allocations[i].n = n;
    allocations[i].number = ++numbers;
    return i;
}

/* --- what tests ask --- */

void *host_allocate(size_t n, void *there) {
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)n + sysconf(_SC_PAGESIZE)) != 0)
        return NULL;
    pthread_mutex_lock(&lock);
    int i = allocate(n, there, fd);
    allocations[i].fd = fd;
    void *made = allocations[i].there;
    pthread_mutex_unlock(&lock);
    return made;
}

/* It stays, whatever becomes of the allocation. */
void *host_header(void *there) { return allocations[number_at((uint64_t)(uintptr_t)there, 1)].shared; }
int host_opened_by(header *of) { return of->opened_by; }
int host_faults(header *of) { return of->faults; }

/* The address stays taken, as by an engine that sleeps. */
void host_give_back(void *there) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].there == there) {
            header *of = allocations[i].shared;
            if (of->opened_by && !has_ended(of->opened_by))
                of->faults |= FREED_WHILE_OPEN;
            of->freed = 1;
            close(allocations[i].fd);
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
void host_engine_ends(void) {
    pthread_mutex_lock(&lock);
    line->ended = given;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

void host_gate(int shut) {
    pthread_mutex_lock(&lock);
    gate_shut = shut;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

int host_at_the_gate(void) { return at_the_gate; }

/* --- the driver --- */

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, 0x40 + device, 16), 0; }
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

static int queue(stream *self, void *to, const void *from, size_t n, uint64_t address) {
    int number = number_at(address, n);
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
    *made = (copy){.to = to, .from = from, .n = n, .of = allocations[number].shared};
    pthread_mutex_lock(&self->lock);
    *self->last = made;
    self->last = &made->next;
    queued++;
    pthread_mutex_unlock(&self->lock);
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *self) {
    return queue(self, bytes_at(to, n), from, n, to);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *self) {
    return queue(self, to, bytes_at(from, n), n, from);
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
        if (each->of->freed)
            each->of->faults |= USED_AFTER_FREE;
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
    event *self = calloc(1, sizeof *self);
    pthread_mutex_lock(&lock);
    *self = (event){.line = line, .slot = events++ % EVENTS};
    pthread_mutex_unlock(&lock);
    *made = self;
    return !depth ? INVALID_CONTEXT : flags == 3 || flags == 7 ? 0 : INVALID_VALUE;
}

int cuEventDestroy_v2(void *self) { return free(self), depth ? 0 : INVALID_CONTEXT; }

int cuEventRecord(void *self, void *behind) {
    event *this = self;
    if (this->pid)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    line->behind[this->slot] = given;
    last_recorded = behind;
    pthread_mutex_unlock(&lock);
    return depth ? 0 : INVALID_CONTEXT;
}

int cuStreamIsCapturing(void *self, int *status) { return *status = self == CAPTURED, 0; }

int cuEventSynchronize(void *self) {
    event *this = self;
    if (this->pid) { /* nobody wakes us but time, and its end */
        while (this->line->ended < this->line->behind[this->slot] && !has_ended(this->pid))
            usleep(200);
        return depth ? 0 : INVALID_CONTEXT;
    }
    pthread_mutex_lock(&lock);
    while (line->ended < line->behind[this->slot])
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return depth ? 0 : INVALID_CONTEXT;
}

/* --- between processes --- */

static int opened_file(const handle *given) {
    char path[64];
    if (given->pid == getpid())
        return -1; /* as CUDA: not by the process that has it */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", given->pid, given->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

int cuIpcGetEventHandle(handle *made, void *self) {
    *made = (handle){.pid = getpid(), .fd = line_fd, .slot = ((event *)self)->slot};
    return depth ? 0 : INVALID_CONTEXT;
}

int cuIpcOpenEventHandle(void **made, handle given) {
    int fd = opened_file(&given);
    event *self = calloc(1, sizeof *self);
    if (fd < 0)
        return INVALID_VALUE;
    timeline *theirs = mmap(NULL, sizeof *theirs, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    *self = (event){.line = theirs, .slot = given.slot, .pid = given.pid};
    *made = self;
    return depth ? 0 : INVALID_CONTEXT;
}

int cuMemGetAddressRange_v2(uint64_t *start, size_t *n, uint64_t address) {
    int i = number_at(address, 1);
    if (i < 0)
        return INVALID_VALUE;
    *start = (uint64_t)(uintptr_t)allocations[i].there;
    *n = allocations[i].n;
    return 0;
}

int cuIpcGetMemHandle(handle *made, uint64_t address) {
    int i = number_at(address, 1);
    if (i < 0 || allocations[i].fd < 0)
        return INVALID_VALUE;
    *made = (handle){.pid = getpid(), .fd = allocations[i].fd, .n = allocations[i].n};
    return depth ? 0 : INVALID_CONTEXT;
}

int cuIpcOpenMemHandle_v2(uint64_t *start, handle given, unsigned flags) {
    int fd = opened_file(&given);
    if (fd < 0 || flags != 1)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int i = allocate(given.n, NULL, fd);
    allocations[i].fd = -1;
    allocations[i].shared->opened_by = getpid();
    if (allocations[i].shared->freed)
        allocations[i].shared->faults |= USED_AFTER_FREE;
    *start = (uint64_t)(uintptr_t)allocations[i].there;
    pthread_mutex_unlock(&lock);
    close(fd);
    return depth ? 0 : INVALID_CONTEXT;
}

int cuIpcCloseMemHandle(uint64_t start) {
    pthread_mutex_lock(&lock);
    int i = number_at(start, 1), known = i >= 0 && allocations[i].fd < 0;
    if (known) {
        allocations[i].shared->opened_by = 0;
        munmap(allocations[i].bytes, allocations[i].n);
        munmap(allocations[i].there, allocations[i].n);
        allocations[i].there = NULL;
    }
    pthread_mutex_unlock(&lock);
    return known && depth ? 0 : INVALID_VALUE;
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
