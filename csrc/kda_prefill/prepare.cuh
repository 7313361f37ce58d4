// SPDX-License-Identifier: Apache-2.0
// First kernel: everything about a chunk that does not depend on the state that enters it.
//
// One block per chunk of up to 64 tokens and head. With unit keys k_t, decay products taken inside the chunk
// and L the strictly lower matrix of beta_t <k_t, k_s> decayed from s to t, the chunk maps its entering state
// S (value x key) as
//     U = (I + L)^-1 diag(beta) (V - K~ S^T),   O = Q~ S^T + A U,   S' = S diag(decay) + U^T K^
// (the WY form of the delta rule, "Parallelizing Linear Transformers with the Delta Rule over Sequence
// Length", with a decay per key channel as in Kimi Delta Attention). Written out here: -M K~ and M V with
// M = (I + L)^-1 diag(beta), Q~, K^, A and the decay.
//
// M in blocks of 16 tokens, with G the products without beta:
//     M_ii = (I + L_ii)^-1 diag(beta_i) by substitution,   M_ij = -M_ii sum_{j <= k < i} G_ik M_kj.
//
// Decays never overflow: between gate blocks only products that shrink are formed, and inside a block of 16
// tokens the largest growth is exp(80).
#pragma once

#include "common.cuh"

namespace kda {

constexpr int kPitch = kHeadDim + 8;   // bf16; rows shift by one 16-byte bank group
constexpr int kTilePitch = kBlock + 8;
constexpr int kDiagonalPitch = kBlock + 4;
constexpr int kPrepareThreads = 256;
constexpr int kPairs = kBlocks * (kBlocks - 1) / 2;   // of gate blocks, an earlier and a later one
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
constexpr int kPrepareBlocks = 3;   // on one multiprocessor
#else
constexpr int kPrepareBlocks = 1;   // SM12x has 100 KB of shared memory a multiprocessor
#endif

using Tile = __nv_bfloat16[kBlock][kTilePitch];

// First -L_ii of a gate block, transposed, then M_ii as a sum of two bf16.
union Diagonal {
  float lower[kBlock][kDiagonalPitch];
  struct {
    Tile high, low;
  } inverse;
};

struct PrepareShared {
  __nv_bfloat16 q[kChunk][kPitch];   // queries, then decayed queries, then values
  __nv_bfloat16 k[kChunk][kPitch];   // keys, then keys decayed from their block's start, negative
  union {
    __nv_bfloat16 g[kChunk][kPitch];   // gate logits, then keys decayed to their block's end
    Tile mixed[kPairs];                // M below the diagonal, transposed
  };
  Tile lower[kPairs];   // -G below the diagonal
  Diagonal diagonal[kBlocks];
  float decay[kBlocks][kHeadDim];   // over one gate block
  // Factors of keys by pairs of channels: undo the decay of block 0 to 3, and decay over block 1, over block 2
  // and over both.
  uint2 factor[kBlocks + 3][kHeadDim / 2];
  uint2 decay_before[kBlocks][kHeadDim];   // from the chunk's start to the block's start
  float2 norm[kChunk];   // factors of queries and keys
  float beta[kChunk];
  int2 place;   // first token and length of the chunk
};
static_assert((sizeof(PrepareShared) + 1024) * kPrepareBlocks <= 227 * 1024, "the blocks must fit");
static_assert(sizeof(PrepareShared) <= 99 * 1024, "a block must fit SM12x");

struct Chunk {
  int token;    // first token in the batch
  int length;   // 0: there is no such chunk
};

// Row and tokens of chunk `index` of the packed batch, found by one warp.
__device__ __forceinline__ Chunk locate(const Params& p, int index) {
  if (p.rows == 1) {
    const int length = row_length(p, 0);
    const Cuts cuts(p.checkpoint_offsets, 0, length);
    const int begin = cuts.chunk_begin(index);
    return Chunk{p.cu_seqlens[0] + begin, begin < length ? cuts.chunk_end(begin) - begin : 0};
  }
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first = 0; first < p.rows; first += 32) {
    const int row = first + lane;
    const int token = p.cu_seqlens[min(row, p.rows)], next_token = p.cu_seqlens[min(row + 1, p.rows)];
    const Cuts cuts(row < p.rows ? p.checkpoint_offsets : nullptr, row, next_token - token);
    const int count = cuts.chunks();
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const int mine = index - base - sum + count;
    const unsigned found = __ballot_sync(0xffffffffu, mine >= 0 && mine < count);
    if (found) {
      const int owner = __ffs(found) - 1;
      const Cuts theirs = cuts.of_lane(owner);
      const int begin = theirs.chunk_begin(__shfl_sync(0xffffffffu, mine, owner));
      return Chunk{__shfl_sync(0xffffffffu, token, owner) + begin, theirs.chunk_end(begin) - begin};
    }
    base += __shfl_sync(0xffffffffu, sum, 31);
  }
  return Chunk{0, 0};
}

