// What the binding asks of the library itself.
#include "common/launch.cuh"

namespace {
__global__ void nothing() {}
}  // namespace

// 0 if the library has code for the current device, else the reason as an error code.
extern "C" SEATRIAL_EXPORT int seatrial_check_device() {
  cudaFuncAttributes attributes;
  const cudaError_t found = cudaFuncGetAttributes(&attributes, nothing);
  cudaGetLastError();  // a failed question is answered here, and is not the next launch's error
  return static_cast<int>(found);
}

// The runtime's words for an error code.
extern "C" SEATRIAL_EXPORT const char* seatrial_error_string(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
