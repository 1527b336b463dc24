/* gpubloat's stitching allocator for PyTorch: what torch.cuda.memory.CUDAPluggableAllocator and its hooks call.

   One lock for each device; the interpreter's lock is never taken. Memory that other streams used is pending until
   their events have passed. Compiled with GPUBLOAT_TORCH, it throws PyTorch's errors; else it returns no address, and
   gpubloat_error says why. It never ends the process. */
#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>

#include "heap.h"
#ifdef GPUBLOAT_TORCH
#include <c10/util/Exception.h>
#endif

using namespace stitching;
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int MOST_DEVICES = 64;
constexpr uint32_t VERSION = 1;
using Filter = std::function<bool(Stream)>;

enum Action : int64_t { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_MAP, SEGMENT_UNMAP, OOM };
struct Entry {  // of the trace; read by Python
  int64_t action, address, size, stream, time_us, pool0, pool1;
};
struct Route {  // allocations of a graph's capture, or of a thread in a MemPool
  PoolId id;
  Filter filter;
};

thread_local std::string last_error;
Config settings = {sizeof(Config), 0, 2 * MIB, 0, 0, 0};
std::atomic<bool> forked{false};
std::atomic<bool> used{false};

struct Device : Heap {
  std::mutex lock;
  std::atomic<bool> ready{false};
  int ordinal = 0, n_waiting = 0;
  size_t total = 0;
  std::vector<Route> routes;
  std::map<Stream, std::deque<std::pair<Event, Address>>> events;  // by the stream that they were recorded on
  std::vector<Address> deferred;  // given back while a graph is captured, with streams that cannot be asked then
  std::vector<Event> spare;
  std::vector<Entry> ring;
  size_t next = 0, most = 0;
  int64_t n_retries = 0, n_oom = 0, n_synchronized = 0;

  void record(Action action, Address address, size_t size, Stream stream, PoolId id) {
    if (!most) return;
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    Entry entry = {action, int64_t(address), int64_t(size), int64_t(stream),
                   now.tv_sec * 1000000 + now.tv_nsec / 1000, int64_t(id.first), int64_t(id.second)};
    if (ring.size() < most)
      ring.push_back(entry);
    else
      ring[next] = entry;
    next = (next + 1) % most;
  }

  void segment(bool created, Pool &pool, Address address, size_t size) override {
    record(created ? SEGMENT_MAP : SEGMENT_UNMAP, address, size, pool.stream, pool.id);
  }

  bool capturing(Stream stream) {
    int status = 0;
    return driver->is_capturing(stream, &status) != OK || status != 0;
  }

  // Is a graph being captured on one of the block's streams? No event of theirs may be recorded or asked then.
  bool captured(const Live &held) {
    return capturing(held.pool->stream) ||
           std::any_of(held.streams.begin(), held.streams.end(), [&](Stream stream) { return capturing(stream); });
  }

  bool wait(Pool &pool) override {
    // A graph may have been replayed on any stream.
    if (pool.id != PoolId{0, 0}) return routes.empty() && call(SYNC, driver->context_wait) == OK;
    if (capturing(pool.stream)) return false;
    return call(SYNC, driver->stream_wait, pool.stream) == OK;
  }
};

Driver driver;
std::string why_not;  // the driver cannot be used
// Never destroyed: tensors may outlive the statics of this file.
Device *const devices = new Device[MOST_DEVICES];
std::mutex *const starting = new std::mutex;

std::string named(int result) {
  const char *name = nullptr;
  if (result == NO_DRIVER) return why_not;
  if (result == FORKED) return "CUDA cannot be used in a forked process";
  if (result == LIVE) return "an address would have been handed out twice: a bug of this allocator";
  if (!driver.error_name || driver.error_name(result, &name) != OK || !name) return "error " + std::to_string(result);
  return name;
}

