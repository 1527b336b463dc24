// The kernels as host C++: a block is run as fibers, one per thread, that change over at the calls of a warp.
//
// Lanes must meet at the same kind of call, all 32 of them; else the process stops with a message. Shared memory ends
// at a page that cannot be touched, as do the buffers of the tests. Asynchronous copies are done when they are waited
// for, so that whoever reads too early sees what was there before; or, with `eager`, at once, so that whoever reads too
// late sees what comes next.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define GPUBLOAT_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define DYNAMIC_SHARED(name) uint4 *name = (uint4 *)emulated::shared
#define threadIdx emulated::now->thread
#define blockIdx emulated::block
#define blockDim emulated::block_dim
#define gridDim emulated::grid_dim

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {
struct Copy { void *to; uint64_t from; unsigned bytes; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    dim3 thread;
    bool done = false;
    std::vector<std::vector<Copy>> groups;  // oldest first; the last one is open
};
struct Meeting { int kind = 0; unsigned arrived = 0, generation = 0; };

inline std::vector<Fiber> fibers;
inline Fiber *now;
inline ucontext_t scheduler;
inline dim3 block, block_dim, grid_dim;
inline char *shared;
inline std::vector<Meeting> warps;
inline std::vector<uint64_t> slots;
inline Meeting whole;
inline const std::function<void()> *kernel;
inline uint64_t progress;
inline bool eager;
inline uint64_t readable_from, readable_to;  // where asynchronous copies may read
inline uint64_t small_copies;                // asynchronous copies of 4 bytes so far

inline void meet(Meeting &at, unsigned size, int kind) {
    if (at.arrived && at.kind != kind) {
        fprintf(stderr, "lanes meet at different calls: %d and %d\n", at.kind, kind);
        abort();
    }
    at.kind = kind;
    unsigned generation = at.generation;
    ++progress;
    if (++at.arrived == size) {
        at.arrived = 0;
        ++at.generation;
    }
    while (at.generation == generation) swapcontext(&now->context, &scheduler);
}
inline unsigned warp() { return now->thread.x / 32; }
inline void meet_warp(int kind) { meet(warps[warp()], 32, kind); }

/// Give `own` to the other lanes, see theirs.
inline void exchange(int kind, uint64_t own, uint64_t (&all)[32]) {
    uint64_t *mine = &slots[warp() * 32];
    mine[now->thread.x % 32] = own;
    meet_warp(kind);
    memcpy(all, mine, sizeof all);
    meet_warp(kind);
}
inline void finish(size_t pending) {  // until at most so many closed groups are left
    while (now->groups.size() > pending + 1) {
        for (auto &c : now->groups.front()) memcpy(c.to, (const void *)c.from, c.bytes);
        now->groups.erase(now->groups.begin());
    }
}
inline void start() {
    (*kernel)();
    now->done = true;
    ++progress;
}

/// Run the blocks one after the other.
inline void launch(dim3 grid, unsigned threads, size_t shared_bytes, const std::function<void()> &body) {
    size_t size = (shared_bytes + 4095) / 4096 * 4096;
    char *pages = (char *)mmap(nullptr, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages + size, 4096, PROT_NONE);
    shared = pages + size - (shared_bytes + 15) / 16 * 16;
    fibers.resize(threads);
    grid_dim = grid;
    block_dim = {threads, 1, 1};
    kernel = &body;
    for (block.y = 0; block.y < grid.y; ++block.y)
        for (block.x = 0; block.x < grid.x; ++block.x) {
            memset(pages, 0xcd, size);
            warps.assign(threads / 32, {});
            slots.assign(threads, 0);
            whole = {};
            for (unsigned i = 0; i < threads; ++i) {
                Fiber &f = fibers[i];
                f.thread = {i, 0, 0};
                f.done = false;
                f.groups.assign(1, {});
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data();
                f.context.uc_stack.ss_size = f.stack.size();
                f.context.uc_link = &scheduler;
                makecontext(&f.context, start, 0);
            }
            for (bool going = true; going;) {
                going = false;
                uint64_t before = progress;
                for (auto &f : fibers)
                    if (!f.done) {
                        going = true;
                        now = &f;
                        swapcontext(&scheduler, &f.context);
                    }
                if (going && progress == before) {
                    fprintf(stderr, "lanes wait for each other\n");
                    abort();
                }
            }
        }
    munmap(pages, size + 4096);
}
}  // namespace emulated

inline void __syncwarp() { emulated::meet_warp(1); }
inline void __syncthreads() { emulated::meet(emulated::whole, emulated::block_dim.x, 2); }
template <typename T> T __shfl_sync(unsigned, T own, int from) {
    uint64_t all[32];
    emulated::exchange(3, (uint64_t)own, all);
    return (T)all[from & 31];
}
template <typename T> T __shfl_up_sync(unsigned, T own, int by) {
    uint64_t all[32];
    emulated::exchange(4, (uint64_t)own, all);
    int lane = emulated::now->thread.x % 32;
    return lane < by ? own : (T)all[lane - by];
}
template <typename T> T __shfl_xor_sync(unsigned, T own, int by) {
    uint64_t all[32];
    emulated::exchange(5, (uint64_t)own, all);
    return (T)all[(emulated::now->thread.x % 32) ^ by];
}
inline unsigned __ballot_sync(unsigned, bool own) {
    uint64_t all[32];
    emulated::exchange(6, own, all);
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= (unsigned)all[i] << i;
    return found;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)((((uint64_t)high << 32) | low) >> (by & 31));
}
template <typename T> T atomicOr(T *at, T bits) { T old = *at; *at |= bits; return old; }
template <typename T> T atomicAdd(T *at, T more) { T old = *at; *at += more; return old; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }

inline void copied(void *to, uint64_t from, unsigned bytes) {
    if (from % bytes || (uint64_t)to % bytes) {
        fprintf(stderr, "a copy of %u bytes is not aligned\n", bytes);
        abort();
    }
    if (from < emulated::readable_from || from + bytes > emulated::readable_to) {
        fprintf(stderr, "a copy reads outside of the rows\n");
        abort();
    }
    if (emulated::eager)
        memcpy(to, (const void *)from, bytes);
    else
        emulated::now->groups.back().push_back({to, from, bytes});
}
inline void copy16(void *to, uint64_t from) { copied(to, from, 16); }
inline void copy4(void *to, uint64_t from) {
    ++emulated::small_copies;
    copied(to, from, 4);
}
inline void commit() { emulated::now->groups.emplace_back(); }
template <int PENDING> void wait() { emulated::finish(PENDING); }
