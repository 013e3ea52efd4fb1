"""Top-k with page transform: beside SGLang's two kernels and torch.topk.

Rows of full length, normal scores, pages of 64 entries in random order. A call reads each score
and the table once, and writes k indices a row. SGLang's v2 is built as sm_120 would have it,
without its cluster path, which on this card begins beyond 32768 entries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks import peers
from benchmarks.harness import Case
from seatrial_kernels.testing import poisoned
from seatrial_kernels.topk import WORKSPACE_BYTES, check, topk_transform

PAGE, PAGE_BITS = 64, 6
ROWS = (1, 8, 64, 1024)
# Microseconds in rotation of SGLang 0.5.23's v2 on an H200, by k and width, for each of ROWS.
TARGETS = {
    (512, 2048): (2.49, 2.82, 3.25, 14.14),
    (512, 8192): (3.53, 4.09, 4.45, 23.19),
    (512, 32768): (9.31, 9.64, 10.24, 60.97),
    (1024, 2048): (2.43, 2.78, 3.19, 14.16),
    (1024, 8192): (3.72, 4.31, 4.69, 24.95),
    (1024, 32768): (10.17, 10.51, 11.09, 66.55),
}
WIDTHS = {
    512: (2048, 8192, 32768, 131072),
    1024: (2048, 8192, 32768, 131072),
    2048: (8192, 32768, 131072),
}
LARGEST_FOR_TORCH = 1 << 23


@dataclass
class Inputs:
    """One call's arguments."""

    scores: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    out: torch.Tensor
    workspace: torch.Tensor
    ordered: bool


def cases() -> Iterator[Case]:
    """Yield the sizes."""
    for k, widths in WIDTHS.items():
        for width in widths:
            targets = TARGETS.get((k, width), (None,) * len(ROWS))
            for rows, target in zip(ROWS, targets, strict=True):
                yield case(k, rows, width, target=target)
    for k in (512, 2048):
        for rows in (1, 8, 64):
            yield case(k, rows, 262144)
    for rows, width in ((8, 8192), (8, 32768), (1024, 8192), (1024, 32768)):
        yield case(512, rows, width, kind="narrow")
    for rows, width in ((1, 8192), (64, 32768), (1024, 8192), (1024, 32768)):
        yield case(512, rows, width, kind="bf16")
    for rows, width in ((8, 8192), (8, 32768), (1024, 8192)):
        yield case(512, rows, width, kind="ordered")


def case(k: int, rows: int, width: int, *, kind: str = "", target: float | None = None) -> Case:
    """Return one size; `kind` is narrow (N(10, 0.05)), bf16, ordered or nothing."""
    beside: dict[str, Callable[[Inputs], None]] = {}
    if kind != "bf16":
        beside["v2"] = partial(sglang, "peer_topk_v2")
        if k <= 1024 and rows * width <= 1 << 25:
            beside["v1"] = partial(sglang, "peer_topk_v1")
    if rows * width <= LARGEST_FOR_TORCH and kind in ("", "bf16"):
        beside["torch"] = torch_topk
    score_bytes = 2 if kind == "bf16" else 4
    return Case(
        op="topk",
        name=" ".join(filter(None, [kind, f"k={k} B={rows} L={width}"])),
        bytes_moved=rows * (width * score_bytes + width // PAGE * 4 + k * 4 + 4),
        make=partial(inputs, k, rows, width, kind),
        ours=ours,
        check=fault,
        peers=beside,
        target_us=target,
    )


def inputs(k: int, rows: int, width: int, kind: str, seed: int) -> Inputs:
    """Return random scores and pages, and a poisoned output."""
    draw = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(rows, width, generator=draw, device="cuda")
    if kind == "narrow":
        scores = 10 + 0.05 * scores
    if kind == "bf16":
        scores = scores.bfloat16()
    return Inputs(
        scores,
        torch.full((rows,), width, dtype=torch.int32, device="cuda"),
        torch.rand(rows, width // PAGE, generator=draw, device="cuda").argsort(-1).int(),
        poisoned(rows, k, dtype=torch.int32, device="cuda"),
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        kind == "ordered",
    )


def ours(given: Inputs) -> None:
    """Run this package's kernel."""
    topk_transform(
        given.scores,
        given.lengths,
        given.table,
        given.out,
        PAGE,
        ordered=given.ordered,
        workspace=given.workspace,
    )


def sglang(name: str, given: Inputs) -> None:
    """Run one of SGLang's."""
    rows, width = given.scores.shape
    code = getattr(peers.library("topk"), name)(
        *map(peers.address, (given.scores, given.lengths, given.table, given.out)),
        *(rows, width, given.out.shape[1], given.table.shape[1], PAGE_BITS),
        peers.stream(),
    )
    if code:
        raise RuntimeError(f"CUDA error {code}")


def torch_topk(given: Inputs) -> None:
    """Select with torch, without the transform."""
    torch.topk(given.scores, given.out.shape[1], dim=-1, sorted=False)


def fault(given: Inputs) -> str | None:
    """Return what is wrong with what we select, or None."""
    ours(given)
    return check.fault(
        given.scores, given.lengths, given.table, PAGE, given.out, ordered=given.ordered
    )
