// First kernel: everything about a chunk that does not depend on the state that enters it.
//
// One block per chunk of up to 64 tokens and head. With unit keys k_t, decay products taken inside the chunk
// and L the strictly lower matrix of beta_t <k_t, k_s> decayed from s to t, the chunk maps its entering state
// S (value x key) as
//     U = (I + L)^-1 diag(beta) (V - K~ S^T),   O = Q~ S^T + A U,   S' = S diag(decay) + U^T K^
// (the WY form of the delta rule, "Parallelizing Linear Transformers with the Delta Rule over Sequence
// Length", with a decay per key channel as in Kimi Delta Attention). Written out here: -(I + L)^-1 diag(beta)
// K~, (I + L)^-1 diag(beta) V, Q~, K^, A and the decay.
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
constexpr int kChains = 2;   // sums over even and odd steps: half the length of the dependent chain
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
constexpr int kPrepareBlocks = 3;   // on one multiprocessor
#else
constexpr int kPrepareBlocks = 1;   // SM12x has 100 KB of shared memory a multiprocessor
#endif

using Tile = __nv_bfloat16[kBlock][kTilePitch];

// First L_ii of a gate block, then (I + L_ii)^-1 as a sum of two bf16.
union Diagonal {
  float lower[kBlock][kDiagonalPitch];
  struct {
    Tile high, low;
  } inverse;
};

struct PrepareShared {
  __nv_bfloat16 q[kChunk][kPitch];   // queries, then decayed queries, then values
  __nv_bfloat16 k[kChunk][kPitch];   // keys, then keys decayed from their block's start
  __nv_bfloat16 g[kChunk][kPitch];   // gate logits, then keys decayed to their block's end
  Tile lower[kBlocks * (kBlocks - 1) / 2];   // -L, blocks below the diagonal
  Diagonal diagonal[kBlocks];
  float decay[kBlocks][kHeadDim];   // over one gate block
  float inverse_decay[kBlocks][kHeadDim];
  float decay_before[kBlocks][kHeadDim];   // from the chunk's start to the block's start
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

// Row and tokens of chunk `index` of the packed batch; every warp finds them for itself.
__device__ __forceinline__ Chunk locate(const Params& p, int index) {
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first = 0; first < p.rows; first += 32) {
    const int row = first + lane;
    int count = 0, length = 0;
    if (row < p.rows) {
      length = row_length(p, row);
      count = Cuts(p.checkpoint_offsets, row, length).chunks();
    }
    int sum = count;
    if (p.rows > 1) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
    }
    const int mine = base + sum - count;
    const unsigned found = __ballot_sync(0xffffffffu, index >= mine && index < mine + count);
    if (found) {
      const int owner = __ffs(found) - 1;
      const int owner_base = __shfl_sync(0xffffffffu, mine, owner);
      const int owner_length = __shfl_sync(0xffffffffu, length, owner);
      const Cuts cuts(p.checkpoint_offsets, first + owner, owner_length);
      const int begin = cuts.chunk_begin(index - owner_base);
      return Chunk{p.cu_seqlens[first + owner] + begin, cuts.chunk_end(begin) - begin};
    }
    base += __shfl_sync(0xffffffffu, sum, 31);
  }
  return Chunk{0, 0};
}

__device__ __forceinline__ void load_tile(__nv_bfloat16 (*tile)[kPitch], const __nv_bfloat16* source,
                                          int64_t stride, int length) {
  const int column = threadIdx.x % 16 * 8;
  int row = threadIdx.x / 16;
  source += row * stride + column;
#pragma unroll
  for (int i = 0; i < kChunk * 16 / kPrepareThreads; ++i) {
    if (row < length)
      copy_async(&tile[row][column], source);
    else
      *reinterpret_cast<uint4*>(&tile[row][column]) = make_uint4(0, 0, 0, 0);
    row += kPrepareThreads / 16;
    source += kPrepareThreads / 16 * stride;
  }
}

__device__ __forceinline__ float square_sum(const uint4& x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(low_half(words[i]), low_half(words[i]), sum);
    sum = fmaf(high_half(words[i]), high_half(words[i]), sum);
  }
  return sum;
}