// Where GPUs of one process can reach each other, copies between them do without a host: that takes access to memory.
void connect(Device &fresh) {
  for (int i = 0; i < MOST_DEVICES; i++) {
    Device &other = devices[i];
    if (&other == &fresh || !other.ready) continue;
    int can = 0;
    if (driver.can_access_peer(&can, other.ordinal, fresh.ordinal) == OK && can)
      fresh.access.push_back({{ON_DEVICE, other.ordinal}, READ_WRITE});
    can = 0;
    if (driver.can_access_peer(&can, fresh.ordinal, other.ordinal) != OK || !can) continue;
    std::lock_guard<std::mutex> guard(other.lock);
    Here here(other.driver, other.context);
    Access added = {{ON_DEVICE, fresh.ordinal}, READ_WRITE};
    other.access.push_back(added);
    auto give = [&](Address at, size_t n) { other.call(ACCESS, driver.access, at, other.bytes(n), &added, size_t(1)); };
    for (auto &each : other.pools) {
      for (auto &block : each.second.blocks) give(block.first, block.second->n);
      for (auto &block : each.second.smalls)
        if (!block.second->before) give(block.first, block.second->mapping->n);
      for (auto &range : each.second.ranges)
        if (range.second->stitched) give(range.second->address, range.second->n);
    }
  }
}

int start(Device &device, int ordinal) {
  std::lock_guard<std::mutex> guard(*starting);
  if (device.ready) return OK;
  static bool loaded = false;
  if (!loaded) {
    why_not = load(driver);
    if (!why_not.empty()) return NO_DRIVER;
    pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });
    loaded = true;
  }
  int handle, result, rdma = 0;
  if ((result = driver.init(0)) != OK || (result = driver.device(&handle, ordinal)) != OK ||
      (result = driver.retain(&device.context, handle)) != OK || (result = driver.total(&device.total, handle)) != OK)
    return result;
  driver.attribute(&rdma, RDMA_WITH_VMM, handle);
  device.driver = &driver;
  device.limit = device.total;
  device.ordinal = handle;
  device.config = settings;
  device.properties = {PINNED, 0, {ON_DEVICE, handle}, nullptr, 0, uint8_t(rdma), 0, {}};
  size_t granularity = 0;
  if ((result = driver.granularity(&granularity, &device.properties, 0)) != OK) return result;
  if (!granularity || settings.chunk_bytes % granularity) {
    why_not = "chunk_bytes is no multiple of the driver's " + std::to_string(granularity);
    return NO_DRIVER;
  }
  if (!device.config.stitch_min_bytes) device.config.stitch_min_bytes = device.config.chunk_bytes;
  if (!device.config.stitch_limit_bytes) device.config.stitch_limit_bytes = 8 * device.total;
  device.access = {{{ON_DEVICE, handle}, READ_WRITE}};
  device.most = settings.trace_entries;
  connect(device);
  device.ready = true;
  used = true;
  return OK;
}

Device *valid(int ordinal) { return ordinal >= 0 && ordinal < MOST_DEVICES ? &devices[ordinal] : nullptr; }
Device *running(int ordinal) {
  Device *device = valid(ordinal);
  return device && device->ready && !forked ? device : nullptr;
}

// A block that nobody uses any more is free.
void complete(Device &device, Address address) {
  auto found = device.live.find(address);
  Live held = std::move(found->second);
  device.live.erase(found);
  bool small = held.small;
  device.stats.add(ACTIVE, small, -1);
  device.stats.add(ACTIVE_BYTES, small, -int64_t(held.rounded));
  if (device.config.flags & CHECK) {
    if (small) device.live_small.erase(address);
    auto clear = [](PBlock *p) { std::fill_n(p->mapping->busy.begin() + p->first, p->n, 0); };
    if (held.whole) clear(held.whole);
    if (held.stitched)
      for (PBlock *p : held.stitched->members) clear(p);
  }
  put_back(held);
  device.record(FREE_COMPLETED, address, held.requested, held.pool->stream, held.pool->id);
}

