// Top-k of rows of scores, with the page-table transform.
//
// A block holds 16-byte vectors of a row in registers and finds the bin of the k-th largest score
// in one histogram whose bins are laid linearly between two scores of the row: a low one that at
// least a few hundred scores exceed, and the highest. Rounding is monotone, so whatever the two
// are, a higher bin never holds a lower score: the bins decide only how many scores share the last
// one, and so the speed, never the result. What lies above the last bin is chosen; the few scores
// inside it are ranked one by one.
//
// Three ways to feed it:
//   a row that fits the registers: read once, selected as above;
//   a longer row: the part in registers is a sample spread over the row. Its histogram gives a score
//     that a little more than k of the row reach; the rest streams past and only what reaches it is
//     kept, in shared memory, and selected as above;
//   few long rows: each block reduces one chunk to its own k best, in the workspace, and the last
//     block of a row to finish selects among those.
// Whenever one of these cannot go on (infinities, thousands of equal scores, an unlucky sample), the
// block selects exactly by digits of the order-preserving key, reading its input again; that way
// also is the deterministic mode.
//
// NaN ranks below -inf. Nothing beyond a row's length is read.
#pragma once

#include "common/launch.cuh"
#include "common/order.cuh"

namespace seatrial::topk {

constexpr int kMaxK = 2048;
constexpr int kMaxBins = 2048;
constexpr int kTies = 256;         // scores of the last bin that are ranked one by one
constexpr int kCandidates = 4096;  // scores of a long row that are kept in shared memory
constexpr int kPagesHeld = 512;    // entries of the page table that are kept in shared memory
constexpr uint32_t kNoBin = 0xffffffffu;
// Before the bins lies a slot for each lane: there go, without a conflict, scores below all bins.
constexpr int kSlots = 32;
constexpr float kSlotZero = 8388608.0f;  // 2^23: the floats from here on are integers
constexpr float kBinZero = kSlotZero + kSlots;

struct Arguments {
  const void* scores;         // [rows, width], row stride `score_stride`, fp32 or bf16
  const int32_t* lengths;     // [rows]
  const int32_t* page_table;  // [rows, pages], row stride `page_stride`; null: indices as they are
  int32_t* out;               // [rows, k]
  int32_t* raw;               // [rows, k] or null: the indices before the transform
  void* workspace;
  int64_t score_stride;
  int64_t page_stride;
  int32_t rows;
  int32_t width;
  int32_t k;
  int32_t page_bits;
  int32_t limit;   // no index at or beyond this is chosen: width, or what the page table covers
  int32_t chunks;  // split only: blocks of a row
};

// Where chosen entries go: transformed into the output, or as they are for a later selection.
struct Sink {
  const int32_t* pages;  // null: no transform
  int32_t page_bits;
  int32_t* out;
  int32_t* raw;
  uint2* entries;  // not null: a score's bits and its index go here, and nowhere else

  __device__ __forceinline__ void put(uint32_t at, int32_t index) const {
    const int32_t within = index & ((1 << page_bits) - 1);
    out[at] = pages == nullptr ? index : (pages[index >> page_bits] << page_bits) | within;
    if (raw != nullptr) raw[at] = index;
  }
};

// What one search for a bin leaves behind.
struct Found {
  uint32_t low, high;  // keys of the histogram's two ends
  uint32_t bin;        // of the last score chosen, or kNoBin
  uint32_t above;      // scores in higher bins
  uint32_t inside;     // scores in this one
  uint32_t safe_bin;   // where the `safe_rank`-th lies, or kNoBin
  uint32_t taken;      // running count of what was stored
};

struct Selection {
  union {
    struct {
      alignas(16) uint32_t slots[kSlots];
      uint32_t bins[kMaxBins];
    };
    int32_t chosen[kMaxK];
  };
  uint2 ties[kTies];  // a score's bits and its place
  uint32_t warp_sums[2][32];
  Found found[2];
  int32_t pages[kPagesHeld];
  uint32_t base;
  Sink sink;  // of select_exactly()
};

struct Candidates {
  uint2 entries[kCandidates];  // a score's bits and its index
};

// Sixteen bytes if `first + size <= n`; otherwise `to` stays as it is.
__device__ __forceinline__ void load_vector(const void* from, int end, int n, uint4& to) {
  asm volatile(
      "{ .reg .pred p; setp.le.s32 p, %5, %6;"
      " @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(end), "r"(n));
}

__device__ __forceinline__ int32_t load_latest(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Atomics as the hardware has them. Where the compiler sees that a warp's lanes share an address, it
// puts a warp-wide sum around; nobodys_offset() is 0, which it cannot see.
__device__ __forceinline__ uint32_t nobodys_offset(uint32_t at_most_2048) {
  return threadIdx.x & (at_most_2048 >> 12);
}
__device__ __forceinline__ void shared_increment(uint32_t at, uint32_t one) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(one) : "memory");
}
__device__ __forceinline__ uint32_t shared_add(uint32_t at, uint32_t by) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(by) : "memory");
  return before;
}
__device__ __forceinline__ void shared_widen(uint32_t low_at, uint32_t low, uint32_t high_at,
                                             uint32_t high) {
  asm volatile("red.shared.min.u32 [%0], %1;" ::"r"(low_at), "r"(low) : "memory");
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(high_at), "r"(high) : "memory");
}

