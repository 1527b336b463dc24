/* Blocks of one device: what is found, split, stitched, created and given back. Whoever calls holds the device's lock.

   Driver memory is handles of one chunk. A primary mapping is one range of addresses whose chunks were created for it.
   PBlock: a part of a primary mapping, the only owner of its chunks. SBlock: a range whose chunks belong to PBlocks,
   its members in order: stitched (addresses of its own that map their handles once more), or the range of a block that
   was split.
   Everything is apart for each (pool, stream). All of it is usable for the one stream only, whose order makes reuse
   safe; memory changes streams only by way of the driver, and only after the old stream has been waited for. */
#pragma once
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver.h"

namespace stitching {

constexpr size_t MIB = 1 << 20, GRAIN = 512, LARGE = 2 * MIB;
using PoolId = std::pair<unsigned long long, unsigned long long>;
struct SBlock;
struct Pool;

struct Mapping {
  Address address;
  uint32_t n, left;  // chunks of the range; chunks that still exist
  bool is_small;
  std::vector<Handle> handles;
  std::vector<uint8_t> busy;  // by chunk; for the self-check only
};

struct PBlock {
  Address address;
  uint32_t n, first;  // chunks; the first one's place in the mapping
  Mapping *mapping;
  bool held = false;
  std::vector<SBlock *> over{};  // those that have it as a member
};

struct SBlock {
  Address address;
  uint32_t n, n_held = 0;  // chunks; members that are held
  bool stitched;
  uint64_t used;  // when it was made or last handed out, in large requests
  std::vector<PBlock *> members{};
};

struct Small {
  Address address;
  size_t size;
  Mapping *mapping;
  Small *before = nullptr, *behind = nullptr;
  bool held = false;
};

using FreeSmall = std::pair<size_t, Address>;
using FreeWhole = std::pair<uint32_t, Address>;
// By address: an order that never changes, so a program that repeats itself finds the same ranges in the same places.
// With the last used first, training of GPT-2 stitched in each of its steps.
using RangeKey = std::pair<uint32_t, Address>;

struct Pool {
  PoolId id;
  Stream stream;
  std::map<FreeSmall, Small *> free_small{};
  std::map<FreeWhole, PBlock *> free{};
  std::map<RangeKey, SBlock *> ranges{};  // all, usable or not
  std::map<Address, PBlock *> blocks{};
  std::map<Address, Small *> smalls{};
};

struct Live {  // what a program holds, or has given back while other streams use it
  Pool *pool;
  Small *small;
  PBlock *whole;
  SBlock *stitched;
  size_t requested, rounded;
  uint32_t n_events;
  bool pending;
  std::vector<Stream> streams;
};

struct Stat {
  int64_t now = 0, peak = 0, up = 0, down = 0;
  void add(int64_t amount) {
    now += amount;
    (amount > 0 ? up : down) += amount > 0 ? amount : -amount;
    peak = std::max(peak, now);
  }
};
enum Row { ALLOCATION, SEGMENT, ACTIVE, ALLOCATED_BYTES, RESERVED_BYTES, ACTIVE_BYTES, REQUESTED_BYTES, N_ROWS };
struct Stats {
  Stat rows[N_ROWS][3];  // all, small, large
  void add(Row row, bool small, int64_t amount) {
    rows[row][0].add(amount);
    rows[row][small ? 1 : 2].add(amount);
  }
};

struct Config {
  uint32_t size, flags;
  uint64_t chunk_bytes, stitch_min_bytes, stitch_limit_bytes, trace_entries;  // limit 0: 8 times the device's memory
};
enum : uint32_t { CHECK = 1, LOG = 2 };

struct Logged {
  int64_t kind, bytes, n;
};

struct Report {  // what Python reads of one device
  uint32_t version, size;
  Stat rows[N_ROWS][3];
  int64_t states[5], n_retries, n_oom, n_synchronized, n_stitched, stitched_bytes, n_ranges, n_leaks, n_check_failures;
  int64_t n_waiting, n_failed, total_bytes, limit_bytes, stitch_limit_bytes;
  int64_t n_split, split_bytes;  // free small blocks in segments that are in use; what is free and large can always go
  int64_t calls[N_CALLS], microseconds[N_CALLS];
};

struct Heap {
  Driver *driver = nullptr;
  Context context = nullptr;
  Config config = {};
  std::vector<Access> access;  // this device, and those of this process that can reach it
  Properties properties = {};
  Counted call;
  Stats stats;
  std::map<std::pair<PoolId, Stream>, Pool> pools;
  std::map<PoolId, int> owners;  // graphs and MemPools; memory of owned pools is never given back
  std::unordered_map<Address, Live> live;
  std::map<Address, size_t> live_small;  // for the self-check only
  std::vector<Logged> log;
  int64_t states[5] = {}, n_stitched = 0, stitched_bytes = 0, n_ranges = 0, n_leaks = 0, n_check_failures = 0;
  size_t limit = 0;  // bytes that may be reserved
  uint64_t tick = 0;

