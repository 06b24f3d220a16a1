// A tile of a matrix product, or of a convolution of NHWC images, on the tensor cores of one thread block.
//
// The rows of the left operand are pixels, gathered from the images while they are copied to shared memory (implicit
// GEMM). The copies run several stages ahead of the multiplication. The tile's sums end up in shared memory in float32,
// where the code after the call, which TVM generates, applies element-wise operators and stores the result.
#ifndef TVMFLOW_PRODUCT
#define TVMFLOW_PRODUCT

#include <cuda_fp16.h>

namespace tvmflow {

// A window that slides over images of `height` by `width` pixels. It reads `channels` numbers of each pixel; from one
// pixel to the next it is `pitch` numbers.
struct Window {
  int height, width, channels, pitch;
  int out_height, out_width;
  int kernel_width;
  int stride_y, stride_x, dilation_y, dilation_x, top, left;
};

// Four matrices of 8 rows of 16 bytes each: a thread gets one word of a row of each.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned address) {
#ifdef TVMFLOW_EMULATED
  emulated::load_matrices(to, address, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
#endif
}

// The same for numbers of 16 bits; a thread gets two neighbours in a column of each matrix.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], unsigned address) {
#ifdef TVMFLOW_EMULATED
  emulated::load_matrices(to, address, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
#endif
}

// The operands of one instruction as it takes them, from the words of matrices that `load_matrices` returns.
template <class Number, int WORDS>
struct Operand {
  unsigned words[WORDS];
};

// A float32 number is the sum of two numbers of the tensor cores' format, which has 10 bits for the fraction.
template <int WORDS>
struct Operand<float, WORDS> {
  unsigned words[WORDS], rest[WORDS];
};

template <int WORDS>
__device__ __forceinline__ Operand<half, WORDS> operand_of(const unsigned* words, half) {
  Operand<half, WORDS> operand;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) operand.words[i] = words[i];
  return operand;
}

__device__ __forceinline__ unsigned round_to_tf32(float number) {
  unsigned word;
#ifdef TVMFLOW_EMULATED
  word = emulated::round_to_tf32(number);
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(number));
#endif
  return word;
}

template <int WORDS>
__device__ __forceinline__ Operand<float, WORDS> operand_of(const unsigned* words, float) {
  Operand<float, WORDS> operand;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const float number = __uint_as_float(words[i]);
    operand.words[i] = round_to_tf32(number);
    const float large = __uint_as_float(operand.words[i]);
    // Of an infinity there is no rest.
    operand.rest[i] = fabsf(large) <= 3.402823466e+38f ? round_to_tf32(number - large) : 0u;
  }
  return operand;
}

// sums += a b, for a of 16 rows and b of 8 columns, spread over the 32 threads of a warp; 16 numbers of 16 bits deep.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Operand<half, 4>& a, const Operand<half, 2>& b) {
#ifdef TVMFLOW_EMULATED
  emulated::multiply_add(sums, a.words, b.words[0], b.words[1]);
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]));
#endif
}

__device__ __forceinline__ void multiply_add_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef TVMFLOW_EMULATED
  emulated::multiply_add_tf32(sums, a, b[0], b[1]);
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same for float32, 8 numbers deep. The product of the two rests is less than the rounding of float32.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const Operand<float, 4>& a, const Operand<float, 2>& b) {
  multiply_add_tf32(sums, a.rest, b.words);
  multiply_add_tf32(sums, a.words, b.rest);
  multiply_add_tf32(sums, a.words, b.words);
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
#ifdef TVMFLOW_EMULATED
  return emulated::shared_address(pointer);
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
#endif
}

// Copy 16 bytes to shared memory in the background; zeros where `valid` is false.
__device__ __forceinline__ void copy_ahead(unsigned to, const void* from, bool valid) {
#ifdef TVMFLOW_EMULATED
  emulated::copy(to, from, valid);
#else
  int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
#endif
}

__device__ __forceinline__ void end_stage() {
#ifndef TVMFLOW_EMULATED
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until all but the last `STAGES` stages are copied.
template <int STAGES>
__device__ __forceinline__ void await_stages() {
#ifndef TVMFLOW_EMULATED
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES) : "memory");
#endif
}

