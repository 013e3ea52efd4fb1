"""Verdicts: what is known of a claim, and how it comes to be known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from seatrial.details import Details
from seatrial.errors import SeatrialError

BoundIs = Literal["min", "max"]
"""Whether a bound is the least or the most that is allowed."""
SIGNS: dict[BoundIs, str] = {"min": ">=", "max": "<="}


class InvalidMeasurementError(SeatrialError):
    """What a gate should measure could not be measured; the message says why."""


class InconclusiveError(SeatrialError):
    """It was measured, and the samples do not decide the claim; the message says what would."""


class Verdict(StrEnum):
    """What is known of a claim. Only PASS promotes."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    NOT_APPLICABLE = "NOT-APPLICABLE"


@dataclass
class Recorder:
    """What one gate measured, as far as it has come."""

    gate_id: str
    seed: int
    say: Callable[[str], None]
    measured: float | None = None
    bound: float | None = None
    bound_is: BoundIs = "min"
    unit: str = ""
    samples: int = 0
    message: str = ""
    next: str = ""
    details: Details = field(default_factory=Details)

    @property
    def is_enough(self) -> bool:
        """Whether what was measured keeps its bound; NaN and nothing do not."""
        if self.measured is None or self.bound is None:
            return False
        if self.bound_is == "max":
            return self.measured <= self.bound
        return self.measured >= self.bound

    def record(
        self,
        measured: float,
        *,
        at_least: float,
        unit: str,
        samples: int,
        message: str = "",
        next_step: str = "",
    ) -> tuple[float, float]:
        """Say and keep what was measured, and return it with its bound, ready to be asserted.

        Raises:
            InvalidMeasurementError: no number, or no sample: there is nothing to judge.
        """
        self.measured, self.bound, self.bound_is, self.unit = measured, at_least, "min", unit
        self.samples, self.message, self.next = samples, message, next_step
        self._tell()
        return measured, at_least

    def record_most(
        self,
        measured: float,
        *,
        at_most: float,
        unit: str,
        samples: int,
        message: str = "",
        next_step: str = "",
    ) -> tuple[float, float]:
        """Do the same for what must not be more: assert ``measured <= bound``.

        Raises:
            InvalidMeasurementError: no number, or no sample: there is nothing to judge.
        """
        self.measured, self.bound, self.bound_is, self.unit = measured, at_most, "max", unit
        self.samples, self.message, self.next = samples, message, next_step
        self._tell()
        return measured, at_most

    def _tell(self) -> None:
        """Say what was recorded, and refuse it if it is no measurement."""
        measured, bound = self.measured, self.bound
        if measured is None or bound is None:
            raise InvalidMeasurementError(f"Nothing was measured. {self.message}")
        self.say(
            f"{words(self.gate_id)}: measured {number(measured)} {self.unit}, "
            f"bound {SIGNS[self.bound_is]} {number(bound)}, samples {self.samples}"
        )
        if self.message:
            self.say(f"  {self.message}")
        if not math.isfinite(measured) or self.samples < 1:
            self.measured = None
            raise InvalidMeasurementError(
                f"Measured {measured} from {self.samples} samples. {self.message}"
            )

    def seeds(self) -> Iterator[int]:
        """Yield a seed per prompt; they repeat when the run's seed is given again."""
        draw = random.Random(f"{self.seed}/{self.gate_id}")
        while True:
            yield draw.randrange(2**32)


def judge(
    recorder: Recorder,
    outcome: Literal["passed", "failed", "skipped"],
    error: BaseException | None,
    reason: str,
) -> tuple[Verdict, str]:
    """Return the verdict that the end of a gate amounts to, and what to say with it.

    PASS needs both: the assertion held, and the gate has recorded enough. FAIL needs a measurement
    that is not enough. A gate that ended otherwise has shown nothing.

    Args:
        recorder: what the gate has recorded.
        outcome: how pytest saw it end.
        error: what it raised, if anything.
        reason: why the thresholds list it as not applicable; empty if they do not.
    """
    if outcome == "skipped":
        if reason:
            return Verdict.NOT_APPLICABLE, reason
        return Verdict.INVALID, f"The gate was skipped: {error}"
    if outcome == "failed":
        return _failure(recorder, error)
    if recorder.measured is None:
        return Verdict.INVALID, "The gate passed without measuring anything."
    if not recorder.is_enough:
        return Verdict.FAIL, f"The gate did not assert what it measured. {recorder.message}"
    return Verdict.PASS, recorder.message


def _failure(recorder: Recorder, error: BaseException | None) -> tuple[Verdict, str]:
    if isinstance(error, InconclusiveError):
        return Verdict.INCONCLUSIVE, str(error)
    if isinstance(error, SeatrialError):
        return Verdict.INVALID, str(error)
    if isinstance(error, AssertionError) and recorder.measured is not None:
        if recorder.is_enough:
            return Verdict.INVALID, f"The gate failed though it measured enough: {error}"
        return Verdict.FAIL, recorder.message
    first = (str(error).strip() or "no message").splitlines()[0]
    return Verdict.INVALID, f"The gate broke: {type(error).__name__}: {first}"


def number(value: float) -> str:
    """Return a number as a person writes it: three figures, an exponent only if tiny.

    More figures where three would make it whole: 399 of 400 is no 1.00, which would keep its bound.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == round(value) or size >= 100:
        return f"{value:.0f}"
    if size < 0.1:
        return f"{value:.3g}"
    text, places = "", 1 if size >= 10 else 2
    while not text or float(text) == round(value):
        text, places = f"{value:.{places}f}", places + 1
    return text


def words(gate_id: str) -> str:
    """Return a gate's name as words."""
    return gate_id.removeprefix("test_").replace("_", " ")
