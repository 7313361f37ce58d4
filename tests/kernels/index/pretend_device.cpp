// SPDX-License-Identifier: Apache-2.0
// Preloaded, it lets the host code of vLLM's DeepGEMM believe in a GB10 (SM121). With NO_GPU it is also a stub of what that
// code asks of PyTorch and the CUDA runtime, so that it runs on a machine without a GPU.
#include <cstdlib>
#include <cuda_runtime_api.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// deep_jit::cuda::Device::get_prop(), which DeepGEMM calls through its symbol table.
EXPORT cudaDeviceProp* _ZN8deep_jit4cuda6Device8get_propEv(void*) {
  static cudaDeviceProp properties{};
  properties.major = 12;
  properties.minor = 1;
  properties.multiProcessorCount = std::atoi(std::getenv("PRETEND_SMS"));
  properties.sharedMemPerBlockOptin = 99 * 1024;
  properties.sharedMemPerMultiprocessor = 100 * 1024;
  return &properties;
}

#ifdef NO_GPU
EXPORT int aoti_torch_get_current_cuda_stream(int, void** stream) { return *stream = nullptr, 0; }
EXPORT int aoti_torch_get_current_device_index(int* index) { return *index = 0; }
// A tensor in host memory counts as one of the GPU: its type is the CPU's, 0.
EXPORT int aoti_torch_device_type_cuda() { return 0; }
EXPORT int cublasLtCreate(void** handle) { return *handle = handle, 0; }
EXPORT int cublasLtDestroy(void*) { return 0; }

__host__ cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#endif