__device__ __forceinline__ void await_cluster() {
#ifdef TVMFLOW_EMULATED
  emulated::await_cluster();
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Four numbers of the shared memory of another thread block of the cluster.
__device__ __forceinline__ float4 read_shared_of(int block, unsigned address) {
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#ifdef TVMFLOW_EMULATED
  value = emulated::read_shared_of(block, address);
#elif __CUDA_ARCH__ >= 900
  unsigned place;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(place) : "memory");
#endif
  return value;
}

// The place of a chunk of 16 bytes in a row of `CHUNKS` of them: 8 rows' chunks of one number lie in different banks.
template <int CHUNKS>
__device__ __forceinline__ int place_of(int row, int chunk) {
  return row * CHUNKS + (CHUNKS >= 8 ? (chunk ^ (row & 7)) : CHUNKS == 4 ? (chunk ^ ((row >> 1) & 3))
                                                                         : (chunk ^ ((row >> 2) & (CHUNKS - 1))));
}

// A chunk of 16 bytes of numbers, computed one by one.
template <class Number, class At>
__device__ __forceinline__ uint4 gather(At at) {
  constexpr int NUMBERS = 16 / sizeof(Number);
  __align__(16) Number numbers[NUMBERS];
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) numbers[i] = at(i);
  return *reinterpret_cast<const uint4*>(numbers);
}

// How the right operand lies in memory: packed weights [column][depth], padded with zeros to whole tiles; columns
// [column][depth] or rows [depth][column] as they are.
enum Right { PACKED, COLUMNS, ROWS };

// One tile of the product of `rows` pixels, of windows over `left`, by `columns` columns of `right`.
//
// `TILE_ROWS` by `TILE_COLUMNS` sums, over `TILE_DEPTH` numbers at a time, are shared out to `WARP_ROWS` by
// `WARP_COLUMNS` warps, and the depth of each tile to `WARP_DEPTHS` of them. `CLUSTER` thread blocks share the whole
// depth; each of them ends with TILE_ROWS / CLUSTER rows of the sums, from row `rank * TILE_ROWS / CLUSTER` on. With
// `WIDE_LEFT` and `WIDE_RIGHT` 16 bytes at a time are copied: their places are multiples of 16.
//
// In `shared` row r of the sums begins at r * (TILE_COLUMNS + 8).
template <class Number, int TILE_ROWS, int TILE_COLUMNS, int TILE_DEPTH, int WARP_ROWS, int WARP_COLUMNS, int WARP_DEPTHS, int STAGES,
          int CLUSTER, bool WIDE_LEFT, Right RIGHT, bool WIDE_RIGHT>