__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The inner steps, each without a branch: the compiler would make one of every `if` here.
__device__ __forceinline__ void store_if_set(uint32_t bits, int bit, uint32_t& at, int32_t index) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 b; and.b32 b, %1, %2; setp.ne.u32 p, b, 0;"
      " @p st.shared.u32 [%0], %3; @p add.u32 %0, %0, 4; }"
      : "+r"(at)
      : "r"(bits), "r"(1u << bit), "r"(index)
      : "memory");
}

__device__ __forceinline__ void store_pair_if_set(uint32_t bits, int bit, uint32_t& at,
                                                  float score, int32_t index) {
  asm volatile(
      "{ .reg .pred p; .reg .u32 b; and.b32 b, %1, %2; setp.ne.u32 p, b, 0;"
      " @p st.shared.v2.u32 [%0], {%3, %4}; @p add.u32 %0, %0, 8; }"
      : "+r"(at)
      : "r"(bits), "r"(1u << bit), "r"(__float_as_uint(score)), "r"(index)
      : "memory");
}

// Which vectors of a row a thread holds. With one round: vector `tid + j * T`. With more, each group
// of eight threads owns kVectors runs of `rounds` consecutive 128-byte lines, and round m is line m
// of every run, so that any one round is a sample spread evenly over the row.
template <int T, int E, typename Score>
struct Layout {
  static constexpr int kSize = ScoreVector<Score>::kSize;
  static constexpr int kVectors = E / kSize;
  int base, step, rounds;

  __device__ __forceinline__ explicit Layout(int n) {
    const int vectors = (n + kSize - 1) / kSize;
    rounds = max(1, (vectors + T * kVectors - 1) / (T * kVectors));
    const int thread = threadIdx.x;
    base = rounds == 1 ? thread : (thread / 8) * (kVectors * rounds * 8) + thread % 8;
    step = rounds == 1 ? T : rounds * 8;
  }
  __device__ __forceinline__ int vector(int j, int round) const {
    return base + j * step + round * 8;
  }
  __device__ __forceinline__ int index(int e, int round) const {
    return vector(e / kSize, round) * kSize + e % kSize;
  }
};

// The row's last vector, where it is not full: nothing beyond `count` scores is read, NaN fills up.
template <typename Score>
__device__ __forceinline__ uint4 load_tail(const Score* from, int count) {
  constexpr uint64_t kAbsent = ScoreVector<Score>::kAbsent * 0x100000001ull;
  constexpr int kBits = 8 * sizeof(Score);
  uint64_t low = kAbsent, high = kAbsent;
#pragma unroll 1
  for (int i = count - 1; i >= 0; --i) {
    high = high << kBits | low >> (64 - kBits);
    low = low << kBits | __float_as_uint(as_float(from[i])) >> (32 - kBits);
  }
  return make_uint4(low, low >> 32, high, high >> 32);
}

// to = from if a == b. An `if` with a register array on its left becomes an index into memory.
__device__ __forceinline__ void replace_if_equal(int a, int b, const uint4& from, uint4& to) {
  asm("{ .reg .pred p; setp.eq.s32 p, %4, %5; @p mov.u32 %0, %6; @p mov.u32 %1, %7;"
      " @p mov.u32 %2, %8; @p mov.u32 %3, %9; }"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "r"(a), "r"(b), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w));
}

// Load round 0; NaN where the row has ended. Of a longer row, only whole vectors.
template <int kCount, int T, int E, typename Score>
__device__ __forceinline__ void load(const Score* scores, int n,
                                     const Layout<T, E, Score>& layout, uint4 (&raw)[kCount]) {
  using Vector = ScoreVector<Score>;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const int at = layout.vector(j, 0) * Vector::kSize;
    raw[j] = make_uint4(Vector::kAbsent, Vector::kAbsent, Vector::kAbsent, Vector::kAbsent);
    load_vector(scores + at, at + Vector::kSize, n, raw[j]);
  }
  // Of a row of one round, the last vector is thread (last % T)'s.
  const int last = n / Vector::kSize;
  if (layout.rounds == 1 && n % Vector::kSize != 0 && last % T == static_cast<int>(threadIdx.x)) {
    const uint4 tail = load_tail(scores + last * Vector::kSize, n % Vector::kSize);
#pragma unroll
    for (int j = 0; j < kCount; ++j) replace_if_equal(j, last / T, tail, raw[j]);
  }
}

template <typename Score, int E>
__device__ __forceinline__ void unpack(const uint4 (&raw)[E / ScoreVector<Score>::kSize],
                                       float (&x)[E]) {
#pragma unroll
  for (int j = 0; j < E / ScoreVector<Score>::kSize; ++j) {
    ScoreVector<Score>::unpack(raw[j], x + j * ScoreVector<Score>::kSize);
  }
}

template <int T>
__device__ __forceinline__ void clear_bins(Selection& s) {
#pragma unroll
  for (int i = 0; i < kMaxBins / 4; i += T) {
    const int at = i + threadIdx.x;
    if (at < kMaxBins / 4) reinterpret_cast<uint4*>(s.bins)[at] = make_uint4(0, 0, 0, 0);
  }
}