// A tile of a chunk; rows past the chunk's end are cleared.
template <bool kWhole>
__device__ __forceinline__ void load_tile(__nv_bfloat16 (*tile)[kPitch], const __nv_bfloat16* source, int64_t stride,
                                          int length) {
  const int column = threadIdx.x % 16 * 8;
  int row = threadIdx.x / 16;
  source += row * stride + column;
  stride *= kPrepareThreads / 16;
#pragma unroll
  for (int i = 0; i < kChunk * 16 / kPrepareThreads; ++i) {
    if (kWhole || row < length)
      copy_async(&tile[row][column], source);
    else
      *reinterpret_cast<uint4*>(&tile[row][column]) = make_uint4(0, 0, 0, 0);
    row += kPrepareThreads / 16;
    source += stride;
  }
}

// Load queries, keys and gates; write strengths go through registers.
template <bool kWhole>
__device__ __forceinline__ void load_inputs(const Params& p, PrepareShared& s, int64_t token, int length, int head) {
  load_tile<kWhole>(s.q, p.q + token * p.q_stride + head * kHeadDim, p.q_stride, length);
  load_tile<kWhole>(s.k, p.k + token * p.k_stride + head * kHeadDim, p.k_stride, length);
  load_tile<kWhole>(s.g, p.g + token * p.g_stride + head * kHeadDim, p.g_stride, length);
  const int row = threadIdx.x;
  if (row < kChunk)
    s.beta[row] = kWhole || row < length
                      ? sigmoid_base2(kLog2e * __bfloat162float(p.beta[(token + row) * p.beta_stride + head]))
                      : 0.0f;
}

// l2 norms of one gate block's queries or keys: the diagonal of their products with themselves.
__device__ __forceinline__ void measure_rows(const Params& p, PrepareShared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, block = warp % 4;
  const bool keys = warp < 4;
  const __nv_bfloat16* const own = &(keys ? s.k : s.q)[block * kBlock + lane % 16][lane / 16 * 8];
  float product[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t a[4];
    ldmatrix(a, own + step * 16);
    mma(product[0], a, a[0], a[2]);
    mma(product[1], a, a[1], a[3]);
  }
  const int row = lane / 4;
  if (row / 2 != lane % 4) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row % 2 ? product[half][2 * half + 1] : product[half][2 * half];
    float2& norm = s.norm[block * kBlock + half * 8 + row];
    if (keys)
      norm.y = rsqrtf(sum + kNormEps);
    else
      norm.x = p.scale * rsqrtf(sum + kNormEps);
  }
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

// log2 of two channels' decay since the start of a gate block, for its 16 tokens.
struct Logs {
  float x[kBlock], y[kBlock];
};

// Gates: one thread runs two key channels down the 16 tokens of one gate block.
__device__ __forceinline__ void apply_gates(const Params& p, PrepareShared& s, Logs& log, float rate, float2 bias,
                                            int length) {
  const int block = threadIdx.x / 64, channel = threadIdx.x % 64 * 2;
  const float bound = p.lower_bound * kLog2e;
  const float2 offset = make_float2(-rate * bias.x, -rate * bias.y);
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const int row = block * kBlock + t;
    const uint32_t g = *reinterpret_cast<const uint32_t*>(&s.g[row][channel]);
    const float limit = row < length ? bound : 0.0f;
    const float x = reciprocal(1.0f + exp2_fast(fmaf(-rate, low_half(g), offset.x)));
    const float y = reciprocal(1.0f + exp2_fast(fmaf(-rate, high_half(g), offset.y)));
    log.x[t] = fmaf(limit, x, t ? log.x[t - 1] : 0.0f);
    log.y[t] = fmaf(limit, y, t ? log.y[t - 1] : 0.0f);
  }
  *reinterpret_cast<float2*>(&s.decay[block][channel]) =
      make_float2(exp2_fast(log.x[kBlock - 1]), exp2_fast(log.y[kBlock - 1]));
}

