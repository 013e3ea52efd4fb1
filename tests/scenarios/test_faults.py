"""Every fault at every phase where it can strike, with the light engine: docs/faults.md.

`make scenarios` runs them all; `make test` runs those that tell most.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import hosts
from tests.faults.cases import CASES
from tests.faults.fleet import WORK, Fleet
from tests.faults.night import Night

TELLING = [name for name, case in CASES.items() if case.is_telling]
PARALLEL = 2
"""Fleets among which `make test` shares the telling cases; the groups are pytest-xdist's."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return whether `make test` runs the case too, and on which of its fleets."""
    if name not in TELLING:
        return []
    group = pytest.mark.xdist_group(f"faults-{TELLING.index(name) % PARALLEL}")
    return [pytest.mark.telling, group]


@pytest.fixture(scope="module")
def night(alone: None) -> Iterator[Night]:
    """Boot one fleet for all cases; take it down whatever happens."""
    try:
        yield Night(Fleet("light"), WORK / "scenarios")
    finally:
        hosts.verb("down")


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_the_fleet_comes_back(night: Night, name: str) -> None:
    """Whatever strikes, the fleet ends whole, on one release, and nobody saw two."""
    night.perform(CASES[name])