// No barrier: the caller has one before the first use.
template <int T>
__device__ __forceinline__ void begin(Selection& s) {
  clear_bins<T>(s);
  if (threadIdx.x < 2) s.found[threadIdx.x] = Found{0xffffffffu, 0, kNoBin, 0, 0, kNoBin, 0};
}

// Find the bin that holds the `rank`-th entry from the top, and the `safe_rank`-th, a later one or 0
// for none. Needs bins complete and visible, and both kNoBin in `found`; ends with a barrier.
template <int T, int N>
__device__ __forceinline__ void find_bin(Selection& s, Found& found, uint32_t rank,
                                         uint32_t safe_rank) {
  constexpr int kEach = N / T;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (T - 1 - static_cast<int>(threadIdx.x)) * kEach;
  uint32_t count[kEach];
  if constexpr (kEach % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(s.bins + first + i);
      count[i] = four.x;
      count[i + 1] = four.y;
      count[i + 2] = four.z;
      count[i + 3] = four.w;
    }
  } else {
    static_assert(kEach == 2);
    const uint2 two = *reinterpret_cast<const uint2*>(s.bins + first);
    count[0] = two.x;
    count[1] = two.y;
  }
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) own += count[i];
  const uint32_t inclusive = warp_inclusive_sum(own, lane);
  if (lane == 31) s.warp_sums[0][warp] = inclusive;
  __syncthreads();
  const uint32_t before = __reduce_add_sync(kWholeWarp, lane < warp ? s.warp_sums[0][lane] : 0);
  uint32_t above = before + inclusive - own;
  if (above < max(rank, safe_rank) && rank <= above + own) {
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (above < rank && rank <= above + count[i]) {
        found.bin = first + i;
        found.above = above;
        found.inside = count[i];
      }
      if (above < safe_rank && safe_rank <= above + count[i]) found.safe_bin = first + i;
      above += count[i];
    }
  }
  __syncthreads();
}

// The linear map of scores to bins, as a float that is kBinZero for the lowest. Monotone: both
// operations round monotonically. Up to there it need not be whole: the slots lie below.
struct Scale {
  float low, high, per_score, width;  // `width` of a bin, in scores
  __device__ __forceinline__ float bin(float score) const {
    return __fmaf_rn(__fsub_rn(score, low), per_score, kBinZero);
  }
  // A score a little below all of a bin's.
  __device__ __forceinline__ float edge(uint32_t of) const {
    const float moved = 0.52f * width + 5e-7f * fmaxf(fabsf(low), fabsf(high));
    return low + (static_cast<float>(of) * width - moved);
  }
};

// Count the first `used` scores of each thread and find the bin of the `rank`-th largest, and of the
// `safe_rank`-th if so many are counted; there are about `n`. False: not possible so.
template <int T, int E>
__device__ __forceinline__ bool locate(const float (&x)[E], int used, int n, uint32_t rank,
                                       uint32_t safe_rank, Selection& s, Found& found,
                                       Scale& scale) {
  constexpr int kBins = 4 * T < kMaxBins ? 4 * T : kMaxBins;
  // The low end: the least of all threads' highest scores, or, where too many scores are wanted for
  // that, of all pairs' higher ones. Bins below it are not counted.
  const float infinity = __int_as_float(0x7f800000);
  float most = -infinity;
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (e < used) most = fmaxf(most, x[e]);
  }
  const uint32_t most_key = order_key(most);
  uint32_t low_key = most > -infinity ? most_key : 0xffffffffu;
  if (static_cast<uint64_t>(rank) * ((n + T - 1) / T) > 3ull * n) {
    float least = infinity;
#pragma unroll
    for (int e = 0; e < E; e += 2) {
      const float higher = fmaxf(x[e], x[e + 1]);
      if (e < used) least = fminf(least, higher > -infinity ? higher : infinity);
    }
    low_key = order_key(least);
  }
  const uint32_t warp_low = __reduce_min_sync(kWholeWarp, low_key);
  const uint32_t warp_high = __reduce_max_sync(kWholeWarp, most_key);
  if (threadIdx.x % 32 == 0) {
    const uint32_t offset = nobodys_offset(rank);
    shared_widen(shared_address(&found.low) + offset, warp_low,
                 shared_address(&found.high) + offset, warp_high);
  }
  __syncthreads();
  scale.low = from_order_key(found.low);
  scale.high = from_order_key(found.high);
  const float range = scale.high - scale.low;
  const bool usable = range > 1e-30f && range < 1e37f;  // false for NaN
  scale.per_score = __fdividef(static_cast<float>(kBins - 2), range);
  scale.width = range * (1.0f / static_cast<float>(kBins - 2));
  if (usable) {
    // Of the card's two pipes, integer operations and comparisons have the slower one: hence a
    // maximum in place of a condition, and a multiplication (by what must not look like 4) for the
    // address. What is no number goes to the lane's slot too.
    const uint32_t four = 4 - (rank >> 12);
    const uint32_t first = shared_address(s.slots) - 4 * __float_as_uint(kSlotZero);
    const float slot = kSlotZero + static_cast<float>(threadIdx.x % 32);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      if (e >= used) break;
      const float bin = fmaxf(scale.bin(x[e]), slot);
      shared_increment(multiply_add(__float_as_uint(bin), four, first), four / 4);
    }
  }
  __syncthreads();
  if (!usable) return false;
  find_bin<T, kBins>(s, found, rank, safe_rank);
  return found.bin != kNoBin;
}

