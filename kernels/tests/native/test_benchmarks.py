"""A speed is shown beside its floor, and never beside a wrong result."""

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import harness
from benchmarks.harness import Case, Time

BANDWIDTH = 4e12


def case(fault: str | None = None, **changes: Any) -> Case:
    """Return a case of 8 MB, whose floor is 2 us."""
    given: dict[str, Any] = {
        "op": "op",
        "name": "N=1",
        "bytes_moved": 8_000_000,
        "make": lambda seed: seed,
        "ours": lambda one: None,
        "check": lambda one: fault,
        "target_us": 3.0,
    }
    return Case(**{**given, **changes})


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand for the GPU: every call takes 2.5 us; return how many sets each call was timed on."""
    timed: list[int] = []

    def measured(call: Callable[[Any], None], sets: list[Any]) -> Time:
        call(sets[0])
        timed.append(len(sets))
        return Time(2.5, 0.02, 4.0, 0.2)

    monkeypatch.setattr(harness, "measured", measured)
    return timed


def test_a_right_result_has_time_floor_and_target() -> None:
    """And what the spread was."""
    line = harness.table([harness.judge(case(), BANDWIDTH)]).splitlines()[-1]
    assert "floor     2.00 us" in line
    assert "ours     2.50 ±0.01 /     4.00 ±0.10" in line
    assert "target 3.00 met" in line
    assert line.endswith(" 80% of floor")


def test_a_wrong_result_has_no_time(clock: list[int]) -> None:
    """Nothing is even measured, of the peers neither."""
    red = harness.judge(case("value 3 is 1 instead of 2", peers={"sglang": print}), BANDWIDTH)
    assert clock == []
    assert red.times == {}
    line = harness.table([red]).splitlines()[-1]
    assert line.endswith("RED: value 3 is 1 instead of 2")
    assert "ours" not in line


def test_a_missed_target_is_said() -> None:
    """In capitals."""
    assert "target 2.40 MISSED" in harness.table([harness.judge(case(target_us=2.4), BANDWIDTH)])


def test_a_peer_that_cannot_be_had_is_said() -> None:
    """With its reason; ours is timed all the same."""

    def absent(_: Any) -> None:
        raise ModuleNotFoundError("sglang is not installed")

    result = harness.judge(case(peers={"sglang": absent}), BANDWIDTH)
    assert set(result.times) == {"ours"}
    told = harness.table([result])
    assert "sglang not run: ModuleNotFoundError: sglang is not installed" in told


def test_an_error_of_ours_is_an_error() -> None:
    """It is not a peer that is missing."""

    def breaks(_: Any) -> None:
        raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        harness.judge(case(ours=breaks), BANDWIDTH)


@pytest.mark.parametrize(("size", "sets"), [(1, 64), (24 << 20, 10), (1 << 30, 3)])
def test_inputs_rotate_through_more_than_the_cache(clock: list[int], size: int, sets: int) -> None:
    """240 MiB in all, with at least three sets and at most 64."""
    harness.judge(case(bytes_moved=size), BANDWIDTH)
    assert clock == [sets]
