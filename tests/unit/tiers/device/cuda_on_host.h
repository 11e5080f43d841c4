// As much of CUDA as the copy kernels use, for a C++ compiler: threads run one after another, which is right for code
// without barriers. Words are read and written with their own type, so that sanitizers see a misaligned one.
#pragma once

#define __device__
#define __global__
#define __launch_bounds__(...)

struct Dimensions {
  unsigned int x;
};

struct alignas(8) uint2 {
  unsigned int x, y;
};

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

inline thread_local Dimensions gridDim, blockDim, blockIdx, threadIdx;

template <typename Word>
Word __ldcs(const Word* address) {
  return *address;
}

template <typename Word>
void __stcs(Word* address, Word value) {
  *address = value;
}

// Runs every thread of a grid.
template <typename Kernel>
void RunGrid(unsigned int grid, unsigned int threads, Kernel kernel) {
  gridDim.x = grid;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
  }
}
