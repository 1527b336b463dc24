/* The functions of the CUDA driver that virtual memory needs, found at run time: no CUDA header, no link to libcuda. */
#pragma once
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace stitching {

using Address = uint64_t;  // CUdeviceptr
using Handle = uint64_t;   // CUmemGenericAllocationHandle
using Stream = void *;
using Event = void *;
using Context = void *;

// Results that mean something here; every other one is an error that is passed on.
enum : int { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NO_DRIVER = -1, FORKED = -2, LIVE = -3 };
enum : int { ON_DEVICE = 1, PINNED = 1, READ_WRITE = 3, RELAXED = 2, NO_TIMING = 2, RDMA_WITH_VMM = 110 };

struct Location {
  int type, id;
};
struct Properties {  // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void *windows;
  uint8_t compression, rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags;
};

struct Driver {
  int (*init)(unsigned);
  int (*device)(int *, int);
  int (*attribute)(int *, int, int);
  int (*total)(size_t *, int);
  int (*can_access_peer)(int *, int, int);
  int (*retain)(Context *, int);
  int (*get_current)(Context *);
  int (*set_current)(Context);
  int (*context_wait)();
  int (*exchange_mode)(int *);
  int (*granularity)(size_t *, const Properties *, int);
  int (*info)(size_t *, size_t *);
  int (*reserve)(Address *, size_t, size_t, Address, unsigned long long);
  int (*unreserve)(Address, size_t);
  int (*create)(Handle *, size_t, const Properties *, unsigned long long);
  int (*release)(Handle);
  int (*map)(Address, size_t, size_t, Handle, unsigned long long);
  int (*unmap)(Address, size_t);
  int (*access)(Address, size_t, const Access *, size_t);
  int (*event_create)(Event *, unsigned);
  int (*event_record)(Event, Stream);
  int (*event_query)(Event);
  int (*event_wait)(Event);
  int (*stream_wait)(Stream);
  int (*is_capturing)(Stream, int *);
  int (*error_name)(int, const char **);
};

// Empty, or why the driver cannot be used.
inline std::string load(Driver &driver) {
  const char *given = getenv("GPUBLOAT_LIBCUDA");
  void *library = dlopen(given && *given ? given : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return "libcuda.so.1 cannot be loaded";
  const struct {
    void *slot;
    const char *name;
  } wanted[] = {
      {&driver.init, "cuInit"},
      {&driver.device, "cuDeviceGet"},
      {&driver.attribute, "cuDeviceGetAttribute"},
      {&driver.total, "cuDeviceTotalMem_v2"},
      {&driver.can_access_peer, "cuDeviceCanAccessPeer"},
      {&driver.retain, "cuDevicePrimaryCtxRetain"},
      {&driver.get_current, "cuCtxGetCurrent"},
      {&driver.set_current, "cuCtxSetCurrent"},
      {&driver.context_wait, "cuCtxSynchronize"},
      {&driver.exchange_mode, "cuThreadExchangeStreamCaptureMode"},
      {&driver.granularity, "cuMemGetAllocationGranularity"},
      {&driver.info, "cuMemGetInfo_v2"},
      {&driver.reserve, "cuMemAddressReserve"},
      {&driver.unreserve, "cuMemAddressFree"},
      {&driver.create, "cuMemCreate"},
      {&driver.release, "cuMemRelease"},
      {&driver.map, "cuMemMap"},
      {&driver.unmap, "cuMemUnmap"},
      {&driver.access, "cuMemSetAccess"},
      {&driver.event_create, "cuEventCreate"},
      {&driver.event_record, "cuEventRecord"},
      {&driver.event_query, "cuEventQuery"},
      {&driver.event_wait, "cuEventSynchronize"},
      {&driver.stream_wait, "cuStreamSynchronize"},
      {&driver.is_capturing, "cuStreamIsCapturing"},
      {&driver.error_name, "cuGetErrorName"},
  };
  for (const auto &each : wanted) {
    void *found = dlsym(library, each.name);
    if (!found) return std::string("libcuda.so.1 has no ") + each.name;
    *static_cast<void **>(each.slot) = found;
  }
  return "";
}

// A device's context is current, and this thread may do what a capture elsewhere would forbid, until the end of it.
struct Here {
  Driver *driver;
  Context before = nullptr, mine;
  int mode = RELAXED;
  Here(Driver *driver, Context context) : driver(driver), mine(context) {
    driver->get_current(&before);
    if (before != mine) driver->set_current(mine);
    driver->exchange_mode(&mode);
  }
  ~Here() {
    driver->exchange_mode(&mode);
    if (before != mine) driver->set_current(before);
  }
  Here(const Here &) = delete;
};

// What is counted and timed, and the kinds of the call log.
enum Call { RESERVE, CREATE, MAP, ACCESS, UNMAP, RELEASE, UNRESERVE, EVENT, SYNC, INFO, N_CALLS };

struct Counted {
  int64_t n[N_CALLS] = {}, ns[N_CALLS] = {}, n_failed = 0;

  template <class Function, class... Arguments>
  int operator()(Call kind, Function function, Arguments... arguments) {
    auto start = std::chrono::steady_clock::now();
    int result = function(arguments...);
    ns[kind] += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    n[kind]++;
    n_failed += result != OK && result != NOT_READY;
    return result;
  }
};

}  // namespace stitching
