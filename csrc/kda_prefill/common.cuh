// SPDX-License-Identifier: Apache-2.0
// Shapes, parameters and small PTX helpers shared by the two KDA prefill kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace kda {

constexpr int kHeadDim = 128;
constexpr int kBlock = 16;             // tokens of one gate block: exp(16 * 5) still fits bf16's range
constexpr int kChunk = 64;             // tokens of one step of the recurrence
constexpr int kBlocks = kChunk / kBlock;
constexpr int kMaxCheckpoints = 4;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;

// One chunk of one head in the workspace, in bytes. Every matrix is stored in the register order of the
// mma operand it becomes, so that the recurrence loads it with 8- and 16-byte reads without conflicts.
constexpr int kOperandBytes = kChunk * kHeadDim * 2;
constexpr int kWOffset = 0;                                   // -(I + L)^-1 diag(beta) K~
constexpr int kQOffset = kWOffset + kOperandBytes;            // scaled, decayed queries
constexpr int kKOffset = kQOffset + kOperandBytes;            // keys decayed to the chunk's end
constexpr int kAOffset = kKOffset + kOperandBytes;            // query-key products, lower blocks only
constexpr int kATiles = kBlocks * (kBlocks + 1) / 2;
constexpr int kDecayOffset = kAOffset + kATiles * 512;        // decay over the whole chunk, fp32
constexpr int kUOffset = kDecayOffset + kHeadDim * 4;         // (I + L)^-1 diag(beta) V
constexpr int kUTileBytes = kChunk * 16 * 2;                  // 16 value columns of it
constexpr int kRecordBytes = kUOffset + kOperandBytes;

struct Params {
  const __nv_bfloat16* q;
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  const __nv_bfloat16* g;
  const __nv_bfloat16* beta;
  const float* a_log;
  const float* dt_bias;
  const int32_t* cu_seqlens;
  const int32_t* state_indices;
  const uint8_t* has_initial_state;
  const int32_t* checkpoint_offsets;   // [rows, 4] or null
  const int32_t* checkpoint_state_indices;
  float* state_pool;
  __nv_bfloat16* out;
  unsigned char* workspace;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;   // elements between tokens
  int64_t state_stride;                                          // elements between states of the pool
  int64_t num_states;
  float scale;
  float lower_bound;
  int32_t rows;
  int32_t heads;        // heads of the tensors
  int32_t head_begin;   // this launch runs heads [head_begin, head_begin + head_count)
  int32_t head_count;
  int32_t max_chunks;   // records per head in the workspace
  int32_t value_tiles;  // 16-column tiles of the value dimension per recurrence block
};

// A chunk never crosses a checkpoint: the state there must exist on its own.
struct Cuts {
  int at[kMaxCheckpoints + 1];   // ascending; unused entries equal the row's length, and so does the last

  __device__ __forceinline__ Cuts(const int32_t* offsets, int row, int length) {
#pragma unroll
    for (int i = 0; i <= kMaxCheckpoints; ++i) at[i] = length;
    if (offsets == nullptr) return;
    const int4 raw = reinterpret_cast<const int4*>(offsets)[row];
    const int given[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = given[i] > 0 && given[i] < length ? given[i] : length;
    order(at[0], at[1]);
    order(at[2], at[3]);
    order(at[0], at[2]);
    order(at[1], at[3]);
    order(at[1], at[2]);
  }

  static __device__ __forceinline__ void order(int& a, int& b) {
    const int low = min(a, b);
    b = max(a, b);
    a = low;
  }

  // The cuts that a lane of this warp holds.
  __device__ __forceinline__ Cuts of_lane(int lane) const {
    Cuts cuts = *this;
#pragma unroll
    for (int i = 0; i <= kMaxCheckpoints; ++i) cuts.at[i] = __shfl_sync(0xffffffffu, at[i], lane);
    return cuts;
  }

  static __device__ __forceinline__ int chunks_between(int begin, int end) {
    return static_cast<int>(static_cast<unsigned>(end - begin + kChunk - 1) / kChunk);
  }

  __device__ __forceinline__ int chunks() const {
    int count = 0, begin = 0;
#pragma unroll
    for (int i = 0; i <= kMaxCheckpoints; ++i) {
      count += chunks_between(begin, at[i]);
      begin = at[i];
    }
    return count;
  }

  // End of the chunk that starts at `begin`.
  __device__ __forceinline__ int chunk_end(int begin) const {
    int end = begin + kChunk;
#pragma unroll
    for (int i = 0; i <= kMaxCheckpoints; ++i)
      if (at[i] > begin) end = min(end, at[i]);
    return end;
  }

  // Start of the row's chunk number `index`, its length where there are fewer.
  __device__ __forceinline__ int chunk_begin(int index) const {
    int found = at[kMaxCheckpoints], begin = 0, left = index;
#pragma unroll
    for (int i = 0; i <= kMaxCheckpoints; ++i) {
      const int count = chunks_between(begin, at[i]);
      if (left >= 0 && left < count) found = begin + left * kChunk;
      left -= count;
      begin = at[i];
    }
    return found;
  }
};

__device__ __forceinline__ int row_length(const Params& p, int row) {
  return p.cu_seqlens[row + 1] - p.cu_seqlens[row];
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// Transpose one 8x8 tile of 16-bit values held by the warp.
__device__ __forceinline__ uint32_t transpose(uint32_t tile) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(tile));
  return out;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (1 + 2^-x)
__device__ __forceinline__ float sigmoid_base2(float x) { return reciprocal(1.0f + exp2_fast(-x)); }

// A factor as a sum of two bf16, for each of two packed values: a product with both halves rounds once.
__device__ __forceinline__ uint2 split_factors(float low, float high) {
  const uint32_t head = pack(low, high);
  return make_uint2(head, pack(low - low_half(head), high - high_half(head)));
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, uint2 factor) {
  uint32_t rest, out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(rest) : "r"(pair), "r"(factor.y));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(factor.x), "r"(rest));
  return out;
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Lets the next kernel take its place beside the last blocks of this one; it waits for their end itself.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until all blocks of the kernel before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace kda
