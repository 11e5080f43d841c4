// The calls of the CUDA driver that tiers/device_driver.py makes, on host memory, at once. Built with the toolkit's
// cuda.h where there is one, whose declarations then check these signatures, and so the calls.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void* CUstream;
typedef void* CUfunction;
struct Location {
  int type, id;
};
struct CUmemcpyAttributes {
  int srcAccessOrder;
  Location srcLocHint, dstLocHint;
  unsigned int flags;
};
#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CU_MEMCPY_SRC_ACCESS_ORDER_STREAM 1
#define CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE 1
#define cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#endif

// The toolkit's own vector types are in the way of those of the kernels' host.
#define uint2 HostUint2
#define uint4 HostUint4
#include "cuda_on_host.h"

#include "copy_kernels.cuh"

extern "C" {

CUstream last_stream = nullptr;
int next_error = 0;

// Stand for CUfunction handles.
void* HostKernel(int scatter) {
  return scatter ? reinterpret_cast<void*>(&kvstore_scatter) : reinterpret_cast<void*>(&kvstore_gather);
}

static CUresult TakeError() {
  const int error = next_error;
  next_error = 0;
  return static_cast<CUresult>(error);
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int threads_x, unsigned int threads_y, unsigned int threads_z, unsigned int shared,
                        CUstream stream, void** arguments, void** extra) {
  if (next_error) return TakeError();
  if (!grid_x || grid_y != 1 || grid_z != 1 || threads_y != 1 || threads_z != 1 || shared || extra) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  last_stream = stream;
  const auto kernel = reinterpret_cast<decltype(&kvstore_gather)>(function);
  RunGrid(grid_x, threads_x, [&] {
    kernel(*static_cast<const kvstore::Piece**>(arguments[0]), *static_cast<unsigned int*>(arguments[1]),
           *static_cast<const long long**>(arguments[2]), *static_cast<const long long**>(arguments[3]),
           *static_cast<unsigned int*>(arguments[4]), *static_cast<unsigned long long*>(arguments[5]),
           *static_cast<long long*>(arguments[6]));
  });
  return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* targets, CUdeviceptr* sources, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* attribute_firsts, size_t attribute_count,
                            CUstream stream) {
  if (next_error) return TakeError();
  if (attribute_count != 1 || attribute_firsts[0] != 0 || !stream ||
      attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
      attributes->flags != CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  last_stream = stream;
  for (size_t at = 0; at < count; ++at) {
    std::memcpy(reinterpret_cast<void*>(targets[at]), reinterpret_cast<void*>(sources[at]), sizes[at]);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
  if (next_error) return TakeError();
  *base = address & ~static_cast<CUdeviceptr>(4095);
  *size = 4096;
  return CUDA_SUCCESS;
}

}  // extern "C"
