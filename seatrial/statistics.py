"""What a handful of samples can say: intervals for shares."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def wilson_interval(successes: int, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the two-sided Wilson score interval of a share.

    Wilson's interval stays inside 0..1 and is honest for few samples and for shares of 0 and 1,
    where the usual normal interval shrinks to a point. Formula: E. B. Wilson, "Probable inference,
    the law of succession, and statistical inference", JASA 22 (1927), 209-212.

    Args:
        successes: how many of the samples had the property.
        samples: how many were taken; at least one.
        confidence: share of intervals, over many repeats, that hold the true share.

    Raises:
        ValueError: the counts or the confidence make no sense.
    """
    if not 0 <= successes <= samples or samples < 1:
        raise ValueError(f"{successes} successes of {samples} samples")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence should be between 0 and 1, is {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / samples
    shrink = 1 + z * z / samples
    middle = (share + z * z / (2 * samples)) / shrink
    half = z / shrink * sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples))
    # Rounding would leave 0 or 1 by 1e-17 where the formula gives them exactly.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == samples else min(1.0, middle + half)
    return low, high