// Add the scores in `bits` to the candidates. Counts on beyond what fits.
// A bit for each score above the edge, NaN's 0: the sign of a difference, shifted in.
struct Itself {
  __device__ __forceinline__ float bin(float score) const { return score; }
};
template <int E, typename Map = Itself>
__device__ __forceinline__ uint32_t bits_above(const float (&x)[E], int used, float edge,
                                               const Map& map = {}) {
  uint32_t bits = 0;
#pragma unroll
  for (int e = E - 1; e >= 0; --e) {
    if (e < used) bits = __funnelshift_l(__float_as_uint(__fsub_rn(edge, map.bin(x[e]))), bits, 1);
  }
  return bits;
}

template <int E, typename Index>
__device__ __forceinline__ void append(const float (&x)[E], uint32_t bits, Candidates& to,
                                       uint32_t* taken, Index index) {
  if (bits == 0) return;
  const uint32_t own = __popc(bits);
  const uint32_t first = shared_add(shared_address(taken) + nobodys_offset(own), own);
  if (first + own > kCandidates) return;
  uint32_t at = shared_address(to.entries) + 8 * first;
#pragma unroll
  for (int e = 0; e < E; ++e) store_pair_if_set(bits, e, at, x[e], index(e));
}

// Select by digits of the key, in order of the index: equal scores go to the lowest indices and the
// output ascends. Any n >= k; reads the input two to four times.
template <int T, typename Score>
__device__ __noinline__ void select_by_digits(const Score* scores, const int32_t* map, int n, int k,
                                              Selection& s) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t prefix = 0, decided = 0, remaining = k, first_sure = 0;
  bool whole_bin = false;
  for (int shift = 21; shift >= 0 && !whole_bin; shift = shift == 21 ? 10 : shift - 10) {
    __syncthreads();
    begin<T>(s);
    __syncthreads();
    const uint32_t mask = shift == 0 ? 1023u : 2047u;
    for (int i = threadIdx.x; i < n; i += T) {
      const uint32_t key = order_key(as_float(scores[i]));
      if ((key & decided) == prefix) atomicAdd(&s.bins[key >> shift & mask], 1u);
    }
    __syncthreads();
    find_bin<T, kMaxBins>(s, s.found[0], remaining, 0);
    remaining -= s.found[0].above;
    prefix |= s.found[0].bin << shift;
    decided |= mask << shift;
    whole_bin = s.found[0].inside == remaining;
  }
  first_sure = whole_bin ? prefix : prefix + 1;
  const Sink sink = s.sink;
  const uint32_t wanted_equal = whole_bin ? 0 : remaining;

  uint32_t sure_before = 0, equal_before = 0;
  int half = 0;
  for (int first = 0; first < n; first += 4 * T) {
    const int own = first + static_cast<int>(warp) * 128 + static_cast<int>(lane);
    uint32_t sure[4], equal[4], total = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = own + 32 * j;
      const uint32_t key = i < n ? order_key(as_float(scores[i])) : 0u;
      const bool is_sure = i < n && key >= first_sure;
      sure[j] = __ballot_sync(kWholeWarp, is_sure);
      equal[j] = __ballot_sync(kWholeWarp, i < n && !is_sure && key == prefix);
      total += __popc(sure[j]) | __popc(equal[j]) << 16;
    }
    if (lane == 0) s.warp_sums[half][warp] = total;
    __syncthreads();
    const uint32_t others = lane < T / 32 ? s.warp_sums[half][lane] : 0;
    const uint32_t before = __reduce_add_sync(kWholeWarp, lane < warp ? others : 0);
    const uint32_t all = __reduce_add_sync(kWholeWarp, others);
    uint32_t sure_at = sure_before + (before & 0xffffu), equal_at = equal_before + (before >> 16);
    const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t s_at = sure_at + __popc(sure[j] & lower_lanes);
      const uint32_t e_at = equal_at + __popc(equal[j] & lower_lanes);
      const bool is_sure = sure[j] >> lane & 1;
      if (is_sure || (equal[j] >> lane & 1 && e_at < wanted_equal)) {
        const int i = own + 32 * j;
        const uint32_t at = s_at + min(e_at, wanted_equal);
        const int32_t index = map == nullptr ? i : map[i];
        if (sink.entries != nullptr) {
          sink.entries[at] = make_uint2(__float_as_uint(as_float(scores[i])), index);
        } else {
          sink.put(at, index);
        }
      }
      sure_at += __popc(sure[j]);
      equal_at += __popc(equal[j]);
    }
    sure_before += all & 0xffffu;
    equal_before = min(equal_before + (all >> 16), 0x7fffffffu);
    half ^= 1;
    if (sure_before + min(equal_before, wanted_equal) == static_cast<uint32_t>(k)) break;
  }
}

template <int T, typename Score>
__device__ __forceinline__ void select_exactly(const Score* scores, const int32_t* map, int n,
                                               int k, Selection& s, const Sink& sink) {
  if (threadIdx.x == 0) s.sink = sink;
  select_by_digits<T>(scores, map, n, k, s);  // begins with a barrier
}