// The factors that later steps need, from the decays over all four blocks. Returns the decay from the chunk's
// start to this thread's block and from there to the chunk's end.
__device__ __forceinline__ float4 combine_decays(PrepareShared& s, unsigned char* record, const Logs& log) {
  const int block = threadIdx.x / 64, pair = threadIdx.x % 64;
  float2 before = make_float2(1, 1), later = before, decay[kBlocks];
#pragma unroll
  for (int other = 0; other < kBlocks; ++other) {
    decay[other] = *reinterpret_cast<const float2*>(&s.decay[other][pair * 2]);
    if (other < block) before = times(before, decay[other]);
    if (other > block) later = times(later, decay[other]);
  }
  s.factor[block][pair] = split_factors(exp2_fast(-log.x[kBlock - 1]), exp2_fast(-log.y[kBlock - 1]));
  const uint2 x = split_factors(before.x, before.x), y = split_factors(before.y, before.y);
  *reinterpret_cast<uint4*>(&s.decay_before[block][pair * 2]) = make_uint4(x.x, x.y, y.x, y.y);
  if (block == 0) {
    *reinterpret_cast<float2*>(record + kDecayOffset + pair * 8) = times(decay[0], later);
  } else {
    const float2 far = block == 1 ? decay[1] : block == 2 ? decay[2] : times(decay[1], decay[2]);
    s.factor[kBlocks - 1 + block][pair] = split_factors(far.x, far.y);
  }
  return make_float4(before.x, before.y, later.x, later.y);
}

// Norms and decays of queries and keys; Q~ and K^ go to the record.
__device__ __forceinline__ void decay_rows(PrepareShared& s, unsigned char* record, const Logs& log,
                                           const float4& around) {
  const int block = threadIdx.x / 64, channel = threadIdx.x % 64 * 2;
  const float total_x = log.x[kBlock - 1], total_y = log.y[kBlock - 1];
  // Operand order of Q~ in the recurrence: [gate block][16 channels][lane][(token, token + 8), channel + 8 k].
  uint2* const queries = reinterpret_cast<uint2*>(record + kQOffset) +
                         ((block * 8 + channel / 16) * 32 + channel % 8 / 2) * 2 + channel / 8 % 2;
  // Operand order of K^: [8 channels][gate block][lane][2 registers].
  uint4* const keys = reinterpret_cast<uint4*>(
      record + kKOffset + ((channel / 8 * kBlocks + block) * 32 + channel % 8 * 4) * 8);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    uint32_t x[4], y[4];   // K^ of tokens 0-3 and 8-11 of the group, by pairs of tokens
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Loads come before stores: the compiler cannot tell that they never overlap.
      uint32_t k[4], q[4];
      float2 norm[4];
      float key_x[4], key_y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = block * kBlock + group * 4 + i * 2 + j % 2 + j / 2 * 8;
        k[j] = *reinterpret_cast<const uint32_t*>(&s.k[row][channel]);
        q[j] = *reinterpret_cast<const uint32_t*>(&s.q[row][channel]);
        norm[j] = s.norm[row];
      }
      uint32_t start[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = group * 4 + i * 2 + j % 2 + j / 2 * 8, row = block * kBlock + t;
        const float since_x = exp2_fast(log.x[t]), since_y = exp2_fast(log.y[t]);
        const float k_x = low_half(k[j]) * norm[j].y, k_y = high_half(k[j]) * norm[j].y;
        const float end_x = k_x * exp2_fast(total_x - log.x[t]), end_y = k_y * exp2_fast(total_y - log.y[t]);
        const float q_x = low_half(q[j]) * norm[j].x * since_x, q_y = high_half(q[j]) * norm[j].x * since_y;
        *reinterpret_cast<uint32_t*>(&s.k[row][channel]) = pack(-k_x * since_x, -k_y * since_y);
        *reinterpret_cast<uint32_t*>(&s.q[row][channel]) = pack(q_x, q_y);
        *reinterpret_cast<uint32_t*>(&s.g[row][channel]) = pack(end_x, end_y);
        start[j] = pack(q_x * around.x, q_y * around.y);
        key_x[j] = end_x * around.z;
        key_y[j] = end_y * around.w;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        queries[(group * 4 + i * 2 + j) * 8] = make_uint2(start[j], start[j + 2]);
        x[i * 2 + j] = pack(key_x[2 * j], key_x[2 * j + 1]);
        y[i * 2 + j] = pack(key_y[2 * j], key_y[2 * j + 1]);
      }
    }
    keys[group] = make_uint4(x[0], x[1], x[2], x[3]);
    keys[2 + group] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