// An event on each stream that used the block. One that cannot be recorded is waited for instead.
void ask(Device &device, Address address, Live &held) {
  for (Stream stream : held.streams) {
    Event event = nullptr;
    int result = OK;
    if (!device.spare.empty()) {
      event = device.spare.back();
      device.spare.pop_back();
    } else {
      result = device.call(EVENT, driver.event_create, &event, unsigned(NO_TIMING));
    }
    if (result == OK) result = device.call(EVENT, driver.event_record, event, stream);
    if (result == OK) {
      device.events[stream].emplace_back(event, address);
      held.n_events++;
      device.n_waiting++;
    } else {
      if (event) device.spare.push_back(event);
      // Else it stays pending for good: better lost than used twice.
      held.n_events += device.call(SYNC, driver.stream_wait, stream) != OK;
    }
  }
  held.streams.clear();
  if (!held.n_events) complete(device, address);
}

// Free what other streams have finished with. `all`: wait until they have.
void poll(Device &device, bool all) {
  if (device.deferred.empty() && !device.n_waiting) return;
  Here here(device.driver, device.context);
  std::vector<Address> later;
  for (Address address : std::exchange(device.deferred, {})) {
    Live &held = device.live.at(address);
    if (device.captured(held))
      later.push_back(address);
    else
      ask(device, address, held);
  }
  device.deferred = std::move(later);
  for (auto at = device.events.begin(); at != device.events.end();) {
    auto &queue = at->second;
    bool skip = !device.routes.empty() && device.capturing(at->first);
    while (!queue.empty() && !skip) {
      auto [event, address] = queue.front();
      int result = all ? device.call(SYNC, driver.event_wait, event) : device.call(EVENT, driver.event_query, event);
      if (result != OK) break;
      queue.pop_front();
      device.spare.push_back(event);
      device.n_waiting--;
      if (--device.live.at(address).n_events == 0) complete(device, address);
    }
    at = queue.empty() ? device.events.erase(at) : std::next(at);
  }
}

void reclaim(Device &device) {
  device.n_synchronized++;
  poll(device, true);
  release(device);
}

Pool &pool_of(Device &device, Stream stream) {
  PoolId id{0, 0};
  for (Route &route : device.routes)
    if (route.filter(stream)) {
      id = route.id;
      break;
    }
  auto found = device.pools.find({id, stream});
  if (found == device.pools.end()) found = device.pools.emplace(std::make_pair(id, stream), Pool{id, stream}).first;
  return found->second;
}

// Is nothing of this block in use by anybody? Asked of marks that the search for blocks does not look at.
bool is_unused(Device &device, Address address, const Live &held) {
  if (!(device.config.flags & CHECK)) return true;
  if (held.small) {
    auto behind = device.live_small.lower_bound(address);
    bool ok = behind == device.live_small.end() || behind->first >= address + held.rounded;
    if (behind != device.live_small.begin()) ok &= std::prev(behind)->first + std::prev(behind)->second <= address;
    device.live_small.emplace(address, held.rounded);
    return ok;
  }
  bool ok = true;
  auto mark = [&](PBlock *p) {
    for (uint32_t i = p->first; i < p->first + p->n; i++) ok &= !std::exchange(p->mapping->busy[i], 1);
  };
  if (held.whole) mark(held.whole);
  if (held.stitched)
    for (PBlock *p : held.stitched->members) mark(p);
  return ok;
}

