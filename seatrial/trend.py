"""Do right answers become fewer with time? A mean can pass while the end has gone wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb, sqrt
from statistics import NormalDist, median

EXACT_WAYS_MAX = 400_000
"""Up to so many steps the probability is counted, beyond it is approximated."""


def decay_probability(outcomes: Sequence[bool]) -> float:
    """Return how likely failures lie so late by chance, if order does not matter: one-sided.

    The Wilcoxon rank-sum test of the failures' positions against those of the successes, which for
    outcomes of yes and no is the exact Cochran-Armitage test for trend with the order as score (P.
    Armitage, "Tests for linear trends in proportions and frequencies", Biometrics 11 (1955),
    375-386). Few failures or few outcomes are counted exactly; many are approximated by the normal
    distribution with a correction for continuity. Without a failure, or without a success, nothing
    can be said of order and it is 1.

    Args:
        outcomes: whether each request was answered rightly, in the order in which it was asked.
    """
    total = len(outcomes)
    late = [index + 1 for index, is_right in enumerate(outcomes) if not is_right]
    failures = len(late)
    if failures in (0, total):
        return 1.0
    ranks = sum(late)
    # Counted from the other end: the reversed ranks sum to at most this.
    mirrored = failures * (total + 1) - ranks
    if total * failures * (mirrored + 1) <= EXACT_WAYS_MAX:
        return _exact(total, failures, mirrored)
    mean = failures * (total + 1) / 2
    spread = sqrt(failures * (total - failures) * (total + 1) / 12)
    return 1 - NormalDist().cdf((ranks - 0.5 - mean) / spread)


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return how much y grows per x: the median of the slopes between all pairs of points.

    The Theil-Sen estimate (P. K. Sen, "Estimates of the regression coefficient based on Kendall's
    tau", JASA 63 (1968), 1379-1389): a few looks that catch a spike do not move it.

    Raises:
        ValueError: there are no two points of different x.
    """
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(points, 2)
        if later[0] != earlier[0]
    ]
    if not slopes:
        raise ValueError("a slope needs two points of different x")
    return median(slopes)


def _exact(total: int, failures: int, mirrored: int) -> float:
    """Return the share of all ways to place the failures whose reversed ranks sum to no more."""
    ways = [[0] * (mirrored + 1) for _ in range(failures + 1)]
    ways[0][0] = 1
    for rank in range(1, total + 1):
        for chosen in range(min(failures, rank), 0, -1):
            row, before = ways[chosen], ways[chosen - 1]
            for at in range(mirrored, rank - 1, -1):
                row[at] += before[at - rank]
    return sum(ways[failures]) / comb(total, failures)
