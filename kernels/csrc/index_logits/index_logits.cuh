// Scores of paged index keys: scale of the key times the sum over 64 heads of weight * relu(q . k).
// seatrial_kernels/index_logits/reference.py says what is computed.
//
// Sixteen keys are the rows of a matrix product and eight heads its columns. A warp owns one query
// row and keeps its 64 heads in registers, laid out as the product's right operand; keys come
// through a ring in shared memory, each read once for all rows of a unit: a request's rows in a
// decode step, or eight neighbouring rows of a prefill. The sum over dimensions does not care for
// their order, so a lane takes the sixteen bytes it can load at once, of queries and keys alike.
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
constexpr int kTile = 16;                // keys of one matrix product
constexpr int kColumns = kHeads / 8;     // products of 8 heads
#ifndef IL_PASS
#define IL_PASS 8
#endif
#ifndef IL_STAGES
#define IL_STAGES 4
#endif
constexpr int kAtOnce = IL_PASS;
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostUnits = 512;          // of one launch
constexpr int kPerThread = kMostUnits / kThreads;
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
};

// How a kernel for units of up to kRows rows goes about it.
template <Keys keys, int kRows>
struct Plan {
  static constexpr bool kIsFp8 = keys != Keys::kBf16;
  static constexpr int kGroups = kWarps / kRows;  // warps of a group share a ring
  static constexpr int kGroupThreads = 32 * kRows;
  static constexpr int kStageKeys = kTile * kRows < kPage ? kTile * kRows : kPage;
  static constexpr int kKeyBytes = kIsFp8 ? kDim : 2 * kDim;
  static constexpr int kKeyChunks = kKeyBytes / 16;
  static constexpr int kValueBytes = kStageKeys * kKeyBytes;
  static constexpr int kStageBytes = kValueBytes + (kIsFp8 ? kStageKeys * 4 : 0);
  static constexpr int kStages = kIsFp8 ? IL_STAGES : 3;
  static constexpr int kSharedBytes = kGroups * kStages * kStageBytes;
  static constexpr int64_t kPageBytes = kIsFp8 ? kFp8PageBytes : kBf16PageBytes;
  // Rows of a prefill may belong to several requests; which do is found out here.
  static constexpr bool kFindsRequests = kRows == kWarps;
};

// What a stage of a ring holds.
struct Stage {
  int unit;  // -1: no stage; the work is done
  int key;   // its first
  uint32_t members;
};

template <int kRows>
struct Shared {
  int begins[kMostUnits + 1];  // a unit's first stage
  int sums[kWarps];
  uint32_t differing;
  Stage stages[kWarps / kRows][8];
};

__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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
  if constexpr (kRows == 1) {
    __syncwarp();
  } else if constexpr (kRows == kWarps) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(32 * kRows) : "memory");
  }
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

// NaN stays NaN: a key that is not finite must not look like one that scores 0.
__device__ __forceinline__ float relu(float value) {
  float kept;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(kept) : "f"(value));
  return kept;
}

__device__ __forceinline__ uint32_t halves_of(uint32_t pair) {
  const __half2_raw two =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return static_cast<uint32_t>(two.y) << 16 | two.x;
}

// Exact: e4m3 is a subset of f16, and f16's numbers of that range one of bf16.
__device__ __forceinline__ uint32_t bf16_of(uint32_t pair) {
  const uint32_t two = halves_of(pair);
  const float2 wide = __half22float2(*reinterpret_cast<const __half2*>(&two));
  const __nv_bfloat162 narrow = __float22bfloat162_rn(wide);
  return *reinterpret_cast<const uint32_t*>(&narrow);
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

// A lane's part of a row's queries: heads 8 j + lane / 4, and its quarter of the dimensions.
template <Keys keys>
struct Queries {
  static constexpr int kSteps = keys == Keys::kFp8 ? 4 : 8;
  uint32_t parts[kColumns][kSteps][2];
  float weights[kColumns][2];  // of heads 8 j + 2 (lane % 4), and the next

  __device__ __forceinline__ void load(const Arguments& a, int row, int lane) {
    const int in_eight = lane / 4, quarter = lane % 4;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int64_t head = static_cast<int64_t>(row) * kHeads + 8 * j + in_eight;
      if constexpr (keys == Keys::kBf16) {
        // 8 values of each quarter of 32: as the keys' chunks of 16 bytes.
        if (a.has_bf16_queries) {
          const uint4* from = reinterpret_cast<const uint4*>(a.queries + head * kDim * 2) + quarter;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint4 eight = from[4 * i];
            parts[j][2 * i][0] = eight.x, parts[j][2 * i][1] = eight.y;
            parts[j][2 * i + 1][0] = eight.z, parts[j][2 * i + 1][1] = eight.w;
          }
        } else {
          const uint2* from = reinterpret_cast<const uint2*>(a.queries + head * kDim) + quarter;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint2 eight = from[4 * i];
            parts[j][2 * i][0] = bf16_of(eight.x & 0xffff);
            parts[j][2 * i][1] = bf16_of(eight.x >> 16);
            parts[j][2 * i + 1][0] = bf16_of(eight.y & 0xffff);
            parts[j][2 * i + 1][1] = bf16_of(eight.y >> 16);
          }
        }
      } else {
        const uint4* from = reinterpret_cast<const uint4*>(a.queries + head * kDim) + quarter;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 sixteen = from[4 * i];
          const uint32_t words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            if constexpr (keys == Keys::kFp8) {
              parts[j][2 * i + word / 2][word % 2] = words[word];
            } else {
              parts[j][4 * i + word][0] = halves_of(words[word] & 0xffff);
              parts[j][4 * i + word][1] = halves_of(words[word] >> 16);
            }
          }
        }
      }
      const float2 two = *reinterpret_cast<const float2*>(
          a.weights + static_cast<int64_t>(row) * kHeads + 8 * j + 2 * quarter);
      weights[j][0] = two.x, weights[j][1] = two.y;
    }
  }
};

