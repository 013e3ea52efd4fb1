// Floats as integers of the same order, and the few warp sums that selections use.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace seatrial {

// Order-preserving: a < b as floats exactly if key(a) < key(b). NaN becomes 0, below -inf's key;
// both zeros get one key.
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 + 0 is +0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return value == value ? key : 0u;
}

// The inverse, for keys of numbers.
__device__ __forceinline__ float from_order_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

constexpr uint32_t kWholeWarp = 0xffffffffu;

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t by = 1; by < 32; by *= 2) {
    const uint32_t below = __shfl_up_sync(kWholeWarp, value, by);
    if (lane >= by) value += below;
  }
  return value;
}

// Sixteen bytes of scores as floats.
template <typename Score>
struct ScoreVector;

template <>
struct ScoreVector<float> {
  static constexpr int kSize = 4;
  static constexpr uint32_t kAbsent = 0x7fffffffu;  // NaN
  static __device__ __forceinline__ void unpack(const uint4& raw, float* to) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
  }
};

template <>
struct ScoreVector<__nv_bfloat16> {
  static constexpr int kSize = 8;
  static constexpr uint32_t kAbsent = 0x7fff7fffu;  // two NaN
  static __device__ __forceinline__ void unpack(const uint4& raw, float* to) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      to[2 * word] = __uint_as_float(words[word] << 16);
      to[2 * word + 1] = __uint_as_float(words[word] & 0xffff0000u);
    }
  }
};

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }

}  // namespace seatrial
