// Scores of paged index keys: scale of the key times the sum over 64 heads of weight * relu(q . k).
// seatrial_kernels/index_logits/reference.py says what is computed.
//
// Sixteen heads are the rows of a matrix product and eight keys its columns. A warp owns one query
// row and keeps its 64 heads in registers, as the product's left operand; keys come through a ring
// in shared memory, each read once for all rows of a unit: a request's rows in a decode step, or
// eight neighbouring rows of a prefill. The sum over dimensions does not care for their order, so a
// lane takes the sixteen bytes it can load at once, of queries and keys alike: what it loads of a key
// is a right operand as it is. Beside a matrix instruction nothing else is issued for free, so the
// steps between are few.
//
// All keys of all units, in stages of 16 to 64, are one row of work that the blocks share evenly.
// Lengths are read here and nowhere else, so what a call costs does not depend on how long a context
// may be, and a CUDA graph may be replayed with others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/launch.cuh"

namespace seatrial::index_logits {

constexpr int kDim = 128, kHeads = 64, kPage = 64;
constexpr int kBlocksOfHeads = kHeads / 16;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostUnits = kThreads;  // of one launch
constexpr int64_t kFp8PageBytes = kPage * (kDim + 4), kBf16PageBytes = kPage * kDim * 2;

// The keys' dtype, and what is multiplied: fp8 as it is (sm_120 has an instruction, sm_90 emulates
// it), or made f16, which is exact; bf16 as it is.
enum class Keys { kFp8AsF16, kFp8, kBf16 };

struct Arguments {
  const uint8_t* queries;  // [rows, 64, 128], e4m3 or bf16
  const uint8_t* cache;    // [pages, 64 * 132 or 64 * 256]
  const float* weights;    // [rows, 64]
  const int* lengths;      // [rows]
  const int* page_table;   // [rows, page_stride]
  float* scores;           // [rows, score_stride]
  int64_t page_stride, score_stride;
  int rows, unit_rows;
  int limit;  // keys that a row can have: what scores and the page table have place for
  int skip;   // rows of up to so many keys are left out
  uint32_t last_page;
  bool has_bf16_queries;
  uint32_t zero;
  bool has_settled;  // nothing before that may still run writes lengths or page table
};

// How a kernel for units of up to kRows rows goes about it.
template <Keys keys, int kRows>
struct Plan {
  static constexpr bool kIsFp8 = keys != Keys::kBf16;
  static constexpr int kGroups = kWarps / kRows;  // warps of a group share a ring
  static constexpr int kGroupThreads = 32 * kRows;
  static constexpr int kStageKeys = kRows > 2 ? kPage : kRows == 2 || kIsFp8 ? 32 : 16;
  static constexpr int kTile = kStageKeys < 32 ? 16 : 32;  // keys that a warp scores at once
  static constexpr int kKeyBytes = kIsFp8 ? kDim : 2 * kDim;
  static constexpr int kKeyChunks = kKeyBytes / 16;
  // Odd keys lie with neighbouring runs of so many bytes swapped, so that two keys' loads share no
  // bank.
  static constexpr uint32_t kSwap = kIsFp8 ? 64 : 16;
  static constexpr int kValueBytes = kStageKeys * kKeyBytes;
  // A warp alone keeps the scales of its 32 keys in registers: there is no room for them.
  static constexpr bool kHasOwnScales = kIsFp8 && kRows == 1;
  static constexpr bool kHasScales = kIsFp8 && kRows > 1;
  static constexpr int kStageBytes = kValueBytes + (kHasScales ? kStageKeys * 4 : 0);
  static constexpr int kStages = kIsFp8 && kRows > 1 ? 4 : 3;
  static_assert(kStages == 3 || !kHasOwnScales);
  static constexpr int kSharedBytes = kGroups * kStages * kStageBytes;
  static constexpr int64_t kPageBytes = kIsFp8 ? kFp8PageBytes : kBf16PageBytes;
  // Rows of a prefill may belong to several requests; which do is found out here.
  static constexpr bool kFindsRequests = kRows == kWarps;
};

// What a stage of a ring holds.
struct __align__(8) Stage {
  uint32_t key;      // its first
  uint16_t unit;     // kNoUnit: no stage; the work is done
  uint16_t members;  // bits of the rows that it is for
};
constexpr uint16_t kNoUnit = 0xffff;

template <Keys keys, int kRows>
struct Shared {
  using P = Plan<keys, kRows>;
  alignas(16) int sums[kWarps];
  int begins[kMostUnits + 1];  // a unit's first stage
  uint32_t differing;
  int first_unit;
  Stage stages[P::kGroups][P::kStages];
};

__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_if(bool is_wanted, uint32_t to, const void* from) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
      "@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(is_wanted))
      : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The warps of a group; whole blocks and single warps have cheaper ways.
template <int kRows>
__device__ __forceinline__ void sync_group(int group) {
  if constexpr (kRows == 1)
    __syncwarp();
  else if constexpr (kRows == kWarps)
    __syncthreads();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * kRows) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

// Twice relu(value), exact: a sum is issued twice as fast as a maximum. NaN stays NaN (a key that is
// not a number must not look like one that scores 0), and so does -inf become.
__device__ __forceinline__ float twice_relu(float value) { return value + fabsf(value); }

// Two pairs of e4m3 as pairs of f16.
__device__ __forceinline__ void halves_of(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// The same as bf16. Exact: e4m3's values are a subset of both.
__device__ __forceinline__ void bf16_of(uint32_t four, uint32_t& low, uint32_t& high) {
  halves_of(four, low, high);
  for (uint32_t* pair : {&low, &high}) {
    const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(pair));
    const __nv_bfloat162 narrow = __float22bfloat162_rn(wide);
    *pair = *reinterpret_cast<const uint32_t*>(&narrow);
  }
}

// The same value in a register that the compiler may choose anew: without this it would keep queries
// as they were loaded, and move four of them before each matrix instruction.
__device__ __forceinline__ uint32_t placed(uint32_t value, uint32_t zero) {
  uint32_t same;
  asm("xor.b32 %0, %1, %2;" : "=r"(same) : "r"(value), "r"(zero));
  return same;
}

template <Keys keys>
__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (keys == Keys::kFp8AsF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else if constexpr (keys == Keys::kFp8) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// A lane's part of a row's queries: of each block of 16 heads those at lane / 4 and 8 later, and its
// quarter of the dimensions.
template <Keys keys>
struct Queries {
  static constexpr int kSteps = keys == Keys::kFp8 ? 4 : 8;
  uint32_t parts[kBlocksOfHeads][kSteps][4];
  float weights[kBlocksOfHeads][2];  // half of what they are

  __device__ __forceinline__ void load_weights(const Arguments& a, int row, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocksOfHeads; ++i)
      weights[i / 2][i % 2] = 0.5f * a.weights[static_cast<int64_t>(row) * kHeads + 8 * i + lane / 4];
  }

  // The lane's bytes of 8 heads, e4m3: chunk lane % 4 of a row's eight, and the fourth after it.
  __device__ __forceinline__ void put(int eight, uint4 first, uint4 second, uint32_t zero) {
    auto& part = parts[eight / 2];
    const int later = eight % 2;
    const uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                               second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (keys == Keys::kFp8)
        part[i / 2][i % 2 * 2 + later] = placed(words[i], zero);
      else if constexpr (keys == Keys::kFp8AsF16)
        halves_of(words[i], part[i][later], part[i][2 + later]);
      else
        bf16_of(words[i], part[i][later], part[i][2 + later]);
    }
  }

