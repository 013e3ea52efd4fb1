"""Patch ``wide_index_topk``: an index_topk other than 512 and 1024.

Subject:     SGLang asserts that index_topk is 512 or 1024 when it allocates the selected indices.
Why:         where 1024 entries lose a needle, 2048 may keep it; everything behind the assert takes
             any multiple of 64, up to what the top-k kernel can.
Upstream:    not sent yet: it needs a top-k for sm_120 that goes beyond 1024.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: the assert names 2048.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_another_width_is_allocated

SGLang's function runs as it is, without the assert: the copy is made from its source at start. Up
to 1024 its own top-k serves; beyond, one that can must be active.
"""

from typing import Any

from seatrial_kernels import plugin, report, selection, upstream
from seatrial_kernels.fingerprint import Edit
from seatrial_kernels.plugin import PatchError, stop
from seatrial_kernels.upstream import Hook

NAME = "wide_index_topk"
V1_MOST = 1024
"""The most entries that SGLang's top-k v1 selects (``kMaxTopK`` in 0.5.23's topk_v1.cuh)."""


def require_kernel(index_topk: int, names: tuple[str, ...], *, is_v2: bool, release: str) -> None:
    """Raise PatchError unless the active top-k selects that many entries.

    ``is_v2``: SGLang's top-k v2 is on, which goes up to 2048; in ``release`` 0.5.17 it serves
    decode steps only, and v1, which serves the others, knows nothing but 512 and 1024.
    """
    if "topk" in names or index_topk in selection.STOCK_TOPK:
        return
    if release == "0.5.17":
        raise PatchError(f"index_topk {index_topk} needs the patch topk with sglang 0.5.17")
    if index_topk > V1_MOST and not is_v2:
        raise PatchError(
            f"index_topk {index_topk} is beyond SGLang's top-k v1, which ends at {V1_MOST}; "
            "add the patch topk"
        )


def _backend_made(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.environ import envs

    try:
        require_kernel(
            selection.topk_of(backend),
            plugin.selected(),
            is_v2=envs.SGLANG_OPT_USE_TOPK_V2.get(),
            release=upstream.require_version(*HOOKS),
        )
    except PatchError as error:
        stop(NAME, error)


_MODULE = "sglang.srt.layers.attention.deepseek_v4_backend"
ASSERTS = {
    "0.5.23": Edit(
        'assert self.index_topk in (512, 1024), f"unexpected index_topk={self.index_topk}; '
        'supported: 512 (small) or 1024 (large)"',
        "pass",
    ),
    "0.5.17": Edit(
        "assert self.c4_sparse_topk in (512, 1024), "
        'f"unexpected c4_sparse_topk={self.c4_sparse_topk}; '
        'supported: 512 (small) or 1024 (large)"',
        "pass",
    ),
}
HOOKS = {
    "0.5.23": (
        Hook(
            f"{_MODULE}.DSV4AttnMetadata.init_flashmla_related",
            "b0e9fe65b18eb827",
            "edit",
            edits=(ASSERTS["0.5.23"],),
        ),
        Hook(
            f"{_MODULE}.DeepseekV4AttnBackend.__init__", "86e0d84314ac5b1d", "after", _backend_made
        ),
    ),
    "0.5.17": (
        Hook(
            f"{_MODULE}.DSV4AttnMetadata.init_flashmla_related",
            "8ae0a9e52e7ee42e",
            "edit",
            edits=(ASSERTS["0.5.17"],),
        ),
        Hook(
            f"{_MODULE}.DeepseekV4AttnBackend.__init__", "779bf40a23d85071", "after", _backend_made
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
