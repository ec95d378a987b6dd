/* Copies between slots and the memory of a GPU, with calls of CUDA's driver.
 *
 * Python loads the driver and passes the addresses of its functions, so nothing is linked. A copy is queued on a stream
 * of ours: when `device_wait` has returned, it is complete, both what was written and what was read. So everything that
 * is true of a copy by the processor is true of this one, too.
 */
#ifndef LMCACHE_CORE_DEVICE_H
#define LMCACHE_CORE_DEVICE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DEVICE_CALLS 6
#define DEVICE_WORDS (DEVICE_CALLS + 2) /* in front of the streams */
#define DEVICE_STREAMS_MAX 16

typedef struct {
    int (*push)(void *context); /* cuCtxPushCurrent: a context is current per thread; the thread's owner has others */
    int (*pop)(void **context);
    int (*wait_event)(void *event);
    int (*to_device)(uint64_t to, const void *from, size_t n, void *stream);
    int (*to_host)(void *to, uint64_t from, size_t n, void *stream);
    int (*wait_stream)(void *stream);
    void *context;
    uint64_t pin_step; /* host memory is registered in steps that begin at multiples of it: a power of two */
    void *streams[DEVICE_STREAMS_MAX];
    size_t streams_count; /* 0: there is no device */
} device;

/* Addresses of the six calls in the order above, the context, the step, and the streams. 0: these are not such words. */
static inline int device_read(device *self, const uint64_t *words, size_t count) {
    if (count <= DEVICE_WORDS || count > DEVICE_WORDS + DEVICE_STREAMS_MAX)
        return 0;
    for (size_t i = 0; i < count; i++)
        if (!words[i])
            return 0;
    self->push = (int (*)(void *))(uintptr_t)words[0];
    self->pop = (int (*)(void **))(uintptr_t)words[1];
    self->wait_event = (int (*)(void *))(uintptr_t)words[2];
    self->to_device = (int (*)(uint64_t, const void *, size_t, void *))(uintptr_t)words[3];
    self->to_host = (int (*)(void *, uint64_t, size_t, void *))(uintptr_t)words[4];
    self->wait_stream = (int (*)(void *))(uintptr_t)words[5];
    self->context = (void *)(uintptr_t)words[DEVICE_CALLS];
    self->pin_step = words[DEVICE_CALLS + 1];
    if (self->pin_step & (self->pin_step - 1))
        return 0;
    self->streams_count = count - DEVICE_WORDS;
    for (size_t i = 0; i < self->streams_count; i++)
        self->streams[i] = (void *)(uintptr_t)words[DEVICE_WORDS + i];
    return 1;
}

/* Queue a copy between host memory and the device's. CUDA refuses one whose host side lies in two registrations, so it is
 * cut where one may end. */
static inline int device_copy(const device *self, void *host, const unsigned char *there, size_t n, int to_host,
                              void *stream) {
    unsigned char *here = host;
    uint64_t address = (uint64_t)(uintptr_t)there;
    int fault = 0;
    while (n && !fault) {
        size_t left = (size_t)(self->pin_step - ((uint64_t)(uintptr_t)here & (self->pin_step - 1)));
        size_t part = n < left ? n : left;
        fault = to_host ? self->to_host(here, address, part, stream) : self->to_device(address, here, part, stream);
        here += part;
        address += part;
        n -= part;
    }
    return fault;
}

#endif
