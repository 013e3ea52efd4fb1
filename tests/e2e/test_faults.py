"""The most telling faults, on real hosts with the light engine; `make scenarios` runs them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import hosts
from tests.faults.cases import CASES
from tests.faults.fleet import WORK, Fleet
from tests.faults.night import Night

TELLING = [name for name, case in CASES.items() if case.is_telling]


@pytest.fixture(scope="module")
def night(alone: None) -> Iterator[Night]:
    """Boot one fleet for all cases; take it down whatever happens."""
    try:
        yield Night(Fleet("light"), WORK / "telling")
    finally:
        hosts.verb("down")


@pytest.mark.parametrize("name", TELLING)
def test_the_fleet_comes_back(night: Night, name: str) -> None:
    """Whatever strikes, the fleet ends whole, on one release, and nobody saw two."""
    night.perform(CASES[name])
