"""The same for long: bursts with pauses, right answers to the end, and memory that does not grow.

Run where it is asked for: in a spec's selection, or by hand with `--select readiness,soak`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest

from seatrial import canary
from seatrial.canary import Reply
from seatrial.cell import Cell, CellServer
from seatrial.details import Point, Series
from seatrial.engine import Engine
from seatrial.haystack import Ruler
from seatrial.host import Host
from seatrial.load import Bursts
from seatrial.memory import MIB
from seatrial.statistics import wilson_interval
from seatrial.thresholds import Soak
from seatrial.trend import decay_probability, growth
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.soak

WARM_SHARE = 0.2
"""The first part is not looked at for growth: caches and pools fill."""
ROUNDS_MIN = 5


@dataclass
class Long:
    """What the soak found.

    Attributes:
        memory: of each server: how many requests were answered before, and the bytes in use.
    """

    replies: list[Reply | None] = field(default_factory=list)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def soaked(
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    run: Any,
    request: pytest.FixtureRequest,
) -> Long:
    """Send rounds of bursts until the time is over; look at memory after each round."""
    bounds: Soak = run.thresholds.section("soak")
    host_of = request.getfixturevalue("host_of") if cell.servers else None
    found, ends = Long(), time.monotonic() + bounds.seconds
    numbers = count(run.seed)
    canary.send(router.chat, ruler, next(numbers), bounds.prompt_tokens)
    while time.monotonic() < ends:
        bursts: Bursts[Reply] = Bursts(bounds.bursts, bounds.burst_pause_seconds)
        bursts.send(
            (
                partial(canary.send, router.chat, ruler, next(numbers), bounds.prompt_tokens)
                for _ in range(sum(bounds.bursts))
            ),
            until=lambda: False,
        )
        found.replies += bursts.replies
        if host_of is not None:
            _look(cell, host_of, found)
    return found


def test_long_bursts_are_answered_rightly(gate: Recorder, soaked: Long, bounds: Soak) -> None:
    """For as long as it is asked, bursts of requests are answered, and rightly."""
    right = sum(reply is not None and reply.is_right for reply in soaked.replies)
    low, high = wilson_interval(right, len(soaked.replies))
    measured, bound = gate.record(
        right / len(soaked.replies),
        at_least=bounds.right_ratio_min,
        unit="of answers right",
        samples=len(soaked.replies),
        message=f"{right} of {len(soaked.replies)} (95 % interval {low:.3f}-{high:.3f}).",
        next_step="Compare with the short bursts of `liveness`: what grows with time?",
    )
    assert measured >= bound


def test_answers_do_not_get_worse_over_the_soak(gate: Recorder, soaked: Long, bounds: Soak) -> None:
    """Wrong answers do not pile up at the end of the soak."""
    outcomes = [reply is not None and reply.is_right for reply in soaked.replies]
    if not any(outcomes):
        raise InvalidMeasurementError("No answer was right, so nothing can be said of their order.")
    measured, bound = gate.record(
        decay_probability(outcomes),
        at_least=bounds.trend_p_min,
        unit="p of this order by chance",
        samples=len(outcomes),
        message=f"{outcomes.count(False)} of {len(outcomes)} wrong.",
        next_step="Something wears out: look for leaks of slots or pages, and at memory over time.",
    )
    assert measured >= bound


def test_memory_does_not_grow_with_requests(gate: Recorder, soaked: Long, bounds: Soak) -> None:
    """Memory in use does not grow with every request that was answered."""
    slopes = {}
    for where, seen in soaked.memory.items():
        settled = seen[int(WARM_SHARE * len(seen)) :]
        if len(settled) < ROUNDS_MIN:
            raise InvalidMeasurementError(
                f"{len(settled)} looks at the memory of {where} are too few to see it grow; "
                "soak for longer."
            )
        slopes[where] = 1000 * growth(settled) / MIB
        gate.details.series.append(
            Series(
                title="Memory over requests",
                name=where,
                x_label="requests",
                y_label="MiB",
                points=[Point(x=requests, y=used / MIB) for requests, used in seen],
            )
        )
    if not slopes:
        raise InvalidMeasurementError("There is no host to look at, so no memory was measured.")
    where = max(slopes, key=lambda one: slopes[one])
    measured, bound = gate.record_most(
        slopes[where],
        at_most=bounds.memory_growth_mib_per_1000_requests_max,
        unit="MiB per 1000 requests",
        samples=sum(len(seen) for seen in soaked.memory.values()),
        message="; ".join(f"{one}: {slope:+.1f}" for one, slope in slopes.items()) + ".",
        next_step="A leak: compare patches and the transfer engine with last_good.",
    )
    assert measured <= bound


def _look(cell: Cell, host_of: Callable[[CellServer], Host], found: Long) -> None:
    """Keep how much memory each engine uses now."""
    for server in cell.engines:
        spec_server = cell.spec.server(server.role) if cell.spec is not None else None
        gpus = list(getattr(spec_server, "gpus", []))
        used = (
            {
                f"{server.label} GPU {gpu}": size
                for gpu, size in host_of(server).gpu_memory_bytes(gpus).items()
            }
            if gpus
            else {server.label: host_of(server).memory_bytes(server.unit)}
        )
        for where, size in used.items():
            found.memory.setdefault(where, []).append((len(found.replies), size))
