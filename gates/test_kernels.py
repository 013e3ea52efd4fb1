"""The installed kernels agree with their references, on the very GPU that will serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from seatrial.cell import Cell, CellServer
from seatrial.host import Host
from seatrial.release import Release
from seatrial.thresholds import Kernels
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.kernels


@dataclass(frozen=True)
class Found:
    """What the self-test said of one operation on one host."""

    where: str
    operation: str
    is_right: bool
    said: str


def test_kernels_agree_with_their_references(
    gate: Recorder,
    cell: Cell,
    release: Release,
    host_of: Callable[[CellServer], Host],
    bounds: Kernels,
) -> None:
    """In the installed build, on each host's own GPU, every kernel agrees with its reference."""
    found: dict[str, list[Found]] = {}
    for server in cell.engines:
        if server.host not in found:
            python = release.servers[server.role].argv[0]
            page = host_of(server).self_test(python, bounds.seconds)
            found[server.host] = _read(server.host, page)
    every = [one for results in found.values() for one in results]
    wrong = [one for one in every if not one.is_right]
    measured, bound = gate.record(
        (len(every) - len(wrong)) / len(every) if every else float("nan"),
        at_least=bounds.passed_ratio_min,
        unit="of self-tests passed",
        samples=len(every),
        message="; ".join(f"{one.operation} on {one.where}: {one.said}" for one in wrong[:5]),
        next_step=(
            "A kernel that is wrong on this GPU serves wrong answers: revert, and run the kernels' "
            "own tests on that host for the worst position."
        ),
    )
    assert measured >= bound


def _read(where: str, page: str) -> list[Found]:
    """Read the self-test's lines, one JSON object each: operation, case, ok, message.

    Raises:
        InvalidMeasurementError: it printed something else, or nothing.
    """
    try:
        lines = [json.loads(line) for line in page.splitlines() if line.strip()]
        found = [
            Found(where, f"{line['op']} ({line['case']})", line["ok"] is True, str(line["message"]))
            for line in lines
        ]
    except (ValueError, KeyError, TypeError):
        raise InvalidMeasurementError(
            f"The self-test on {where} printed something else than its findings: {page[:100]!r}."
        ) from None
    if not found:
        raise InvalidMeasurementError(f"The self-test on {where} tested nothing.")
    return found
