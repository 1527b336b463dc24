/* Drives the stitching allocator from C: random work of several threads on poisoned memory, and lists of operations. */
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "../../gpubloat/native/stitching/heap.h"

using stitching::Logged;
using stitching::PoolId;
using Filter = std::function<bool(void *)>;
extern "C" {
void *gpubloat_alloc(ssize_t, int, void *);
void gpubloat_free(void *, size_t, int, void *);
void gpubloat_record_stream(void *, void *);
void gpubloat_empty_cache();
void gpubloat_begin_pool(int, PoolId, Filter);
void gpubloat_end_pool(int, PoolId);
void gpubloat_release_pool(int, PoolId);
size_t gpubloat_log(int, Logged *, size_t);
int gpubloat_report(int, void *);
}
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t CHUNK = 2 << 20;
struct Block {
  char *at;
  size_t size;
  uint64_t mark;
  int device;
  intptr_t stream, other;  // other: a stream that reads it after it was given back
  long work;
};

template <class F>
F *fake(const char *name) {
  static void *library = dlopen(getenv("GPUBLOAT_LIBCUDA"), RTLD_NOW);
  return reinterpret_cast<F *>(dlsym(library, name));
}

// Words all over a block, the last one too: 512 bytes apart or a 64th of a small block, 512 KiB apart in a large one.
template <class F>
void words(const Block &block, F each) {
  size_t step = block.size < CHUNK ? std::max<size_t>(512, block.size / 64 / 512 * 512) : CHUNK / 4;
  for (size_t i = 0; i + 8 <= block.size; i += step) each(reinterpret_cast<uint64_t *>(block.at + i));
  if (block.size >= 8) each(reinterpret_cast<uint64_t *>(block.at + (block.size - 8) / 8 * 8));
}
void poison(const Block &block) {
  words(block, [&](uint64_t *word) { *word = block.mark; });
}
long damage(const Block &block) {
  long n = 0;
  words(block, [&](uint64_t *word) { n += *word != block.mark; });
  return n;
}
// The same of memory that another thread may take away meanwhile.
bool is_damaged(const Block &block) {
  std::vector<iovec> from;
  words(block, [&](uint64_t *word) { from.push_back({word, 8}); });
  std::vector<uint64_t> copy(from.size());
  for (size_t i = 0; i < from.size(); i += 1000) {
    size_t n = std::min<size_t>(1000, from.size() - i);
    iovec to = {&copy[i], 8 * n};
    if (process_vm_readv(getpid(), &to, 1, &from[i], n, 0) != ssize_t(8 * n)) return true;
  }
  return std::any_of(copy.begin(), copy.end(), [&](uint64_t word) { return word != block.mark; });
}

}  // namespace

struct Outcome {
  int64_t n_alloc, n_none, n_damaged;
  int64_t n_late;  // given back, and damaged before another stream had read them
};

