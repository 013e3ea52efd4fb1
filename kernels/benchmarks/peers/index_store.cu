// SGLang's own kernel behind a C function, so that both are launched alike. Its source is not here:
// it is included from the sglang that is installed, and compiled with that package's flags.
#include <deepseek_v4/fused_norm_rope_v2.cuh>

extern "C" int peer_index_store(void* keys, const void* plan, const void* weight, float eps,
                                const float* rotations, const int64_t* slots, uint8_t* cache,
                                int count, int ratio, void* stream) {
  using namespace sglang;
  FusedNormRopeStoreParams params{};
  params.input = keys;
  params.handle = plan;
  params.weight = weight;
  params.freqs_cis = rotations;
  params.out_loc = slots;
  params.kvcache = cache;
  params.eps = eps;
  params.compress_ratio = static_cast<uint32_t>(ratio);
  params.num_tokens = static_cast<uint32_t>(count);
  // As its host code launches it: eight keys a block, overlapping the kernel before it.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((count + kNumWarps - 1) / kNumWarps);
  config.blockDim = dim3(kBlockSize);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(
      &config, fused_norm_rope_indexer<float, ForwardMode::CompressDecode, 6, true>, params);
}
