"""Patch ``index_keys_bf16``: the index keys of DeepSeek-V4 in bf16 instead of fp8.

Subject:     SGLang stores an index key as 128 fp8 values and one scale: 132 bytes.
Why:         the ranking of entries is what recall beyond 4 x index_topk tokens depends on; in bf16
             a key keeps 8 bits of each value, for 256 bytes.
Upstream:    not sent yet: first the kernels must be measured on sm_120.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: SGLang has a switch for the dtype of index keys on CUDA.
Gate:        kernels/tests/plugin/test_gpu_patches.py, and the recall gates on a GPU

The size of an entry is said where the pool is allocated and where memory is divided among the
pools; both are changed, or the pool would outgrow its share. Keys are written by the op
``index_store`` and read by ``index_logits``. The paths that would read or write an
fp8 page are closed.
"""

from typing import Any, NoReturn

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.fingerprint import Edit
from seatrial_kernels.patches import index_logits, index_store
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "index_keys_bf16"
# What would read or write these pages in another way, by SGLang's server argument.
NOT_TOGETHER = ("enable_deepseek_v4_fp4_indexer", "enable_hisparse", "enable_hierarchical_cache")


def bytes_per_key(index_head_dim: int) -> int:
    """Return the bytes of one index key in bf16."""
    return 2 * index_head_dim


def _bytes_per_token(index_head_dim: int, use_fp4_indexer: bool) -> int:
    """Stand in for ``get_dsv4_indexer_bytes_per_token``, which the pool and the budget both ask."""
    if use_fp4_indexer:  # pools of compression ratios 1 and 2, which are fp4 in any case
        return index_head_dim // 2 + index_head_dim // 32
    return bytes_per_key(index_head_dim)


def _pool_bytes_per_token(self: Any) -> int:
    """Stand in for the pool's own size of an entry in 0.5.17."""
    return bytes_per_key(self.index_head_dim)


def _no_gathered_keys(
    self: Any, *, c4_indexer: Any, forward_batch: Any, indexer_metadata: Any
) -> bool:
    """Stand in for the question whether a prefill may gather its keys for DeepGEMM's fp8 kernel."""
    return False


def seatrial_paged_scores(*arguments: Any) -> Any:
    """Score bf16 keys; called by SGLang's ``forward_c4_indexer`` in place of an fp8 kernel."""
    from seatrial_kernels.index_logits import scores_for_sglang

    return scores_for_sglang(*arguments)


def _closed(original: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    """Stop where SGLang would read or write an fp8 page."""
    stop(NAME, PatchError(f"{original.__qualname__} was called; it knows no bf16 index keys"))


def _backend_made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    arguments = backend.model_runner.server_args
    for name in NOT_TOGETHER:
        if getattr(arguments, name, False):
            flag = f"--{name.replace('_', '-')}"
            stop(NAME, PatchError(f"{flag} is not written for bf16 index keys; take it out"))


_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_SIZES = "sglang.srt.model_executor.pool_configurator"
_INDEXER = "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
_ENTRY = Edit("68 if use_fp4_indexer else 132", "256")
HOOKS = {
    "0.5.23": (
        # The size of an entry: the pool asks this function, and so does the budget.
        Hook(
            f"{_POOL}.get_dsv4_indexer_bytes_per_token",
            "cabf11c592aaca5f",
            "replace",
            _bytes_per_token,
            bindings=(_SIZES,),
        ),
        Hook(f"{_POOL}.DeepSeekV4IndexerPool.get_bytes_per_token", "7165379801fdaffb", "read"),
        Hook(f"{_POOL}.DeepSeekV4IndexerPool._create_buffer", "56c503892e047bca", "read"),
        Hook(f"{_SIZES}.DSV4PoolConfigurator.__init__", "40092733cbf28d89", "read"),
        Hook(
            f"{_SIZES}.DSV4PoolConfigurator._compressed_bytes_per_full_token",
            "e192381678946633",
            "read",
        ),
        # Reading.
        Hook(
            f"{_INDEXER}.forward_c4_indexer",
            "6e656f21e64e55f3",
            "edit",
            seatrial_paged_scores,
            edits=(
                _ENTRY,
                index_logits.SCORING["0.5.23"],
            ),
        ),
        Hook(
            f"{_INDEXER}._can_use_nonpaged_indexer",
            "a4a69d41b254c66c",
            "replace",
            _no_gathered_keys,
        ),
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.get_index_k_scale_buffer",
            "e408777e541da406",
            "around",
            _closed,
        ),
        # Writing: see index_store.
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.set_index_k_scale_buffer",
            "7e1b4896d3de6e89",
            "around",
            _closed,
        ),
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.set_index_fused", "7f28545e713bada6", "around", _closed
        ),
        Hook(f"{_BACKEND}.__init__", "86e0d84314ac5b1d", "after", _backend_made),
    ),
    "0.5.17": (
        # The size of an entry: here the pool and the budget each have their own.
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.get_bytes_per_token",
            "d5327e6486ac18b9",
            "replace",
            _pool_bytes_per_token,
        ),
        Hook(f"{_POOL}.DeepSeekV4IndexerPool._create_buffer", "c90aef1a1544164e", "read"),
        Hook(
            f"{_SIZES}.DSV4PoolConfigurator._get_bytes_per_full_token",
            "059003e821c097cf",
            "edit",
            edits=(
                Edit(
                    "self.indexer_head_dim + self.indexer_head_dim // quant_block_size * 4",
                    "2 * self.indexer_head_dim",
                ),
            ),
        ),
        # Reading.
        Hook(
            f"{_INDEXER}.forward_c4_indexer",
            "ae67f67ebd60482a",
            "edit",
            seatrial_paged_scores,
            edits=(
                _ENTRY,
                index_logits.SCORING["0.5.17"],
            ),
        ),
        Hook(
            f"{_INDEXER}._can_use_nonpaged_indexer",
            "a4a69d41b254c66c",
            "replace",
            _no_gathered_keys,
        ),
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.get_index_k_scale_buffer",
            "1f9bba648d12f608",
            "around",
            _closed,
        ),
        # Writing: see index_store.
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.set_index_k_scale_buffer",
            "4d08e029fe1c7571",
            "around",
            _closed,
        ),
        Hook(
            f"{_POOL}.DeepSeekV4IndexerPool.set_index_fused", "7f28545e713bada6", "around", _closed
        ),
        Hook(f"{_BACKEND}.__init__", "779bf40a23d85071", "after", _backend_made),
    ),
}


def apply() -> None:
    """Register the hooks, with those of ``index_store``.

    Raises
    ------
    PatchError
        When SGLang is not as expected, or this build has no compiled kernels.
    """
    index_store.require_kernel()
    upstream.install(NAME, HOOKS, index_store.HOOKS, selection.HOOKS, report.HOOKS)
