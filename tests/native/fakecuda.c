/* A libcuda without a GPU, for the stitching allocator: chunks are pages of a file in memory, so that a chunk that is
   mapped twice is the same memory at two addresses. Streams do what a test lets them do. Misuse is counted, and the
   first is named. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPACE (1u << 22) /* chunks of address space that there can be */
#define BACKED (1u << 17) /* of it where there is memory behind: many of these libraries fit into one process */
#define HANDLES (1u << 20)
#define STREAMS 64
#define DEVICES 2

enum kind { RESERVE, CREATE, MAP, ACCESS, UNMAP, RELEASE, UNRESERVE, RECORD, QUERY, WAIT, KINDS };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t chunk = 2ul << 20;
static char *base;
static int file, backed = 1, reuse;
static uint32_t space = SPACE;
static uint32_t next_space, next_handle, reserved[SPACE], mapped[SPACE], refs[HANDLES];
static uint8_t accessible[SPACE], alive[HANDLES], owner[HANDLES];
static uint32_t spare_handles[HANDLES], n_spare_handles, spare_space[SPACE], n_spare_space;
static size_t total = 1ul << 30, used[DEVICES];
static long counts[KINDS], fail_at[KINDS], n_misuse;
static int fail_with[KINDS];
static char misuse[200];
static long submitted[STREAMS], done[STREAMS];
static int capturing[STREAMS], n_capturing, can_peer;
static __thread void *current;
static __thread int mode; /* of capture: 0 global, 2 relaxed */
struct event { int stream; long at; };
static struct work { long stream, at; uint32_t first, n; } *works;
static size_t n_works, room;

static int fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    if (!n_misuse++) vsnprintf(misuse, sizeof misuse, format, list);
    va_end(list);
    return 1;
}

static int count(enum kind kind) {
    counts[kind]++;
    if (fail_at[kind] && --fail_at[kind] == 0) return fail_with[kind];
    return 0;
}
#define LOCKED pthread_mutex_lock(&lock)
#define RETURN(x) do { int result_ = (x); pthread_mutex_unlock(&lock); return result_; } while (0)
#define COUNT(kind) do { int failed_ = count(kind); if (failed_) RETURN(failed_); } while (0)

int cuInit(unsigned flags) {
    (void)flags;
    LOCKED;
    if (!base) {
        base = (char *)(1ul << 45);
        if (backed) {
            space = BACKED;
            base = mmap(0, (space + 1) * chunk, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base == MAP_FAILED) RETURN(999);
            base = (char *)(((uintptr_t)base + chunk - 1) / chunk * chunk);
            file = memfd_create("memory", 0);
            if (file < 0 || ftruncate(file, (off_t)(total * DEVICES))) RETURN(999);
        }
        next_space = 1;
    }
    RETURN(0);
}
int cuDeviceGet(int *device, int n) { *device = n; return n < DEVICES ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)device; *value = attribute == 110; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = total; return 0; }
int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = can_peer && a != b; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 100); return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuThreadExchangeStreamCaptureMode(int *given) { int before = mode; mode = *given; *given = before; return 0; }
int cuMemGetAllocationGranularity(size_t *bytes, const int *properties, int option) {
    (void)properties, (void)option;
    *bytes = 2ul << 20;
    return 0;
}
int cuMemGetInfo_v2(size_t *free, size_t *all) {
    LOCKED;
    int device = (int)((intptr_t)current - 100);
    if (device < 0 || device >= DEVICES) RETURN(fail("info without a context"));
    *free = total - used[device];
    *all = total;
    RETURN(0);
}
int cuGetErrorName(int error, const char **name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
    return 0;
}

static uint32_t place(uint64_t address, const char *what) {
    uint64_t offset = address - (uint64_t)base;
    if (address < (uint64_t)base || offset % chunk || offset / chunk >= space) fail("%s of a foreign address", what);
    return (uint32_t)(offset / chunk);
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t align, uint64_t hint, unsigned long long flags) {
    (void)align, (void)hint, (void)flags;
    LOCKED;
    COUNT(RESERVE);
    uint32_t n = (uint32_t)(size / chunk), at = 0;
    if (!n || size % chunk) RETURN(fail("reserve of %zu bytes", size));
    for (uint32_t i = n_spare_space; reuse && i-- > 0 && !at;)
        if (reserved[spare_space[i]] == n) {
            at = spare_space[i];
            spare_space[i] = spare_space[--n_spare_space];
        }
    if (!at) {
        if (next_space + n + 1 > space - 1) RETURN(2);
        at = next_space;
        next_space += n + 1; /* a gap: neighbours in numbers only are found out */
    }
    reserved[at] = n | 1u << 31;
    *address = (uint64_t)base + at * chunk;
    RETURN(0);
}