// Address 0, and why, where there is none.
Address allocate(Device &device, size_t size, Stream stream, int &result) {
  poll(device, false);
  Pool &pool = pool_of(device, stream);
  size_t rounded = (std::max(size, GRAIN) + GRAIN - 1) / GRAIN * GRAIN;
  Live held = {&pool, nullptr, nullptr, nullptr, size, rounded, 0, false, {}};
  auto search = [&]() -> int {
    if (rounded > device.total) return OUT_OF_MEMORY;
    if (rounded >= LARGE) return find(device, pool, uint32_t(device.chunks(rounded)), held.whole, held.stitched);
    return find_small(device, pool, rounded, held.small);
  };
  if (rounded >= LARGE) device.tick++;
  result = search();
  if (result == OUT_OF_MEMORY) {
    device.states[4] += rounded >= LARGE;
    device.n_retries++;
    reclaim(device);
    result = search();
  }
  if (result == OUT_OF_MEMORY) {
    device.n_oom++;
    size_t free = 0, all = 0;
    Here here(device.driver, device.context);
    device.call(INFO, driver.info, &free, &all);
    device.record(OOM, free, rounded, stream, pool.id);
  }
  if (result != OK) return 0;
  Address address = held.small ? held.small->address : held.whole ? held.whole->address : held.stitched->address;
  if (!is_unused(device, address, held) || !device.live.emplace(address, std::move(held)).second) {
    device.n_check_failures++;
    result = LIVE;
    return 0;
  }
  bool small = rounded < LARGE;
  device.stats.add(ALLOCATION, small, 1);
  device.stats.add(ACTIVE, small, 1);
  device.stats.add(ALLOCATED_BYTES, small, rounded);
  device.stats.add(ACTIVE_BYTES, small, rounded);
  device.stats.add(REQUESTED_BYTES, small, size);
  device.record(ALLOC, address, size, stream, pool.id);
  return address;
}

std::string text(double bytes) {
  char out[32];
  const char *units[] = {"bytes", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; unit < 3 && bytes > 1024; unit++) bytes /= 1024;
  snprintf(out, sizeof out, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
  return out;
}

// The words of PyTorch's own message, which programs look for.
std::string out_of_memory(Device &device, int ordinal, size_t size) {
  size_t free = 0, all = 0;
  Here here(device.driver, device.context);
  device.call(INFO, driver.info, &free, &all);
  int64_t reserved = device.stats.rows[RESERVED_BYTES][0].now, held = device.stats.rows[ALLOCATED_BYTES][0].now;
  std::string allowed = device.limit == device.total ? "" : text(device.limit) + " allowed; ";
  return "CUDA out of memory. Tried to allocate " + text(size) + ". GPU " + std::to_string(ordinal) +
         " has a total capacity of " + text(all) + " of which " + text(free) + " is free. " + allowed +
         "Of the allocated memory " + text(held) + " is allocated by PyTorch, and " + text(reserved - held) +
         " is reserved by PyTorch but unallocated. gpubloat's stitching allocator is in use.";
}

void *refuse(int result, std::string message) {
  last_error = std::move(message);
#ifdef GPUBLOAT_TORCH
  c10::SourceLocation here = {__func__, __FILE__, uint32_t(__LINE__)};
  if (result == OUT_OF_MEMORY) throw c10::OutOfMemoryError(here, last_error);
  throw c10::Error(here, last_error);
#endif
  (void)result;
  return nullptr;
}

}  // namespace

// Before the first allocation. 0, or 1 where memory was handed out already, 2 for settings that make no sense.
EXPORT int gpubloat_configure(const Config *config) {
  std::lock_guard<std::mutex> guard(*starting);
  if (used) return 1;
  if (config->size != sizeof(Config) || !config->chunk_bytes || config->chunk_bytes % GRAIN) return 2;
  settings = *config;
  return 0;
}

EXPORT int gpubloat_error(char *out, size_t size) { return snprintf(out, size, "%s", last_error.c_str()); }

