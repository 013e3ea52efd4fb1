// SGLang's two top-k kernels behind C functions, so that all are launched alike. Their source is not
// here: it is included from the sglang that is installed, and compiled with that package's flags, but
// for one: where v2 asks for the architecture it is told sm_120's, so that it is without its cluster
// path, as it would be there. That path begins beyond 32768 entries.
//
// Both files call theirs so:
#define kMaxTopK kMaxTopKOfV1
#define TopKKernel TopKKernelOfV1
#include <deepseek_v4/topk_v1.cuh>
#undef kMaxTopK
#undef TopKKernel

#undef SGL_CUDA_ARCH
#define SGL_CUDA_ARCH 1200
#include <deepseek_v4/topk_v2.cuh>

namespace {

template <typename Parameters>
int queue(void (*kernel)(Parameters), const Parameters& parameters, int rows, int threads,
          size_t shared, void* stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, parameters);
}

}  // namespace

extern "C" int peer_topk_v1(const float* scores, const int* lengths, const int* table, int* out,
                            int rows, int width, int k, int pages, int page_bits, void* stream) {
  using namespace sglang;
  constexpr auto kernel = topk_transform_kernel<true>;
  constexpr size_t kShared = kSMEM + 4;
  if (const int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kShared))) {
    return code;
  }
  const TopKParams parameters{scores, lengths, table, out, nullptr, width, pages,
                              static_cast<uint32_t>(page_bits), static_cast<uint32_t>(k)};
  return queue(kernel, parameters, rows, kTopKBlockSize, kShared, stream);
}

extern "C" int peer_topk_v2(const float* scores, const int* lengths, const int* table, int* out,
                            int rows, int width, int k, int pages, int page_bits, void* stream) {
  using namespace sglang;
  TopKPagedParams parameters{};
  parameters.scores = scores;
  parameters.seq_lens = lengths;
  parameters.page_table = table;
  parameters.page_indices = out;
  parameters.score_stride = width;
  parameters.page_table_stride = pages;
  parameters.topk = static_cast<uint32_t>(k);
  parameters.page_bits = static_cast<uint32_t>(page_bits);
  parameters.static_cluster_floor = UINT_MAX;
  parameters.batch_size = static_cast<uint32_t>(rows);
  parameters.out_stride = k;
  parameters.out_cols = static_cast<uint32_t>(k);
  const auto go = [&](auto kernel) {
    return queue(kernel, parameters, rows, kBlockSize, 0, stream);
  };
  constexpr auto kMode = TopKMode::PAGE_TABLE;
  if (width <= static_cast<int>(kReg2MaxSeqLen)) return go(topk_main_kernel<true, 0, kMode>);
  if (width <= static_cast<int>(kReg4MaxSeqLen)) return go(topk_main_kernel<true, 1, kMode>);
  return go(topk_main_kernel<true, 2, kMode>);
}
