// SPDX-License-Identifier: Apache-2.0
// Second kernel: the recurrence over chunks, one block per row, head and slice of the value dimension.
//
// Value columns of the state do not interact, so a slice needs nothing from its neighbours. Four state warps
// share a slice, each with 32 key channels of the state in fp32 registers. Four token warps compute U and O, each
// for 16 tokens of a chunk. They take turns: the state goes to the token warps and U comes back, as bf16 operands
// in register order through shared memory, whose traffic is what bounds a step; while the state warps apply U
// the token warps finish O. One more warp streams chunk records in by bulk copies, several chunks ahead.
#pragma once

#include "common.cuh"

namespace kda {

constexpr int kComputeThreads = 256;
constexpr int kRecurrenceThreads = kComputeThreads + 32;

template <int kTiles, int kStages>
struct RecurrenceShared {
  unsigned char stage[kStages][kUOffset + kTiles * kUTileBytes];
  uint4 state[8][kTiles][32];          // A operand: [16 channels][value tile][lane]
  uint4 update[kBlocks][kTiles][32];   // A operand: [16 tokens][value tile][lane]
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// Barrier of the eight warps that compute.
__device__ __forceinline__ void sync_compute() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Registers of a warp's part of the state: [value tile][8 channels][mma accumulator].
template <int kTiles>
using State = float[kTiles][4][4];

template <int kTiles>
__device__ __forceinline__ void load_state(State<kTiles>& state, const float* matrix) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x =
            *reinterpret_cast<const float2*>(matrix + (tile * 16 + half * 8) * kHeadDim + n * 8);
        state[tile][n][2 * half] = x.x;
        state[tile][n][2 * half + 1] = x.y;
      }
}

template <int kTiles>
__device__ __forceinline__ void store_state(const State<kTiles>& state, float* matrix) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(matrix + (tile * 16 + half * 8) * kHeadDim + n * 8) =
            make_float2(state[tile][n][2 * half], state[tile][n][2 * half + 1]);
}

template <int kTiles>
__device__ __forceinline__ void publish_state(const State<kTiles>& state, uint4 (*operand)[kTiles][32], int warp,
                                              int lane) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const float(&a)[4] = state[tile][2 * step];
      const float(&b)[4] = state[tile][2 * step + 1];
      operand[warp * 2 + step][tile][lane] =
          make_uint4(pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3]));
    }
}

__device__ __forceinline__ void unpack(uint32_t (&r)[4], const uint4& x) {
  r[0] = x.x;
  r[1] = x.y;
  r[2] = x.z;
  r[3] = x.w;
}

// State index of the checkpoint at `position` of the row, or 0.
__device__ __forceinline__ int checkpoint_state_index(const Params& p, int row, int position) {
  if (p.checkpoint_offsets == nullptr) return 0;
  const int4 at = reinterpret_cast<const int4*>(p.checkpoint_offsets)[row];
  const int4 index = reinterpret_cast<const int4*>(p.checkpoint_state_indices)[row];
  if (at.x == position) return index.x;
  if (at.y == position) return index.y;
  if (at.z == position) return index.z;
  return at.w == position ? index.w : 0;
}

// Where a block stands: its row's chunks, its records and its corner of the state.
struct Place {
  const Cuts cuts;
  int length, chunks, slice, head, row;
  int64_t first_token;
  const unsigned char* records;
  int64_t record_stride;
};

template <int kTiles>
__device__ __forceinline__ Place find_place(const Params& p) {
  const int lane = threadIdx.x % 32, row = blockIdx.z;
  int earlier = 0;   // chunks of the rows before this one
  for (int other = lane; other < row; other += 32)
    earlier += Cuts(p.checkpoint_offsets, other, row_length(p, other)).chunks();
  earlier = __reduce_add_sync(0xffffffffu, earlier);
  const int length = row_length(p, row);
  const int64_t stride = static_cast<int64_t>(p.head_count) * kRecordBytes;
  const Cuts cuts(p.checkpoint_offsets, row, length);
  return Place{cuts,
               length,
               cuts.chunks(),
               static_cast<int>(blockIdx.x),
               p.head_begin + static_cast<int>(blockIdx.y),
               row,
               p.cu_seqlens[row],
               p.workspace + earlier * stride + blockIdx.y * static_cast<int64_t>(kRecordBytes),
               stride};
}

