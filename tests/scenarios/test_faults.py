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
MARKED = [
    pytest.param(name, marks=pytest.mark.telling) if name in TELLING else name for name in CASES
]


@pytest.fixture(scope="module")
def night(alone: None) -> Iterator[Night]:
    """Boot one fleet for all cases; take it down whatever happens."""
    try:
        yield Night(Fleet("light"), WORK / "scenarios")
    finally:
        hosts.verb("down")


@pytest.mark.parametrize("name", MARKED)
def test_the_fleet_comes_back(night: Night, name: str) -> None:
    """Whatever strikes, the fleet ends whole, on one release, and nobody saw two."""
    night.perform(CASES[name])
