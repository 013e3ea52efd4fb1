// Chooses the kernel for a shape and queues it.
#include "topk/topk.cuh"

#include <atomic>

namespace seatrial::topk {
namespace {

// The ways to select; 0 lets the shape decide. The others serve tests and benchmarks.
enum Way { kByShape = 0, kRows2048 = 1, kRows4096 = 2, kRows8192 = 3, kLong512 = 4, kLong1024 = 5, kSplit = 6, kRows8192Many = 7, kRows16384 = 8 };

constexpr int kSplitThreads = 512, kSplitEach = 16, kChunk = kSplitThreads * kSplitEach;
constexpr int kSplitBlocks = 264;    // at most so many chunks: more rows keep the card busy without
constexpr int kSplitWidth = 32768;  // no split up to here: one block is as fast

int chunks_of(int width) { return ceil_div(width, kChunk); }

Way way_of(int rows, int width) {
  if (width <= 2048) return kRows2048;
  if (width <= 4096) return kRows4096;
  if (width <= 8192) return kRows8192;
  if (width > kSplitWidth && rows * chunks_of(width) <= kSplitBlocks) return kSplit;
  return rows <= 132 || width > 131072 ? kLong1024 : kLong512;
}

// Dynamic shared memory beyond 48 KiB is asked for once for each kernel and device.
template <typename Kernel>
int allow_shared(Kernel* kernel, size_t bytes, std::atomic<uint64_t>& asked) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return static_cast<int>(error);
  const uint64_t bit = 1ull << (device & 63);
  if (asked.load(std::memory_order_relaxed) & bit) return 0;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) asked.fetch_or(bit, std::memory_order_relaxed);
  return static_cast<int>(error);
}

template <int T, int E, bool kLong, int kBlocks, typename Score>
int queue_rows(const Arguments& a, void* stream) {
  constexpr auto kernel = rows_kernel<T, E, kLong, kBlocks, Score>;
  size_t shared = 0;
  if constexpr (kLong) {
    shared = sizeof(LongRow<T, E, Score>);
    static std::atomic<uint64_t> asked{0};
    if (const int error = allow_shared(kernel, shared, asked)) return error;
  }
  return launch(kernel, dim3(a.rows), T, shared, stream, true, a);
}

template <typename Score>
int queue(const Arguments& a, Way way, bool ordered, void* stream) {
  if (ordered) return launch(ordered_kernel<512, Score>, dim3(a.rows), 512, 0, stream, true, a);
  switch (way) {
    case kRows2048:
      return queue_rows<256, 8, false, 5, Score>(a, stream);
    case kRows4096:
      return queue_rows<256, 16, false, 4, Score>(a, stream);
    case kRows8192:
      return queue_rows<512, 16, false, 2, Score>(a, stream);
    case kLong512:
      return queue_rows<512, 16, true, 2, Score>(a, stream);
    case kLong1024:
      return queue_rows<1024, 16, true, 1, Score>(a, stream);
    case kSplit: {
      constexpr auto kernel = split_kernel<kSplitThreads, kSplitEach, Score>;
      constexpr size_t kShared = sizeof(LongRow<kSplitThreads, kSplitEach, float>);
      static std::atomic<uint64_t> asked{0};
      if (const int error = allow_shared(kernel, kShared, asked)) return error;
      return launch(kernel, dim3(a.chunks, a.rows), kSplitThreads, kShared, stream, true, a);
    }
    case kRows8192Many:
      return queue_rows<256, 32, false, 3, Score>(a, stream);
    case kRows16384:
      return queue_rows<512, 32, false, 1, Score>(a, stream);
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

int most_of(Way way) {
  return way == kRows2048 ? 2048 : way == kRows4096 ? 4096 : way == kRows8192 || way == kRows8192Many ? 8192 : way == kRows16384 ? 16384 : 0x7fffffff;
}

}  // namespace
}  // namespace seatrial::topk

// Bytes of workspace that a call with these sizes may use; 0 for most. Zero them once.
extern "C" SEATRIAL_EXPORT long long seatrial_topk_workspace_bytes(int rows, int width, int k,
                                                                   int way) {
  using namespace seatrial::topk;
  if (rows <= 0 || width <= 0) return 0;
  if (way == kByShape) way = way_of(rows, width);
  if (way != kSplit) return 0;
  const long long capacity = Workspace::capacity_of(chunks_of(width), k);
  return Workspace::kHeaderBytes + 8 * capacity * rows;
}

// See Arguments for shapes. `bf16`: type of the scores. `pages`: columns of the page table.
extern "C" SEATRIAL_EXPORT int seatrial_topk(const void* scores, int bf16, const int* lengths,
                                             const int* page_table, int* out, int* raw,
                                             void* workspace, long long workspace_bytes,
                                             long long score_stride, long long page_stride,
                                             int rows, int width, int k, int page_size, int pages,
                                             int ordered, int way, void* stream) {
  using namespace seatrial::topk;
  constexpr int kInvalid = static_cast<int>(cudaErrorInvalidValue);
  const int vector = bf16 ? 8 : 4;
  if (rows < 0 || width < 0 || k <= 0 || k > kMaxK || k % 64 != 0) return kInvalid;
  if (score_stride % vector != 0 || reinterpret_cast<uintptr_t>(scores) % 16 != 0) return kInvalid;
  if (page_size <= 0 || (page_size & (page_size - 1)) != 0) return kInvalid;
  if (rows == 0) return 0;
  Arguments a{};
  a.scores = scores;
  a.lengths = lengths;
  a.page_table = page_table;
  a.out = out;
  a.raw = raw;
  a.workspace = workspace;
  a.score_stride = score_stride;
  a.page_stride = page_stride;
  a.rows = rows;
  a.width = width;
  a.k = k;
  while (1 << a.page_bits < page_size) ++a.page_bits;
  a.limit = width;
  if (page_table != nullptr && (static_cast<long long>(pages) << a.page_bits) < width) {
    a.limit = pages << a.page_bits;
  }
  a.chunks = chunks_of(width);
  const Way chosen = way == kByShape ? way_of(rows, width) : static_cast<Way>(way);
  if (width > most_of(chosen)) return kInvalid;
  if (chosen == kSplit && !ordered) {
    if (workspace == nullptr || rows > Workspace::kMostRows ||
        workspace_bytes < seatrial_topk_workspace_bytes(rows, width, k, kSplit)) {
      return kInvalid;
    }
  }
  return bf16 ? queue<__nv_bfloat16>(a, chosen, ordered != 0, stream)
              : queue<float>(a, chosen, ordered != 0, stream);
}
