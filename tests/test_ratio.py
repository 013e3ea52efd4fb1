"""A slower release is told from noise."""

from __future__ import annotations

import random

import pytest

from seatrial.ratio import RatioError, compare


def runs(draw: random.Random, speed: float, noise: float, repeats: int = 4) -> list[list[float]]:
    """Return the rates of ``repeats`` of 12 requests each, with a noise per request."""
    return [[speed * draw.lognormvariate(0, noise) for _ in range(12)] for _ in range(repeats)]


def test_textbook_shift_is_found() -> None:
    """Hodges and Lehmann's estimate of a known example: quotients' median."""
    found = compare([[2.0, 4.0, 8.0, 16.0]], [[1.0, 2.0, 4.0, 8.0]], 0.0)
    assert found.ratio == pytest.approx(2.0)
    assert found.low <= 2.0 <= found.high


def test_interval_holds_the_truth_as_often_as_it_says() -> None:
    """With 10 % noise, the true ratio lies inside in at least 95 of 100 runs."""
    draw = random.Random(3)
    inside = 0
    for _ in range(300):
        found = compare(runs(draw, 85.0, 0.1), runs(draw, 100.0, 0.1), 0.0)
        inside += found.low <= 0.85 <= found.high
    assert inside / 300 >= 0.94


def test_fifteen_percent_below_is_seen_through_ten_percent_noise() -> None:
    """The interval excludes equality in nearly every run, and almost never without a change."""
    draw = random.Random(4)
    seen = sum(
        compare(runs(draw, 85.0, 0.1), runs(draw, 100.0, 0.1), 0.0).high < 1 for _ in range(100)
    )
    cried = sum(
        compare(runs(draw, 100.0, 0.1), runs(draw, 100.0, 0.1), 0.0).high < 1 for _ in range(100)
    )
    assert seen >= 95
    assert cried <= 5


def test_known_noise_widens_the_interval() -> None:
    """What runs of one release differ by is no finding."""
    draw = random.Random(5)
    new, old = runs(draw, 90.0, 0.02), runs(draw, 100.0, 0.02)
    assert compare(new, old, 0.0).high < 1 < compare(new, old, 0.1).high


@pytest.mark.parametrize(
    ("old", "message"),
    [([[1.0]], "too few"), ([[0.0] * 9], "not above zero"), ([[float("nan")] * 9], "not above")],
)
def test_no_baseline_is_no_comparison(old: list[list[float]], message: str) -> None:
    """A baseline of nothing, of zero or of no number never passes."""
    with pytest.raises(RatioError, match=message):
        compare([[1.0] * 9], old, 0.0)
