"""Peak memory under long prefills, against the plan that let this release start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from seatrial.cell import Cell, CellServer
from seatrial.engine import Engine
from seatrial.haystack import START, Ruler, ask_at_length
from seatrial.host import Host
from seatrial.memory import MIB, RolePlan
from seatrial.thresholds import Memory
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.memory


@dataclass(frozen=True)
class Peak:
    """One server's (or one GPU's) peak against its plan, in bytes."""

    where: str
    measured: int
    planned: int

    @property
    def headroom_mib(self) -> float:
        """What is left of the plan."""
        return (self.planned - self.measured) / MIB


def test_peak_memory_stays_within_plan(
    gate: Recorder,
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    host_of: Callable[[CellServer], Host],
    bounds: Memory,
) -> None:
    """Under long prefills no server's peak memory exceeds what was planned for it."""
    seeds = gate.seeds()
    with ThreadPoolExecutor(bounds.requests) as pool:
        loads = [
            pool.submit(
                ask_at_length,
                lambda text: router.chat(text, 8),
                ruler,
                next(seeds),
                bounds.prompt_tokens,
                START,
            )
            for _ in range(bounds.requests)
        ]
        for load in loads:
            load.result()
    peaks = [peak for server in cell.engines for peak in _peaks(cell, server, host_of)]
    if not peaks:
        raise InvalidMeasurementError("The cell file names no engine, so no memory was measured.")
    tightest = min(peaks, key=lambda peak: peak.headroom_mib)
    measured, bound = gate.record(
        tightest.headroom_mib,
        at_least=bounds.headroom_mib_min,
        unit="MiB",
        samples=len(peaks),
        message="; ".join(
            f"{peak.where}: peak {peak.measured / MIB:.0f} MiB of {peak.planned / MIB:.0f} planned"
            for peak in peaks
        )
        + ".",
        next_step=(
            "The plan was too small: lower chunked_prefill_size or context_length. Memory ran out "
            "while serving, so mem_fraction_static must go down, not up."
        ),
    )
    assert measured >= bound


def _peaks(cell: Cell, server: CellServer, host_of: Callable[[CellServer], Host]) -> list[Peak]:
    """Read the peaks of one server through its host: of its GPUs, or of its processes."""
    plan = _plan(cell, server)
    spec_server = cell.spec.server(server.role) if cell.spec is not None else None
    gpus = getattr(spec_server, "gpus", [])
    if not gpus:
        peak = host_of(server).peak_memory_bytes(server.unit)
        return [Peak(server.label, peak, plan.peak_bytes)]
    used = host_of(server).gpu_memory_bytes(gpus)
    return [Peak(f"{server.label} GPU {gpu}", used[gpu], plan.peak_bytes) for gpu in gpus]


def _plan(cell: Cell, server: CellServer) -> RolePlan:
    plan = cell.plan.roles.get(server.role) if cell.plan is not None else None
    if plan is None:
        raise InvalidMeasurementError(f"The cell file has no memory plan for {server.role}.")
    return plan
