// Runs CUDA kernels, as TVM generates them, on a CPU: each thread of a cluster of thread blocks is a fiber.
//
// A fiber runs until a barrier, or until an instruction of a whole warp, and then the next one runs. Memory in the
// background (cp.async) is copied at once, so what this cannot show are missing waits for it, and races.
#pragma once
#define TVMFLOW_EMULATED 1
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

typedef _Float16 half;
typedef half __half;
struct half2 { half x, y; };
typedef half2 __half2;
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct float3 { float x, y, z; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct longlong2 { long long x, y; };
struct longlong4 { long long x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
struct ulonglong4 { unsigned long long x, y, z, w; };
struct dim3 { int x = 1, y = 1, z = 1; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline longlong4 make_longlong4(long long x, long long y, long long z, long long w) { return {x, y, z, w}; }
inline float __half2float(half x) { return float(x); }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
inline half hexp(half x) { return half(std::exp(float(x))); }
inline half hsqrt(half x) { return half(std::sqrt(float(x))); }
inline half htanh(half x) { return half(std::tanh(float(x))); }
using std::max;
using std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __uint_as_float(unsigned word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }

namespace emulated {

struct Warp {
  int arrived = 0, alive = 0;
  long generation = 0;
  uint32_t words[32][8];
  const void* pointers[32];
};

struct Block {
  dim3 index;
  int rank = 0, arrived = 0, alive = 0;
  long generation = 0;
  std::vector<char> shared;
  std::vector<Warp> warps;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Block* block = nullptr;
  dim3 thread;
  int linear = 0;
  bool done = false;
};

struct Cluster {
  int arrived = 0, alive = 0;
  long generation = 0;
  std::vector<Block> blocks;
};

inline Cluster cluster;
inline Fiber* fiber = nullptr;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline dim3 block_size, grid_size;

inline void yield() { swapcontext(&fiber->context, &scheduler); }

template <class Group>
void await(Group& group) {
  const long generation = group.generation;
  if (++group.arrived >= group.alive) {
    group.arrived = 0;
    ++group.generation;
    return;
  }
  while (group.generation == generation) yield();
}

inline Warp& warp() { return fiber->block->warps[fiber->linear / 32]; }
inline int lane() { return fiber->linear % 32; }
inline void await_warp() { await(warp()); }
inline void await_block() { await(*fiber->block); }
inline void await_cluster() { await(cluster); }

inline char* shared() { return fiber->block->shared.data(); }
inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const char*>(pointer) - shared());
}
inline char* at(unsigned address, unsigned size) {
  if (address + size > fiber->block->shared.size() || address % size != 0) {
    std::fprintf(stderr, "a thread uses %u bytes at %u of %zu bytes of shared memory\n", size, address,
                 fiber->block->shared.size());
    std::abort();
  }
  return shared() + address;
}
inline void copy(unsigned to, const void* from, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    std::fprintf(stderr, "a thread copies from %p, which is not a multiple of 16\n", from);
    std::abort();
  }
  if (valid) std::memcpy(at(to, 16), from, 16);
  else std::memset(at(to, 16), 0, 16);
}
inline float4 read_shared_of(int block, unsigned address) {
  at(address, 16);
  float4 value;
  std::memcpy(&value, cluster.blocks[block].shared.data() + address, 16);
  return value;
}

inline void load_matrices(uint32_t (&to)[4], unsigned address, bool transposed) {
  Warp& mine = warp();
  mine.pointers[lane()] = at(address, 16);
  await_warp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int outer = lane() / 4, inner = lane() % 4 * 2 + i;
      const int row = transposed ? inner : outer, column = transposed ? outer : inner;
      pair[i] = static_cast<const uint16_t*>(mine.pointers[matrix * 8 + row])[column];
    }
    to[matrix] = pair[0] | uint32_t(pair[1]) << 16;
  }
  await_warp();
}

inline float number(uint32_t word, int place) {
  const uint16_t bits = place == 0 ? word & 0xffff : word >> 16;
  half value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}

inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Warp& mine = warp();
  for (int i = 0; i < 4; ++i) mine.words[lane()][i] = a[i];
  mine.words[lane()][4] = b0;
  mine.words[lane()][5] = b1;
  await_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    double total = sums[i];
    for (int k = 0; k < 16; ++k) {
      const float left = number(mine.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
      const float right = number(mine.words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
      total += double(left) * right;
    }
    sums[i] = float(total);
  }
  await_warp();
}

inline uint32_t round_to_tf32(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  // To the nearest, halves away from zero; infinities and what is not a number stay.
  return (word & 0x7f800000) == 0x7f800000 ? word : (word + 0x1000) & 0xffffe000;
}