// Store what lies above the found bin, rank what lies in it. False, and nothing is stored, if more
// than kTies do. `place`: of a score, a number; `resolve`: from that number to the index to store.
template <int T, int E, typename Place, typename Resolve>
__device__ __forceinline__ bool choose(const float (&x)[E], int used, uint32_t k, Selection& s,
                                       Found& found, const Scale& scale, const Sink& sink,
                                       Place place, Resolve resolve) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // The bin's edges as scores, moved out by more than all that was rounded: what reaches the upper
  // one surely lies above the bin, and what lies in it or above surely reaches the lower one.
  const float largest = fmaxf(fabsf(scale.low), fabsf(scale.high));
  const float half = 0.52f * scale.width + 5e-7f * largest;
  const float middle = static_cast<float>(found.bin) * scale.width;
  const float upper = scale.low + (middle + half);
  const float lower = scale.low + (middle - half);
  const uint32_t sure_bits = bits_above(x, used, upper);
  const uint32_t reached_bits = bits_above(x, used, lower);
  const uint32_t tied_bits = reached_bits & ~sure_bits;
  const uint32_t own = __popc(sure_bits) | __popc(tied_bits) << 16;
  const uint32_t inclusive = warp_inclusive_sum(own, lane);
  uint32_t base = 0;
  if (lane == 31) base = shared_add(shared_address(&found.taken) + nobodys_offset(k), inclusive);
  base = __shfl_sync(kWholeWarp, base, 31);
  const uint32_t before = base + inclusive - own;
  uint32_t at = shared_address(s.chosen) + 4 * (before & 0xffffu);
#pragma unroll
  for (int e = 0; e < E; ++e) {
    if (e >= used) break;
    store_if_set(sure_bits, e, at, place(e));
  }
  if (__any_sync(kWholeWarp, tied_bits != 0)) {
    const uint32_t first = before >> 16;
    if (first + (own >> 16) <= kTies) {
      uint32_t tied_at = shared_address(s.ties) + 8 * first;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        if (e >= used) break;
        store_pair_if_set(tied_bits, e, tied_at, x[e], place(e));
      }
    }
  }
  __syncthreads();
  const uint32_t sure = found.taken & 0xffffu, inside = found.taken >> 16;
  if (inside > kTies) return false;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < sure; i += T) sink.put(i, resolve(s.chosen[i]));
#pragma unroll 1
  for (uint32_t target = warp; target < inside; target += T / 32) {
    const uint2 mine = s.ties[target];
    const float score = __uint_as_float(mine.x);
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < inside; first += 32) {
      const uint2 other = s.ties[min(first + lane, kTies - 1)];
      const float its = __uint_as_float(other.x);
      const bool is_better = its > score || (its == score && other.y < mine.y);
      better += __popc(__ballot_sync(kWholeWarp, is_better && first + lane < inside));
    }
    if (lane == 0 && sure + better < k) sink.put(sure + better, resolve(mine.y));
  }
  return true;
}

// The row's last scores, fewer than fill a vector.
template <typename Score>
__device__ __forceinline__ void append_tail(const Score* scores, int n, float edge, Candidates& to,
                                            uint32_t* taken) {
  constexpr int kSize = ScoreVector<Score>::kSize;
  if (static_cast<int>(threadIdx.x) < n % kSize) {
    const int at = n - n % kSize + threadIdx.x;
    const float last[1] = {as_float(scores[at])};
    append(last, bits_above(last, 1, edge), to, taken, [&](int) { return at; });
  }
}

// Select among the first `entries` candidates, in bins that are clear. Stores only on success; in
// any case `scale` and found[1] say where the k-th lies, if found[1].bin is one.
template <int T>
__device__ __forceinline__ bool choose_among_candidates(const int32_t* map, int entries, int k,
                                                        Selection& s, Candidates& candidates,
                                                        Scale& scale, const Sink& sink,
                                                        bool only_locate = false) {
  const int each = (entries + T - 1) / T;
  constexpr int kEach = kCandidates / T;
  float y[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int at = e * T + threadIdx.x;
    y[e] = __uint_as_float(at < entries ? candidates.entries[at].x : 0x7fffffffu);
  }
  if (!locate<T>(y, each, entries, k, 0, s, s.found[1], scale) || only_locate) return false;
  return choose<T>(y, each, k, s, s.found[1], scale, sink,
                   [](int e) { return e * T + static_cast<int>(threadIdx.x); },
                   [&](int place) {
                     const int at = candidates.entries[place].y;
                     return map == nullptr ? at : map[at];
                   });
}

// The second attempt at a long row, when fewer than k candidates were found, or more than fit: with
// a score that so many surely reach; or with the k-th of those that fitted, which is a higher one.
template <int T, typename Score>
__device__ __noinline__ void select_again(const Score* scores, const int32_t* map, int n, int k,
                                          float enough, int kept, Selection& s,
                                          Candidates& candidates) {
  constexpr int kSize = ScoreVector<Score>::kSize;
  asm volatile("cp.async.wait_all;" ::: "memory");
  Scale scale;
#pragma unroll 1
  for (int attempt = 0; attempt < 4; ++attempt) {
    __syncthreads();
    begin<T>(s);
    __syncthreads();
    if (attempt > 0 || kept < k) {
      uint32_t* taken = &s.found[0].taken;
      for (int vector = threadIdx.x; vector < n / kSize; vector += T) {
        uint4 raw;
        load_vector(scores + vector * kSize, 0, 0, raw);
        float y[kSize];
        ScoreVector<Score>::unpack(raw, y);
        append(y, bits_above(y, kSize, enough), candidates, taken,
               [&](int e) { return vector * kSize + e; });
      }
      append_tail(scores, n, enough, candidates, taken);
      __syncthreads();
      kept = *taken;
      if (kept < k) break;
    }
    // What came too late for the candidates left no gap before the last 32 of them.
    const bool fits = kept <= kCandidates;
    const int entries = fits ? kept : kCandidates - 32;
    if (choose_among_candidates<T>(map, entries, k, s, candidates, scale, s.sink, !fits)) return;
    if (fits || s.found[1].bin == kNoBin) break;
    enough = scale.edge(s.found[1].bin);
  }
  select_by_digits<T>(scores, map, n, k, s);
}