  __device__ __forceinline__ void load(const Arguments& a, int row, int lane) {
    const int quarter = lane % 4;
    load_weights(a, row, lane);
#pragma unroll
    for (int eight = 0; eight < 2 * kBlocksOfHeads; ++eight) {
      const int64_t head = static_cast<int64_t>(row) * kHeads + 8 * eight + lane / 4;
      if (keys == Keys::kBf16 && a.has_bf16_queries) {
        if constexpr (keys == Keys::kBf16) {
          auto& part = parts[eight / 2];
          const int later = eight % 2;
          const uint4* from = reinterpret_cast<const uint4*>(a.queries + head * kDim * 2);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint4 values = from[2 * quarter + i % 2 + i / 2 * 8];
            part[2 * i][later] = placed(values.x, a.zero);
            part[2 * i][2 + later] = placed(values.y, a.zero);
            part[2 * i + 1][later] = placed(values.z, a.zero);
            part[2 * i + 1][2 + later] = placed(values.w, a.zero);
          }
        }
      } else {
        const uint4* from = reinterpret_cast<const uint4*>(a.queries + head * kDim) + quarter;
        put(eight, from[0], from[4], a.zero);
      }
    }
  }
};

// Lanes that differ in `bit` add up both of their values: one gets the first's sum, the other the
// second's.
__device__ __forceinline__ float halved(float first, float second, int bit, int lane) {
  const bool keeps_second = (lane & bit) != 0;
  const float kept = keeps_second ? second : first;
  return kept + __shfl_xor_sync(0xffffffffu, keeps_second ? first : second, bit);
}