__device__ __forceinline__ void product(const Number* __restrict__ left, const Number* __restrict__ right,
                                        float* __restrict__ shared, int first_row, int first_column, int rank, int rows,
                                        int columns, int depth, int stride, int height, int width, int channels,
                                        int pitch, int out_height, int out_width, int kernel_width, int stride_y,
                                        int stride_x, int dilation_y, int dilation_x, int top, int left_margin) {
  const Window window = {height, width, channels, pitch, out_height, out_width, kernel_width, stride_y, stride_x,
                         dilation_y, dilation_x, top, left_margin};
  constexpr int WARPS = WARP_ROWS * WARP_COLUMNS, THREADS = 32 * WARPS * WARP_DEPTHS;
  // The numbers of a chunk. Those of 32 bits cannot be transposed on their way to registers, only to shared memory.
  constexpr int NUMBERS = 16 / sizeof(Number);
  constexpr bool TRANSPOSES = RIGHT == ROWS && sizeof(Number) == 2;
  constexpr int CHUNKS = TILE_DEPTH / NUMBERS;
  constexpr int RIGHT_LINES = TRANSPOSES ? TILE_DEPTH : TILE_COLUMNS;
  constexpr int RIGHT_CHUNKS = TRANSPOSES ? TILE_COLUMNS / NUMBERS : CHUNKS;
  constexpr int LEFT_COPIES = (TILE_ROWS * CHUNKS + THREADS - 1) / THREADS;
  constexpr int RIGHT_COPIES = (RIGHT_LINES * RIGHT_CHUNKS + THREADS - 1) / THREADS;
  constexpr int LEFT_BYTES = TILE_ROWS * CHUNKS * 16, STAGE = LEFT_BYTES + TILE_COLUMNS * CHUNKS * 16;
  constexpr int M = TILE_ROWS / WARP_ROWS / 16, N = TILE_COLUMNS / WARP_COLUMNS / 8;
  constexpr int STEPS = CHUNKS / 2 / WARP_DEPTHS;
  constexpr int LINE = TILE_COLUMNS + 8;
  static_assert(THREADS % CHUNKS == 0 && M >= 1 && N >= 2 && N % 2 == 0 && STEPS >= 1, "tiles fit warps");

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp % WARP_ROWS, warp_column = warp / WARP_ROWS % WARP_COLUMNS, warp_depth = warp / WARPS;
  const unsigned base = shared_address(shared);

  // The pixels whose numbers this thread copies.
  const int left_chunk = thread % CHUNKS;
  const Number* images[LEFT_COPIES];
  int ys[LEFT_COPIES], xs[LEFT_COPIES];
#pragma unroll
  for (int i = 0; i < LEFT_COPIES; ++i) {
    const int row = first_row + thread / CHUNKS + i * (THREADS / CHUNKS);
    const int line = row / window.out_width, image = line / window.out_height;
    ys[i] = row < rows ? (line - image * window.out_height) * window.stride_y - window.top : -(1 << 28);
    xs[i] = (row - line * window.out_width) * window.stride_x - window.left;
    images[i] = left + static_cast<long long>(row < rows ? image : 0) * window.height * window.width * window.pitch;
  }
  const int tiles = (depth + TILE_DEPTH - 1) / TILE_DEPTH;
  const int share = (tiles + CLUSTER - 1) / CLUSTER;
  const int begin = CLUSTER == 1 ? 0 : min(rank * share, tiles), count = min(share, tiles - begin);

  auto load = [&](int tile, int slot) {
    const int first = (begin + tile) * TILE_DEPTH;
    const unsigned to = base + slot * STAGE;
    const int at = first + left_chunk * NUMBERS;
    const int tap = at / window.channels, channel = at - tap * window.channels;
    const int tap_y = tap / window.kernel_width;
    const int dy = tap_y * window.dilation_y, dx = (tap - tap_y * window.kernel_width) * window.dilation_x;
#pragma unroll
    for (int i = 0; i < LEFT_COPIES; ++i) {
      const int row = thread / CHUNKS + i * (THREADS / CHUNKS);
      if (TILE_ROWS * CHUNKS % THREADS != 0 && row >= TILE_ROWS) break;
      const unsigned place = to + place_of<CHUNKS>(row, left_chunk) * 16;
      if (WIDE_LEFT) {
        const int y = ys[i] + dy, x = xs[i] + dx;
        const bool valid = at < depth && unsigned(y) < unsigned(window.height) && unsigned(x) < unsigned(window.width);
        copy_ahead(place, valid ? images[i] + (y * window.width + x) * window.pitch + channel : left, valid);
      } else {
        const uint4 value = gather<Number>([&](int number) {
          const int at_number = at + number, tap = at_number / window.channels;
          const int tap_y = tap / window.kernel_width;
          const int y = ys[i] + tap_y * window.dilation_y;
          const int x = xs[i] + (tap - tap_y * window.kernel_width) * window.dilation_x;
          const bool valid =
              at_number < depth && unsigned(y) < unsigned(window.height) && unsigned(x) < unsigned(window.width);
          const int channel = at_number - tap * window.channels;
          return valid ? images[i][(y * window.width + x) * window.pitch + channel] : Number(0.0f);
        });
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared) + (place - base)) = value;
      }
    }
