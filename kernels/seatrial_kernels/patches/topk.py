"""Patch ``topk``: entries are selected by this package's kernel.

Subject:     SGLang's ``topk_transform_paged`` (v1) and ``topk_transform_paged_v2``.
Why:         on sm_120 SGLang has v1 only, which ends at 1024 entries and gives each row one block;
             v2 loses time on scores that lie close together.
Upstream:    not sent yet: first the kernel must be measured on sm_120.
Applies-to:  sglang 0.5.23 and 0.5.17
Remove-when: SGLang's own selects 2048 entries on sm_120 and is no slower.
Gate:        kernels/tests/plugin/test_gpu_patches.py::test_both_top_ks_are_ours

The kernel needs no plan, so that none is made: SGLang would compile v2 for it.
"""

from typing import Any

from seatrial_kernels import report, selection, upstream
from seatrial_kernels.patches.index_store import require_kernel
from seatrial_kernels.upstream import Hook

NAME = "topk"


def _paged(
    scores: Any,
    seq_lens: Any,
    page_tables: Any,
    out_page_indices: Any,
    page_size: Any,
    out_raw_indices: Any = None,
) -> None:
    _select(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def _paged_v2(
    scores: Any,
    seq_lens: Any,
    page_tables: Any,
    out_page_indices: Any,
    page_size: Any,
    metadata: Any,
    out_raw_indices: Any = None,
) -> None:
    _select(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def _plan(seq_lens: Any, static_threshold: Any = -1, *, out: Any = None) -> Any:
    return seq_lens.new_empty(seq_lens.shape[0] + 1, 2) if out is None else out


def _plan_0_5_17(seq_lens: Any, static_threshold: Any = 0) -> Any:
    return _plan(seq_lens)


def _select(scores: Any, lengths: Any, table: Any, out: Any, page_size: int, raw: Any) -> None:
    from seatrial_kernels.topk import topk_transform

    topk_transform(scores, lengths, table, out, page_size, raw)


_MODULE = "sglang.kernels.ops.attention.dsv4"
_BINDINGS = (_MODULE, "sglang.srt.layers.attention.dsv4.indexer")
HOOKS = {
    "0.5.23": (
        Hook(
            f"{_MODULE}.topk.topk_transform_paged",
            "d1cf6e460e09989b",
            "replace",
            _paged,
            bindings=_BINDINGS,
        ),
        Hook(
            f"{_MODULE}.topk.topk_transform_paged_v2",
            "e0ed12855229fdc6",
            "replace",
            _paged_v2,
            bindings=_BINDINGS,
        ),
        Hook(
            f"{_MODULE}.topk.plan_topk_v2", "312f5373a4f7564e", "replace", _plan, bindings=_BINDINGS
        ),
    ),
    "0.5.17": (
        Hook(
            f"{_MODULE}.topk.topk_transform_512",
            "99784d8716640daa",
            "replace",
            _paged,
            bindings=_BINDINGS,
        ),
        Hook(
            f"{_MODULE}.topk.topk_transform_512_v2",
            "39db0748761d5ea2",
            "replace",
            _paged_v2,
            bindings=_BINDINGS,
        ),
        Hook(
            f"{_MODULE}.topk.plan_topk_v2",
            "2e12290f47e9fe96",
            "replace",
            _plan_0_5_17,
            bindings=(_MODULE,),
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