// Which of the 32 keys, or 16, that score_keys() scores a lane has the score of. Of 16, the upper half
// of a warp has the same as the lower.
__device__ __forceinline__ uint32_t key_of_lane(uint32_t lane) {
  return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
}

// The scores of 32 keys in shared memory, or 16, before the keys' scales. Eight at a time: while their
// sums are weighted and added, the products of the next are under way.
template <Keys keys, int kEights>
__device__ __forceinline__ float score_keys(const Queries<keys>& queries, uint32_t from, int lane) {
  constexpr int kKeyBytes = keys == Keys::kBf16 ? 2 * kDim : kDim;
  constexpr int kLoads = kKeyBytes / 64, kSteps = Queries<keys>::kSteps / kLoads;
  const uint32_t key = from + (lane / 4) * kKeyBytes;
  const uint32_t swap = (lane / 4) % 2 * Plan<keys, 1>::kSwap;
  float scores[kEights][2];  // of keys 2 (lane % 4) and the next, summed over this lane's heads
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
    float sums[kBlocksOfHeads][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // The chunks whose dimensions those are of which the lane has the queries.
      const uint32_t at = keys == Keys::kBf16 ? lane % 4 * 32 + i % 2 * 16 + i / 2 * 128
                                              : lane % 4 * 16 + i * 64;
      const uint4 loaded = load_shared(key + (at ^ swap) + n * 8 * kKeyBytes);
      const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t right[2];
        if constexpr (keys == Keys::kFp8AsF16)
          halves_of(words[step], right[0], right[1]);
        else
          right[0] = words[2 * step], right[1] = words[2 * step + 1];
#pragma unroll
        for (int block = 0; block < kBlocksOfHeads; ++block) {
          const auto& left = queries.parts[block][kSteps * i + step];
          multiply<keys>(sums[block], left[0], left[1], left[2], left[3], right[0], right[1]);
        }
      }
    }
    scores[n][0] = scores[n][1] = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocksOfHeads; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[n][i % 2] =
            fmaf(twice_relu(sums[block][i]), queries.weights[block][i / 2], scores[n][i % 2]);
    }
  }
  // Over the lanes that have the other heads: each keeps half of the keys and gives the others away.
  float kept[kEights];
#pragma unroll
  for (int n = 0; n < kEights; ++n)
    kept[n] = halved(scores[n][0], scores[n][1], 4, lane);
#pragma unroll
  for (int n = 0; n < kEights; n += 2) kept[n / 2] = halved(kept[n], kept[n + 1], 8, lane);
  if constexpr (kEights == 4) return halved(kept[0], kept[1], 16, lane);
  return kept[0] + __shfl_xor_sync(0xffffffffu, kept[0], 16);
}

__device__ __forceinline__ int length_of(const Arguments& a, int row) {
  const int length = min(a.lengths[row], a.limit);
  return length > a.skip ? length : 0;
}