EXPORT void *gpubloat_alloc(ssize_t size, int ordinal, Stream stream) {
  last_error.clear();
  if (size <= 0) return nullptr;
  int result = forked ? FORKED : OK;
  std::string message;
  Device *device = valid(ordinal);
  if (!device) return refuse(INVALID_VALUE, "no device " + std::to_string(ordinal));
  if (result == OK && !device->ready) result = start(*device, ordinal);
  if (result == OK) {
    std::lock_guard<std::mutex> guard(device->lock);
    Address address = allocate(*device, size, stream, result);
    if (address) return reinterpret_cast<void *>(address);
    if (result == OUT_OF_MEMORY) message = out_of_memory(*device, ordinal, size);
  }
  if (message.empty()) message = "gpubloat's allocator on GPU " + std::to_string(ordinal) + ": " + named(result);
  return refuse(result, std::move(message));
}

EXPORT void gpubloat_free(void *pointer, size_t, int ordinal, Stream) {
  Device *device = running(ordinal);
  if (!pointer || !device) return;
  std::lock_guard<std::mutex> guard(device->lock);
  Address address = reinterpret_cast<Address>(pointer);
  auto found = device->live.find(address);
  if (found == device->live.end() || found->second.pending) {
    device->n_check_failures++;  // given back twice, or never handed out
    return;
  }
  Live &held = found->second;
  held.pending = true;
  bool small = held.small;
  device->stats.add(ALLOCATION, small, -1);
  device->stats.add(ALLOCATED_BYTES, small, -int64_t(held.rounded));
  device->stats.add(REQUESTED_BYTES, small, -int64_t(held.requested));
  device->record(FREE_REQUESTED, address, held.requested, held.pool->stream, held.pool->id);
  if (held.streams.empty()) {
    complete(*device, address);
    return;
  }
  Here here(device->driver, device->context);
  if (device->captured(held))
    device->deferred.push_back(address);
  else
    ask(*device, address, held);
}

EXPORT void gpubloat_record_stream(void *pointer, Stream stream) {
  for (int i = 0; i < MOST_DEVICES; i++) {
    Device *device = running(i);
    if (!device) continue;
    std::lock_guard<std::mutex> guard(device->lock);
    auto found = device->live.find(reinterpret_cast<Address>(pointer));
    if (found == device->live.end()) continue;
    Live &held = found->second;
    bool known = stream == held.pool->stream || held.pending ||
                 std::find(held.streams.begin(), held.streams.end(), stream) != held.streams.end();
    if (!known) held.streams.push_back(stream);
    return;
  }
}

EXPORT void gpubloat_empty_cache() {
  for (int i = 0; i < MOST_DEVICES; i++) {
    Device *device = running(i);
    if (!device) continue;
    std::lock_guard<std::mutex> guard(device->lock);
    reclaim(*device);
  }
}

EXPORT void gpubloat_memory_fraction(double fraction, int ordinal) {
  Device *device = valid(ordinal);
  if (!device || forked || (!device->ready && start(*device, ordinal) != OK)) return;
  std::lock_guard<std::mutex> guard(device->lock);
  device->limit = fraction < 1 ? size_t(fraction * double(device->total)) : device->total;
}

EXPORT void *gpubloat_base_alloc(void *pointer, size_t *size) {
  Address inside = reinterpret_cast<Address>(pointer);
  for (int i = 0; i < MOST_DEVICES; i++) {
    Device *device = running(i);
    if (!device) continue;
    std::lock_guard<std::mutex> guard(device->lock);
    for (auto &each : device->live)
      if (inside >= each.first && inside - each.first < each.second.rounded) {
        if (size) *size = each.second.rounded;
        return reinterpret_cast<void *>(each.first);
      }
  }
  return pointer;
}

EXPORT void gpubloat_begin_pool(int ordinal, PoolId id, Filter filter) {
  Device *device = valid(ordinal);
  if (!device || forked || (!device->ready && start(*device, ordinal) != OK)) return;
  std::lock_guard<std::mutex> guard(device->lock);
  device->owners[id]++;
  device->routes.push_back({id, std::move(filter)});
}

