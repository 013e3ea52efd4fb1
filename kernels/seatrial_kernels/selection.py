"""What this process selects with: how many entries, from which index keys, in which buffers.

The CPU backend declares it when it is made. On a GPU it is read from SGLang's own backend and
buffers when they are made, and every active patch is reported with it.
"""

from typing import Any, NamedTuple

from seatrial_kernels import plugin, report
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

STOCK_TOPK = (512, 1024)
"""What SGLang accepts for DeepSeek-V4 as it is shipped."""
KEY_BYTES = {"fp8_e4m3": 132, "bf16": 256}
"""Bytes of one index key of 128 values in the pool; fp8 has a 4-byte scale."""
PAGE = 64
"""Index keys in a page."""


class Selection(NamedTuple):
    """The sparse selection of one server."""

    index_topk: int
    index_key_dtype: str


class _Process:
    """This process's one selection, and for whom it reports."""

    selection: Selection | None = None
    rank = 0
    role = "combined"
    is_metrics_enabled = False
    is_reported = False


def declare(index_topk: int, index_key_dtype: str) -> None:
    """Say what this process serves with.

    Raises
    ------
    PatchError
        When it has said something else before.
    """
    now = Selection(index_topk, index_key_dtype)
    if _Process.selection not in (None, now):
        raise PatchError(f"one process serves with {_Process.selection} and with {now}")
    _Process.selection = now


def current() -> Selection | None:
    """Return what was declared."""
    return _Process.selection


def check_topk(index_topk: int, names: tuple[str, ...]) -> None:
    """Raise PatchError unless the selected patches can select ``index_topk`` entries on a GPU."""
    if index_topk in STOCK_TOPK:
        return
    if "wide_index_topk" not in names:
        raise PatchError(
            f"index_topk {index_topk} needs the patch wide_index_topk; "
            f"without it SGLang accepts {' and '.join(map(str, STOCK_TOPK))}"
        )
    if index_topk % 64 or not 64 <= index_topk <= 2048:
        raise PatchError(f"index_topk {index_topk} should be a multiple of 64 up to 2048")


def key_dtype(names: tuple[str, ...]) -> str:
    """Return the dtype of the index keys that the selected patches store on a GPU."""
    return "bf16" if "index_keys_bf16" in names else "fp8_e4m3"


def backend_made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """Read and check the selection of SGLang's DeepSeek-V4 backend, which has just been made."""
    try:
        _read(backend)
    except PatchError as error:
        stop(", ".join(_reporting()), error)


def buffers_made(_result: None, metadata: Any, *_args: Any, **_kwargs: Any) -> None:
    """Report, once, what was allocated for the indices of selected entries."""
    indices = metadata.c4_sparse_page_indices
    selection = _Process.selection
    if _Process.is_reported or selection is None or indices is None:
        return
    _Process.is_reported = True
    for patch in _reporting():
        report.publish(
            patch,
            rank=_Process.rank,
            role=_Process.role,
            facts={
                "index_topk": str(selection.index_topk),
                "index_key_dtype": selection.index_key_dtype,
                "allocated_width": str(indices.shape[1]),
                "index_key_bytes": str(KEY_BYTES[selection.index_key_dtype]),
            },
            is_metrics_enabled=_Process.is_metrics_enabled,
        )


def _reporting() -> list[str]:
    return [name for name in plugin.selected() if name in plugin.PATCHES_OF["cuda"]]


def _read(backend: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    names, runner = plugin.selected(), backend.model_runner
    config = runner.model_config.hf_text_config
    topk = backend.index_topk if hasattr(backend, "index_topk") else backend.c4_topk
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
    declare(topk, dtype)
    arguments = runner.server_args
    mode = arguments.disaggregation_mode
    _Process.rank = get_parallel().tp_rank
    _Process.role = "combined" if mode in (None, "null") else mode
    _Process.is_metrics_enabled = arguments.enable_metrics


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