template <int kStageKeys>
__device__ __forceinline__ int stages_of(const Arguments& a, int unit) {
  int longest = 0;
  const int row = unit * a.unit_rows;
  for (int i = 0; i < a.unit_rows && row + i < a.rows; ++i)
    longest = max(longest, length_of(a, row + i));
  return ceil_div(longest, kStageKeys);
}

// Fill `begins`: how many stages the units before each have. Returns the number of all.
template <Keys keys, int kRows>
__device__ __forceinline__ int count_stages(const Arguments& a, int units,
                                            Shared<keys, kRows>& shared) {
  static_assert(kMostUnits == kThreads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = threadIdx.x;
  const int own = unit < units ? stages_of<Plan<keys, kRows>::kStageKeys>(a, unit) : 0;
  int until = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, until, by);
    if (lane >= by) until += before;
  }
  if (lane == 31) shared.sums[warp] = until;
  __syncthreads();
  int before = until - own, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int its = shared.sums[w];
    if (w < warp) before += its;
    total += its;
  }
  shared.begins[unit] = before;
  if (unit == kMostUnits - 1) shared.begins[kMostUnits] = total;
  __syncthreads();
  return total;
}

// Goes through the stages of one group, ahead of those who compute.
template <Keys keys, int kRows>
struct Cursor {
  using P = Plan<keys, kRows>;
  const Arguments& a;
  Shared<keys, kRows>& shared;
  int units, last;  // of this block: the stage after its last one
  int stage, unit, begin, end;
  const int* pages;  // of the unit, or run
  // Where requests are found out: the stages of this unit that are the block's are gone through
  // once for each run of rows with the same pages.
  uint32_t starts, members;
  int first;

  __device__ __forceinline__ void enter(int at) {
    stage = at;
    members = (1u << kRows) - 1;
    unit = -1;
    if (at >= last) return;
    int low = 0, high = units;  // begins[low] <= at < begins[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (shared.begins[middle] <= at)
        low = middle;
      else
        high = middle;
    }
    unit = low;
    begin = shared.begins[low];
    end = min(shared.begins[low + 1], last);
    pages = a.page_table + static_cast<int64_t>(unit) * a.unit_rows * a.page_stride;
    if constexpr (P::kFindsRequests) {
      first = at;
      starts = find_requests();
      take_run(1u);
    }
  }

  // All threads of the block: bit i, whether row i of the unit is of another request than row i - 1.
  // Compared are the pages of the unit's longest row, so that the rows of a run agree in all.
  __device__ __forceinline__ uint32_t find_requests() {
    const int row = unit * kRows, count = min(kRows, a.rows - row);
    const int stop = ceil_div(min((end - begin) * P::kStageKeys, a.limit), kPage);
    uint32_t differing = 0;
    for (int page = (first - begin) * P::kStageKeys / kPage + threadIdx.x; page < stop;
         page += kThreads) {
      const int* entry = a.page_table + row * a.page_stride + page;
      int before = *entry;
      for (int i = 1; i < count; ++i) {
        const int its = entry[i * a.page_stride];
        if (its != before) differing |= 1u << i;
        before = its;
      }
    }
    if (threadIdx.x == 0) shared.differing = 0;
    __syncthreads();
    differing = __reduce_or_sync(0xffffffffu, differing);
    if (threadIdx.x % 32 == 0 && differing != 0) atomicOr(&shared.differing, differing);
    __syncthreads();
    const uint32_t found = shared.differing;
    __syncthreads();  // before the next unit's
    return found | 1u | 1u << count;
  }

  // The run that begins at the lowest bit set in `from`.
  __device__ __forceinline__ void take_run(uint32_t from) {
    const int begins = __ffs(static_cast<int>(from)) - 1;
    const uint32_t later = starts & ~((2u << begins) - 1);
    members = (later & (~later + 1)) - (1u << begins);
    pages = a.page_table + (static_cast<int64_t>(unit) * kRows + begins) * a.page_stride;
  }

  __device__ __forceinline__ void advance() {
    if (unit < 0) return;
    stage += P::kGroups;
    if (stage < end) return;
    if constexpr (P::kFindsRequests) {
      // What follows the run just done; the bit after the last row ends the unit.
      const uint32_t next = members + (members & (~members + 1));
      if (next < (1u << kRows) && (starts & ~(next * 2 - 1)) != 0) {
        stage = first;
        take_run(next);
        return;
      }
    }
    enter(stage);
  }

  __device__ __forceinline__ Stage what() const {
    return {static_cast<uint32_t>(stage - begin) * P::kStageKeys, static_cast<uint16_t>(unit),
            static_cast<uint16_t>(members)};
  }

  // The page that the stage lies in; its load is not waited for here.
  __device__ __forceinline__ uint32_t page() const {
    if (unit < 0) return 0;
    return pages[static_cast<uint32_t>(stage - begin) * P::kStageKeys / kPage];
  }
};

