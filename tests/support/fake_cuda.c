/* A CUDA driver in software behind the real symbols: what fake_cuda.py is, for what ctypes makes of a call.
 *
 * GPU memory is a reserved range that the CPU may not touch; its bytes lie elsewhere. Copies are carried out when
 * somebody waits for their stream or event. Parameters are of the types in cuda.h, so a prototype that is wrong (a size
 * of 32 bits, an address cut short) shows as a wrong result. One lock around everything.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult, CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { DEVICES = 2, MOST = 1024, PAGE = 4096, DEPTH = 64 };

struct Context { int device, retained; };
struct Event { CUstream stream; uint64_t at; };
struct Op { int kind; void *host; char *device; size_t size; CUevent event; struct Event seen; };
struct Stream { struct Context *context; struct Op ops[MOST]; uint64_t begun, done; };
struct Memory { CUdeviceptr address; size_t size, reserved; char *data; int device; };
struct Range { char *start; size_t size; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Context contexts[DEVICES] = {{0, 0}, {1, 0}};
static struct Memory memories[MOST];
static struct Range ranges[MOST];
static int ready, fail_registering;
static long direct_copies, pageable_copies, violations, flushes;
static __thread struct Context *stack[DEPTH];
static __thread int depth;

#define API __attribute__((visibility("default")))
#define ENTER pthread_mutex_lock(&lock); if (!ready) LEAVE(NOT_INITIALIZED)
#define LEAVE(code) do { CUresult code_ = (code); pthread_mutex_unlock(&lock); return code_; } while (0)

static struct Memory *find(CUdeviceptr address, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (memories[i].data && memories[i].address <= address && address + size <= memories[i].address + memories[i].size)
            return &memories[i];
    return NULL;
}

/* 1: within one registration; 0: in none; -1: across a border. */
static int pinned(const char *start, size_t size) {
    int touching = 0, within = 0;
    for (int i = 0; i < MOST; i++)
        if (ranges[i].size && ranges[i].start < start + size && start < ranges[i].start + ranges[i].size) {
            touching++;
            within = ranges[i].start <= start && start + size <= ranges[i].start + ranges[i].size;
        }
    return touching == 0 ? 0 : touching == 1 && within ? 1 : -1;
}

static void run(CUstream stream, uint64_t until) {
    while (stream->done < until) {
        struct Op *op = &stream->ops[stream->done % MOST];
        if (op->kind == 3)
            run(op->seen.stream, op->seen.at);
        else {
            if (pinned(op->host, op->size) != 1) violations++;
            if (op->kind == 1) memcpy(op->device, op->host, op->size);
            else memcpy(op->host, op->device, op->size);
        }
        stream->done++;
    }
}

static CUresult copy(int kind, CUdeviceptr address, void *host, size_t size, CUstream stream) {
    struct Memory *memory = find(address, size);
    if (!stream || !memory || !size) return INVALID_VALUE;
    if (!depth || stack[depth - 1] != stream->context) return INVALID_CONTEXT;
    char *data = memory->data + (address - memory->address);
    int how = pinned(host, size);
    if (how < 0) return INVALID_VALUE;
    if (how == 0) {
        run(stream, stream->begun);
        if (kind == 1) memcpy(data, host, size);
        else memcpy(host, data, size);
        pageable_copies++;
        return OK;
    }
    if (stream->begun - stream->done == MOST) run(stream, stream->done + 1);
    stream->ops[stream->begun++ % MOST] = (struct Op){.kind = kind, .host = host, .device = data, .size = size};
    direct_copies++;
    return OK;
}

API CUresult cuInit(unsigned flags) { ready = flags == 0; return ready ? OK : INVALID_VALUE; }

API CUresult cuGetErrorName(CUresult code, const char **text) {
    *text = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *text ? OK : INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = code == INVALID_VALUE ? "invalid argument" : NULL;
    return *text ? OK : INVALID_VALUE;
}

API CUresult cuDeviceGetCount(int *count) { ENTER; *count = DEVICES; LEAVE(OK); }

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER;
    if (ordinal < 0 || ordinal >= DEVICES) LEAVE(INVALID_DEVICE);
    *device = ordinal;
    LEAVE(OK);
}