// l2 norms of queries and keys, four threads a token.
__device__ __forceinline__ void measure_rows(const Params& p, PrepareShared& s) {
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;
  float q = 0, k = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q += square_sum(*reinterpret_cast<const uint4*>(&s.q[row][(part + 4 * i) * 8]));
    k += square_sum(*reinterpret_cast<const uint4*>(&s.k[row][(part + 4 * i) * 8]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    q += __shfl_xor_sync(0xffffffffu, q, step);
    k += __shfl_xor_sync(0xffffffffu, k, step);
  }
  if (part == 0) s.norm[row] = make_float2(p.scale * rsqrtf(q + kNormEps), rsqrtf(k + kNormEps));
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

// Gates and decays: one thread runs two key channels down the 16 tokens of one gate block.
__device__ __forceinline__ void apply_gates(const Params& p, PrepareShared& s, unsigned char* record, float rate,
                                            float2 bias, int length) {
  const int block = threadIdx.x / 64, channel = threadIdx.x % 64 * 2;
  const float bound = p.lower_bound * kLog2e;
  float log0[kBlock], log1[kBlock];   // log2 of the decay since the block's start
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const int row = block * kBlock + t;
    const uint32_t g = *reinterpret_cast<const uint32_t*>(&s.g[row][channel]);
    const float limit = row < length ? bound : 0.0f;
    log0[t] = limit * sigmoid_base2(rate * (low_half(g) + bias.x));
    log1[t] = limit * sigmoid_base2(rate * (high_half(g) + bias.y));
  }
#pragma unroll
  for (int t = 1; t < kBlock; ++t) {
    log0[t] += log0[t - 1];
    log1[t] += log1[t - 1];
  }
  const float total0 = log0[kBlock - 1], total1 = log1[kBlock - 1];
  const float decay0 = exp2_fast(total0), decay1 = exp2_fast(total1);
  float key0[kBlock], key1[kBlock];
#pragma unroll
  for (int group = 0; group < kBlock; group += 4) {
    // Loads of a group come before its stores: the compiler cannot tell that they never overlap.
    uint32_t k[4], q[4];
    float2 norm[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = block * kBlock + group + i;
      k[i] = *reinterpret_cast<const uint32_t*>(&s.k[row][channel]);
      q[i] = *reinterpret_cast<const uint32_t*>(&s.q[row][channel]);
      norm[i] = s.norm[row];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = group + i;
      const float since0 = exp2_fast(log0[t]), since1 = exp2_fast(log1[t]);
      const float k0 = low_half(k[i]) * norm[i].y, k1 = high_half(k[i]) * norm[i].y;
      key0[t] = k0 * exp2_fast(total0 - log0[t]);
      key1[t] = k1 * exp2_fast(total1 - log1[t]);
      k[i] = pack(k0 * since0, k1 * since1);
      q[i] = pack(low_half(q[i]) * norm[i].x * since0, high_half(q[i]) * norm[i].x * since1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = block * kBlock + group + i;
      *reinterpret_cast<uint32_t*>(&s.k[row][channel]) = k[i];
      *reinterpret_cast<uint32_t*>(&s.q[row][channel]) = q[i];
      *reinterpret_cast<uint32_t*>(&s.g[row][channel]) = pack(key0[group + i], key1[group + i]);
    }
  }
  *reinterpret_cast<float2*>(&s.decay[block][channel]) = make_float2(decay0, decay1);
  *reinterpret_cast<float2*>(&s.inverse_decay[block][channel]) =
      make_float2(exp2_fast(-total0), exp2_fast(-total1));
  __syncthreads();

  float2 before = make_float2(1, 1), later = before;
#pragma unroll
  for (int other = 0; other < kBlocks; ++other) {
    const float2 factor = *reinterpret_cast<const float2*>(&s.decay[other][channel]);
    if (other < block) before = times(before, factor);
    if (other > block) later = times(later, factor);
  }
  *reinterpret_cast<float2*>(&s.decay_before[block][channel]) = before;
  // Operand order of K^ in the recurrence: [8 channels][gate block][lane][2 registers].
  uint4* const target = reinterpret_cast<uint4*>(
      record + kKOffset + ((channel / 8 * kBlocks + block) * 32 + channel % 8 * 4) * 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    target[i] = make_uint4(pack(key0[4 * i] * later.x, key0[4 * i + 1] * later.x),
                           pack(key0[4 * i + 8] * later.x, key0[4 * i + 9] * later.x),
                           pack(key0[4 * i + 2] * later.x, key0[4 * i + 3] * later.x),
                           pack(key0[4 * i + 10] * later.x, key0[4 * i + 11] * later.x));
    target[2 + i] = make_uint4(pack(key1[4 * i] * later.y, key1[4 * i + 1] * later.y),
                               pack(key1[4 * i + 8] * later.y, key1[4 * i + 9] * later.y),
                               pack(key1[4 * i + 2] * later.y, key1[4 * i + 3] * later.y),
                               pack(key1[4 * i + 10] * later.y, key1[4 * i + 11] * later.y));
  }
  if (block == 0)
    *reinterpret_cast<float2*>(record + kDecayOffset + channel * 4) =
        make_float2(decay0 * later.x, decay1 * later.y);
}

// Multiply an A operand (16 tokens x 16 channels) by a factor per channel; `factors` points at this lane's
// first channel.
__device__ __forceinline__ void scale_channels(uint32_t (&out)[4], const uint32_t (&in)[4],
                                               const float* factors) {
  // Keeps the compiler from fetching the factors of all steps at once, which would spill.
  asm volatile("" ::: "memory");
  const float2 low = *reinterpret_cast<const float2*>(factors);
  const float2 high = *reinterpret_cast<const float2*>(factors + 8);
  out[0] = pack(low_half(in[0]) * low.x, high_half(in[0]) * low.y);
  out[1] = pack(low_half(in[1]) * low.x, high_half(in[1]) * low.y);
  out[2] = pack(low_half(in[2]) * high.x, high_half(in[2]) * high.y);
  out[3] = pack(low_half(in[3]) * high.x, high_half(in[3]) * high.y);
}

// (I + L_ii)^-1 by forward substitution in fp32, one lane a column.
__device__ __forceinline__ void invert_diagonal(PrepareShared& s, int block) {
  const int lane = threadIdx.x & 31, column = lane & 15;
  float x[kBlock];
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    float value = t == column ? 1.0f : 0.0f;
    float partial = 0;
#pragma unroll
    for (int quad = 0; quad < (t + 3) / 4; ++quad) {
      const float4 l = *reinterpret_cast<const float4*>(&s.diagonal[block].lower[t][4 * quad]);
      const float row[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * quad + i >= t) continue;
        if (i % 2)
          partial = fmaf(-row[i], x[4 * quad + i], partial);
        else
          value = fmaf(-row[i], x[4 * quad + i], value);
      }
    }
    x[t] = value + partial;
  }
  __syncwarp();   // the inverse takes the place of L_ii
  if (lane >= kBlock) return;
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    const __nv_bfloat16 high = __float2bfloat16(x[t]);
    s.diagonal[block].inverse.high[t][column] = high;
    s.diagonal[block].inverse.low[t][column] = __float2bfloat16(x[t] - __bfloat162float(high));
  }
}

