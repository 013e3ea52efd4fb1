"""Patch ``index_logits``: fp8 index keys are scored by this package's kernel.

Subject:     the kernel that SGLang's ``forward_c4_indexer`` calls to score a step's index keys.
Why:         on sm_120 that is TileLang's, which reads the keys anew for every row of a prefill and
             gives the longest row of a batch no more blocks than the others.
Upstream:    not sent yet: first the kernel must be measured on sm_120.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: SGLang's own is no slower on sm_120.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_fp8_keys_are_scored_by_our_kernel

How many rows are scored at once stays SGLang's: see ``index_logits_budget``. Of drafted tokens,
each is a row of its own here; the kernel could read their keys once. For bf16 keys there is
``index_keys_bf16``.
"""

from typing import Any

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.fingerprint import Edit
from seatrial_kernels.patches.index_store import require_kernel
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "index_logits"


def seatrial_paged_scores(*arguments: Any) -> Any:
    """Score fp8 keys; called by SGLang's ``forward_c4_indexer`` in place of its own kernel."""
    from seatrial_kernels.index_logits import scores_for_sglang

    return scores_for_sglang(*arguments)


def _no_gathered_keys(
    self: Any, *, c4_indexer: Any, forward_batch: Any, indexer_metadata: Any
) -> bool:
    """Stand in for the question whether a prefill gathers its keys for DeepGEMM's kernel."""
    return False


def _backend_made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    if getattr(backend.model_runner.server_args, "enable_deepseek_v4_fp4_indexer", False):
        stop(NAME, PatchError("--enable-deepseek-v4-fp4-indexer has fp4 keys; take one out"))


_INDEXER = "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
_IS_PREFILL = "forward_batch.forward_mode == ForwardMode.EXTEND"
_CALL = (
    "(row_q, c4_indexer_kv_cache, weights[rows], _c4sl[rows], page_table[rows], metadata, "
    "indexer_metadata.max_compressed_seq_len, False)"
)
_CALL_0_5_17 = (
    "(q, c4_indexer_kv_cache, weights, _c4sl, page_table, indexer_metadata.deep_gemm_metadata, "
    "indexer_metadata.max_c4_seq_len, False)"
)


def scoring(call: str) -> Edit:
    """Return the edit that has keys scored here; the first argument: is it a prefill."""
    return Edit(f"fn{call}", f"seatrial_paged_scores({_IS_PREFILL}, {call[1:]}")


SCORING = {"0.5.23": scoring(_CALL), "0.5.17": scoring(_CALL_0_5_17)}
_FORWARD = {"0.5.23": "6e656f21e64e55f3", "0.5.17": "ae67f67ebd60482a"}
_MADE = {"0.5.23": "86e0d84314ac5b1d", "0.5.17": "779bf40a23d85071"}
HOOKS = {
    version: (
        Hook(
            f"{_INDEXER}.forward_c4_indexer",
            _FORWARD[version],
            "edit",
            seatrial_paged_scores,
            edits=(SCORING[version],),
        ),
        Hook(
            f"{_INDEXER}._can_use_nonpaged_indexer",
            "a4a69d41b254c66c",
            "replace",
            _no_gathered_keys,
        ),
        Hook(f"{_BACKEND}.__init__", _MADE[version], "after", _backend_made),
    )
    for version in ("0.5.23", "0.5.17")
}


def apply() -> None:
    """Register the hooks.

    Raises
    ------
    PatchError
        When SGLang is not as expected, or this build has no compiled kernels.
    """
    require_kernel()
    upstream.install(NAME, HOOKS, selection.HOOKS, report.HOOKS)
