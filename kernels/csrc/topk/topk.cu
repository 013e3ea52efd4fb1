// Chooses the kernel for a shape and queues it.
#include "topk/topk.cuh"

#include <atomic>

namespace seatrial::topk {
namespace {

// The ways to select; 0 lets the shape decide. The others serve tests and benchmarks. A name says up
// to which width a row fits the registers, and how many threads a block has.
enum Way {
  kByShape,
  kRows2048By256,
  kRows4096By256,
  kRows4096By512,
  kRows8192By256,
  kRows8192By512,
  kRows16384By512,
  kLongBy256,
  kLongBy512,
  kLongBy1024,
  kSplit,
  kWays
};

constexpr int kSplitThreads = 256, kSplitEach = 32, kChunk = kSplitThreads * kSplitEach;

int chunks_of(int width) { return ceil_div(width, kChunk); }

long long workspace_bytes_of(int rows, int width, int k) {
  return Workspace::kHeaderBytes + 8 * Workspace::capacity_of(chunks_of(width), k) * rows;
}

int most_of(Way way) {
  switch (way) {
    case kRows2048By256:
      return 2048;
    case kRows4096By256:
    case kRows4096By512:
      return 4096;
    case kRows8192By256:
    case kRows8192By512:
      return 8192;
    case kRows16384By512:
      return 16384;
    default:
      return 0x7fffffff;
  }
}

// Measured on an H200, which has 132 multiprocessors: whether there is at most a row for each
// (`few`), or more than two.
Way way_of(int rows, int width, int k, bool has_workspace) {
  const bool few = rows <= 132, many = rows > 264;
  if (width <= 2048) return kRows2048By256;
  if (width <= 4096) return few && k > 512 ? kRows4096By512 : kRows4096By256;
  if (width <= 8192) return many ? kRows8192By256 : kRows8192By512;
  if (width <= 16384 && few) return k <= 1024 ? kRows16384By512 : kLongBy1024;
  if (width <= 32768) return many ? kLongBy256 : kLongBy512;
  const int blocks = rows * chunks_of(width);
  if (has_workspace && (blocks <= 132 || (blocks <= 264 && rows <= 16))) return kSplit;
  return k > 1024 && width > 131072 ? kLongBy1024 : kLongBy512;
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
    case kRows2048By256:
      return queue_rows<256, 8, false, 5, Score>(a, stream);
    case kRows4096By256:
      return queue_rows<256, 16, false, 4, Score>(a, stream);
    case kRows4096By512:
      return queue_rows<512, 8, false, 2, Score>(a, stream);
    case kRows8192By256:
      return queue_rows<256, 32, false, 3, Score>(a, stream);
    case kRows8192By512:
      return queue_rows<512, 16, false, 2, Score>(a, stream);
    case kRows16384By512:
      return queue_rows<512, 32, false, 1, Score>(a, stream);
    case kLongBy256:
      return queue_rows<256, 16, true, 3, Score>(a, stream);
    case kLongBy512:
      return queue_rows<512, 16, true, 2, Score>(a, stream);
    case kLongBy1024:
      return queue_rows<1024, 16, true, 1, Score>(a, stream);
    case kSplit: {
      constexpr auto kernel = split_kernel<kSplitThreads, kSplitEach, Score>;
      constexpr size_t kShared = sizeof(LongRow<kSplitThreads, kSplitEach, float>);
      static std::atomic<uint64_t> asked{0};
      if (const int error = allow_shared(kernel, kShared, asked)) return error;
      return launch(kernel, dim3(a.chunks, a.rows), kSplitThreads, kShared, stream, true, a);
    }
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace seatrial::topk

// Bytes of workspace with which a call with these sizes is fastest; 0 for most. Zero them once. Calls
// that may run at the same time need one each.
extern "C" SEATRIAL_EXPORT long long seatrial_topk_workspace_bytes(int rows, int width, int k,
                                                                   int way) {
  using namespace seatrial::topk;
  if (rows <= 0 || width <= 0) return 0;
  if (way == kByShape) way = way_of(rows, width, k, true);
  return way == kSplit ? workspace_bytes_of(rows, width, k) : 0;
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
  const bool has_workspace = workspace != nullptr && rows <= Workspace::kMostRows &&
                             workspace_bytes >= workspace_bytes_of(rows, width, k);
  const Way chosen =
      way == kByShape ? way_of(rows, width, k, has_workspace) : static_cast<Way>(way);
  if (chosen < 0 || chosen >= kWays || width > most_of(chosen)) return kInvalid;
  if (chosen == kSplit && !has_workspace && !ordered) return kInvalid;
  return bf16 ? queue<__nv_bfloat16>(a, chosen, ordered != 0, stream)
              : queue<float>(a, chosen, ordered != 0, stream);
}