// Store the product of gate blocks `block` (queries or keys) and `other` (keys), [8 keys][accumulator].
template <bool kQueries>
__device__ __forceinline__ void store_product(PrepareShared& s, unsigned char* record, const float (&product)[2][4],
                                              int block, int other) {
  const int lane = threadIdx.x & 31, t = lane / 4, quad = lane % 4;
  if constexpr (kQueries) {
    reinterpret_cast<uint4*>(record + kAOffset)[(block * (block + 1) / 2 + other) * 32 + lane] =
        make_uint4(pack(product[0][0], product[0][1]), pack(product[1][0], product[1][1]),
                   pack(product[0][2], product[0][3]), pack(product[1][2], product[1][3]));
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t + half * 8;
      const float beta = s.beta[block * kBlock + row];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float x = beta * product[tile][2 * half], y = beta * product[tile][2 * half + 1];
        const int column = tile * 8 + 2 * quad;
        if (other == block)
          *reinterpret_cast<float2*>(&s.diagonal[block].lower[row][column]) =
              make_float2(column < row ? x : 0.0f, column + 1 < row ? y : 0.0f);
        else
          *reinterpret_cast<uint32_t*>(&s.lower[block * (block - 1) / 2 + other][row][column]) = pack(-x, -y);
      }
    }
  }
}

