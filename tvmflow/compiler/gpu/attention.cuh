// Attention of one thread block's queries to all keys, softmax(scale q k^T + mask) v, on the tensor cores.
//
// The scores are never stored: each warp keeps the largest score so far, the sum of the exponentials and the weighted sum
// of the values of its queries, and corrects them when a larger score comes (online softmax; Dao et al., 2022).
#ifndef TVMFLOW_ATTENTION
#define TVMFLOW_ATTENTION

namespace tvmflow {

__device__ __forceinline__ unsigned pack_half(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The queries from `first_row` on of one head, `ROW_WARPS` times 16 of them. The keys are shared out to `KEY_WARPS` warps,
// `KEYS` at a time each. `CHANNELS` is `channels`, a multiple of 8, rounded up to a multiple of 16. From one position to
// the next it is `query_pitch`, `key_pitch` and `value_pitch` numbers, multiples of 8. The mask, if `MASKED`, is added to
// the scores; its element for a query and a key lies at query * mask_row + key * mask_column. A query whose scores are
// all negative infinity gets zeros if `ZERO_FOR_NAN`.
//
// In `shared` row r of the result begins at r * (CHANNELS + 8).
template <int ROW_WARPS, int KEY_WARPS, int CHANNELS, int KEYS, bool MASKED, bool ZERO_FOR_NAN>
__device__ __forceinline__ void attention(const half* __restrict__ query, const half* __restrict__ key,
                                          const half* __restrict__ value, const float* __restrict__ mask,
                                          float* __restrict__ shared, int first_row, int queries, int keys,
                                          int channels, int query_pitch, int key_pitch, int value_pitch, int mask_row,
                                          int mask_column, float scale) {
  constexpr int THREADS = 32 * ROW_WARPS * KEY_WARPS, ROWS = 16 * ROW_WARPS, BLOCK = KEYS * KEY_WARPS;
  // A chunk of padding puts neighbouring rows into different banks.
  constexpr int CHUNKS = CHANNELS / 8, PITCH = CHANNELS * 2 + 16, LINE = CHANNELS + 8;
  constexpr int KEY_BYTES = BLOCK * PITCH, STAGE = 2 * KEY_BYTES;
  constexpr int N = KEYS / 8, D = CHANNELS / 8;
  constexpr float LOG2_E = 1.44269504f;
  const float NEGATIVE_INFINITY = __uint_as_float(0xff800000u);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
  const unsigned base = shared_address(shared), stages = base + ROWS * PITCH;

  auto load = [&](unsigned to, const half* from, int first, int count, int lines, int pitch) {
    for (int item = thread; item < lines * CHUNKS; item += THREADS) {
      const int line = item / CHUNKS, chunk = item % CHUNKS;
      const bool valid = first + line < count && chunk * 8 < channels;
      copy_ahead(to + line * PITCH + chunk * 16,
                 valid ? from + static_cast<long long>(first + line) * pitch + chunk * 8 : from, valid);
    }
  };
  const int blocks = (keys + BLOCK - 1) / BLOCK;
  load(base, query, first_row, queries, ROWS, query_pitch);
  load(stages, key, 0, keys, BLOCK, key_pitch);
  load(stages + KEY_BYTES, value, 0, keys, BLOCK, value_pitch);
  end_stage();

  unsigned queries_of_warp[CHANNELS / 16][4];
  float sums[D][4], largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < D; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;

#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) {
      const unsigned next = stages + (block + 1) % 2 * STAGE;
      load(next, key, (block + 1) * BLOCK, keys, BLOCK, key_pitch);
      load(next + KEY_BYTES, value, (block + 1) * BLOCK, keys, BLOCK, value_pitch);
    }
    end_stage();
    await_stages<1>();
    __syncthreads();
    if (block == 0) {
#pragma unroll
      for (int i = 0; i < CHANNELS / 16; ++i)
        load_matrices(queries_of_warp[i],
                      base + (row_warp * 16 + lane % 16) * PITCH + (i * 2 + lane / 16) * 16);
    }
    const unsigned keys_at = stages + block % 2 * STAGE + key_warp * KEYS * PITCH, values_at = keys_at + KEY_BYTES;
    const int first_key = block * BLOCK + key_warp * KEYS;

    float scores[N][4];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) scores[j][k] = 0.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS / 16; ++i) {
      const Operand<half, 4> a = operand_of<4>(queries_of_warp[i], half());
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        unsigned words[4];
        load_matrices(words, keys_at + (j * 8 + lane / 16 * 8 + lane % 8) * PITCH + (i * 2 + lane / 8 % 2) * 16);
        multiply_add(scores[j], a, operand_of<2>(words, half()));
        multiply_add(scores[j + 1], a, operand_of<2>(words + 2, half()));
      }
    }
    float block_largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int column = first_key + j * 8 + lane % 4 * 2 + k % 2;
        const int row = first_row + row_warp * 16 + lane / 4 + k / 2 * 8;
        float score = scores[j][k] * scale;
        if (MASKED && column < keys && row < queries)
          score += mask[static_cast<long long>(row) * mask_row + static_cast<long long>(column) * mask_column];
        score = column < keys ? score : NEGATIVE_INFINITY;
        scores[j][k] = score;
        block_largest[k / 2] = fmaxf(block_largest[k / 2], score);
      }
    float shift[2];
