// Chooses the kernel for a call and queues it.
#include "index_logits/index_logits.cuh"

#include <atomic>

namespace seatrial::index_logits {
namespace {

// What a device is asked for once: its multiprocessors, and which fp8 instruction it has.
struct Device {
  std::atomic<int> multiprocessors{0}, major{0};
};
constexpr int kMostDevices = 64;
Device devices[kMostDevices];

cudaError_t ask(int device, Device& known) {
  if (known.multiprocessors.load(std::memory_order_acquire) != 0) return cudaSuccess;
  int major = 0, count = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  known.major.store(major, std::memory_order_relaxed);
  known.multiprocessors.store(count, std::memory_order_release);
  return cudaSuccess;
}

template <Keys keys, int kRows>
cudaError_t queue(const Arguments& a, int device, int blocks, void* stream) {
  constexpr auto kernel = logits_kernel<keys, kRows>;
  constexpr int kBytes = Plan<keys, kRows>::kSharedBytes;
  static std::atomic<uint64_t> asked{0};
  const uint64_t bit = 1ull << device;
  if (!(asked.load(std::memory_order_relaxed) & bit)) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    asked.fetch_or(bit, std::memory_order_relaxed);
  }
  return static_cast<cudaError_t>(launch(kernel, dim3(blocks), kThreads, kBytes, stream, true, a));
}

template <Keys keys>
cudaError_t queue(const Arguments& a, int device, int blocks, void* stream) {
  switch (a.unit_rows) {
    case 1:
      return queue<keys, 1>(a, device, blocks, stream);
    case 2:
      return queue<keys, 2>(a, device, blocks, stream);
    case 3:
    case 4:
      return queue<keys, 4>(a, device, blocks, stream);
    case kWarps:
      return queue<keys, kWarps>(a, device, blocks, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

enum Way { kByDevice, kAsF16, kAsFp8 };

}  // namespace
}  // namespace seatrial::index_logits

// See Arguments for shapes. `key_bits`, `query_bits`: 8 (e4m3) or 16 (bf16). `unit_rows`: rows of a
// request, 1 to 4, which share its page table; or 8: rows of any requests, each with its own. `way`:
// how fp8 keys are multiplied, 0 as the device does it best.
extern "C" SEATRIAL_EXPORT int seatrial_index_logits(
    const void* queries, const void* cache, const float* weights, const int* lengths,
    const int* page_table, float* scores, long long page_stride, long long score_stride,
    long long pages, int rows, int width, int table_width, int unit_rows, int skip, int key_bits,
    int query_bits, int way, int settled, void* stream) {
  using namespace seatrial::index_logits;
  const bool has_fp8_keys = key_bits == 8, has_fp8_queries = query_bits == 8;
  if (!has_fp8_keys && key_bits != 16) return cudaErrorInvalidValue;
  if (!has_fp8_queries && (query_bits != 16 || has_fp8_keys)) return cudaErrorInvalidValue;
  if (rows < 0 || width < 0 || table_width < 0 || skip < 0) return cudaErrorInvalidValue;
  if (pages < 0 || pages > 0xffffffffll || unit_rows < 1) return cudaErrorInvalidValue;
  if (rows == 0 || width == 0 || table_width == 0 || pages == 0) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < 0 || device >= kMostDevices) return cudaErrorInvalidDevice;
  error = ask(device, devices[device]);
  if (error != cudaSuccess) return error;
  const int blocks = devices[device].multiprocessors, major = devices[device].major;

  const long long covered = static_cast<long long>(table_width) * kPage;
  const int step = kMostUnits * unit_rows;
  for (int first = 0; first < rows && error == cudaSuccess; first += step) {
    Arguments a{};
    const int64_t heads = static_cast<int64_t>(first) * kHeads;
    a.queries = static_cast<const uint8_t*>(queries) + heads * kDim * (query_bits / 8);
    a.cache = static_cast<const uint8_t*>(cache);
    a.weights = weights + heads;
    a.lengths = lengths + first;
    a.page_table = page_table + first * page_stride;
    a.scores = scores + first * score_stride;
    a.page_stride = page_stride;
    a.score_stride = score_stride;
    a.rows = rows - first < step ? rows - first : step;
    a.unit_rows = unit_rows;
    a.limit = static_cast<int>(covered < width ? covered : width);
    a.skip = skip;
    a.last_page = static_cast<uint32_t>(pages - 1);
    a.has_bf16_queries = !has_fp8_queries;
    a.has_settled = settled != 0;
    if (!has_fp8_keys)
      error = queue<Keys::kBf16>(a, device, blocks, stream);
    else if (way == kAsF16 || (way == kByDevice && major < 10))
      error = queue<Keys::kFp8AsF16>(a, device, blocks, stream);
    else
      error = queue<Keys::kFp8>(a, device, blocks, stream);
  }
  return error;
}