// Products of one gate block's keys (or queries) with the keys of all blocks up to it.
template <bool kQueries>
__device__ __forceinline__ void multiply_rows(PrepareShared& s, unsigned char* record, int block) {
  const int lane = threadIdx.x & 31, quad = lane % 4;
  const __nv_bfloat16(*rows)[kPitch] = kQueries ? s.q : s.k;
  const int key_row = lane / 16 * 8 + lane % 8, key_column = lane / 8 % 2 * 8;
  const __nv_bfloat16* const own = &rows[block * kBlock + lane % 16][lane / 16 * 8];
  if constexpr (kQueries) {
    uint4* const target = reinterpret_cast<uint4*>(record + kQOffset) + block * 8 * 32 + lane;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      uint32_t a[4], scaled[4];
      ldmatrix(a, own + step * 16);
      scale_channels(scaled, a, &s.decay_before[block][step * 16 + 2 * quad]);
      target[step * 32] = make_uint4(scaled[0], scaled[2], scaled[1], scaled[3]);
    }
  }

  float product[kChains][2][4] = {};
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    // Rows are decayed from the block's start, keys to its end: undo one whole block.
    uint32_t a[4], scaled[4], b[4];
    ldmatrix(a, own + step * 16);
    scale_channels(scaled, a, &s.inverse_decay[block][step * 16 + 2 * quad]);
    ldmatrix(b, &s.g[block * kBlock + key_row][step * 16 + key_column]);
    mma(product[step % kChains][0], scaled, b[0], b[1]);
    mma(product[step % kChains][1], scaled, b[2], b[3]);
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kChains == 2) product[0][tile][i] += product[kChains - 1][tile][i];
      if (kQueries && tile * 8 + 2 * quad + i % 2 > lane / 4 + i / 2 * 8) product[0][tile][i] = 0;
    }
  store_product<kQueries>(s, record, product[0], block, block);
  if constexpr (!kQueries) {
    __syncwarp();
    invert_diagonal(s, block);
  }

  uint32_t a[8][4];
#pragma unroll
  for (int step = 0; step < 8; ++step) ldmatrix(a[step], own + step * 16);
#pragma unroll 1
  for (int other = block - 1; other >= 0; --other) {
    if (other < block - 1) {
#pragma unroll
      for (int step = 0; step < 8; ++step)
        scale_channels(a[step], a[step], &s.decay[other + 1][step * 16 + 2 * quad]);
    }
    float sum[kChains][2][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      uint32_t b[4];
      ldmatrix(b, &s.g[other * kBlock + key_row][step * 16 + key_column]);
      mma(sum[step % kChains][0], a[step], b[0], b[1]);
      mma(sum[step % kChains][1], a[step], b[2], b[3]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) if (kChains == 2) sum[0][tile][i] += sum[kChains - 1][tile][i];
    store_product<kQueries>(s, record, sum[0], block, other);
  }
}

// The 32 value columns one warp solves for, into the queries' place.
__device__ __forceinline__ void load_value_columns(PrepareShared& s, const __nv_bfloat16* source, int64_t stride,
                                                   int length, int tile_pair) {
  const int lane = threadIdx.x & 31, column = tile_pair * 32 + lane % 4 * 8;
#pragma unroll
  for (int row = lane / 4; row < kChunk; row += 8) {
    if (row < length)
      copy_async(&s.q[row][column], source + row * stride + column);
    else
      *reinterpret_cast<uint4*>(&s.q[row][column]) = make_uint4(0, 0, 0, 0);
  }
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}