API CUresult cuDeviceGetName(char *text, int size, CUdevice device) {
    ENTER; snprintf(text, size, "Fake GPU %d", device); LEAVE(OK);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER;
    if (device < 0 || device >= DEVICES) LEAVE(INVALID_DEVICE);
    if (attribute != 99 && attribute != 113 && (attribute < 116 || attribute > 118) && attribute != 124)
        LEAVE(INVALID_VALUE);
    *value = attribute == 118 ? 100 : 1;
    LEAVE(OK);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER;
    if (device < 0 || device >= DEVICES) LEAVE(INVALID_DEVICE);
    contexts[device].retained++;
    *context = &contexts[device];
    LEAVE(OK);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { ENTER; contexts[device].retained--; LEAVE(OK); }

API CUresult cuCtxGetCurrent(CUcontext *context) { ENTER; *context = depth ? stack[depth - 1] : NULL; LEAVE(OK); }

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER;
    if (context && (context < contexts || context >= contexts + DEVICES || !context->retained)) LEAVE(INVALID_CONTEXT);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    LEAVE(OK);
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER;
    if (context < contexts || context >= contexts + DEVICES || !context->retained || depth == DEPTH) LEAVE(INVALID_CONTEXT);
    stack[depth++] = context;
    LEAVE(OK);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER;
    if (!depth) LEAVE(INVALID_CONTEXT);
    *context = stack[--depth];
    LEAVE(OK);
}

API CUresult cuCtxSynchronize(void) { ENTER; LEAVE(depth ? OK : INVALID_CONTEXT); }

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    ENTER;
    struct Memory *memory = find(address, 1);
    if (!memory) LEAVE(INVALID_VALUE);
    if (attribute == 2) *(unsigned *)value = 2;
    else if (attribute == 8) *(unsigned *)value = 0;
    else if (attribute == 9) *(int *)value = memory->device;
    else LEAVE(INVALID_VALUE);
    LEAVE(OK);
}

API CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address) {
    ENTER; LEAVE(depth && find(address, 1) && attribute == 6 && *(const unsigned *)value == 1 ? OK : INVALID_VALUE);
}

API CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER;
    if (fail_registering) LEAVE(fail_registering);
    if (!depth) LEAVE(INVALID_CONTEXT);
    if ((uintptr_t)start % PAGE || !size || flags & ~15u) LEAVE(INVALID_VALUE);
    if (pinned(start, size)) LEAVE(ALREADY_REGISTERED);
    for (int i = 0; i < MOST; i++)
        if (!ranges[i].size) {
            ranges[i] = (struct Range){start, size};
            LEAVE(OK);
        }
    LEAVE(2);
}

API CUresult cuMemHostUnregister(void *start) {
    ENTER;
    for (int i = 0; i < MOST; i++)
        if (ranges[i].size && ranges[i].start == start) {
            unsigned char there;
            if (mincore(start, PAGE, &there)) violations++;
            ranges[i].size = 0;
            LEAVE(OK);
        }
    LEAVE(NOT_REGISTERED);
}

static CUdeviceptr allocate(int device, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (!memories[i].data) {
            size_t reserved = (size + PAGE - 1) / PAGE * PAGE;
            void *at = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            memories[i] = (struct Memory){(CUdeviceptr)(uintptr_t)at, size, reserved, calloc(1, size), device};
            return memories[i].address;
        }
    abort();
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER;
    if (!depth) LEAVE(INVALID_CONTEXT);
    *address = allocate(stack[depth - 1]->device, size);
    LEAVE(OK);
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER;
    struct Memory *memory = find(address, 1);
    if (!memory || memory->address != address) LEAVE(INVALID_VALUE);
    munmap((void *)(uintptr_t)address, memory->reserved);
    free(memory->data);
    memory->data = NULL;
    LEAVE(OK);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    ENTER; LEAVE(copy(1, target, (void *)source, size, stream));
}

API CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    ENTER; LEAVE(copy(2, source, target, size, stream));
}

struct Attributes { int order, source_hint[2], target_hint[2]; unsigned flags; };

