// Index keys into the paged cache: RMSNorm, RoPE on the last 64 of 128 dimensions, a normalised
// 128-point Hadamard transform, and a store as e4m3 with one scale a key, or as bf16.
// seatrial_kernels/index_store/reference.py says what is computed, step by step.
//
// Eight lanes own a key, each 16 of its dimensions: the lower three bits of a lane and the four of
// a register together are the seven bits of a dimension, so the transform is four butterflies
// within registers and three between lanes. Which bit is which does not matter to it; here it is
// chosen so that eight lanes load, and store, neighbouring bytes, and so that all of them have the
// same share of the rotated half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/launch.cuh"

namespace seatrial::index_store {

constexpr int kDim = 128, kRotated = 64, kPage = 64;
constexpr int kLanes = 8, kOwn = kDim / kLanes;
constexpr int kThreads = 128, kKeysPerBlock = kThreads / kLanes;
constexpr int kScaleBytes = 4;
constexpr int64_t kFp8PageBytes = kPage * (kDim + kScaleBytes);
constexpr float kE4m3Max = 448.0f, kSmallest = 1e-4f;
constexpr float kHadamard = 0.08838834764831845f;  // 128 ** -0.5

enum class Format { kFp8, kBf16 };

// Where a key's position and slot come from: lists of their own, or SGLang's plans (16 bytes a key).
enum class Source { kLists, kDecodePlan, kExtendPlan };

struct Arguments {
  const void* keys;        // [count, 128]
  const void* weight;      // [128], of the keys' type
  const float* rotations;  // [positions, 64]: cos, sin of 32 angles
  const void* plan;        // [count] int64 positions, or [count, 16] bytes
  const int64_t* slots;    // [count], or [slots_count] that an extend plan points into
  uint8_t* cache;
  float eps;
  uint32_t ratio;  // tokens a key stands for, a power of 2; a plan says where its last one ends
  uint32_t count, slots_count, positions, capacity;
};

// What is said of a key, as it was loaded: place_of() judges it later, so that nothing waits here.
struct Said {
  int64_t position, slot;
};

template <Source source>
__device__ __forceinline__ Said load_said(const Arguments& a, uint32_t index) {
  if (index >= a.count) return {0, -1};
  if constexpr (source == Source::kLists) {
    return {static_cast<const int64_t*>(a.plan)[index], a.slots[index]};
  } else {
    // {uint32 tokens so far, uint16 row of the slot, ...}
    const uint2 plan = *reinterpret_cast<const uint2*>(static_cast<const uint4*>(a.plan) + index);
    if constexpr (source == Source::kDecodePlan) return {plan.x, a.slots[index]};
    const uint32_t row = plan.y & 0xffff;
    const bool is_valid = plan.x != 0xffffffffu && row < a.slots_count;
    return {plan.x, is_valid ? a.slots[row] : -1};
  }
}

constexpr uint32_t kNowhere = 0xffffffffu;

struct Place {
  uint32_t position, slot;
};

// Where the key belongs. What is not within bounds, or no key yet, has slot kNowhere and position 0.
template <Source source>
__device__ __forceinline__ Place place_of(const Arguments& a, Said said) {
  bool is_kept = static_cast<uint64_t>(said.slot) < a.capacity;
  if constexpr (source != Source::kLists) {
    const uint32_t tokens = static_cast<uint32_t>(said.position);
    is_kept = is_kept && tokens >= a.ratio;
    if constexpr (source == Source::kDecodePlan)
      is_kept = is_kept && (tokens & (a.ratio - 1)) == 0;
    said.position = tokens - a.ratio;
  }
  is_kept = is_kept && static_cast<uint64_t>(said.position) < a.positions;
  return {is_kept ? static_cast<uint32_t>(said.position) : 0,
          is_kept ? static_cast<uint32_t>(said.slot) : kNowhere};
}

// This lane's 16 values of a row of 128: in runs of 16 bytes, eight lanes side by side.
__device__ __forceinline__ void load_own(const float* row, int lane, float (&own)[kOwn]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 four = reinterpret_cast<const float4*>(row)[lane + kLanes * j];
    own[4 * j] = four.x, own[4 * j + 1] = four.y, own[4 * j + 2] = four.z, own[4 * j + 3] = four.w;
  }
}

__device__ __forceinline__ void load_own(const __nv_bfloat16* row, int lane, float (&own)[kOwn]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint4 eight = reinterpret_cast<const uint4*>(row)[lane + kLanes * j];
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[8 * j + 2 * i] = __uint_as_float(pairs[i] << 16);
      own[8 * j + 2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  }
}

// The same for the 64 values of a rotation: register r of it belongs to register 8 + r of the key.
template <int kRun>
__device__ __forceinline__ void load_rotation(const float* row, int lane, float (&turn)[kOwn / 2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = kRun == 4 ? lane + kLanes * j : 2 * lane + j;
    const float4 four = reinterpret_cast<const float4*>(row)[at];
    turn[4 * j] = four.x, turn[4 * j + 1] = four.y, turn[4 * j + 2] = four.z,
             turn[4 * j + 3] = four.w;
  }
}

template <typename Combine>
__device__ __forceinline__ float over_lanes(float value, Combine combine) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