inline void multiply_add_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Warp& mine = warp();
  for (int i = 0; i < 4; ++i) mine.words[lane()][i] = a[i];
  mine.words[lane()][4] = b0;
  mine.words[lane()][5] = b1;
  await_warp();
  auto number = [](uint32_t word) {
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    double total = sums[i];
    for (int k = 0; k < 8; ++k)
      total += double(number(mine.words[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2])) *
               number(mine.words[column * 4 + k % 4][4 + k / 4]);
    sums[i] = float(total);
  }
  await_warp();
}

template <class T>
T shuffle(T value, int from) {
  Warp& mine = warp();
  static_assert(sizeof(T) <= 8, "");
  std::memcpy(mine.words[lane()], &value, sizeof(T));
  await_warp();
  T result;
  std::memcpy(&result, mine.words[from & 31], sizeof(T));
  await_warp();
  return result;
}

inline void start(unsigned low, unsigned high) {
  Fiber* self = reinterpret_cast<Fiber*>(uintptr_t(low) | uintptr_t(high) << 32);
  body();
  self->done = true;
  // Those that wait no longer wait for this thread.
  Block& block = *self->block;
  Warp& mine = block.warps[self->linear / 32];
  auto leave = [](auto& group) {
    if (--group.alive > 0 && group.arrived >= group.alive) group.arrived = 0, ++group.generation;
  };
  leave(mine), leave(block), leave(cluster);
  while (true) yield();
}

// Run a kernel: `kernel` is called once in each thread.
inline void launch(dim3 grid, dim3 blocks, dim3 clusters, size_t shared_bytes, std::function<void()> kernel) {
  body = std::move(kernel);
  block_size = blocks, grid_size = grid;
  const int threads = blocks.x * blocks.y * blocks.z, in_cluster = clusters.x * clusters.y * clusters.z;
  std::vector<Fiber> fibers(size_t(threads) * in_cluster);
  for (Fiber& item : fibers) item.stack.resize(64 << 10);
  for (int z = 0; z < grid.z; z += clusters.z)
    for (int y = 0; y < grid.y; y += clusters.y)
      for (int x = 0; x < grid.x; x += clusters.x) {
        cluster = Cluster();
        cluster.alive = threads * in_cluster;
        cluster.blocks.resize(in_cluster);
        for (int rank = 0; rank < in_cluster; ++rank) {
          Block& block = cluster.blocks[rank];
          block.rank = rank;
          block.index = {x + rank % clusters.x, y + rank / clusters.x % clusters.y,
                         z + rank / clusters.x / clusters.y};
          block.alive = threads;
          // What a kernel reads before it writes it is not a number.
          block.shared.assign((shared_bytes + 127) / 64 * 64, char(0xff));
          block.warps.resize((threads + 31) / 32);
          for (int i = 0; i < threads; ++i) ++block.warps[i / 32].alive;
        }
        for (size_t i = 0; i < fibers.size(); ++i) {
          Fiber& item = fibers[i];
          item.done = false;
          item.block = &cluster.blocks[i / threads];
          item.linear = i % threads;
          item.thread = {item.linear % blocks.x, item.linear / blocks.x % blocks.y, item.linear / blocks.x / blocks.y};
          getcontext(&item.context);
          item.context.uc_stack.ss_sp = item.stack.data();
          item.context.uc_stack.ss_size = item.stack.size();
          const uintptr_t self = reinterpret_cast<uintptr_t>(&item);
          makecontext(&item.context, reinterpret_cast<void (*)()>(start), 2, unsigned(self), unsigned(self >> 32));
        }
        for (bool alive = true; alive;) {
          alive = false;
          for (Fiber& item : fibers)
            if (!item.done) {
              alive = true;
              fiber = &item;
              swapcontext(&scheduler, &item.context);
            }
        }
      }
}

}  // namespace emulated

#define threadIdx (emulated::fiber->thread)
#define blockIdx (emulated::fiber->block->index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)
// A template takes no volatile operand beside another one.
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline void __syncthreads() { emulated::await_block(); }
inline void __syncwarp(unsigned = 0) { emulated::await_warp(); }
inline unsigned __activemask() { return 0xffffffffu; }
template <class T> T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  const int lane = emulated::lane();
  return emulated::shuffle(value, lane % width + by < width ? lane + by : lane);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int by, int = 32) {
  return emulated::shuffle(value, emulated::lane() ^ by);
}
template <class T> T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const int lane = emulated::lane();
  return emulated::shuffle(value, lane / width * width + from % width);
}
template <class T> T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  const int lane = emulated::lane();
  return emulated::shuffle(value, lane % width >= by ? lane - by : lane);
}