// M_ii by forward substitution in fp32, one lane a column; each value found is at once taken from all later ones.
__device__ __forceinline__ void invert_diagonal(PrepareShared& s, int block) {
  const int lane = threadIdx.x & 31, column = lane & 15;
  const float beta = s.beta[block * kBlock + column];
  float x[kBlock];
#pragma unroll
  for (int t = 0; t < kBlock; ++t) x[t] = t == column ? beta : 0.0f;
#pragma unroll
  for (int t = 0; t < kBlock - 1; ++t)
#pragma unroll
    for (int quad = (t + 1) / 4; quad < kBlock / 4; ++quad) {
      const float4 l = *reinterpret_cast<const float4*>(&s.diagonal[block].lower[t][4 * quad]);
      const float rows[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (4 * quad + i > t) x[4 * quad + i] = fmaf(rows[i], x[t], x[4 * quad + i]);
    }
  __syncwarp();   // M_ii takes the place of L_ii
  Tile& target = lane < kBlock ? s.diagonal[block].inverse.high : s.diagonal[block].inverse.low;
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const __nv_bfloat16 high = __float2bfloat16(x[t]);
    target[t][column] = lane < kBlock ? high : __float2bfloat16(x[t] - __bfloat162float(high));
  }
}

// Products of the queries and the negative keys of gate block `row` with the keys of block `column`. These are
// decayed to their block's end, so all but neighbours need a factor per channel.
template <bool kScaled>
__device__ __forceinline__ void multiply_blocks(PrepareShared& s, unsigned char* record, int row, int column,
                                                const uint2* factor) {
  const int lane = threadIdx.x & 31, t = lane / 4, quad = lane % 4;
  const __nv_bfloat16* const later_keys = &s.k[row * kBlock + lane % 16][lane / 16 * 8];
  const __nv_bfloat16* const queries = &s.q[row * kBlock + lane % 16][lane / 16 * 8];
  const __nv_bfloat16* const keys = &s.g[column * kBlock + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
  factor += quad;
  float key_product[2][4] = {}, query_product[2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t a[4], b[4], c[4];
    ldmatrix(b, keys + step * 16);
    if (kScaled) {
      const uint2 low = factor[step * 8], high = factor[step * 8 + 4];
      b[0] = scale_pair(b[0], low);
      b[1] = scale_pair(b[1], high);
      b[2] = scale_pair(b[2], low);
      b[3] = scale_pair(b[3], high);
    }
    ldmatrix(a, later_keys + step * 16);
    ldmatrix(c, queries + step * 16);
    mma(key_product[0], a, b[0], b[1]);
    mma(key_product[1], a, b[2], b[3]);
    mma(query_product[0], c, b[0], b[1]);
    mma(query_product[1], c, b[2], b[3]);
  }
  if (row == column) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int later = t + i / 2 * 8, earlier = tile * 8 + 2 * quad + i % 2;
        if (earlier > later) query_product[tile][i] = 0;
        s.diagonal[row].lower[earlier][later] = s.beta[row * kBlock + later] * key_product[tile][i];
      }
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<uint32_t*>(
            &s.lower[row * (row - 1) / 2 + column][t + half * 8][tile * 8 + 2 * quad]) =
            pack(key_product[tile][2 * half], key_product[tile][2 * half + 1]);
  }
  // Operand order of A in the recurrence: [pair of gate blocks][lane][token, token + 8][8 keys].
  const float(&x)[2][4] = query_product;
  reinterpret_cast<uint4*>(record + kAOffset)[(row * (row + 1) / 2 + column) * 32 + lane] =
      make_uint4(pack(x[0][0], x[0][1]), pack(x[1][0], x[1][1]), pack(x[0][2], x[0][3]), pack(x[1][2], x[1][3]));
}

// All ten products: one scaled one for each of seven warps, the three of neighbours for the eighth.
__device__ __forceinline__ void multiply_all(PrepareShared& s, unsigned char* record, int warp) {
  if (warp < 7) {
    const int row = warp < 4 ? warp : warp == 4 ? 2 : 3, column = warp < 4 ? warp : warp == 5;
    multiply_blocks<true>(s, record, row, column, s.factor[warp]);
    if (warp < 4) {
      __syncwarp();
      invert_diagonal(s, warp);
    }
  } else {
#pragma unroll 1
    for (int row = 1; row < kBlocks; ++row) multiply_blocks<false>(s, record, row, row - 1, nullptr);
  }
}