template <Keys keys, int kRows>
__global__ void __launch_bounds__(kThreads, 1) logits_kernel(const Arguments a) {
  using P = Plan<keys, kRows>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ Shared<keys, kRows> shared;
  release_successor();
  if (!a.has_settled) wait_for_predecessor();
  const int units = ceil_div(a.rows, a.unit_rows);
  const int total = count_stages(a, units, shared);
  const int64_t blocks = gridDim.x;
  const int begin = static_cast<int>(total * static_cast<int64_t>(blockIdx.x) / blocks);
  const int end = static_cast<int>(total * (blockIdx.x + int64_t{1}) / blocks);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / kRows, in_group = threadIdx.x % P::kGroupThreads;
  // Units of three rows leave a warp of four idle: not the same one in each group.
  const int member = kRows == 4 ? (warp + group) % 4 : warp % kRows;
  Stage(&stages)[P::kStages] = shared.stages[group];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(rings)) +
                        group * P::kStages * P::kStageBytes;

  // This thread's share of the copies: the same places in every stage.
  const uint32_t key_of = in_group / P::kKeyChunks, chunk_of = in_group % P::kKeyChunks;
  const uint32_t copy_to = key_of * P::kKeyBytes + ((chunk_of * 16) ^ (key_of % 2 * P::kSwap));
  const uint8_t* const copy_from = a.cache + in_group * 16;
  const auto fill = [&](int slot, const Stage& stage, uint32_t page) {
    if (in_group == 0) stages[slot] = stage;
    if (stage.unit != kNoUnit) {
      const uint32_t in_page = stage.key % kPage;
      const uint8_t* from = copy_from + min(page, a.last_page) * P::kPageBytes;
      const uint32_t to = ring + slot * P::kStageBytes;
      if (P::kHasScales)
        copy_async_if(in_group < P::kStageKeys / 4, to + P::kValueBytes + in_group * 16,
                      from + kPage * kDim + in_page * 4);
      from += in_page * P::kKeyBytes;
      constexpr int kAtOnce = 16 * P::kGroupThreads;
      static_assert(P::kValueBytes % kAtOnce == 0);
#pragma unroll
      for (int i = 0; i < P::kValueBytes; i += kAtOnce) copy_async(to + copy_to + i, from + i);
    }
    commit_copies();
  };

  // The scale of this lane's key of a stage.
  const auto scale_of = [&](const Stage& stage, uint32_t page) {
    if (!P::kHasOwnScales || stage.unit == kNoUnit) return 0.0f;
    const uint8_t* from = a.cache + min(page, a.last_page) * P::kPageBytes + kPage * kDim;
    return reinterpret_cast<const float*>(from)[stage.key % kPage + key_of_lane(lane)];
  };

  Cursor<keys, kRows> cursor{a, shared, units, end};
  cursor.enter(begin + group);
  Stage ahead[P::kStages - 1];
  uint32_t pages[P::kStages - 1];
