"""How much faster or slower this release is than the last good one, and how sure that is.

Requests of one run share its luck (other load on the host, a warm or cold cache), so the spread of
requests within a run is not the whole noise. What is added is learned from repeats: how far the
medians of repeats on the *same* release lie apart, and how far whole runs were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean, median

from seatrial.errors import SeatrialError

SAMPLES_MIN = 4


class RatioError(SeatrialError):
    """The observations allow no comparison."""


@dataclass(frozen=True)
class RatioInterval:
    """New over old, with an interval that holds the true ratio at the asked confidence."""

    ratio: float
    low: float
    high: float
    samples: int


def compare(
    new: Sequence[Sequence[float]],
    old: Sequence[Sequence[float]],
    noise_ratio: float,
    confidence: float = 0.95,
) -> RatioInterval:
    """Return new over old, as a ratio of what is typical.

    The estimate is Hodges and Lehmann's: the median of all quotients of a new by an old
    observation; its interval holds the quotients that a Mann-Whitney test does not refuse, by the
    normal approximation (M. Hollander and D. A. Wolfe, "Nonparametric Statistical Methods", 2nd
    ed., section 4.3). In logarithms, that interval is widened, as variances add, by the standard
    error of the repeats' medians on both sides and by ``noise_ratio``.

    Args:
        new: observations of this release, one list per repeat.
        old: the same of the last good one.
        noise_ratio: standard deviation between whole runs of one release, as a share.
        confidence: share of intervals, over many repeats, that hold the true ratio.

    Raises:
        RatioError: too few observations, or one that is not positive (a rate of zero is no
            baseline).
    """
    ours, theirs = _logs("this release", new), _logs("the last good release", old)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    all_ours = [value for repeat in ours for value in repeat]
    all_theirs = [value for repeat in theirs for value in repeat]
    shifts = sorted(a - b for a in all_ours for b in all_theirs)
    m, n = len(all_ours), len(all_theirs)
    rank = max(0, round(m * n / 2 - z * sqrt(m * n * (m + n + 1) / 12)))
    estimate = median(shifts)
    between = z * sqrt(_error(ours) ** 2 + _error(theirs) ** 2 + log(1 + noise_ratio) ** 2)
    low = estimate - sqrt((estimate - shifts[rank]) ** 2 + between**2)
    high = estimate + sqrt((shifts[-1 - rank] - estimate) ** 2 + between**2)
    return RatioInterval(exp(estimate), exp(low), exp(high), m)


def _logs(whose: str, repeats: Sequence[Sequence[float]]) -> list[list[float]]:
    values = [value for repeat in repeats for value in repeat]
    if len(values) < SAMPLES_MIN:
        raise RatioError(
            f"{len(values)} observations of {whose} are too few to compare; "
            f"at least {SAMPLES_MIN} are needed"
        )
    if any(not value > 0 for value in values):
        raise RatioError(f"an observation of {whose} is not above zero: nothing compares with it")
    return [[log(value) for value in repeat] for repeat in repeats if repeat]


def _error(repeats: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean of the repeats' medians; 0 with one repeat."""
    middles = [median(repeat) for repeat in repeats]
    if len(middles) < 2:
        return 0.0
    mean = fmean(middles)
    variance = sum((middle - mean) ** 2 for middle in middles) / (len(middles) - 1)
    return sqrt(variance / len(middles))
