"""Intervals against published values."""

from __future__ import annotations

import pytest

from seatrial.statistics import PairedDrop, binomial_tail, mcnemar_exact, wilson_interval


@pytest.mark.parametrize(
    ("successes", "samples", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_is_the_published_one(
    successes: int, samples: int, low: float, high: float
) -> None:
    """The interval agrees with the table to its last digit."""
    found = wilson_interval(successes, samples)
    assert found[0] == pytest.approx(low, abs=5e-5)
    assert found[1] == pytest.approx(high, abs=5e-5)


def test_all_of_few_says_little() -> None:
    """Three of three does not show a share of one."""
    low, high = wilson_interval(3, 3)
    assert (round(low, 2), high) == (0.44, 1.0)


@pytest.mark.parametrize(("successes", "samples"), [(1, 0), (3, 2), (-1, 2)])
def test_senseless_counts_are_refused(successes: int, samples: int) -> None:
    """No interval is made up for counts that cannot be."""
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, samples)


def test_a_share_of_thousands_is_counted() -> None:
    """Counts whose ways leave the range of a float still have a tail: 3 sigma and the median."""
    assert binomial_tail(3, 1200, 0.1) == pytest.approx(1.0)
    assert binomial_tail(50 + 15, 5000, 0.01) == pytest.approx(0.0229, abs=1e-3)
    assert mcnemar_exact(600, 600) == 1.0


def test_thousands_of_pairs_are_decided() -> None:
    """A long comparison ends in a decision and in what it can detect, not in an overflow."""
    assert PairedDrop(0.1, pairs=1500, lost=1200).is_lost
    assert PairedDrop(0.1, pairs=1100, lost=11).detectable() == pytest.approx(0.1)
