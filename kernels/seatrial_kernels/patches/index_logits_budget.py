"""Patch ``index_logits_budget``: a prefill's index scores within SGLang's own memory budget.

Subject:     a prefill scores all its rows at once: [chunk, context / 4] fp32, a GiB for 8192 rows
             of 128K tokens and 8 GiB for 1M. Only on its DeepGEMM path does SGLang cut the rows to
             a budget.
Why:         on sm_120 the default path is TileLang with SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=1, which
             takes no part in that; the scores are outside mem_fraction_static and end in OOM.
Upstream:    not sent yet.
Applies-to:  sglang 0.5.23; 0.5.17 cannot cut the rows
Remove-when: ``PagedIndexerMetadata`` plans its chunks on every path.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_scores_are_cut_to_the_budget

The budget, the chunk size and the loop over the chunks are SGLang's; only the question whether to
ask for them is answered differently. A CUDA graph keeps its single step, as there.
"""

from typing import Any

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.upstream import Hook

NAME = "index_logits_budget"


def _plan_chunks(_result: None, metadata: Any) -> None:
    """Give the metadata of a forward pass a chunk size where SGLang gave it none."""
    if metadata.deep_gemm_metadata is not None:
        return
    from sglang.srt.layers.attention.dsv4.metadata import iter_row_chunks, plan_indexer_row_chunks

    rows = metadata.compressed_seq_lens.shape[0]
    chunk = plan_indexer_row_chunks(
        num_rows=rows,
        num_cols=metadata.max_compressed_seq_len,
        budget_bytes=metadata._mqa_logits_budget(num_rows=rows),
        sm120_row_cap=None,
    )
    if chunk is None:
        return
    chunks = list(iter_row_chunks(num_rows=rows, rows_per_chunk=chunk))
    metadata.rows_per_chunk = chunk
    metadata.deep_gemm_metadata = [None] * len(chunks)
    if metadata.use_topk_v2:
        from sglang.kernels.ops.attention.dsv4 import plan_topk_v2

        metadata.topk_metadata_chunks = [
            plan_topk_v2(metadata.compressed_seq_lens[rows]) for rows in chunks
        ]


_METADATA = "sglang.srt.layers.attention.dsv4.metadata"
HOOKS = {
    "0.5.23": (
        Hook(
            f"{_METADATA}.PagedIndexerMetadata.__post_init__",
            "ac0163dc9f5524c5",
            "after",
            _plan_chunks,
        ),
        Hook(f"{_METADATA}.PagedIndexerMetadata._mqa_logits_budget", "b3fdccb4753394d7", "read"),
        Hook(f"{_METADATA}.plan_indexer_row_chunks", "268318096e5c37a4", "read"),
        Hook(f"{_METADATA}.iter_row_chunks", "597c9b3ec63fd02d", "read"),
        Hook(
            "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer",
            "6e656f21e64e55f3",
            "read",
        ),
    ),
}


def apply() -> None:
    """Register the hooks.

    Raises
    ------
    PatchError
        When SGLang is not as expected.
    """
    upstream.install(NAME, HOOKS, selection.HOOKS, report.HOOKS)