// Solve (I + L) X = diag(beta) [K~ | V] for 32 of the 256 columns, transposed, in registers.
template <bool kValues>
__device__ __forceinline__ void solve_columns(const PrepareShared& s, unsigned char* record, int tile_pair) {
  const int lane = threadIdx.x & 31, quad = lane % 4;
  const __nv_bfloat16(*source)[kPitch] = kValues ? s.q : s.k;
  uint32_t x[2][kBlocks][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    float y[2][2][4];
    const float2 beta0 = *reinterpret_cast<const float2*>(&s.beta[block * kBlock + 2 * quad]);
    const float2 beta1 = *reinterpret_cast<const float2*>(&s.beta[block * kBlock + 8 + 2 * quad]);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int channel = (tile_pair * 2 + tile) * 16;
      uint32_t raw[4];
      ldmatrix_transposed(raw, &source[block * kBlock + lane / 16 * 8 + lane % 8][channel + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 beta = i < 2 ? beta0 : beta1;
        const float decay = kValues ? 1.0f : s.decay_before[block][channel + lane / 4 + i % 2 * 8];
        y[tile][i / 2][i % 2 * 2] = low_half(raw[i]) * beta.x * decay;
        y[tile][i / 2][i % 2 * 2 + 1] = high_half(raw[i]) * beta.y * decay;
      }
    }
    const int operand_row = lane / 16 * 8 + lane % 8, operand_column = lane / 8 % 2 * 8;
#pragma unroll
    for (int other = 0; other < block; ++other) {
      uint32_t l[4];
      ldmatrix(l, &s.lower[block * (block - 1) / 2 + other][operand_row][operand_column]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        mma(y[tile][0], x[tile][other], l[0], l[1]);
        mma(y[tile][1], x[tile][other], l[2], l[3]);
      }
    }
    uint32_t inverse[4], rest[4];
    ldmatrix(inverse, &s.diagonal[block].inverse.high[operand_row][operand_column]);
    ldmatrix(rest, &s.diagonal[block].inverse.low[operand_row][operand_column]);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t high[4], low[4];
      float solved[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = y[tile][i / 2][i % 2 * 2], b = y[tile][i / 2][i % 2 * 2 + 1];
        high[i] = pack(a, b);
        low[i] = pack(a - low_half(high[i]), b - high_half(high[i]));
      }
      // Both factors as sums of two bf16: the solve itself adds no bf16 rounding.
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma(solved[n], low, inverse[2 * n], inverse[2 * n + 1]);
        mma(solved[n], high, rest[2 * n], rest[2 * n + 1]);
        mma(solved[n], high, inverse[2 * n], inverse[2 * n + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[tile][block][i] = pack(solved[i / 2][i % 2 * 2], solved[i / 2][i % 2 * 2 + 1]);
      const uint32_t(&r)[4] = x[tile][block];
      const int column_tile = tile_pair * 2 + tile;
      if (kValues)
        reinterpret_cast<uint4*>(record + kUOffset)[(column_tile * kBlocks + block) * 32 + lane] =
            make_uint4(r[0], r[1], r[2], r[3]);
      else
        reinterpret_cast<uint4*>(record + kWOffset)[(block * 8 + column_tile) * 32 + lane] =
            make_uint4(transpose(r[0]) ^ 0x80008000u, transpose(r[1]) ^ 0x80008000u,
                       transpose(r[2]) ^ 0x80008000u, transpose(r[3]) ^ 0x80008000u);
    }
  }
}

// Start the loads of queries, keys and gates; write strengths go through registers.
__device__ __forceinline__ void load_inputs(const Params& p, PrepareShared& s, const Chunk& chunk, int head) {
  const int64_t token = chunk.token;
  load_tile(s.q, p.q + token * p.q_stride + head * kHeadDim, p.q_stride, chunk.length);
  load_tile(s.k, p.k + token * p.k_stride + head * kHeadDim, p.k_stride, chunk.length);
  load_tile(s.g, p.g + token * p.g_stride + head * kHeadDim, p.g_stride, chunk.length);
  asm volatile("cp.async.commit_group;" ::: "memory");
  const int row = threadIdx.x;
  if (row >= kChunk) return;
  s.beta[row] = row < chunk.length
                    ? sigmoid_base2(kLog2e * __bfloat162float(p.beta[(token + row) * p.beta_stride + head]))
                    : 0.0f;
}

__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    prepare_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_shared[];
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(raw_shared);
  const int warp = threadIdx.x / 32;
  const int head = p.head_begin + blockIdx.x;
  // The recurrence may take its place beside the last of these blocks; it waits for their end itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  {
    const Chunk chunk = locate(p, blockIdx.y);
    if (chunk.length == 0) return;
    // Through shared memory, so that no register holds them while the products need all.
    if (threadIdx.x == 0) s.place = make_int2(chunk.token, chunk.length);
    load_inputs(p, s, chunk, head);
  }
  unsigned char* const record =
      p.workspace + (static_cast<int64_t>(blockIdx.y) * p.head_count + blockIdx.x) * kRecordBytes;

  const float rate = kLog2e * expf(p.a_log[head]);
  const float2 bias =
      *reinterpret_cast<const float2*>(&p.dt_bias[head * kHeadDim + threadIdx.x % 64 * 2]);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

  measure_rows(p, s);
  __syncthreads();
  const int64_t token = s.place.x;
  const int length = s.place.y;
  apply_gates(p, s, record, rate, bias, length);
  // Values follow into the queries' place; from here on they wait in L2.
  if (static_cast<int>(threadIdx.x) < 2 * length)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.v + (token + static_cast<int>(threadIdx.x / 2)) * p.v_stride +
                                                  head * kHeadDim + threadIdx.x % 2 * 64));
  __syncthreads();

  // The gate block with the most products shares its scheduler with the one that has the fewest.
  if (warp < 4)
    multiply_rows<false>(s, record, warp);
  else
    multiply_rows<true>(s, record, 7 - warp);
  __syncthreads();

  if (warp < 4) {
    solve_columns<false>(s, record, warp);
  } else {
    const int2 place = s.place;
    load_value_columns(s, p.v + place.x * p.v_stride + head * kHeadDim, p.v_stride, place.y, warp - 4);
    solve_columns<true>(s, record, warp - 4);
  }
}

}  // namespace kda
