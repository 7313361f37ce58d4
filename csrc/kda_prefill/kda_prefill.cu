// SPDX-License-Identifier: Apache-2.0
// C entry points of the KDA prefill kernels, called through ctypes with raw pointers.
#include "prepare.cuh"
#include "recurrence.cuh"

namespace kda {
namespace {

template <int kTiles, int kStages>
cudaError_t launch_recurrence(const Params& p, cudaStream_t stream) {
  constexpr int bytes = sizeof(RecurrenceShared<kTiles, kStages>);
  const auto kernel = recurrence_kernel<kTiles, kStages>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(kHeadDim / 16 / kTiles, p.head_count, p.rows);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kRecurrenceThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

cudaError_t launch(const Params& p, bool large_shared, cudaStream_t stream) {
  if (p.max_chunks > 0) {
    constexpr int bytes = sizeof(PrepareShared);
    cudaError_t error = cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    prepare_kernel<<<dim3(p.head_count, p.max_chunks), kPrepareThreads, bytes, stream>>>(p);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  // SM12x has 99 KB of shared memory a block: one chunk in flight.
  if (!large_shared) return launch_recurrence<2, 1>(p, stream);
  switch (p.value_tiles) {
    case 1: return launch_recurrence<1, 3>(p, stream);
    case 2: return launch_recurrence<2, 3>(p, stream);
    default: return launch_recurrence<4, 3>(p, stream);
  }
}

}  // namespace
}  // namespace kda

extern "C" {

int kda_prefill_params_bytes() { return sizeof(kda::Params); }

// 0 when this library holds code for the current device.
int kda_prefill_check() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kda::prepare_kernel);
}

int kda_prefill_record_bytes() { return kda::kRecordBytes; }

int kda_prefill_launch(const kda::Params* params, int large_shared, void* stream) {
  return kda::launch(*params, large_shared != 0, static_cast<cudaStream_t>(stream));
}

const char* kda_prefill_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}