EXPORT void gpubloat_end_pool(int ordinal, PoolId id) {
  Device *device = running(ordinal);
  if (!device) return;
  std::lock_guard<std::mutex> guard(device->lock);
  auto &routes = device->routes;
  auto found = std::find_if(routes.begin(), routes.end(), [&](const Route &route) { return route.id == id; });
  if (found != routes.end()) routes.erase(found);
}

EXPORT void gpubloat_release_pool(int ordinal, PoolId id) {
  Device *device = running(ordinal);
  if (!device) return;
  std::lock_guard<std::mutex> guard(device->lock);
  auto found = device->owners.find(id);
  if (found != device->owners.end() && --found->second == 0) device->owners.erase(found);
}

/* What Python reads. */

EXPORT int gpubloat_report(int ordinal, Report *out) {
  Device *device = running(ordinal);
  uint32_t size = out->size;
  memset(static_cast<void *>(out), 0, size);
  out->version = VERSION;
  out->size = size;
  if (size != sizeof(Report)) return 2;
  if (!device) return 1;
  std::lock_guard<std::mutex> guard(device->lock);
  memcpy(static_cast<void *>(out->rows), device->stats.rows, sizeof out->rows);
  memcpy(out->states, device->states, sizeof out->states);
  out->n_retries = device->n_retries;
  out->n_oom = device->n_oom;
  out->n_synchronized = device->n_synchronized;
  out->n_stitched = device->n_stitched;
  out->stitched_bytes = device->stitched_bytes;
  out->n_ranges = device->n_ranges;
  out->n_leaks = device->n_leaks;
  out->n_check_failures = device->n_check_failures;
  out->n_waiting = device->n_waiting + int64_t(device->deferred.size());
  out->n_failed = device->call.n_failed;
  out->total_bytes = device->total;
  out->limit_bytes = device->limit;
  out->stitch_limit_bytes = device->config.stitch_limit_bytes;
  for (auto &each : device->pools)
    for (auto &block : each.second.free_small)
      if (block.second->before || block.second->behind) {
        out->n_split++;
        out->split_bytes += int64_t(block.second->size);
      }
  for (int i = 0; i < N_CALLS; i++) {
    out->calls[i] = device->call.n[i];
    out->microseconds[i] = device->call.ns[i] / 1000;
  }
  return 0;
}

// what: 0 peaks, 1 sums.
EXPORT void gpubloat_reset_stats(int ordinal, int what) {
  Device *device = running(ordinal);
  if (!device) return;
  std::lock_guard<std::mutex> guard(device->lock);
  for (auto &row : device->stats.rows)
    for (Stat &stat : row) {
      if (what)
        stat.up = stat.down = 0;
      else
        stat.peak = stat.now;
    }
  if (what) device->n_retries = device->n_oom = device->n_synchronized = 0;
}

EXPORT void gpubloat_record(size_t entries, int clear) {
  std::lock_guard<std::mutex> guard(*starting);
  settings.trace_entries = entries;
  for (int i = 0; i < MOST_DEVICES; i++) {
    Device &device = devices[i];
    std::lock_guard<std::mutex> inner(device.lock);
    if (clear || device.most != entries) {
      device.ring.clear();
      device.next = 0;
    }
    device.most = device.ready ? entries : 0;
  }
}

// Entries of the trace, oldest first. How many there are.
EXPORT size_t gpubloat_trace(int ordinal, Entry *out, size_t room) {
  Device *device = running(ordinal);
  if (!device) return 0;
  std::lock_guard<std::mutex> guard(device->lock);
  size_t n = device->ring.size(), first = n < device->most ? 0 : device->next;
  for (size_t i = 0; i < n && i < room; i++) out[i] = device->ring[(first + i) % n];
  return n;
}

enum RowKind : int64_t { SEGMENT_ROW, BLOCK_ROW, ALIAS_ROW, MEMBER_ROW };
struct DumpRow {  // blocks follow their segment, members their alias; state: 0 free, 1 held, 2 waits for other streams
  int64_t kind, address, size, requested, state, stream, pool0, pool1, is_small;
};