// The rest of a long row on its way to a block: each thread reads back only what it sent for.
template <int T, int E, typename Score>
struct Stream {
  static constexpr int kSize = ScoreVector<Score>::kSize;
  static constexpr int kStages = 3;
  static constexpr int kVectors = T == 256 ? 2 : 1024 / T;  // of a thread in a stage
  static constexpr int kStagesOfRound = E / kSize / kVectors;
  static_assert(kStagesOfRound >= 1);

  uint4 ring[kStages][kVectors][T];

  static __device__ __forceinline__ int first_of(const Layout<T, E, Score>& layout, int stage,
                                                 int v) {
    return kSize * layout.vector(stage % kStagesOfRound * kVectors + v, 1 + stage / kStagesOfRound);
  }

  // Send for a stage. Past the last one, nothing is asked for, but counted all the same.
  __device__ __forceinline__ void send(const Score* scores, int n,
                                       const Layout<T, E, Score>& layout, int stage, int stages) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = first_of(layout, stage, v);
      if (stage < stages && first + kSize <= n) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(&ring[stage % kStages][v][threadIdx.x])),
                     "l"(scores + first)
                     : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  static __device__ __forceinline__ void wait_for_oldest() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
  }
};

// What a block keeps in shared memory for rows longer than its registers.
template <int T, int E, typename Score>
struct LongRow {
  Candidates candidates;
  Stream<T, E, Score> stream;
};

// Select k of the n > k scores of which `raw` holds round 0. `map`: indices to store instead of
// positions, or null. The caller has called begin() and passed a barrier.
template <int T, int E, bool kLong, typename Score>
__device__ __forceinline__ void select(const Score* scores, const int32_t* map, int n, int k,
                                       const Layout<T, E, Score>& layout,
                                       uint4 (&raw)[E / ScoreVector<Score>::kSize], Selection& s,
                                       unsigned char* long_row, const Sink& sink) {
  float x[E];
  unpack<Score>(raw, x);
  Scale scale;
  if (!kLong || layout.rounds == 1) {
    const bool done = locate<T>(x, E, n, k, 0, s, s.found[0], scale) &&
                      choose<T>(x, E, k, s, s.found[0], scale, sink,
                                [&](int e) { return layout.index(e, 0); },
                                [&](int place) { return map == nullptr ? place : map[place]; });
    if (!done) select_exactly<T>(scores, map, n, k, s, sink);
    return;
  }
  if constexpr (kLong) {
    using Way = Stream<T, E, Score>;
    constexpr int kSize = ScoreVector<Score>::kSize;
    auto* row = reinterpret_cast<LongRow<T, E, Score>*>(long_row);
    Candidates& candidates = row->candidates;
    const int rounds = layout.rounds;
    const int stages = (rounds - 1) * Way::kStagesOfRound;
#pragma unroll
    for (int stage = 0; stage < Way::kStages; ++stage) {
      row->stream.send(scores, n, layout, stage, stages);
    }
    // So many of the row's k best are in the sample, give or take: choose a score that a few
    // standard deviations more of the sample reach. What k of the sample reach is safe.
    const int used = rounds <= 8 ? E / 2 : E;  // a sample of a sixteenth is enough
    const float share = static_cast<float>(used) / static_cast<float>(E * rounds);
    const float expected = static_cast<float>(k) * share;
    const float margin = 4.5f * sqrtf(expected * (1.0f - share)) + 4.0f;
    const int rank = min(k, static_cast<int>(expected + margin) + 1);
    const int sampled = static_cast<int>(static_cast<float>(n) * share);
    if (!locate<T>(x, used, sampled, rank, k, s, s.found[0], scale)) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      return select_exactly<T>(scores, map, n, k, s, sink);
    }
    uint32_t* taken = &s.found[0].taken;
    const float enough = scale.edge(s.found[0].bin);
    const float safe = s.found[0].safe_bin == kNoBin ? enough : scale.edge(s.found[0].safe_bin);
    clear_bins<T>(s);
    append(x, bits_above(x, E, enough), candidates, taken,
           [&](int e) { return layout.index(e, 0); });
    append_tail(scores, n, enough, candidates, taken);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      Way::wait_for_oldest();
      float y[Way::kVectors * kSize];
      uint32_t present = 0;
#pragma unroll
      for (int v = 0; v < Way::kVectors; ++v) {
        const uint4 sent = row->stream.ring[stage % Way::kStages][v][threadIdx.x];
        ScoreVector<Score>::unpack(sent, y + v * kSize);
        const bool is_whole = Way::first_of(layout, stage, v) + kSize <= n;
        present |= is_whole ? ((1u << kSize) - 1) << (v * kSize) : 0;
      }
      append(y, bits_above(y, Way::kVectors * kSize, enough) & present, candidates, taken,
             [&](int e) { return Way::first_of(layout, stage, e / kSize) + e % kSize; });
      row->stream.send(scores, n, layout, stage + Way::kStages, stages);
    }
    __syncthreads();
    const int kept = *taken;
    if (kept < k || kept > kCandidates) {
      if (threadIdx.x == 0) s.sink = sink;
      select_again<T>(scores, map, n, k, safe, kept, s, candidates);
    } else if (!choose_among_candidates<T>(map, kept, k, s, candidates, scale, sink)) {
      select_exactly<T>(scores, map, n, k, s, sink);
    }
  }
}

