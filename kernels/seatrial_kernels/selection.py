"""What this process selects with: how many entries, from which index keys, in which buffers.

The CPU backend declares it when it is made. On a GPU it is read from SGLang's own backend and
buffers when they are made, and every active patch is reported with it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from seatrial_kernels import native, plugin, report
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

STOCK_TOPK = (512, 1024)
"""What SGLang accepts for DeepSeek-V4 as it is shipped."""
WIDE_TOPK = tuple(range(64, 2048 + 1, 64))
"""What the kernels of this package select, and SGLang's attention takes."""
KERNEL_PATCHES = {"index_keys_bf16", "index_store", "topk"}
"""Those that call compiled kernels."""
KEY_BYTES = {"fp8_e4m3": 132, "bf16": 256}
"""Bytes of one index key of 128 values in the pool; fp8 has a 4-byte scale."""
PAGE = 64
"""Index keys in a page."""


class Selection(NamedTuple):
    """The sparse selection of one server."""

    index_topk: int
    index_key_dtype: str


@dataclass
class _Process:
    """This process's one selection, and for whom it reports."""

    selection: Selection | None = None
    rank: int = 0
    role: str = "combined"
    is_metrics_enabled: bool = False
    is_reported: bool = False


_process = _Process()


def declare(index_topk: int, index_key_dtype: str, *, rank: int, arguments: Any) -> None:
    """Say what this process serves with, and as what; ``arguments`` are SGLang's server arguments.

    Raises
    ------
    PatchError
        When it has said something else before.
    """
    now = Selection(index_topk, index_key_dtype)
    if _process.selection not in (None, now):
        raise PatchError(f"one process serves with {_process.selection} and with {now}")
    mode = arguments.disaggregation_mode
    _process.selection, _process.rank = now, rank
    _process.role = "combined" if mode in (None, "null") else mode
    _process.is_metrics_enabled = arguments.enable_metrics


def current() -> Selection | None:
    """Return what was declared."""
    return _process.selection


def check_topk(index_topk: int, names: tuple[str, ...]) -> None:
    """Raise PatchError unless the selected patches can select ``index_topk`` entries on a GPU."""
    if index_topk in STOCK_TOPK:
        return
    if "wide_index_topk" not in names:
        raise PatchError(
            f"index_topk {index_topk} needs the patch wide_index_topk; "
            f"without it SGLang accepts {' and '.join(map(str, STOCK_TOPK))}"
        )
    if index_topk not in WIDE_TOPK:
        raise PatchError(f"index_topk {index_topk} should be a multiple of 64 up to 2048")


def key_dtype(names: tuple[str, ...]) -> str:
    """Return the dtype of the index keys that the selected patches store on a GPU."""
    return "bf16" if "index_keys_bf16" in names else "fp8_e4m3"


def topk_of(backend: Any) -> int:
    """Return the index_topk of SGLang's backend; 0.5.17 calls it c4_topk."""
    return int(backend.index_topk if hasattr(backend, "index_topk") else backend.c4_topk)


def backend_made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """Read and check the selection of SGLang's DeepSeek-V4 backend, which has just been made."""
    try:
        if KERNEL_PATCHES & {*plugin.active()}:
            native.check_device()
        _read(backend)
    except (PatchError, native.NativeError) as error:
        stop(", ".join(plugin.active()), error)


def buffers_made(_result: None, metadata: Any, *_args: Any, **_kwargs: Any) -> None:
    """Report, once, what was allocated for the indices of selected entries."""
    indices = metadata.c4_sparse_page_indices
    if not _process.is_reported and _process.selection is not None and indices is not None:
        allocated(indices.shape[1])


def allocated(width: int) -> None:
    """Report every active patch, with the width of the buffer of selected entries."""
    if _process.selection is None:
        raise PatchError("a buffer was allocated before anything said index_topk")
    _process.is_reported = True
    topk, dtype = _process.selection
    for patch in plugin.active():
        report.publish(
            patch,
            rank=_process.rank,
            role=_process.role,
            facts={
                "index_topk": str(topk),
                "index_key_dtype": dtype,
                "allocated_width": str(width),
            },
            is_metrics_enabled=_process.is_metrics_enabled,
        )


def _read(backend: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    names, runner = plugin.active(), backend.model_runner
    config = runner.model_config.hf_text_config
    topk = topk_of(backend)
    check_topk(topk, names)
    dtype = key_dtype(names)
    asked = getattr(config, "index_key_dtype", dtype)
    if asked != dtype:
        raise PatchError(
            f"index_key_dtype {asked} is asked and {dtype} would be stored; "
            + ("take index_keys_bf16 out of" if dtype == "bf16" else "put index_keys_bf16 into")
            + " the spec's patches"
        )
    for pool in _index_pools(backend.token_to_kv_pool):
        for buffer in pool.index_k_with_scale_buffer:
            if buffer.shape[1] != PAGE * KEY_BYTES[dtype]:
                raise PatchError(
                    f"a page of {PAGE} index keys has {buffer.shape[1]} bytes in the pool, "
                    f"not {PAGE * KEY_BYTES[dtype]}"
                )
    declare(topk, dtype, rank=get_parallel().tp_rank, arguments=runner.server_args)


def _index_pools(pool: Any) -> list[Any]:
    """Return the index-key pools of the layers that compress by 4; a draft model may have none."""
    pools = [getattr(pool, "c4_indexer_kv_pool", None)]
    return [each for each in pools if each is not None and each.layer_num]


_MODULE = "sglang.srt.layers.attention.deepseek_v4_backend"
HOOKS = {
    "0.5.23": (
        Hook(
            f"{_MODULE}.DeepseekV4AttnBackend.__init__", "86e0d84314ac5b1d", "after", backend_made
        ),
        Hook(
            f"{_MODULE}.DSV4AttnMetadata.init_flashmla_related",
            "b0e9fe65b18eb827",
            "after",
            buffers_made,
        ),
    ),
    "0.5.17": (
        Hook(
            f"{_MODULE}.DeepseekV4AttnBackend.__init__", "779bf40a23d85071", "after", backend_made
        ),
        Hook(
            f"{_MODULE}.DSV4AttnMetadata.init_flashmla_related",
            "8ae0a9e52e7ee42e",
            "after",
            buffers_made,
        ),
    ),
}
"""What every patch for GPUs adds to its own hooks."""
