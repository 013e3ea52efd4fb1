"""Patch ``index_store``: index keys are normalised, rotated and stored by this package's kernel.

Subject:     SGLang's ``compress_norm_rope_store`` for keys of the indexer.
Why:         it has no bf16 form, and the fp8 form is compiled when it is first used.
Upstream:    not sent yet: first the kernel must be measured on sm_120.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: SGLang stores bf16 index keys, and its fp8 form is no slower.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_keys_of_the_indexer_go_to_our_kernel

Keys of other widths, and fp4 keys, go SGLang's way. Whether fp8 or bf16 is stored follows from the
size of the pool's pages, which the patch ``index_keys_bf16`` changes.
"""

from collections.abc import Callable
from typing import Any

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.plugin import PatchError
from seatrial_kernels.upstream import Hook

NAME = "index_store"
WIDTH = 128
"""Values of an index key; those of the attention's latent are 512."""


def require_kernel() -> None:
    """Raise PatchError unless this build holds the compiled kernels and the op that calls them."""
    try:
        from seatrial_kernels import native
        from seatrial_kernels.native import NativeError

        native.library()
    except (ImportError, NativeError) as error:
        raise PatchError(f"this build has no compiled kernels ({error})") from error


def _store(original: Callable[..., None], kv: Any, plan: Any, **named: Any) -> None:
    """Store keys of the indexer; the bytes of the pool's pages say in which form."""
    if kv.shape[-1] != WIDTH or named.get("use_fp4"):
        original(kv, plan, **named)
        return
    import torch

    from seatrial_kernels.index_store import Plan, index_store

    index_store(
        kv,
        named["norm_weight"].to(kv.dtype),
        torch.view_as_real(named["freq_cis"]).flatten(-2),
        Plan(plan[1], plan.is_decode, plan.compress_ratio),
        named["out_loc"],
        named["kvcache"],
        eps=named["norm_eps"],
    )


_MODULE = "sglang.kernels.ops.attention.dsv4"
_BINDINGS = (_MODULE, "sglang.srt.layers.attention.dsv4.compressor_v2")
HOOKS = {
    "0.5.23": (
        Hook(
            f"{_MODULE}.compress.compress_norm_rope_store",
            "0706fd6ee17c4b29",
            "around",
            _store,
            bindings=_BINDINGS,
        ),
        Hook(f"{_BINDINGS[1]}._extract_positions_from_plan", "dbe3b41e78f1c0a9", "read"),
        Hook(
            f"{_BINDINGS[1]}.CompressorBackendMixin._forward_compress_all_in_one",
            "4b93f8ab810fa163",
            "read",
        ),
    ),
    "0.5.17": (
        Hook(
            f"{_MODULE}.compress.compress_norm_rope_store",
            "a26d29b0b687340f",
            "around",
            _store,
            bindings=_BINDINGS,
        ),
        Hook(f"{_BINDINGS[1]}._extract_positions_from_plan", "dbe3b41e78f1c0a9", "read"),
        Hook(
            f"{_BINDINGS[1]}.CompressorBackendMixin._forward_compress_all_in_one",
            "e9513d448d7b453e",
            "read",
        ),
    ),
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