/* In an order that no caller expects, as the copies of a batch have none. */
API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                   struct Attributes *attributes, size_t *at, size_t kinds, CUstream stream) {
    ENTER;
    if ((uintptr_t)stream < 16) LEAVE(INVALID_HANDLE);
    struct Attributes wanted = {.order = 1};
    if (!count || kinds != 1 || *at || memcmp(attributes, &wanted, sizeof wanted)) LEAVE(INVALID_VALUE);
    for (size_t i = count; i--;) {
        int into = find(targets[i], 1) != NULL;
        if (into == (find(sources[i], 1) != NULL)) LEAVE(INVALID_VALUE);
        CUresult code = into ? copy(1, targets[i], (void *)(uintptr_t)sources[i], sizes[i], stream)
                             : copy(2, sources[i], (void *)(uintptr_t)targets[i], sizes[i], stream);
        if (code) LEAVE(code);
    }
    LEAVE(OK);
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER;
    if (!depth || flags > 1) LEAVE(INVALID_CONTEXT);
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = stack[depth - 1];
    LEAVE(OK);
}

API CUresult cuStreamDestroy_v2(CUstream stream) { ENTER; run(stream, stream->begun); free(stream); LEAVE(OK); }

API CUresult cuStreamSynchronize(CUstream stream) {
    ENTER;
    if ((uintptr_t)stream == 1) LEAVE(depth ? OK : INVALID_CONTEXT); /* the legacy one, which nobody uses here */
    if ((uintptr_t)stream < 16) LEAVE(INVALID_HANDLE);
    run(stream, stream->begun);
    LEAVE(OK);
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER;
    if (flags) LEAVE(INVALID_VALUE);
    if (event->stream)
        stream->ops[stream->begun++ % MOST] = (struct Op){.kind = 3, .seen = *event};
    LEAVE(OK);
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER;
    if (flags != 2) LEAVE(INVALID_VALUE);
    *event = calloc(1, sizeof **event);
    LEAVE(OK);
}

API CUresult cuEventDestroy_v2(CUevent event) { ENTER; free(event); LEAVE(OK); }

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER;
    if ((uintptr_t)stream < 16) LEAVE(INVALID_HANDLE);
    *event = (struct Event){stream, stream->begun};
    LEAVE(OK);
}

API CUresult cuEventSynchronize(CUevent event) {
    ENTER;
    if (event->stream) run(event->stream, event->at);
    LEAVE(OK);
}

API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size, int kind, unsigned long long flags) {
    ENTER;
    if (kind != 1 || flags || address % PAGE || size % PAGE) LEAVE(INVALID_VALUE);
    int fd = memfd_create("fake-dma-buf", MFD_CLOEXEC);
    uint64_t range[2] = {address, size};
    if (fd < 0 || write(fd, range, sizeof range) != sizeof range) LEAVE(2);
    *(int *)handle = fd;
    LEAVE(OK);
}

API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER;
    if (!depth) LEAVE(INVALID_CONTEXT);
    if (target || (scope != 100 && scope != 200)) LEAVE(INVALID_VALUE);
    flushes++;
    LEAVE(OK);
}

/* For tests. */
API CUdeviceptr fake_alloc(int device, size_t size) {
    pthread_mutex_lock(&lock);
    CUdeviceptr address = allocate(device, size);
    pthread_mutex_unlock(&lock);
    return address;
}

/* Free all GPU memory; nothing is under way. */
API void fake_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (memories[i].data) {
            munmap((void *)(uintptr_t)memories[i].address, memories[i].reserved);
            free(memories[i].data);
            memories[i].data = NULL;
        }
    pthread_mutex_unlock(&lock);
}

API int fake_peek(CUdeviceptr address, void *to, size_t size) {
    ENTER;
    struct Memory *memory = find(address, size);
    if (!memory) LEAVE(INVALID_VALUE);
    memcpy(to, memory->data + (address - memory->address), size);
    LEAVE(OK);
}

API int fake_poke(CUdeviceptr address, const void *from, size_t size) {
    ENTER;
    struct Memory *memory = find(address, size);
    if (!memory) LEAVE(INVALID_VALUE);
    memcpy(memory->data + (address - memory->address), from, size);
    LEAVE(OK);
}

API size_t fake_registered(void) {
    size_t sum = 0;
    for (int i = 0; i < MOST; i++) sum += ranges[i].size;
    return sum;
}

API int fake_depth(void) { return depth; }
API void fake_fail_registering(int code) { fail_registering = code; }
API long fake_count(int which) {
    return which == 0 ? direct_copies : which == 1 ? pageable_copies : which == 2 ? violations : flushes;
}