#pragma unroll
  for (int i = 0; i < P::kStages - 1; ++i) {
    ahead[i] = cursor.what();
    pages[i] = cursor.page();
    cursor.advance();
  }
  uint32_t page = cursor.page();
  // Where all warps begin with the same row, its queries come through what the rings do not use yet.
  const bool stages_queries = kRows == 1 && !a.has_bf16_queries && begin < end;
  if (stages_queries) {
    if (threadIdx.x == 0) shared.first_unit = ahead[0].unit;
    __syncthreads();
  }
  if (a.has_settled) wait_for_predecessor();
  const auto staged = [&](uint32_t head, uint32_t chunk) {
    constexpr uint32_t kHeadsOfRing = P::kStageBytes / kDim, kLastSlot = P::kStages - 1;
    return static_cast<uint32_t>(__cvta_generic_to_shared(rings)) +
           head / kHeadsOfRing * P::kStages * P::kStageBytes + kLastSlot * P::kStageBytes +
           head % kHeadsOfRing * kDim + ((chunk * 16) ^ (head % 2 * 64));
  };
  if (stages_queries) {
    const uint8_t* from = a.queries + static_cast<int64_t>(shared.first_unit) * kHeads * kDim;
#pragma unroll
    for (int i = threadIdx.x; i < kHeads * kDim / 16; i += kThreads)
      copy_async(staged(i / 8, i % 8), from + i * 16);
  }
  commit_copies();
#pragma unroll
  for (int i = 0; i < P::kStages - 1; ++i) fill(i, ahead[i], pages[i]);
  float scale = 0.0f, next_scale = scale_of(ahead[0], pages[0]);
  float last_scale = scale_of(ahead[1], pages[1]);

  Queries<keys> queries;
  uint32_t unit = kNoUnit, length = 0;
  float* scores = nullptr;
  const auto enter_unit = [&](uint32_t its, bool is_staged) {
    unit = its;
    const int row = its * a.unit_rows + member;
    length = member < a.unit_rows && row < a.rows ? length_of(a, row) : 0;
    scores = a.scores + row * a.score_stride + key_of_lane(lane);
    if (length == 0) return;
    if (!is_staged) {
      queries.load(a, row, lane);
      return;
    }
    queries.load_weights(a, row, lane);
#pragma unroll
    for (int eight = 0; eight < 2 * kBlocksOfHeads; ++eight) {
      const uint32_t head = 8 * eight + lane / 4;
      queries.put(eight, load_shared(staged(head, lane % 4)), load_shared(staged(head, lane % 4 + 4)),
                  a.zero);
    }
  };
  if (stages_queries) {
    wait_copies<P::kStages - 1>();
    __syncthreads();
    if (ahead[0].unit == shared.first_unit) enter_unit(ahead[0].unit, true);
    __syncthreads();  // before a ring uses that slot
  }
  if (ahead[0].unit != kNoUnit && ahead[0].unit != unit) enter_unit(ahead[0].unit, false);

  for (int slot = 0;; slot = slot + 1 == P::kStages ? 0 : slot + 1) {
    wait_copies<P::kStages - 2>();
    sync_group<kRows>(group);
    const Stage stage = stages[slot];
    if (stage.unit == kNoUnit) break;
    const Stage next = cursor.what();
    fill(slot == 0 ? P::kStages - 1 : slot - 1, next, page);
    scale = next_scale, next_scale = last_scale;
    last_scale = scale_of(next, page);
    cursor.advance();
    page = cursor.page();
    if (stage.unit != unit) enter_unit(stage.unit, false);
    if (!(stage.members >> member & 1)) continue;
    const uint32_t values = ring + slot * P::kStageBytes;
#pragma unroll 1
    for (uint32_t first = 0; first < P::kStageKeys; first += P::kTile) {
      const uint32_t key = stage.key + first;
      if (key >= length) break;
      float score = score_keys<keys, P::kTile / 8>(queries, values + first * P::kKeyBytes, lane);
      if constexpr (P::kHasScales) {
        const uint32_t at = values + P::kValueBytes + (first + key_of_lane(lane)) * 4;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(at));
      }
      if constexpr (P::kIsFp8) score *= scale;
      if (lane < P::kTile && key + key_of_lane(lane) < length) scores[key] = score;
    }
  }
}

}  // namespace seatrial::index_logits