#pragma unroll
    for (int i = 0; i < RIGHT_COPIES; ++i) {
      const int copy = thread + i * THREADS;
      if (RIGHT_LINES * RIGHT_CHUNKS % THREADS != 0 && copy >= RIGHT_LINES * RIGHT_CHUNKS) break;
      // Neighbouring threads read neighbours in memory.
      const bool is_copied_across = RIGHT == ROWS && !TRANSPOSES;
      const int line = is_copied_across ? copy % RIGHT_LINES : copy / RIGHT_CHUNKS;
      const int chunk = is_copied_across ? copy / RIGHT_LINES : copy % RIGHT_CHUNKS;
      const unsigned place = to + LEFT_BYTES + place_of<RIGHT_CHUNKS>(line, chunk) * 16;
      const int column = first_column + (TRANSPOSES ? chunk * NUMBERS : line);
      const int number = first + (TRANSPOSES ? line : chunk * NUMBERS);
      const Number* from = right + static_cast<long long>(RIGHT == ROWS ? number : column) * stride +
                           (RIGHT == ROWS ? column : number);
      if (RIGHT == PACKED) {
        copy_ahead(place, from, true);
      } else if (WIDE_RIGHT && !is_copied_across) {
        const bool valid = column < columns && number < depth;
        copy_ahead(place, valid ? from : right, valid);
      } else {
        const uint4 value = gather<Number>([&](int i) {
          const bool valid = column + (TRANSPOSES ? i : 0) < columns && number + (TRANSPOSES ? 0 : i) < depth;
          return valid ? from[is_copied_across ? static_cast<long long>(i) * stride : i] : Number(0.0f);
        });
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared) + (place - base)) = value;
      }
    }
  };

  float sums[M][N][4];
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][j][k] = 0.0f;

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < count) load(stage, stage);
    end_stage();
  }
  int slot = 0, next = STAGES - 1;
#pragma unroll 1
  for (int tile = 0; tile < count; ++tile) {
    await_stages<STAGES - 2>();
    __syncthreads();
    if (tile + STAGES - 1 < count) load(tile + STAGES - 1, next);
    end_stage();
    const unsigned left_tile = base + slot * STAGE, right_tile = left_tile + LEFT_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int chunk = (warp_depth * STEPS + step) * 2;
      Operand<Number, 4> a[M];
      Operand<Number, 2> b[N];
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const int row = (warp_row * M + i) * 16 + lane % 16;
        load_matrices(words, left_tile + place_of<CHUNKS>(row, chunk + lane / 16) * 16);
        a[i] = operand_of<4>(words, Number());
      }
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        const int column = (warp_column * N + j) * 8;
        if (TRANSPOSES) {
          const int line = chunk * 8 + lane % 16;
          load_transposed(words, right_tile + place_of<RIGHT_CHUNKS>(line, column / 8 + lane / 16) * 16);
        } else {
          const int line = column + lane / 16 * 8 + lane % 8;
          load_matrices(words, right_tile + place_of<CHUNKS>(line, chunk + lane / 8 % 2) * 16);
        }
        b[j] = operand_of<2>(words, Number());
        b[j + 1] = operand_of<2>(words + 2, Number());
      }
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) multiply_add(sums[i][j], a[i], b[j]);
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
  await_stages<0>();

#pragma unroll
  for (int depth_part = 0; depth_part < WARP_DEPTHS; ++depth_part) {
    __syncthreads();
    if (warp_depth == depth_part) {
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int half_tile = 0; half_tile < 2; ++half_tile) {
            const int row = (warp_row * M + i) * 16 + half_tile * 8 + lane / 4;
            const int column = (warp_column * N + j) * 8 + lane % 4 * 2;
            float2* place = reinterpret_cast<float2*>(shared + row * LINE + column);
            float2 value = make_float2(sums[i][j][half_tile * 2], sums[i][j][half_tile * 2 + 1]);
            if (depth_part > 0) value.x += place->x, value.y += place->y;
            *place = value;
          }
    }
  }
  if (CLUSTER == 1) {
    __syncthreads();
  } else {
    await_cluster();
    constexpr int PART = TILE_ROWS / CLUSTER, QUADS = TILE_COLUMNS / 4;
    for (int item = thread; item < PART * QUADS; item += THREADS) {
      const int place = (rank * PART + item / QUADS) * LINE + item % QUADS * 4;
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) {
        const float4 part = read_shared_of(block, base + place * 4);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      *reinterpret_cast<float4*>(shared + place) = total;
    }
    // The memory of a thread block must exist while the others read it.
    await_cluster();
  }
}

}  // namespace tvmflow
#endif