// A row of at most k entries: all of them, then -1.
template <int T>
__device__ __forceinline__ void take_all(int n, int k, const Sink& sink) {
#pragma unroll 1
  for (int i = threadIdx.x; i < k; i += T) {
    if (i < n) {
      sink.put(i, i);
    } else {
      sink.out[i] = -1;
      if (sink.raw != nullptr) sink.raw[i] = -1;
    }
  }
}

__device__ __forceinline__ Sink output_of(const Arguments& a, int row) {
  const int64_t at = static_cast<int64_t>(row) * a.k;
  return Sink{a.page_table == nullptr ? nullptr : a.page_table + row * a.page_stride, a.page_bits,
              a.out + at, a.raw == nullptr ? nullptr : a.raw + at, nullptr};
}

__device__ __forceinline__ int length_of(const Arguments& a, int row) {
  return max(0, min(load_latest(a.lengths + row), a.limit));
}

// Blocks that a multiprocessor should hold. For sm_120 the compiler needs a few registers more, and
// would spill them.
template <int E>
constexpr int held(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return E == 32 && blocks > 2 ? 2 : blocks;
#else
  return blocks;
#endif
}

// One block a row.
template <int T, int E, bool kLong, int kBlocks, typename Score>
__global__ __launch_bounds__(T, held<E>(kBlocks)) void rows_kernel(const __grid_constant__ Arguments a) {
  __shared__ Selection s;
  extern __shared__ __align__(16) unsigned char long_row[];  // LongRow, if kLong
  const int row = blockIdx.x;
  const Score* scores = static_cast<const Score*>(a.scores) + row * a.score_stride;
  Sink sink = output_of(a, row);
  // A guess: the kernel before this one may still write it. It only says what to load early.
  const int guess = length_of(a, row);
  begin<T>(s);
  __syncthreads();
  wait_for_predecessor();
  release_successor();
  Layout<T, E, Score> layout(guess);
  uint4 raw[E / ScoreVector<Score>::kSize];
  if (guess > a.k) load(scores, guess, layout, raw);
  const int thread = threadIdx.x;
  constexpr int kEach = kLong && T < kPagesHeld ? 2 : 1;
  constexpr int kHeld = kEach * T < kPagesHeld ? kEach * T : kPagesHeld;
  const auto pages = [&](int entries) { return (entries + (1 << a.page_bits) - 1) >> a.page_bits; };
  int32_t page[kEach];
  const auto load_pages = [&](int count) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * T + thread;
      page[i] = sink.pages != nullptr && at < min(count, kHeld) ? sink.pages[at] : 0;
    }
  };
  load_pages(pages(guess));
  const int n = length_of(a, row);  // after the loads: nothing of theirs waits for it
  if (n <= a.k) return take_all<T>(n, a.k, sink);
  if (guess != n) {
    layout = Layout<T, E, Score>(n);
    load(scores, n, layout, raw);
    load_pages(pages(n));
  }
  if (sink.pages != nullptr && pages(n) <= kHeld) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * T + thread < kHeld) s.pages[i * T + thread] = page[i];
    }
    sink.pages = s.pages;
  }
  select<T, E, kLong, Score>(scores, nullptr, n, a.k, layout, raw, s,
                             long_row, sink);
}

// One block a row, equal scores to the lowest indices, indices ascending.
template <int T, typename Score>
__global__ __launch_bounds__(T) void ordered_kernel(const __grid_constant__ Arguments a) {
  __shared__ Selection s;
  const int row = blockIdx.x;
  const Score* scores = static_cast<const Score*>(a.scores) + row * a.score_stride;
  const Sink sink = output_of(a, row);
  wait_for_predecessor();
  release_successor();
  const int n = length_of(a, row);
  if (n <= a.k) return take_all<T>(n, a.k, sink);
  select_exactly<T>(scores, nullptr, n, a.k, s, sink);
}

// The workspace of the split: zero before the first call, and again after every call.
struct RowState {
  uint32_t stored;   // candidates of the row so far
  uint32_t arrived;  // chunks done
};

struct Workspace {
  // First a RowState for each row, then:
  float* scores;     // [rows, capacity]
  int32_t* indices;  // [rows, capacity]
  int64_t capacity;

  static __host__ __device__ int64_t capacity_of(int64_t chunks, int64_t k) {
    return (chunks * (k + kTies) + 3) / 4 * 4;
  }
  // The same for all shapes, so that calls of different shapes can share a workspace.
  static constexpr int64_t kHeaderBytes = 4096;
  static constexpr int kMostRows = kHeaderBytes / sizeof(RowState);