#pragma unroll
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
      float& best = block_largest[half_tile];
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1, 32));
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2, 32));
      best = fmaxf(best, largest[half_tile]);
      shift[half_tile] = best == NEGATIVE_INFINITY ? 0.0f : best;
      const float correction = exp2f((largest[half_tile] - shift[half_tile]) * LOG2_E);
      largest[half_tile] = best;
      total[half_tile] *= correction;
#pragma unroll
      for (int i = 0; i < D; ++i) {
        sums[i][half_tile * 2] *= correction;
        sums[i][half_tile * 2 + 1] *= correction;
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        scores[j][k] = exp2f((scores[j][k] - shift[k / 2]) * LOG2_E);
        total[k / 2] += scores[j][k];
      }
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      Operand<half, 4> a;
      a.words[0] = pack_half(scores[j][0], scores[j][1]);
      a.words[1] = pack_half(scores[j][2], scores[j][3]);
      a.words[2] = pack_half(scores[j + 1][0], scores[j + 1][1]);
      a.words[3] = pack_half(scores[j + 1][2], scores[j + 1][3]);
#pragma unroll
      for (int i = 0; i < D; i += 2) {
        unsigned words[4];
        load_transposed(words, values_at + (j * 8 + lane % 16) * PITCH + (i + lane / 16) * 16);
        multiply_add(sums[i], a, operand_of<2>(words, half()));
        multiply_add(sums[i + 1], a, operand_of<2>(words + 2, half()));
      }
    }
    __syncthreads();
  }
  await_stages<0>();
  __syncthreads();

  // The warps of the same queries agree on the largest score and the sum of the exponentials.
  float* const largest_of = shared + ROWS * LINE;
  float* const total_of = largest_of + KEY_WARPS * ROWS;
#pragma unroll
  for (int half_tile = 0; half_tile < 2; ++half_tile) {
    float& sum = total[half_tile];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1, 32);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2, 32);
    if (lane % 4 == 0) {
      const int row = row_warp * 16 + half_tile * 8 + lane / 4;
      largest_of[key_warp * ROWS + row] = largest[half_tile];
      total_of[key_warp * ROWS + row] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int half_tile = 0; half_tile < 2; ++half_tile) {
    const int row = row_warp * 16 + half_tile * 8 + lane / 4;
    float best = NEGATIVE_INFINITY, sum = 0.0f;
#pragma unroll
    for (int other = 0; other < KEY_WARPS; ++other) best = fmaxf(best, largest_of[other * ROWS + row]);
    const float shift = best == NEGATIVE_INFINITY ? 0.0f : best;
#pragma unroll
    for (int other = 0; other < KEY_WARPS; ++other)
      sum += total_of[other * ROWS + row] * exp2f((largest_of[other * ROWS + row] - shift) * LOG2_E);
    float factor = exp2f((largest[half_tile] - shift) * LOG2_E) / sum;
    if (ZERO_FOR_NAN && sum == 0.0f) factor = 0.0f;
#pragma unroll
    for (int i = 0; i < D; ++i) {
      sums[i][half_tile * 2] *= factor;
      sums[i][half_tile * 2 + 1] *= factor;
    }
  }
#pragma unroll
  for (int part = 0; part < KEY_WARPS; ++part) {
    if (part > 0) __syncthreads();
    if (key_warp == part) {
#pragma unroll
      for (int i = 0; i < D; ++i)
#pragma unroll
        for (int half_tile = 0; half_tile < 2; ++half_tile) {
          const int row = row_warp * 16 + half_tile * 8 + lane / 4;
          float2* place = reinterpret_cast<float2*>(shared + row * LINE + i * 8 + lane % 4 * 2);
          float2 pair = make_float2(sums[i][half_tile * 2], sums[i][half_tile * 2 + 1]);
          if (part > 0) pair.x += place->x, pair.y += place->y;
          *place = pair;
        }
    }
  }
  __syncthreads();
}

}  // namespace tvmflow
#endif
