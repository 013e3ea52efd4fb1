"""A verdict needs a measurement, and says what is known."""

from __future__ import annotations

from typing import Literal

import pytest

from seatrial.errors import SeatrialError
from seatrial.verdict import (
    InconclusiveError,
    InvalidMeasurementError,
    Recorder,
    Verdict,
    judge,
    number,
)

MEASURED_ENOUGH, MEASURED_LITTLE, NOTHING = 1.0, 0.0, None


@pytest.mark.parametrize(
    ("measured", "outcome", "error", "reason", "expected"),
    [
        (MEASURED_ENOUGH, "passed", None, "", Verdict.PASS),
        (MEASURED_LITTLE, "failed", AssertionError(), "", Verdict.FAIL),
        (MEASURED_LITTLE, "passed", None, "", Verdict.FAIL),
        (MEASURED_ENOUGH, "failed", AssertionError(), "", Verdict.INVALID),
        (NOTHING, "failed", AssertionError(), "", Verdict.INVALID),
        (NOTHING, "passed", None, "", Verdict.INVALID),
        (NOTHING, "failed", SeatrialError("why"), "", Verdict.INVALID),
        (MEASURED_LITTLE, "failed", SeatrialError("why"), "", Verdict.INVALID),
        (MEASURED_LITTLE, "failed", InconclusiveError("why"), "", Verdict.INCONCLUSIVE),
        (MEASURED_LITTLE, "failed", KeyError("why"), "", Verdict.INVALID),
        (NOTHING, "skipped", None, "", Verdict.INVALID),
        (NOTHING, "skipped", None, "listed", Verdict.NOT_APPLICABLE),
        (MEASURED_ENOUGH, "failed", AssertionError(), "listed", Verdict.INVALID),
    ],
)
def test_end_of_gate_is_judged(
    measured: float | None,
    outcome: Literal["passed", "failed", "skipped"],
    error: BaseException | None,
    reason: str,
    expected: Verdict,
) -> None:
    """Only a measurement that is enough passes, and only one that is not enough fails."""
    recorder = Recorder("test_it", 1, print, measured=measured, bound=0.5)
    assert judge(recorder, outcome, error, reason)[0] is expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.6667, "0.67"),
        (206.4, "206"),
        (79.93, "79.9"),
        (0.00123, "0.00123"),
        (-3.0, "-3"),
        (399 / 400, "0.998"),
        (9999 / 10000, "0.9999"),
        (99.96, "99.96"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    """Three figures are enough for a person."""
    assert number(value) == text


@pytest.mark.parametrize(("measured", "samples"), [(float("nan"), 1), (float("inf"), 1), (1.0, 0)])
def test_recorder_refuses_what_is_no_measurement(measured: float, samples: int) -> None:
    """NaN, infinity and an empty sample are not judged."""
    said: list[str] = []
    recorder = Recorder("test_it", 1, said.append)
    with pytest.raises(InvalidMeasurementError):
        recorder.record(measured, at_least=0, unit="x", samples=samples)
    assert recorder.measured is None
    assert len(said) == 1


def test_seeds_repeat_with_the_run() -> None:
    """The same run seed gives a gate the same prompts, and each gate its own."""

    def first(gate_id: str, seed: int) -> int:
        return next(Recorder(gate_id, seed, print).seeds())

    assert first("test_a", 1) == first("test_a", 1)
    assert len({first("test_a", 1), first("test_b", 1), first("test_a", 2)}) == 3


@pytest.mark.parametrize(("measured", "is_enough"), [(3.0, True), (4.0, True), (4.1, False)])
def test_upper_bound_is_kept_from_below(measured: float, is_enough: bool) -> None:
    """What must not be more than its bound is said and judged so."""
    said: list[str] = []
    recorder = Recorder("test_it", 1, said.append)
    found, bound = recorder.record_most(measured, at_most=4.0, unit="ms", samples=2)
    assert (found <= bound) is recorder.is_enough is is_enough
    assert "bound <= 4, samples 2" in said[0]