  size_t bytes(size_t n) const { return n * config.chunk_bytes; }
  size_t chunks(size_t size) const { return (size + config.chunk_bytes - 1) / config.chunk_bytes; }
  void note(Call kind, size_t size, size_t n) {
    if (config.flags & LOG) log.push_back({kind, int64_t(size), int64_t(n)});
  }
  virtual void segment(bool created, Pool &pool, Address address, size_t size) = 0;  // for the trace
  virtual bool wait(Pool &pool) = 0;  // until nothing uses what is free in it; false if that cannot be now
};

inline RangeKey key(const SBlock *s) { return {s->n, s->address}; }

// Held members are counted, not looked for: a block may be in hundreds of ranges.
inline void hold(Pool &pool, PBlock *p) {
  p->held = true;
  pool.free.erase({p->n, p->address});
  for (SBlock *s : p->over) s->n_held++;
}

inline void unhold(Pool &pool, PBlock *p) {
  p->held = false;
  pool.free.emplace(FreeWhole{p->n, p->address}, p);
  for (SBlock *s : p->over) s->n_held--;
}

inline void hold(Heap &heap, Pool &pool, SBlock *s) {
  s->used = heap.tick;
  for (PBlock *p : s->members) hold(pool, p);
}

// Take mappings away, wholly mapped ranges only. One call for all; where a driver wants them one by one, so be it.
inline int unmap(Heap &heap, Address address, size_t n) {
  int result = heap.call(UNMAP, heap.driver->unmap, address, heap.bytes(n));
  for (size_t i = 0; result == INVALID_VALUE && n > 1 && i < n; i++) {
    int one = heap.call(UNMAP, heap.driver->unmap, address + heap.bytes(i), heap.bytes(1));
    if (one != OK) return one;
    if (i + 1 == n) result = OK;
  }
  return result;
}

inline int reserve(Heap &heap, size_t size, Address &address) {
  int result = heap.call(RESERVE, heap.driver->reserve, &address, size, size_t(0), Address(0), 0ull);
  if (result == OK) heap.note(RESERVE, size, 0);
  return result;
}

inline void unreserve(Heap &heap, Address address, size_t size) {
  heap.n_leaks += heap.call(UNRESERVE, heap.driver->unreserve, address, size) != OK;
  heap.note(UNRESERVE, size, 0);
}

// Map handles into a range that was reserved for them, and set access once. If that fails, the range is gone.
inline int map(Heap &heap, const std::vector<Handle> &handles, Address address) {
  size_t size = heap.bytes(handles.size()), done = 0;
  int result = OK;
  for (; done < handles.size() && result == OK; done += result == OK)
    result = heap.call(MAP, heap.driver->map, Address(address + heap.bytes(done)), heap.bytes(1), size_t(0),
                       handles[done], 0ull);
  if (result == OK)
    result = heap.call(ACCESS, heap.driver->access, address, size, heap.access.data(), heap.access.size());
  if (result == OK) {
    heap.note(MAP, size, handles.size());
    heap.note(ACCESS, size, handles.size());
  } else if (done && unmap(heap, address, done) != OK) {
    heap.n_leaks++;  // addresses that are still mapped must not be given back: better lose them than use them twice
  } else {
    unreserve(heap, address, size);
  }
  return result;
}

inline int create(Heap &heap, Pool &pool, size_t n, bool is_small, Mapping *&out) {
  if (heap.bytes(n) > heap.limit || size_t(heap.stats.rows[RESERVED_BYTES][0].now) > heap.limit - heap.bytes(n))
    return OUT_OF_MEMORY;
  Here here(heap.driver, heap.context);
  size_t free = SIZE_MAX, all;
  // Thousands of chunks made in vain, and given back again, would take a second.
  if (n >= 512 && heap.call(INFO, heap.driver->info, &free, &all) == OK && free < heap.bytes(n)) return OUT_OF_MEMORY;
  Address address;
  int result = reserve(heap, heap.bytes(n), address);
  if (result != OK) return result;
  std::vector<Handle> handles;
  Handle handle;
  while (handles.size() < n && result == OK)
    if ((result = heap.call(CREATE, heap.driver->create, &handle, heap.bytes(1), &heap.properties, 0ull)) == OK)
      handles.push_back(handle);
  heap.note(CREATE, heap.bytes(handles.size()), handles.size());
  if (result == OK)
    result = map(heap, handles, address);
  else
    unreserve(heap, address, heap.bytes(n));
  if (result != OK) {
    for (Handle each : handles) heap.n_leaks += heap.call(RELEASE, heap.driver->release, each) != OK;
    heap.note(RELEASE, heap.bytes(handles.size()), handles.size());
    return result;
  }
  std::vector<uint8_t> busy(heap.config.flags & CHECK ? n : 0);
  out = new Mapping{address, uint32_t(n), uint32_t(n), is_small, std::move(handles), std::move(busy)};
  heap.stats.add(RESERVED_BYTES, is_small, heap.bytes(n));
  heap.stats.add(SEGMENT, is_small, 1);
  heap.segment(true, pool, address, heap.bytes(n));
  return OK;
}

inline int create(Heap &heap, Pool &pool, size_t n, PBlock *&out) {
  Mapping *mapping;
  int result = create(heap, pool, n, false, mapping);
  if (result != OK) return result;
  out = new PBlock{mapping->address, uint32_t(n), 0, mapping};
  pool.blocks.emplace(out->address, out);
  pool.free.emplace(FreeWhole{out->n, out->address}, out);
  return OK;
}

// Cut a free block to n chunks, without a driver call. Its range stays usable; in other ranges both take its place.
inline void split(Heap &heap, Pool &pool, PBlock *low, uint32_t n) {
  auto *high = new PBlock{low->address + heap.bytes(n), low->n - n, low->first + n, low->mapping};
  pool.free.erase({low->n, low->address});
  auto *range = new SBlock{low->address, low->n, 0, false, heap.tick, {low, high}};
  low->n = n;
  high->over = low->over;
  for (SBlock *s : low->over)
    s->members.insert(std::find(s->members.begin(), s->members.end(), low) + 1, high);
  low->over.push_back(range);
  high->over.push_back(range);
  pool.blocks.emplace(high->address, high);
  pool.free.emplace(FreeWhole{low->n, low->address}, low);
  pool.free.emplace(FreeWhole{high->n, high->address}, high);
  pool.ranges.emplace(key(range), range);
  heap.n_ranges++;
}

inline int stitch(Heap &heap, Pool &pool, const std::vector<PBlock *> &members, SBlock *&out) {
  std::vector<Handle> handles;
  for (PBlock *p : members) {
    auto first = p->mapping->handles.begin() + p->first;
    handles.insert(handles.end(), first, first + p->n);
  }
  Address address;
  Here here(heap.driver, heap.context);
  size_t n = handles.size();
  int result = reserve(heap, heap.bytes(n), address);
  if (result == OK) result = map(heap, handles, address);
  if (result != OK) return result;
  out = new SBlock{address, uint32_t(n), 0, true, heap.tick, members};
  for (PBlock *p : members) p->over.push_back(out);
  pool.ranges.emplace(key(out), out);
  heap.n_stitched++;
  heap.stitched_bytes += heap.bytes(n);
  return OK;
}

// Forget a range; take a stitched one off the driver. The caller has waited for the stream.
inline int destroy(Heap &heap, Pool &pool, SBlock *s) {
  if (s->stitched) {
    int result = unmap(heap, s->address, s->n);
    if (result != OK) return result;
    heap.note(UNMAP, heap.bytes(s->n), s->n);
    unreserve(heap, s->address, heap.bytes(s->n));
    heap.n_stitched--;
    heap.stitched_bytes -= heap.bytes(s->n);
  } else {
    heap.n_ranges--;
  }
  pool.ranges.erase(key(s));
  for (PBlock *p : s->members) p->over.erase(std::find(p->over.begin(), p->over.end(), s));
  delete s;
  return OK;
}

inline bool is_kept(const Heap &heap, const Pool &pool) { return heap.owners.count(pool.id); }

// StitchFree: the least recently used stitched ranges go until the rest is below the limit.
inline void stitch_free(Heap &heap) {
  if (uint64_t(heap.stitched_bytes) <= heap.config.stitch_limit_bytes) return;
  Here here(heap.driver, heap.context);
  while (uint64_t(heap.stitched_bytes) > heap.config.stitch_limit_bytes) {
    Pool *where = nullptr;
    SBlock *oldest = nullptr;
    for (auto &each : heap.pools)
      for (auto &entry : each.second.ranges) {
        SBlock *s = entry.second;
        if (s->stitched && !s->n_held && !is_kept(heap, each.second) && (!oldest || s->used < oldest->used))
          where = &each.second, oldest = s;
      }
    if (!oldest || !heap.wait(*where) || destroy(heap, *where, oldest) != OK) return;
  }
}

// Take n chunks from a mapping, and its addresses with the last of them. False where the driver did not let go.
inline bool hand_back(Heap &heap, Pool &pool, Mapping *mapping, uint32_t first, uint32_t n) {
  Address address = mapping->address + heap.bytes(first);
  if (unmap(heap, address, n) != OK) return false;
  heap.note(UNMAP, heap.bytes(n), n);
  for (uint32_t i = first; i < first + n; i++)
    heap.n_leaks += heap.call(RELEASE, heap.driver->release, mapping->handles[i]) != OK;
  heap.note(RELEASE, heap.bytes(n), n);
  heap.stats.add(RESERVED_BYTES, mapping->is_small, -int64_t(heap.bytes(n)));
  heap.segment(false, pool, address, heap.bytes(n));
  if ((mapping->left -= n) == 0) {
    unreserve(heap, mapping->address, heap.bytes(mapping->n));
    heap.stats.add(SEGMENT, mapping->is_small, -1);
    delete mapping;
  }
  return true;
}

// Undo the creation of a block that nothing has used.
inline void drop(Heap &heap, Pool &pool, PBlock *p) {
  if (!hand_back(heap, pool, p->mapping, 0, p->n)) return;
  pool.free.erase({p->n, p->address});
  pool.blocks.erase(p->address);
  delete p;
}

// S1 to S4. OK with one of the two, both held; or why the driver refused.
inline int find(Heap &heap, Pool &pool, uint32_t n, PBlock *&whole, SBlock *&stitched) {
  whole = nullptr;
  stitched = nullptr;
  auto found = pool.free.lower_bound({n, 0});
  bool larger = found != pool.free.end() && found->first.first > n;
  if (found != pool.free.end() && !larger) {
    heap.states[0]++;
    hold(pool, whole = found->second);
    return OK;
  }
  for (auto range = pool.ranges.lower_bound({n, 0}); range != pool.ranges.end() && range->second->n == n; ++range)
    if (!range->second->n_held) {
      heap.states[0]++;
      hold(heap, pool, stitched = range->second);
      return OK;
    }
  if (larger) {
    heap.states[1]++;
    whole = found->second;
    split(heap, pool, whole, n);
    hold(pool, whole);
    return OK;
  }
  std::vector<PBlock *> members;
  uint32_t sum = 0;
  // Sizes from the largest down, addresses upwards in each.
  for (auto end = pool.free.end(); sum < n && end != pool.free.begin();) {
    uint32_t size = std::prev(end)->first.first;
    if (heap.bytes(size) < heap.config.stitch_min_bytes) break;
    auto first = pool.free.lower_bound({size, 0});
    for (auto at = first; at != end && sum < n; ++at) {
      members.push_back(at->second);
      sum += size;
    }
    end = first;
  }
  bool enough = sum >= n;
  if (!enough) {
    PBlock *rest;
    int result = create(heap, pool, n - sum, rest);
    if (result != OK) return result;
    if (members.empty()) {
      heap.states[3]++;
      hold(pool, whole = rest);
      return OK;
    }
    members.push_back(rest);
  } else if (sum > n) {
    split(heap, pool, members.back(), members.back()->n - (sum - n));
  }
  int result = stitch(heap, pool, members, stitched);
  if (result != OK) {
    stitched = nullptr;
    if (!enough) drop(heap, pool, members.back());
    return result;
  }
  heap.states[enough ? 2 : 3]++;
  hold(heap, pool, stitched);
  stitch_free(heap);
  return OK;
}

// The small allocator: best fit, split, merged with its neighbours when it is free again.
inline int find_small(Heap &heap, Pool &pool, size_t rounded, Small *&out) {
  auto found = pool.free_small.lower_bound({rounded, 0});
  if (found == pool.free_small.end()) {
    Mapping *mapping;
    size_t n = heap.chunks(rounded <= MIB ? 2 * MIB : 20 * MIB);
    int result = create(heap, pool, n, true, mapping);
    if (result != OK) return result;
    out = new Small{mapping->address, heap.bytes(n), mapping};
    pool.smalls.emplace(out->address, out);
  } else {
    out = found->second;
    pool.free_small.erase(found);
  }
  out->held = true;
  if (out->size > rounded) {
    auto *rest = new Small{out->address + rounded, out->size - rounded, out->mapping, out, out->behind};
    if (rest->behind) rest->behind->before = rest;
    out->behind = rest;
    out->size = rounded;
    pool.smalls.emplace(rest->address, rest);
    pool.free_small.emplace(FreeSmall{rest->size, rest->address}, rest);
  }
  return OK;
}

inline void put_back(Pool &pool, Small *block) {
  block->held = false;
  Small *low = block->before && !block->before->held ? block->before : block;
  Small *high = block->behind && !block->behind->held ? block->behind : block;
  if (low != block) pool.free_small.erase({low->size, low->address});
  if (high != block) pool.free_small.erase({high->size, high->address});
  while (low != high) {
    Small *next = low->behind, *last = next->behind;
    bool done = next == high;
    low->size += next->size;
    low->behind = last;
    if (last) last->before = low;
    pool.smalls.erase(next->address);
    delete next;
    if (done) break;
  }
  pool.free_small.emplace(FreeSmall{low->size, low->address}, low);
}

inline void put_back(const Live &held) {
  if (held.small) put_back(*held.pool, held.small);
  if (held.whole) unhold(*held.pool, held.whole);
  if (held.stitched)
    for (PBlock *p : held.stitched->members) unhold(*held.pool, p);
}

// Everything free of one (pool, stream) goes back to the driver; what is held is not touched.
inline void release(Heap &heap, Pool &pool) {
  if (pool.free.empty() && pool.free_small.empty()) return;
  if (!heap.wait(pool)) return;
  std::vector<SBlock *> doomed;
  for (auto &each : pool.ranges)
    if (each.second->n_held < each.second->members.size()) doomed.push_back(each.second);
  std::sort(doomed.begin(), doomed.end(), [](SBlock *a, SBlock *b) {
    return std::tie(a->address, a->n) < std::tie(b->address, b->n);
  });
  for (SBlock *s : doomed) destroy(heap, pool, s);
  for (auto at = pool.blocks.begin(); at != pool.blocks.end();) {
    std::vector<PBlock *> run;  // free neighbours in one mapping
    uint32_t n = 0;
    for (; at != pool.blocks.end(); ++at) {
      PBlock *p = at->second;
      if (p->held || !p->over.empty()) break;
      if (n && (p->mapping != run[0]->mapping || p->first != run[0]->first + n)) break;
      run.push_back(p);
      n += p->n;
    }
    if (run.empty()) {
      ++at;
    } else if (hand_back(heap, pool, run[0]->mapping, run[0]->first, n)) {
      for (PBlock *p : run) {
        pool.free.erase({p->n, p->address});
        pool.blocks.erase(p->address);
        delete p;
      }
    }
  }
  std::vector<Small *> whole;
  for (auto &each : pool.smalls)
    if (!each.second->held && !each.second->before && !each.second->behind) whole.push_back(each.second);
  for (Small *block : whole) {
    Address address = block->address;
    if (!hand_back(heap, pool, block->mapping, 0, block->mapping->n)) continue;
    pool.free_small.erase({block->size, address});
    pool.smalls.erase(address);
    delete block;
  }
}

inline void release(Heap &heap) {
  Here here(heap.driver, heap.context);
  for (auto &each : heap.pools)
    if (!is_kept(heap, each.second)) release(heap, each.second);
}

}  // namespace stitching