// All that there is, segments by address. How many rows that makes.
EXPORT size_t gpubloat_dump(int ordinal, DumpRow *out, size_t room) {
  Device *device = running(ordinal);
  if (!device) return 0;
  std::lock_guard<std::mutex> guard(device->lock);
  size_t n = 0;
  Pool *pool = nullptr;
  auto put = [&](int64_t kind, Address address, size_t size, size_t requested, int64_t state, bool small) {
    if (n++ < room)
      out[n - 1] = {kind, int64_t(address), int64_t(size), int64_t(requested), state, int64_t(pool->stream),
                    int64_t(pool->id.first), int64_t(pool->id.second), small};
  };
  struct Part {  // of a held PBlock: what the program asked for of it, and the same rounded
    size_t requested, rounded;
    int64_t state;
  };
  std::unordered_map<const PBlock *, Part> parts;
  for (auto &each : device->live) {
    const Live &held = each.second;
    size_t requested = held.requested, rounded = held.rounded;
    auto take = [&](const PBlock *p) {
      size_t size = device->bytes(p->n);
      parts[p] = {std::min(size, requested), std::min(size, rounded), held.pending ? 2 : 1};
      requested -= parts[p].requested;
      rounded -= parts[p].rounded;
    };
    if (held.whole) take(held.whole);
    if (held.stitched)
      for (const PBlock *p : held.stitched->members) take(p);
  }
  for (auto &each : device->pools) {
    pool = &each.second;
    for (auto at = pool->blocks.begin(); at != pool->blocks.end();) {
      size_t header = n, size = 0;
      PBlock *first = at->second;
      put(SEGMENT_ROW, first->address, 0, 0, 0, false);
      for (; at != pool->blocks.end(); ++at) {
        PBlock *p = at->second;
        if (p->mapping != first->mapping || p->address != first->address + size) break;
        size_t whole = device->bytes(p->n);
        size += whole;
        auto found = parts.find(p);
        Part part = found == parts.end() ? Part{0, 0, 0} : found->second;
        if (part.rounded) put(BLOCK_ROW, p->address, part.rounded, part.requested, part.state, false);
        if (part.rounded < whole) put(BLOCK_ROW, p->address + part.rounded, whole - part.rounded, 0, 0, false);
      }
      if (header < room) out[header].size = size;
    }
    for (auto &block : pool->smalls) {
      const Small *s = block.second;
      if (!s->before) put(SEGMENT_ROW, s->address, device->bytes(s->mapping->n), 0, 0, true);
      auto found = s->held ? device->live.find(s->address) : device->live.end();
      bool held = found != device->live.end();
      int64_t state = held ? 1 + found->second.pending : 0;
      put(BLOCK_ROW, s->address, s->size, held ? found->second.requested : 0, state, true);
    }
    for (auto &range : pool->ranges) {
      SBlock *s = range.second;
      auto found = device->live.find(s->address);
      bool held = found != device->live.end() && found->second.stitched == s;
      if (!s->stitched && !held) continue;
      put(ALIAS_ROW, s->address, device->bytes(s->n), held ? found->second.requested : 0,
          held ? 1 + found->second.pending : 0, false);
      for (PBlock *p : s->members) put(MEMBER_ROW, p->address, device->bytes(p->n), 0, 0, false);
    }
  }
  return n;
}

// With the flag LOG: calls to the driver as (kind, bytes, handles), oldest first; read once.
EXPORT size_t gpubloat_log(int ordinal, Logged *out, size_t room) {
  Device *device = running(ordinal);
  if (!device) return 0;
  std::lock_guard<std::mutex> guard(device->lock);
  size_t n = device->log.size();
  for (size_t i = 0; i < n && i < room; i++) out[i] = device->log[i];
  if (room >= n) device->log.clear();
  return n;
}