  __device__ __forceinline__ explicit Workspace(const Arguments& a) {
    capacity = capacity_of(a.chunks, a.k);
    char* after = static_cast<char*>(a.workspace) + kHeaderBytes;
    scores = reinterpret_cast<float*>(after);
    indices = reinterpret_cast<int32_t*>(after + 4 * capacity * a.rows);
  }
};

// Select among what the chunks of a row kept, or in a row of one chunk, in registers of its own. The
// sink is s.sink.
template <int T, int E, bool kLong, typename Score>
__device__ __noinline__ void select_apart(const Score* scores, const int32_t* map, int n, int k,
                                          Selection& s, unsigned char* long_row) {
  const Layout<T, E, Score> layout(n);
  uint4 raw[E / ScoreVector<Score>::kSize];
  load(scores, n, layout, raw);
  const Sink sink = s.sink;
  select<T, E, kLong, Score>(scores, map, n, k, layout, raw, s, long_row, sink);
}

// Chunks of a row are equally long, but for the last: a multiple of what keeps vectors aligned.
__device__ __forceinline__ int length_of_chunk(int n, int most) {
  const int chunks = max(1, (n + most - 1) / most);
  return ((n + chunks - 1) / chunks + 7) / 8 * 8;
}

// blockIdx.x: chunk, blockIdx.y: row. A chunk is what one block's registers hold, or less.
template <int T, int E, typename Score>
__global__ __launch_bounds__(T, 2) void split_kernel(const __grid_constant__ Arguments a) {
  __shared__ Selection s;
  extern __shared__ __align__(16) unsigned char long_row[];  // LongRow of the second selection
  Candidates& candidates = reinterpret_cast<LongRow<T, E, float>*>(long_row)->candidates;
  const int row = blockIdx.y;
  const Score* scores = static_cast<const Score*>(a.scores) + row * a.score_stride;
  const auto chunk_of = [&](int n, int& first) {
    const int length = length_of_chunk(n, T * E);
    first = blockIdx.x * length;
    return min(n - first, length);
  };
  const int guess = length_of(a, row);
  begin<T>(s);
  __syncthreads();
  wait_for_predecessor();
  release_successor();
  int first;
  int length = chunk_of(guess, first);
  uint4 raw[E / ScoreVector<Score>::kSize];
  Layout<T, E, Score> layout(length);
  if (guess > a.k && length > 0) load(scores + first, length, layout, raw);
  const int n = length_of(a, row);
  if (n <= a.k) {
    if (blockIdx.x == 0) take_all<T>(n, a.k, output_of(a, row));
    return;
  }
  if (guess != n) {
    length = chunk_of(n, first);
    if (length > 0) {
      layout = Layout<T, E, Score>(length);
      load(scores + first, length, layout, raw);
    }
  }
  if (length <= 0) return;
  if (length == n) {  // the only chunk
    if (threadIdx.x == 0) s.sink = output_of(a, row);
    __syncthreads();
    return select_apart<T, E, false, Score>(scores, nullptr, n, a.k, s, nullptr);
  }

  RowState& state = static_cast<RowState*>(a.workspace)[row];
  float x[E];
  unpack<Score>(raw, x);
  const int wanted = min(a.k, length);
  Scale scale;
  const Found& found = s.found[0];
  const bool exactly = length <= a.k || !locate<T>(x, E, length, a.k, 0, s, s.found[0], scale) ||
                       found.inside > kTies;
  const uint32_t total = exactly ? wanted : found.above + found.inside;
  uint32_t base = 0;
  if (threadIdx.x == 0) base = atomicAdd(&state.stored, total);
  if (exactly) {
    const Sink aside{nullptr, 0, nullptr, nullptr, candidates.entries};
    select_exactly<T>(scores + first, nullptr, length, wanted, s, aside);
  } else {
    const float below = kBinZero + static_cast<float>(found.bin) - 1.0f;
    const uint32_t bits = bits_above(x, E, below, scale);
    append(x, bits, candidates, &s.found[1].taken, [&](int e) { return layout.index(e, 0); });
  }
  if (threadIdx.x == 0) s.base = base;
  __syncthreads();
  base = s.base;
  const Workspace workspace(a);
  float* kept_scores = workspace.scores + row * workspace.capacity;
  int32_t* kept_indices = workspace.indices + row * workspace.capacity;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < total; i += T) {
    const uint2 entry = candidates.entries[i];
    kept_scores[base + i] = __uint_as_float(entry.x);
    kept_indices[base + i] = first + static_cast<int32_t>(entry.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const int chunks = (n + length_of_chunk(n, T * E) - 1) / length_of_chunk(n, T * E);
    s.base = atomicAdd(&state.arrived, 1u) + 1 == static_cast<uint32_t>(chunks);
    __threadfence();
  }
  __syncthreads();
  if (!s.base) return;

  const int kept = static_cast<int>(load_latest(reinterpret_cast<int32_t*>(&state.stored)));
  begin<T>(s);
  if (threadIdx.x == 0) s.sink = output_of(a, row);
  __syncthreads();  // and all have read `stored`
  if (threadIdx.x == 0) state = RowState{0, 0};
  select_apart<T, E, true, float>(kept_scores, kept_indices, kept, a.k, s, long_row);
}

}  // namespace seatrial::topk