__device__ __forceinline__ void hadamard(int lane, float (&own)[kOwn]) {
#pragma unroll
  for (int bit = 1; bit < kOwn; bit *= 2) {
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if (r & bit) continue;
      const float a = own[r], b = own[r | bit];
      own[r] = a + b, own[r | bit] = a - b;
    }
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < kOwn; ++r)
      own[r] = fmaf(sign, own[r], __shfl_xor_sync(0xffffffffu, own[r], mask));
  }
}

__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// kRun neighbouring values at a time, as they were loaded; `norm` is still to be multiplied in.
template <int kRun>
__device__ __forceinline__ void store_fp8(uint8_t* cache, uint32_t slot, int lane, float norm,
                                          const float (&own)[kOwn]) {
  float largest = 0.0f;
#pragma unroll
  for (float value : own) largest = fmaxf(largest, fabsf(value));
  largest = over_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
  largest = fmaxf(largest * norm, kSmallest);
  // NaN where norm is.
  const float factor = norm * __fdividef(kE4m3Max, largest);
  const float scale = isnan(norm) ? norm : largest * (1 / kE4m3Max);
  if (slot == kNowhere) return;
  uint8_t* page = cache + static_cast<uint64_t>(slot / kPage) * kFp8PageBytes;
  const uint32_t row = slot % kPage;
#pragma unroll
  for (int j = 0; j < kOwn / kRun; ++j) {
    uint32_t words[kRun / 4];
#pragma unroll
    for (int w = 0; w < kRun / 4; ++w) {
      const float* four = &own[kRun * j + 4 * w];
      words[w] = e4m3x4(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
    }
    uint8_t* target = page + row * kDim + kRun * (lane + kLanes * j);
    if constexpr (kRun == 4) {
      *reinterpret_cast<uint32_t*>(target) = words[0];
    } else {
      *reinterpret_cast<uint2*>(target) = {words[0], words[1]};
    }
  }
  if (lane == 0) *reinterpret_cast<float*>(page + kPage * kDim + row * kScaleBytes) = scale;
}

__device__ __forceinline__ uint32_t bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kRun>
__device__ __forceinline__ void store_bf16(uint8_t* cache, uint32_t slot, int lane, float norm,
                                           const float (&own)[kOwn]) {
  if (slot == kNowhere) return;
  uint8_t* target = cache + static_cast<uint64_t>(slot) * (2 * kDim);
#pragma unroll
  for (int j = 0; j < kOwn / kRun; ++j) {
    uint32_t pairs[kRun / 2];
#pragma unroll
    for (int p = 0; p < kRun / 2; ++p)
      pairs[p] = bf16x2(own[kRun * j + 2 * p] * norm, own[kRun * j + 2 * p + 1] * norm);
    uint8_t* at = target + 2 * kRun * (lane + kLanes * j);
    if constexpr (kRun == 4) {
      *reinterpret_cast<uint2*>(at) = {pairs[0], pairs[1]};
    } else {
      *reinterpret_cast<uint4*>(at) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
}

template <typename T, Format format, Source source>
__global__ void __launch_bounds__(kThreads, 8) store(const __grid_constant__ Arguments a) {
  constexpr int kRun = 16 / sizeof(T);
  const int lane = threadIdx.x % kLanes;
  const uint32_t index = blockIdx.x * kKeysPerBlock + threadIdx.x / kLanes;
  const uint32_t row = index < a.count ? index : 0;

  // A plan and its slots are older than the kernel before this one, as SGLang's own kernel takes
  // them to be; nothing is assumed of the rest.
  if constexpr (source == Source::kLists) wait_for_predecessor();
  const Said said = load_said<source>(a, index);
  float weight[kOwn], turn[kOwn / 2], own[kOwn];
  if constexpr (source != Source::kLists) wait_for_predecessor();
  release_successor();
  load_own(static_cast<const T*>(a.weight), lane, weight);
  load_own(static_cast<const T*>(a.keys) + static_cast<uint64_t>(row) * kDim, lane, own);
  const Place place = place_of<source>(a, said);
  load_rotation<kRun>(a.rotations + static_cast<uint64_t>(place.position) * kRotated, lane, turn);

  float squares = 0.0f;
#pragma unroll
  for (float value : own) squares = fmaf(value, value, squares);
  squares = over_lanes(squares, [](float x, float y) { return x + y; });
  // All that follows is linear, so the norm's factor comes last: nothing waits for the sum.
  const float norm = isfinite(squares) ? rsqrtf(fmaf(squares, 1.0f / kDim, a.eps)) * kHadamard
                                       : __int_as_float(0x7fffffff);
#pragma unroll
  for (int r = 0; r < kOwn; ++r) own[r] *= weight[r];
#pragma unroll
  for (int p = 0; p < kOwn / 2; p += 2) {
    const float real = own[kOwn / 2 + p], imaginary = own[kOwn / 2 + p + 1];
    own[kOwn / 2 + p] = real * turn[p] - imaginary * turn[p + 1];
    own[kOwn / 2 + p + 1] = real * turn[p + 1] + imaginary * turn[p];
  }
  hadamard(lane, own);
  if constexpr (format == Format::kFp8) {
    store_fp8<kRun>(a.cache, place.slot, lane, norm, own);
  } else {
    store_bf16<kRun>(a.cache, place.slot, lane, norm, own);
  }
}

}  // namespace seatrial::index_store