// The scores of 16 keys in shared memory, before the keys' scales: lanes with lane % 4 of 0 have key
// lane / 4, those with 1 the eighth after it.
template <Keys keys>
__device__ __forceinline__ float score_tile(const Queries<keys>& queries, uint32_t tile, int lane) {
  constexpr int kKeyBytes = keys == Keys::kBf16 ? 2 * kDim : kDim;
  constexpr int kLoads = kKeyBytes / 64;
  const uint32_t low = tile + (lane / 4) * kKeyBytes, high = low + 8 * kKeyBytes;
  // Odd keys lie with their halves of eight chunks swapped, so that two keys' loads share no bank.
  const uint32_t swap = (lane / 4) % 2 * 64;
  constexpr int kSteps = Queries<keys>::kSteps;
  uint32_t parts[kSteps][4];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const uint32_t at = (lane % 4 * 16 + 64 * i) ^ swap;
    const uint4 a = load_shared(low + at), b = load_shared(high + at);
    const uint32_t lows[4] = {a.x, a.y, a.z, a.w}, highs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int step = 0; step < kSteps / kLoads; ++step) {
      auto& part = parts[kSteps / kLoads * i + step];
      if constexpr (keys == Keys::kFp8AsF16) {
        part[0] = halves_of(lows[step] & 0xffff), part[2] = halves_of(lows[step] >> 16);
        part[1] = halves_of(highs[step] & 0xffff), part[3] = halves_of(highs[step] >> 16);
      } else {
        part[0] = lows[2 * step], part[2] = lows[2 * step + 1];
        part[1] = highs[2 * step], part[3] = highs[2 * step + 1];
      }
    }
  }
  float first = 0.0f, second = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kColumns; pass += kAtOnce) {
    float sums[kAtOnce][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& part = parts[step];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const auto& b = queries.parts[pass + j][step];
        multiply<keys>(sums[j], part[0], part[1], part[2], part[3], b[0], b[1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const auto& weights = queries.weights[pass + j];
      first = fmaf(relu(sums[j][0]), weights[0], first);
      second = fmaf(relu(sums[j][2]), weights[0], second);
      first = fmaf(relu(sums[j][1]), weights[1], first);
      second = fmaf(relu(sums[j][3]), weights[1], second);
    }
  }
  // Each lane of a pair keeps one of the two and gives the other away.
  const bool keeps_second = lane % 2 != 0;
  float kept = keeps_second ? second : first;
  kept += __shfl_xor_sync(0xffffffffu, keeps_second ? first : second, 1);
  return kept + __shfl_xor_sync(0xffffffffu, kept, 2);
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
template <int kStageKeys, int kRows>
__device__ __forceinline__ int count_stages(const Arguments& a, int units, Shared<kRows>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[kPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int unit = threadIdx.x * kPerThread + i;
    own[i] = unit < units ? stages_of<kStageKeys>(a, unit) : 0;
    sum += own[i];
  }
  int until = sum;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, until, by);
    if (lane >= by) until += before;
  }
  if (lane == 31) shared.sums[warp] = until;
  __syncthreads();
  int before = until - sum, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int its = shared.sums[w];
    if (w < warp) before += its;
    total += its;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    shared.begins[threadIdx.x * kPerThread + i] = before;
    before += own[i];
  }
  if (threadIdx.x == kThreads - 1) shared.begins[kMostUnits] = total;
  __syncthreads();
  return total;
}