template <int kStages>
struct Stage {
  int index = 0;
  int phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

template <int kTiles, int kStages>
__device__ __forceinline__ void stream_records(RecurrenceShared<kTiles, kStages>& s, const Place& place) {
  constexpr int kStageBytes = kUOffset + kTiles * kUTileBytes;
  const unsigned char* record = place.records;
  const int values = kUOffset + place.slice * kTiles * kUTileBytes;
  Stage<kStages> at;
  // Launched before the first kernel has ended; its records are read by this thread only.
  wait_for_previous_kernel();
  for (int chunk = 0; chunk < place.chunks; ++chunk) {
    if (chunk >= kStages) barrier_wait(&s.empty[at.index], at.phase ^ 1);
    uint64_t* const full = &s.full[at.index];
    barrier_expect(full, kStageBytes);
    bulk_copy(s.stage[at.index], record, kUOffset, full);
    bulk_copy(s.stage[at.index] + kUOffset, record + values, kTiles * kUTileBytes, full);
    record += place.record_stride;
    at.next();
  }
}

template <int kTiles, int kStages>
__device__ __forceinline__ void run_state(const Params& p, RecurrenceShared<kTiles, kStages>& s,
                                          const Place& place, int warp) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  // This thread's corner of a [128 value][128 key] matrix.
  float* const corner =
      p.state_pool +
      (static_cast<int64_t>(place.head) * kHeadDim + place.slice * kTiles * 16 + lane / 4) * kHeadDim +
      warp * 32 + 2 * quad;
  int indices[kMaxCheckpoints];
#pragma unroll
  for (int i = 0; i < kMaxCheckpoints; ++i) {
    const int index = place.cuts.at[i] < place.length ? checkpoint_state_index(p, place.row, place.cuts.at[i]) : 0;
    indices[i] = index < p.num_states ? index : 0;
  }
  const int64_t own_index = p.state_indices[place.row];
  State<kTiles> state = {};
  if (p.has_initial_state[place.row] && own_index >= 0 && own_index < p.num_states)
    load_state<kTiles>(state, corner + own_index * p.state_stride);
  publish_state<kTiles>(state, s.state, warp, lane);
  sync_compute();

  Stage<kStages> at;
  int begin = 0;
  for (int chunk = 0; chunk < place.chunks; ++chunk) {
    const unsigned char* const stage = s.stage[at.index];
    barrier_wait(&s.full[at.index], at.phase);
    // While the token warps compute U: S diag(decay), for this warp's 32 channels.
    const float* const decay = reinterpret_cast<const float*>(stage + kDecayOffset) + warp * 32 + 2 * quad;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(decay + n * 8);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[tile][n][i] *= i % 2 ? factor.y : factor.x;
    }
    sync_compute();

    // S' = S diag(decay) + U^T K^
    const uint2* const k = reinterpret_cast<const uint2*>(stage + kKOffset) + warp * 4 * kBlocks * 32 + lane;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) unpack(a[tile], s.update[block][tile][lane]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 b = k[(n * kBlocks + block) * 32];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) mma(state[tile][n], a[tile], b.x, b.y);
      }
    }
    publish_state<kTiles>(state, s.state, warp, lane);
    sync_compute();
    barrier_arrive(&s.empty[at.index]);

    begin = place.cuts.chunk_end(begin);
    int index = 0;
#pragma unroll
    for (int i = 0; i < kMaxCheckpoints; ++i)
      if (place.cuts.at[i] == begin) index = max(index, indices[i]);
    if (index > 0) store_state<kTiles>(state, corner + index * p.state_stride);
    at.next();
  }
  if (own_index > 0 && own_index < p.num_states) store_state<kTiles>(state, corner + own_index * p.state_stride);
}

// Q~ comes with the registers of tokens 0-7 and 8-15 in turns.
__device__ __forceinline__ uint4 by_tokens(const uint4& x) { return make_uint4(x.x, x.z, x.y, x.w); }

// Add the product of A operands of all value tiles and the operand of 16 tokens.
template <int kTiles>
__device__ __forceinline__ void multiply_add(float (&out)[kTiles][2][4], const uint32_t (&a)[kTiles][4],
                                                 const uint4& b) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    mma(out[tile][0], a[tile], b.x, b.y);
    mma(out[tile][1], a[tile], b.z, b.w);
  }
}