// Operands of a tile [n][k] for 16 columns n; `tile` may be stored as [k][n].
__device__ __forceinline__ void load_columns(uint32_t (&r)[4], const Tile& tile) {
  const int lane = threadIdx.x & 31;
  ldmatrix(r, &tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
}

__device__ __forceinline__ void load_columns_transposed(uint32_t (&r)[4], const Tile& tile) {
  const int lane = threadIdx.x & 31;
  ldmatrix_transposed(r, &tile[lane % 16][lane / 16 * 8]);
}

// Operand of 16 rows of a tile.
__device__ __forceinline__ void load_rows(uint32_t (&r)[4], const Tile& tile) {
  const int lane = threadIdx.x & 31;
  ldmatrix(r, &tile[lane % 16][lane / 16 * 8]);
}

__device__ __forceinline__ void load_rows_transposed(uint32_t (&r)[4], const Tile& tile) {
  const int lane = threadIdx.x & 31;
  ldmatrix_transposed(r, &tile[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
}

// Column block `column` of M below the diagonal, transposed.
__device__ __forceinline__ void invert_column(PrepareShared& s, int column) {
  const int lane = threadIdx.x & 31;
  uint32_t x[kBlocks][4];
#pragma unroll
  for (int row = 0; row < kBlocks; ++row) {
    if (row < column) continue;
    if (row == column) {
      load_rows_transposed(x[row], s.diagonal[row].inverse.high);
      continue;
    }
    float y[2][4] = {};
#pragma unroll
    for (int other = 0; other < row; ++other) {
      if (other < column) continue;
      uint32_t l[4];
      load_columns(l, s.lower[row * (row - 1) / 2 + other]);
      mma(y[0], x[other], l[0], l[1]);
      mma(y[1], x[other], l[2], l[3]);
    }
    uint32_t inverse[4], rest[4], high[4], low[4];
    load_columns(inverse, s.diagonal[row].inverse.high);
    load_columns(rest, s.diagonal[row].inverse.low);
    // Both factors as sums of two bf16: the product itself adds no bf16 rounding.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = y[i / 2][i % 2 * 2], b = y[i / 2][i % 2 * 2 + 1];
      high[i] = pack(a, b);
      low[i] = pack(a - low_half(high[i]), b - high_half(high[i]));
    }
    float solved[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma(solved[n], low, inverse[2 * n], inverse[2 * n + 1]);
      mma(solved[n], high, rest[2 * n], rest[2 * n + 1]);
      mma(solved[n], high, inverse[2 * n], inverse[2 * n + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[row][i] = pack(solved[i / 2][i % 2 * 2], solved[i / 2][i % 2 * 2 + 1]);
      *reinterpret_cast<uint32_t*>(
          &s.mixed[row * (row - 1) / 2 + column][lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2]) = x[row][i];
    }
  }
}

// Values into the queries' place, by the warps that do not invert.
__device__ __forceinline__ void load_values(PrepareShared& s, const __nv_bfloat16* source, int64_t stride, int length,
                                            int thread) {
  const int column = thread % 16 * 8;
#pragma unroll
  for (int i = 0; i < kChunk / 8; ++i) {
    const int row = thread / 16 + i * 8;
    if (row < length)
      copy_async(&s.q[row][column], source + row * stride + column);
    else
      *reinterpret_cast<uint4*>(&s.q[row][column]) = make_uint4(0, 0, 0, 0);
  }
  copy_async_wait();
}

// 16 value columns of M V, transposed.
__device__ __forceinline__ void finish_values(const PrepareShared& s, unsigned char* record, int column_tile) {
  const int lane = threadIdx.x & 31;
  uint32_t x[kBlocks][4];
#pragma unroll
  for (int row = 0; row < kBlocks; ++row) {
    ldmatrix_transposed(x[row], &s.q[row * kBlock + lane / 16 * 8 + lane % 8][column_tile * 16 + lane / 8 % 2 * 8]);
    float y[2][4] = {};
    uint32_t m[4];
#pragma unroll
    for (int other = 0; other < row; ++other) {
      load_columns_transposed(m, s.mixed[row * (row - 1) / 2 + other]);
      mma(y[0], x[other], m[0], m[1]);
      mma(y[1], x[other], m[2], m[3]);
    }
    load_columns(m, s.diagonal[row].inverse.low);
    mma(y[0], x[row], m[0], m[1]);
    mma(y[1], x[row], m[2], m[3]);
    load_columns(m, s.diagonal[row].inverse.high);
    mma(y[0], x[row], m[0], m[1]);
    mma(y[1], x[row], m[2], m[3]);
    reinterpret_cast<uint4*>(record + kUOffset)[(column_tile * kBlocks + row) * 32 + lane] = make_uint4(
        pack(y[0][0], y[0][1]), pack(y[0][2], y[0][3]), pack(y[1][0], y[1][1]), pack(y[1][2], y[1][3]));
  }
}

// 16 key channels of -M K~.
__device__ __forceinline__ void finish_keys(const PrepareShared& s, unsigned char* record, int column_tile) {
  const int lane = threadIdx.x & 31;
  uint32_t x[kBlocks][4];
#pragma unroll
  for (int row = 0; row < kBlocks; ++row) {
    uint32_t(&r)[4] = x[row];
    ldmatrix_transposed(r, &s.k[row * kBlock + lane % 16][column_tile * 16 + lane / 16 * 8]);
    if (row > 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint2 factor = s.decay_before[row][column_tile * 16 + n * 8 + lane / 4];
        r[2 * n] = scale_pair(r[2 * n], factor);
        r[2 * n + 1] = scale_pair(r[2 * n + 1], factor);
      }
    }
    float y[2][4] = {};
    uint32_t m[4];
#pragma unroll
    for (int other = 0; other < row; ++other) {
      load_rows_transposed(m, s.mixed[row * (row - 1) / 2 + other]);
      mma(y[0], m, x[other][0], x[other][1]);
      mma(y[1], m, x[other][2], x[other][3]);
    }
    load_rows(m, s.diagonal[row].inverse.low);
    mma(y[0], m, r[0], r[1]);
    mma(y[1], m, r[2], r[3]);
    load_rows(m, s.diagonal[row].inverse.high);
    mma(y[0], m, r[0], r[1]);
    mma(y[1], m, r[2], r[3]);
    reinterpret_cast<uint4*>(record + kWOffset)[(row * 8 + column_tile) * 32 + lane] = make_uint4(
        pack(y[0][0], y[0][1]), pack(y[1][0], y[1][1]), pack(y[0][2], y[0][3]), pack(y[1][2], y[1][3]));
  }
}

__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    prepare_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_shared[];
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(raw_shared);
  const int warp = threadIdx.x / 32;
  const int head = p.head_begin + blockIdx.x;
  // The first chunks come last: the recurrence starts with them and finds them in L2.
  const int index = gridDim.y - 1 - blockIdx.y;
  launch_dependents();
  if (warp == 0) {
    const Chunk chunk = locate(p, index);
    if (threadIdx.x == 0) s.place = make_int2(chunk.token, chunk.length);
  }
  const float rate = kLog2e * expf(p.a_log[head]);
  const float2 bias =
      *reinterpret_cast<const float2*>(&p.dt_bias[head * kHeadDim + threadIdx.x % 64 * 2]);
  __syncthreads();
  const int64_t token = s.place.x;
  const int length = s.place.y;
  if (length == 0) return;
  const __nv_bfloat16* const values = p.v + token * p.v_stride + head * kHeadDim;
  unsigned char* const record =
      p.workspace + (static_cast<int64_t>(index) * p.head_count + blockIdx.x) * kRecordBytes;
  if (length == kChunk)
    load_inputs<true>(p, s, token, length, head);
  else
    load_inputs<false>(p, s, token, length, head);
  // Values follow into the queries' place; until then they wait in L2.
  if (static_cast<int>(threadIdx.x) < 2 * length)
    prefetch_l2(values + threadIdx.x / 2 * p.v_stride + threadIdx.x % 2 * 64);
  copy_async_wait();
  __syncthreads();

  {
    Logs log;
    measure_rows(p, s);
    apply_gates(p, s, log, rate, bias, length);
    __syncthreads();
    const float4 around = combine_decays(s, record, log);
    decay_rows(s, record, log, around);
  }
  __syncthreads();
  multiply_all(s, record, warp);
  __syncthreads();
  if (warp < kBlocks - 1)
    invert_column(s, warp);
  else if (warp >= 4)
    load_values(s, values, p.v_stride, length, threadIdx.x - 128);
  __syncthreads();
#pragma unroll 1
  for (int tile = warp % 4; tile < kHeadDim / 16; tile += 4) {
    if (warp < 4)
      finish_values(s, record, tile);
    else
      finish_keys(s, record, tile);
  }
}

}  // namespace kda