// Goes through the stages of one group, ahead of those who compute.
template <Keys keys, int kRows>
struct Cursor {
  using P = Plan<keys, kRows>;
  const Arguments& a;
  Shared<kRows>& shared;
  int units, last;  // of this block: the stage after its last one
  int stage, unit, begin, end;
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
    return {unit, (stage - begin) * P::kStageKeys, members};
  }

  // The page that the stage lies in; its load is not waited for here.
  __device__ __forceinline__ uint32_t page() const {
    if (unit < 0) return 0;
    const int member = P::kFindsRequests ? __ffs(static_cast<int>(members)) - 1 : 0;
    const int64_t row = static_cast<int64_t>(unit) * a.unit_rows + member;
    return a.page_table[row * a.page_stride + (stage - begin) * P::kStageKeys / kPage];
  }
};

template <Keys keys, int kRows>
__global__ void __launch_bounds__(kThreads, 1) logits_kernel(const Arguments a) {
  using P = Plan<keys, kRows>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ Shared<kRows> shared;
  release_successor();
  wait_for_predecessor();
  const int units = ceil_div(a.rows, a.unit_rows);
  const int total = count_stages<P::kStageKeys>(a, units, shared);
  const int64_t blocks = gridDim.x;
  const int begin = static_cast<int>(total * static_cast<int64_t>(blockIdx.x) / blocks);
  const int end = static_cast<int>(total * (blockIdx.x + int64_t{1}) / blocks);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / kRows, in_group = threadIdx.x % P::kGroupThreads;
  // Units of three rows leave a warp of four idle: not the same one in each group.
  const int member = kRows == 4 ? (warp + group) % 4 : warp % kRows;
  Stage(&stages)[8] = shared.stages[group];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(rings)) +
                        group * P::kStages * P::kStageBytes;

  // This thread's share of the copies: the same places in every stage.
  const uint32_t key_of = in_group / P::kKeyChunks, chunk_of = in_group % P::kKeyChunks;
  const uint32_t copy_to = key_of * P::kKeyBytes + ((chunk_of * 16) ^ (key_of % 2 * 64));
  const uint32_t copy_from = in_group * 16;
  const auto fill = [&](int slot, const Stage& stage, uint32_t page) {
    if (in_group == 0) stages[slot] = stage;
    if (stage.unit >= 0) {
      const uint8_t* from = a.cache + min(page, a.last_page) * P::kPageBytes;
      const uint32_t to = ring + slot * P::kStageBytes;
      const int in_page = stage.key % kPage;
      constexpr int kCopies = P::kValueBytes / (16 * P::kGroupThreads);
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        copy_async(to + copy_to + i * 16 * P::kGroupThreads,
                   from + in_page * P::kKeyBytes + copy_from + i * 16 * P::kGroupThreads);
      if (P::kIsFp8 && in_group < P::kStageKeys / 4)
        copy_async(to + P::kValueBytes + copy_from,
                   from + kPage * kDim + in_page * 4 + copy_from);
    }
    commit_copies();
  };

  Cursor<keys, kRows> cursor{a, shared, units, end};
  cursor.enter(begin + group);
  Stage ahead[P::kStages];
  uint32_t pages[P::kStages];
#pragma unroll
  for (int i = 0; i < P::kStages; ++i) {
    ahead[i] = cursor.what();
    pages[i] = cursor.page();
    cursor.advance();
  }
#pragma unroll
  for (int i = 0; i < P::kStages - 1; ++i) fill(i, ahead[i], pages[i]);
  Stage next = ahead[P::kStages - 1];
  uint32_t next_page = pages[P::kStages - 1];

  Queries<keys> queries;
  int unit = -1, row = 0, length = 0;
  for (int slot = 0;; slot = slot + 1 == P::kStages ? 0 : slot + 1) {
    wait_copies<P::kStages - 2>();
    sync_group<kRows>(group);
    const Stage stage = stages[slot];
    if (stage.unit < 0) break;
    fill(slot == 0 ? P::kStages - 1 : slot - 1, next, next_page);
    next = cursor.what();
    next_page = cursor.page();
    cursor.advance();
    if (stage.unit != unit) {
      unit = stage.unit;
      row = unit * a.unit_rows + member;
      length = member < a.unit_rows && row < a.rows ? length_of(a, row) : 0;
      if (length > 0) queries.load(a, row, lane);
    }
    if (!(stage.members >> member & 1)) continue;
    const uint32_t values = ring + slot * P::kStageBytes;
#pragma unroll 1
    for (int i = 0; i < P::kStageKeys / kTile; ++i) {
      const int key = stage.key + i * kTile;
      if (key >= length) break;
      float score = score_tile(queries, values + i * kTile * P::kKeyBytes, lane);
      const int own = lane / 4 + lane % 2 * 8;
      if constexpr (P::kIsFp8) {
        const uint32_t at = values + P::kValueBytes + (i * kTile + own) * 4;
        float scale;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(at));
        score *= scale;
      }
      if (lane % 4 < 2 && key + own < length) a.scores[row * a.score_stride + key + own] = score;
    }
  }
}

}  // namespace seatrial::index_logits
