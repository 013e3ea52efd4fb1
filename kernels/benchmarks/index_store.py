"""Index-key store: fp8 beside SGLang's kernel, and bf16, which nobody else has.

As on a decode step: fp32 keys, SGLang's plan, every row a key, each at a place of its own. A key is
512 bytes in, 256 of rotations, 24 of plan and slot, and 132 or 256 bytes out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks import peers
from benchmarks.harness import Case
from seatrial_kernels.index_store import Plan, check, index_store
from seatrial_kernels.index_store import reference as ref
from seatrial_kernels.testing import poisoned

EPS = 1e-6
RATIO = 4
IN_BYTES = ref.DIM * 4 + ref.ROTATED * 4 + 24
# Microseconds in rotation. fp8: what SGLang 0.5.23's kernel takes on an H200. bf16: 2 where the
# launch is all there is, and 70 % of 4.26 TB/s at 32768.
TARGETS = {
    "fp8_e4m3": {1: 1.20, 8: 1.25, 32: 1.48, 64: None, 128: 2.12, 2048: 2.81, 32768: 12.27},
    "bf16": {1: 2.0, 8: 2.0, 32: 2.0, 64: 2.0, 128: None, 2048: None, 32768: 11.52},
}


@dataclass
class Inputs:
    """One call's arguments."""

    keys: torch.Tensor
    weight: torch.Tensor
    rotations: torch.Tensor
    plan: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor


def cases() -> Iterator[Case]:
    """Yield the sizes."""
    for layout, targets in TARGETS.items():
        out_bytes = ref.PAGE_BYTES[layout] // ref.PAGE
        for count, target in targets.items():
            yield Case(
                op="index_store",
                name=f"{layout} N={count}",
                bytes_moved=count * (IN_BYTES + out_bytes),
                make=partial(inputs, count, layout),
                ours=ours,
                check=fault,
                peers={"sglang": sglang} if layout == "fp8_e4m3" else {},
                target_us=target,
            )


def inputs(count: int, layout: str, seed: int) -> Inputs:
    """Return random keys, positions and slots, all different, and a poisoned cache."""
    draw = torch.Generator("cuda").manual_seed(seed)
    rows = max(RATIO * count, 1024)
    pages = count // ref.PAGE + 2
    angles = torch.rand(rows, ref.ROTATED // 2, generator=draw, device="cuda") * 6.28
    plan = torch.zeros(count, 4, dtype=torch.int32, device="cuda")
    plan[:, 0] = (torch.randperm(rows // RATIO, generator=draw, device="cuda")[:count] + 1) * RATIO
    return Inputs(
        torch.randn(count, ref.DIM, generator=draw, device="cuda"),
        torch.rand(ref.DIM, generator=draw, device="cuda") + 0.5,
        torch.stack([angles.cos(), angles.sin()], -1).reshape(rows, ref.ROTATED),
        plan.view(torch.uint8),
        torch.randperm(pages * ref.PAGE, generator=draw, device="cuda")[:count],
        poisoned(pages, ref.PAGE_BYTES[layout], dtype=torch.uint8, device="cuda"),
    )


def ours(given: Inputs) -> None:
    """Run this package's kernel."""
    index_store(
        given.keys,
        given.weight,
        given.rotations,
        Plan(given.plan, is_decode=True, ratio=RATIO),
        given.slots,
        given.cache,
        eps=EPS,
    )


def sglang(given: Inputs) -> None:
    """Run SGLang's."""
    code = peers.library("index_store").peer_index_store(
        *map(peers.address, (given.keys, given.plan, given.weight)),
        peers.single(EPS),
        *map(peers.address, (given.rotations, given.slots, given.cache)),
        len(given.keys),
        RATIO,
        peers.stream(),
    )
    if code:
        raise RuntimeError(f"CUDA error {code}")


def fault(given: Inputs) -> str | None:
    """Return what is wrong with what we store, or None."""
    ours(given)
    return check.fault(wanted(given), given.slots, given.cache)


def wanted(given: Inputs) -> torch.Tensor:
    """Return the keys that the reference says."""
    positions = given.plan.view(torch.int32)[:, 0].long() - RATIO
    return ref.reference_index_keys(given.keys, given.weight, given.rotations, positions, EPS)
