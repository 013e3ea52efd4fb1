// What every launcher uses: an exported C function that queues work on the caller's stream and
// returns the runtime's error code. Nothing here allocates or waits, so all of it can be captured.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// `extern "C" SEATRIAL_EXPORT int seatrial_<op>(..., void* stream)`; 0 is success.
#define SEATRIAL_EXPORT __attribute__((visibility("default")))

namespace seatrial {

template <typename T>
constexpr T ceil_div(T value, T by) {
  return (value + by - 1) / by;
}

// Queue `kernel` and return the error code. With `overlap`, it may start while the kernel before it
// in the stream ends: it must then call wait_for_predecessor() before it touches what that one wrote.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           bool overlap, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return static_cast<int>(
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

// Wait until the kernel before this one has ended and its writes are seen. Does nothing unless
// this one was launched with `overlap`.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Let the kernel after this one start, if it was launched with `overlap`.
__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace seatrial