// n operations on each of so many threads, each with two streams; with several devices, they take turns.
EXPORT void stress(int64_t n, int threads, int devices, uint64_t seed, uint64_t most_live, Outcome *out) {
  std::atomic<int64_t> n_alloc{0}, n_none{0}, n_damaged{0}, n_late{0};
  std::atomic<uint64_t> marks{seed << 32 | 1};
  auto work = fake<long(long, uint64_t, size_t)>("fake_work");
  auto finish = fake<void(long, long)>("fake_complete");
  auto done = fake<long(long)>("fake_done"), submitted = fake<long(long)>("fake_submitted");
  auto run = [&](int thread) {
    std::mt19937_64 random(seed + thread);
    std::vector<Block> live, reading;
    uint64_t held = 0;
    auto hand_back = [&](size_t i) {
      Block block = live[i];
      live[i] = live.back();
      live.pop_back();
      held -= block.size;
      n_damaged += damage(block);
      if (random() % 8 == 0) {
        // Another stream still reads it when it is given back.
        block.other = 1 + 2 * threads + thread;
        block.work = work(block.other, reinterpret_cast<uint64_t>(block.at), block.size);
        gpubloat_record_stream(block.at, reinterpret_cast<void *>(block.other));
        reading.push_back(block);
      } else if (random() % 16 == 0) {
        work(block.stream, reinterpret_cast<uint64_t>(block.at), block.size);  // nothing here waits for it
      }
      gpubloat_free(block.at, block.size, block.device, reinterpret_cast<void *>(block.stream));
    };
    auto read = [&] {
      // Damage counts if the stream had not come so far yet; another thread may have made the allocator wait for it.
      for (Block &block : reading) n_late += is_damaged(block) && done(block.other) < block.work;
      if (!reading.empty()) finish(reading[0].other, reading.back().work);
      reading.clear();
      for (intptr_t stream = 1 + 2 * thread; stream < 3 + 2 * thread; stream++) finish(stream, submitted(stream));
    };
    for (int64_t i = 0; i < n; i++) {
      uint64_t dice = random() % 1000;
      if (dice == 0 && random() % 16 == 0) gpubloat_empty_cache();
      if (reading.size() > 8 || dice < 20) read();
      if ((dice < 520 && held < most_live) || live.empty()) {
        uint64_t kind = random() % 10;
        size_t size = kind < 7   ? 1 + random() % 20000
                      : kind < 9 ? 1 + random() % (2 * CHUNK)
                                 : 1 + random() % (CHUNK << random() % 5);
        intptr_t stream = 1 + 2 * thread + intptr_t(random() % 2);
        Block block = {nullptr, size, marks += 2, int(random() % devices), stream, 0, 0};
        block.at = static_cast<char *>(gpubloat_alloc(size, block.device, reinterpret_cast<void *>(block.stream)));
        n_alloc++;
        if (!block.at) {
          n_none++;
          continue;
        }
        poison(block);
        live.push_back(block);
        held += size;
      } else {
        hand_back(random() % live.size());
      }
    }
    read();
    while (!live.empty()) hand_back(live.size() - 1);
    read();
  };
  std::vector<std::thread> all;
  for (int i = 0; i < threads; i++) all.emplace_back(run, i);
  for (auto &each : all) each.join();
  *out = {n_alloc, n_none, n_damaged, n_late};
}

struct Step {  // kind: 0 allocate, 1 free, 2 empty the cache; id names the block
  int64_t kind, id, size, stream, pool0, pool1;
};
struct After {  // n_calls: entries of the log so far
  int64_t address, n_calls, reserved, active;
};

// Run steps on device 0; the log of calls goes to `calls`. How long that is, or -1 if there is no room for it.
EXPORT int64_t replay(const Step *steps, int64_t n, Logged *calls, int64_t room, After *after) {
  std::vector<std::pair<void *, Step>> blocks;
  std::set<PoolId> pools;
  int64_t n_calls = 0;
  stitching::Report report = {};
  report.size = sizeof report;
  for (int64_t i = 0; i < n; i++) {
    const Step &step = steps[i];
    PoolId pool(step.pool0, step.pool1);
    bool routed = step.kind == 0 && pool != PoolId(0, 0);
    if (size_t(step.id) >= blocks.size()) blocks.resize(step.id + 1);
    void *address = nullptr;
    if (routed) gpubloat_begin_pool(0, pool, [](void *) { return true; });
    if (step.kind == 0) {
      address = gpubloat_alloc(step.size, 0, reinterpret_cast<void *>(step.stream));
      blocks[step.id] = {address, step};
    } else if (step.kind == 1) {
      const Step &was = blocks[step.id].second;
      gpubloat_free(blocks[step.id].first, was.size, 0, reinterpret_cast<void *>(was.stream));
    } else {
      gpubloat_empty_cache();
    }
    if (routed) {
      gpubloat_end_pool(0, pool);
      if (!pools.insert(pool).second) gpubloat_release_pool(0, pool);  // each keeps one owner
    }
    n_calls += gpubloat_log(0, calls + n_calls, room - n_calls);
    if (n_calls > room) return -1;
    gpubloat_report(0, &report);
    after[i] = {int64_t(address), n_calls, report.rows[stitching::RESERVED_BYTES][0].now,
                report.rows[stitching::ACTIVE_BYTES][0].now};
  }
  return n_calls;
}

// Allocations on this stream go to a pool of their own, as in the capture of a graph, until the pool ends.
EXPORT void begin_pool(int device, unsigned long long a, unsigned long long b, void *stream) {
  gpubloat_begin_pool(device, {a, b}, [stream](void *asked) { return asked == stream; });
}
EXPORT void end_pool(int device, unsigned long long a, unsigned long long b) { gpubloat_end_pool(device, {a, b}); }
EXPORT void release_pool(int device, unsigned long long a, unsigned long long b) {
  gpubloat_release_pool(device, {a, b});
}