template <int kTiles, int kStages>
__device__ __forceinline__ void run_tokens(const Params& p, RecurrenceShared<kTiles, kStages>& s,
                                           const Place& place, int warp) {
  // The state's operands stay in registers for O where they fit; else O is computed along with U.
  constexpr bool kKeep = kTiles <= 2;
  constexpr int kSteps = kKeep ? 8 : 1;
  // One tile alone would leave the tensor cores waiting: two chains of half the length.
  constexpr int kChains = kTiles == 1 ? 2 : 1;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int64_t token_stride = static_cast<int64_t>(p.heads) * kHeadDim;
  // After the exchange below an even lane holds values 0-7 of a tile, an odd lane 8-15.
  __nv_bfloat16* target = p.out + (place.first_token + warp * kBlock + lane / 4) * token_stride +
                          place.head * kHeadDim + place.slice * kTiles * 16 + quad % 2 * 8 + quad / 2 * 4;
  sync_compute();

  Stage<kStages> at;
  int begin = 0;
  for (int chunk = 0; chunk < place.chunks; ++chunk) {
    const int end = place.cuts.chunk_end(begin);
    const unsigned char* const stage = s.stage[at.index];
    barrier_wait(&s.full[at.index], at.phase);

    // U^T for this warp's 16 tokens: [chain][value tile][8 tokens].
    float update[kChains][kTiles][2][4] = {};
    float out[kTiles][2][4] = {};
    const uint4* const u = reinterpret_cast<const uint4*>(stage + kUOffset);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t r[4];
      unpack(r, u[(tile * kBlocks + warp) * 32 + lane]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        update[0][tile][i / 2][i % 2 * 2] = low_half(r[i]);
        update[0][tile][i / 2][i % 2 * 2 + 1] = high_half(r[i]);
      }
    }
    const uint4* const w = reinterpret_cast<const uint4*>(stage + kWOffset) + warp * 8 * 32 + lane;
    const uint4* const q = reinterpret_cast<const uint4*>(stage + kQOffset) + warp * 8 * 32 + lane;
    uint32_t a[kSteps][kTiles][4];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint4 b = w[step * 32];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        unpack(a[step % kSteps][tile], s.state[step][tile][lane]);
        mma(update[step % kChains][tile][0], a[step % kSteps][tile], b.x, b.y);
        mma(update[step % kChains][tile][1], a[step % kSteps][tile], b.z, b.w);
      }
      if (!kKeep) multiply_add<kTiles>(out, a[0], by_tokens(q[step * 32]));
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (kChains == 2)
#pragma unroll
        for (int i = 0; i < 8; ++i) update[0][tile][i / 4][i % 4] += update[kChains - 1][tile][i / 4][i % 4];
      const float(&x)[2][4] = update[0][tile];
      s.update[warp][tile][lane] =
          make_uint4(pack(x[0][0], x[0][1]), pack(x[0][2], x[0][3]), pack(x[1][0], x[1][1]), pack(x[1][2], x[1][3]));
    }
    sync_compute();

    if (kKeep) {
#pragma unroll
      for (int step = 0; step < 8; ++step) multiply_add<kTiles>(out, a[step % kSteps], by_tokens(q[step * 32]));
    }
    // The chunk's own part of O.
    const uint4* const products =
        reinterpret_cast<const uint4*>(stage + kAOffset) + warp * (warp + 1) / 2 * 32 + lane;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block > warp) break;
      uint32_t x[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) unpack(x[tile], s.update[block][tile][lane]);
      multiply_add<kTiles>(out, x, products[block * 32]);
    }
    sync_compute();
    barrier_arrive(&s.empty[at.index]);

#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = begin + warp * kBlock + n * 8 + lane / 4;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t low = transpose(pack(out[tile][n][0], out[tile][n][1]));
        const uint32_t high = transpose(pack(out[tile][n][2], out[tile][n][3]));
        const uint32_t other = __shfl_xor_sync(0xffffffffu, quad % 2 ? low : high, 1);
        if (token < end)
          *reinterpret_cast<uint2*>(target + n * 8 * token_stride + tile * 16) =
              quad % 2 ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
    target += (end - begin) * token_stride;
    begin = end;
    at.next();
  }
}

template <int kTiles, int kStages>
__global__ void __launch_bounds__(kRecurrenceThreads, 1) recurrence_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char raw_shared[];
  auto& s = *reinterpret_cast<RecurrenceShared<kTiles, kStages>*>(raw_shared);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kComputeThreads);   // every reader hands a stage back
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Place place = find_place<kTiles>(p);
  if (warp < 4)
    run_state<kTiles, kStages>(p, s, place, warp);
  else if (warp < 8)
    run_tokens<kTiles, kStages>(p, s, place, warp - 4);
  else if (threadIdx.x % 32 == 0)
    stream_records<kTiles, kStages>(s, place);
}

}  // namespace kda