int cuMemAddressFree(uint64_t address, size_t size) {
    LOCKED;
    COUNT(UNRESERVE);
    uint32_t at = place(address, "free"), n = (uint32_t)(size / chunk);
    if (reserved[at] != (n | 1u << 31)) RETURN(fail("free of addresses that are no reservation"));
    for (uint32_t i = at; i < at + n; i++)
        if (mapped[i]) RETURN(fail("free of addresses that are mapped"));
    reserved[at] = n;
    if (reuse) spare_space[n_spare_space++] = at;
    RETURN(0);
}

int cuMemCreate(uint64_t *handle, size_t size, const int *properties, unsigned long long flags) {
    (void)flags;
    LOCKED;
    COUNT(CREATE);
    int device = properties[3];
    if (size != chunk || properties[0] != 1 || properties[2] != 1 || device < 0 || device >= DEVICES)
        RETURN(fail("create with odd properties"));
    if (used[device] + chunk > total) RETURN(2);
    uint32_t n = n_spare_handles ? spare_handles[--n_spare_handles] : ++next_handle;
    if (n >= HANDLES) RETURN(2);
    used[device] += chunk;
    alive[n] = 1;
    owner[n] = (uint8_t)device;
    *handle = n;
    RETURN(0);
}

static void let_go(uint64_t handle) {
    if (alive[handle] || refs[handle]) return;
    used[owner[handle]] -= chunk;
    spare_handles[n_spare_handles++] = (uint32_t)handle;
}

int cuMemRelease(uint64_t handle) {
    LOCKED;
    COUNT(RELEASE);
    if (!handle || handle >= HANDLES || !alive[handle]) RETURN(fail("release of a handle that is none"));
    alive[handle] = 0;
    let_go(handle);
    RETURN(0);
}

static int range(uint64_t address, size_t size, int flags, int from, off_t offset) {
    return mmap((void *)address, size, PROT_NONE, MAP_FIXED | flags, from, offset) != MAP_FAILED;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    LOCKED;
    COUNT(MAP);
    uint32_t at = place(address, "map");
    if (size != chunk || offset || !alive[handle]) RETURN(fail("map of no whole handle"));
    if (mapped[at]) RETURN(fail("map over a mapping"));
    if (backed && !range(address, chunk, MAP_SHARED, file, (off_t)((handle - 1) * chunk))) RETURN(2);
    mapped[at] = (uint32_t)handle;
    refs[handle]++;
    RETURN(0);
}

int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t n_access) {
    LOCKED;
    COUNT(ACCESS);
    uint32_t at = place(address, "access");
    for (uint32_t i = at; i < at + size / chunk; i++) {
        if (!mapped[i]) RETURN(fail("access to what is not mapped"));
        for (size_t each = 0; each < n_access; each++) accessible[i] |= (uint8_t)(1 << access[3 * each + 1]);
    }
    if (!n_access || access[0] != 1 || access[2] != 3) RETURN(fail("access with odd flags"));
    if (backed && mprotect((void *)address, size, PROT_READ | PROT_WRITE)) RETURN(999);
    RETURN(0);
}

