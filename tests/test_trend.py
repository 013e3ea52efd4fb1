"""A decay is found where there is one, and rarely where there is none."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from seatrial.trend import decay_probability, growth


@pytest.mark.parametrize(("total", "failures"), [(6, 2), (8, 3), (9, 4)])
def test_exact_probability_is_that_of_all_placements(total: int, failures: int) -> None:
    """For short runs it equals the count over every way to place the failures."""
    ways = list(combinations(range(1, total + 1), failures))
    for late in ways:
        outcomes = [rank not in late for rank in range(1, total + 1)]
        expected = sum(sum(way) >= sum(late) for way in ways) / len(ways)
        assert decay_probability(outcomes) == pytest.approx(expected, abs=1e-12)


def test_published_example_agrees() -> None:
    """Rank sum 4 + 5 of 5 placed 2: one of ten ways, the smallest p of the published tables."""
    assert decay_probability([True, True, True, False, False]) == pytest.approx(0.1)


@pytest.mark.parametrize("outcomes", [[], [True] * 9, [False] * 9])
def test_without_both_outcomes_nothing_is_said(outcomes: list[bool]) -> None:
    """All right or all wrong is no trend."""
    assert decay_probability(outcomes) == 1.0


def test_decay_with_a_passing_mean_is_found() -> None:
    """95 % right, all the wrong ones in the last tenth: no chance."""
    draw = random.Random(1)
    late = [draw.random() > 0.5 for _ in range(20)]
    assert decay_probability([True] * 180 + late) < 1e-6


def test_false_alarms_keep_their_rate() -> None:
    """Over 2,000 steady runs of 200 with 5 % wrong, p below 0.01 is as rare as it says."""
    draw = random.Random(2)
    runs = [[draw.random() > 0.05 for _ in range(200)] for _ in range(2000)]
    alarms = sum(decay_probability(run) < 0.01 for run in runs)
    assert alarms <= 34  # binomial(2000, 0.01): 34 or fewer in 99.8 % of experiments


def test_growth_is_not_moved_by_a_spike() -> None:
    """A leak of 2 per request is seen through one wild look, and no leak is none."""
    leaking = [(float(x), 2.0 * x + (500.0 if x == 7 else 0.0)) for x in range(12)]
    assert growth(leaking) == pytest.approx(2.0)
    assert growth([(float(x), 5.0) for x in range(12)]) == 0
    with pytest.raises(ValueError, match="two points"):
        growth([(1.0, 2.0)])
