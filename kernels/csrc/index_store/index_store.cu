// The launcher of index_store.cuh.
#include "index_store/index_store.cuh"

using namespace seatrial;
using namespace seatrial::index_store;

namespace {

template <typename T, Format format>
int queue(const Arguments& a, int source, void* stream, bool overlap) {
  const dim3 grid(ceil_div<uint32_t>(a.count, kKeysPerBlock));
  switch (static_cast<Source>(source)) {
    case Source::kLists:
      return launch(store<T, format, Source::kLists>, grid, kThreads, 0, stream, overlap, a);
    case Source::kDecodePlan:
      return launch(store<T, format, Source::kDecodePlan>, grid, kThreads, 0, stream, overlap, a);
    case Source::kExtendPlan:
      return launch(store<T, format, Source::kExtendPlan>, grid, kThreads, 0, stream, overlap, a);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

// key_bits: 32 (fp32) or 16 (bf16), for keys and weight; format and source: see the enums.
extern "C" SEATRIAL_EXPORT int seatrial_index_store(
    const void* keys, const void* weight, const float* rotations, const void* plan,
    const int64_t* slots, void* cache, int64_t count, int64_t slots_count, int64_t positions,
    int64_t capacity, float eps, int ratio, int key_bits, int format, int source, int overlap,
    void* stream) {
  if (count == 0) return cudaSuccess;
  const int64_t limit = 0x7fffffff;
  const bool is_small = count <= limit && positions <= limit && capacity <= limit;
  const bool is_power = ratio > 0 && (ratio & (ratio - 1)) == 0;
  if (count < 0 || !is_small || !is_power) return cudaErrorInvalidValue;
  const Arguments a{keys,
                    weight,
                    rotations,
                    plan,
                    slots,
                    static_cast<uint8_t*>(cache),
                    eps,
                    static_cast<uint32_t>(ratio),
                    static_cast<uint32_t>(count),
                    static_cast<uint32_t>(slots_count < limit ? slots_count : limit),
                    static_cast<uint32_t>(positions),
                    static_cast<uint32_t>(capacity)};
  const bool is_fp8 = static_cast<Format>(format) == Format::kFp8;
  if (key_bits == 32)
    return is_fp8 ? queue<float, Format::kFp8>(a, source, stream, overlap)
                  : queue<float, Format::kBf16>(a, source, stream, overlap);
  if (key_bits == 16)
    return is_fp8 ? queue<__nv_bfloat16, Format::kFp8>(a, source, stream, overlap)
                  : queue<__nv_bfloat16, Format::kBf16>(a, source, stream, overlap);
  return cudaErrorInvalidValue;
}