int cuMemUnmap(uint64_t address, size_t size) {
    LOCKED;
    COUNT(UNMAP);
    uint32_t at = place(address, "unmap"), n = (uint32_t)(size / chunk);
    if (!n || size % chunk) RETURN(fail("unmap of a part of a handle"));
    for (uint32_t i = at; i < at + n; i++)
        if (!mapped[i]) RETURN(fail("unmap of what is not mapped"));
    for (size_t i = 0; i < n_works; i++)
        if (works[i].at > done[works[i].stream] && works[i].first < at + n && at < works[i].first + works[i].n)
            fail("unmap of what a kernel on stream %ld uses", works[i].stream);
    if (backed && !range(address, size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) RETURN(999);
    for (uint32_t i = at; i < at + n; i++) {
        uint32_t handle = mapped[i];
        mapped[i] = accessible[i] = 0;
        refs[handle]--;
        let_go(handle);
    }
    RETURN(0);
}

/* Of unsafe calls during a capture: forbidden on the stream itself, and anywhere for a thread in the global mode. */
static int forbidden(long stream) {
    if (capturing[stream] || (n_capturing && mode != 2)) return fail("a call that a capture forbids") ? 900 : 0;
    return 0;
}

int cuEventCreate(void **event, unsigned flags) { *event = calloc(1, sizeof(struct event)); return flags == 2 ? 0 : 1; }
int cuEventRecord(struct event *event, void *stream) {
    LOCKED;
    COUNT(RECORD);
    if ((intptr_t)stream >= STREAMS) RETURN(400);
    if (forbidden((intptr_t)stream)) RETURN(900);
    event->stream = (int)(intptr_t)stream;
    event->at = submitted[event->stream];
    RETURN(0);
}
int cuEventQuery(struct event *event) {
    LOCKED;
    COUNT(QUERY);
    if (forbidden(event->stream)) RETURN(900);
    RETURN(done[event->stream] >= event->at ? 0 : 600);
}
int cuEventSynchronize(struct event *event) {
    LOCKED;
    COUNT(WAIT);
    if (forbidden(event->stream)) RETURN(900);
    if (done[event->stream] < event->at) done[event->stream] = event->at;
    RETURN(0);
}
int cuStreamSynchronize(void *stream) {
    LOCKED;
    COUNT(WAIT);
    if ((intptr_t)stream >= STREAMS) RETURN(400);
    if (forbidden((intptr_t)stream)) RETURN(900);
    done[(intptr_t)stream] = submitted[(intptr_t)stream];
    RETURN(0);
}
int cuCtxSynchronize(void) {
    LOCKED;
    COUNT(WAIT);
    if (n_capturing) RETURN(fail("waits for a context that captures") ? 900 : 0);
    memcpy(done, submitted, sizeof done);
    RETURN(0);
}
int cuStreamIsCapturing(void *stream, int *status) {
    *status = (intptr_t)stream < STREAMS && capturing[(intptr_t)stream];
    return 0;
}

/* What tests call. */
void fake_setup(size_t bytes, int backing, int reuses) { total = bytes, backed = backing, reuse = reuses; }
void fake_chunk(size_t bytes) { chunk = bytes; } /* of the handles that there will be */
void fake_peers(int can) { can_peer = can; }
void fake_fail(int kind, long nth, int error) { fail_at[kind] = nth, fail_with[kind] = error; }
long fake_count(int kind) { return counts[kind]; }
long fake_misuse(char *out, size_t size) { snprintf(out, size, "%s", misuse); return n_misuse; }
size_t fake_used(int device) { return used[device]; }
int fake_access(uint64_t address) { return accessible[(address - (uint64_t)base) / chunk]; }
void fake_capture(long stream, int on) { n_capturing += on - capturing[stream], capturing[stream] = on; }

/* A kernel on a stream that uses memory until it is complete. Returns its number. */
long fake_work(long stream, uint64_t address, size_t size) {
    LOCKED;
    size_t kept = 0;
    for (size_t i = 0; i < n_works; i++)
        if (works[i].at > done[works[i].stream]) works[kept++] = works[i];
    n_works = kept;
    if (n_works == room) works = realloc(works, (room = 2 * room + 16) * sizeof *works);
    uint32_t first = (uint32_t)((address - (uint64_t)base) / chunk);
    uint32_t last = (uint32_t)((address + size - 1 - (uint64_t)base) / chunk);
    works[n_works++] = (struct work){stream, ++submitted[stream], first, last - first + 1};
    long at = submitted[stream];
    pthread_mutex_unlock(&lock);
    return at;
}
void fake_complete(long stream, long at) {
    LOCKED;
    if (done[stream] < at) done[stream] = at;
    pthread_mutex_unlock(&lock);
}
long fake_done(long stream) { return done[stream]; }
long fake_submitted(long stream) { return submitted[stream]; }

/* 0 if nothing is left of reservations, mappings, handles. */
long fake_left(void) {
    long left = 0;
    LOCKED;
    for (uint32_t i = 0; i < next_space; i++) left += (reserved[i] >> 31) + (mapped[i] != 0);
    for (uint32_t i = 0; i <= next_handle; i++) left += alive[i] != 0;
    pthread_mutex_unlock(&lock);
    return left;
}
