"""Paired comparisons: against published values, and by simulated rollouts for what they promise."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from seatrial.statistics import (
    PairedDrop,
    binomial_tail,
    drop_interval,
    fixed_pairs,
    loss_evidence,
    loss_power,
    mcnemar_exact,
)

ROLLOUTS = 2000
ALPHA = 0.05
# Four standard errors of a share of 0.05 among so many rollouts.
SLACK = 4 * math.sqrt(ALPHA * (1 - ALPHA) / ROLLOUTS)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        # M. W. Fagerland, S. Lydersen, P. Laake, BMC Med. Res. Methodol. 13:91 (2013), table 3:
        # airway hyper-responsiveness (1 and 7) and complete response (6 and 16), exact conditional.
        (1, 7, 0.0703),
        (6, 16, 0.0525),
        (5, 0, 0.0625),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_is_the_published_one(lost: int, gained: int, p: float) -> None:
    """The exact p-value agrees with the table, whichever side gained."""
    assert mcnemar_exact(lost, gained) == pytest.approx(p, abs=5e-5)
    assert mcnemar_exact(gained, lost) == mcnemar_exact(lost, gained)


def test_score_interval_is_the_published_one() -> None:
    """The interval of a fixed run is Tango's, as published for the airway data: -0.517 to -0.026.

    M. W. Fagerland, S. Lydersen, P. Laake, Statistics in Medicine 33 (2014), 2850-2875.
    """
    low, high = drop_interval(1, 7, 21)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)
    assert drop_interval(7, 1, 21) == pytest.approx((-high, -low), abs=1e-8)


def test_score_interval_solves_its_equation() -> None:
    """Without a pair that differs it is z^2 / (n + z^2) either way, the closed form."""
    z2 = 1.959963984540054**2
    assert drop_interval(0, 0, 50) == pytest.approx((-z2 / (50 + z2), z2 / (50 + z2)), abs=1e-8)


def test_evidence_of_a_loss_is_its_integral() -> None:
    """The closed form is the mean likelihood ratio over the shares above one half."""
    for lost, gained in ((0, 0), (7, 0), (20, 10), (3, 9)):
        steps = 20000
        shares = ((0.5 + 0.5 * (step + 0.5) / steps) for step in range(steps))
        mean = sum((2 * s) ** lost * (2 - 2 * s) ** gained for s in shares) / steps
        assert loss_evidence(lost, gained) == pytest.approx(mean, rel=1e-5)


def test_binomial_tail_is_exact() -> None:
    """Against counting: three or more heads of five."""
    heads = sum(sum(faces) >= 3 for faces in product((0, 1), repeat=5)) / 32
    assert binomial_tail(3, 5, 0.5) == pytest.approx(heads)
    assert binomial_tail(0, 5, 0.1) == 1.0


@pytest.mark.parametrize(("allowed", "pairs"), [(0.1, 36), (0.05, 73), (0.02, 184)])
def test_pairs_that_never_differ_decide_after_about_three_allowances(
    allowed: float, pairs: int
) -> None:
    """An unchanged release passes after 3.7 / allowed pairs; 3 / allowed is the least possible."""
    test = PairedDrop(allowed)
    while not test.is_kept:
        test.add(was_right=True, is_right=True)
    assert test.pairs == pairs
    assert math.log(ALPHA) / math.log(1 - allowed) < pairs
    assert test.upper <= allowed


def test_bounds_mirror_each_other() -> None:
    """What is lost one way is gained the other way, and both bounds hold the drop between them."""
    test, mirror = PairedDrop(0.1, 0.05, 100, 9, 3), PairedDrop(0.1, 0.05, 100, 3, 9)
    assert test.lower == -mirror.upper
    assert test.lower < test.drop < test.upper


def test_nothing_is_decided_without_pairs() -> None:
    """No pair: no drop, no bound, no decision."""
    test = PairedDrop(0.1)
    assert math.isnan(test.drop)
    assert not test.is_decided
    assert (test.lower, test.upper) == (-1.0, 1.0)
    assert math.isnan(test.detectable())


def test_detectable_drop_is_found_as_often_as_promised() -> None:
    """The drop that a run says it can detect is found with the power that it says."""
    test = PairedDrop(0.05, pairs=150, gained=2)
    drop = test.detectable(0.95)
    assert loss_power(drop, 2 / 150, 150) == pytest.approx(0.95, abs=0.01)
    verdicts = _verdicts(0.05, lost=drop + 2 / 150, gained=2 / 150, pairs=150)
    assert verdicts["FAIL"] >= (0.95 - SLACK) * ROLLOUTS


@cache
def _rollouts(allowed: float, lost: float, gained: float, pairs: int) -> tuple[Counter[str], float]:
    """Return the verdicts of simulated rollouts and the mean number of pairs they asked for."""
    draw = random.Random(f"{allowed} {lost} {gained} {pairs}")
    verdicts: Counter[str] = Counter()
    asked = 0
    for _ in range(ROLLOUTS):
        test = PairedDrop(allowed, ALPHA)
        for was_right, is_right in _pairs(draw, lost, gained, pairs):
            test.add(was_right, is_right)
            if test.is_decided:
                break
        verdicts["PASS" if test.is_kept else "FAIL" if test.is_lost else "INCONCLUSIVE"] += 1
        asked += test.pairs
    return verdicts, asked / ROLLOUTS


def _pairs(
    draw: random.Random, lost: float, gained: float, pairs: int
) -> Iterator[tuple[bool, bool]]:
    for _ in range(pairs):
        luck = draw.random()
        yield (True, False) if luck < lost else (luck >= lost + gained, True)


def _verdicts(allowed: float, *, lost: float, gained: float, pairs: int) -> Counter[str]:
    return _rollouts(allowed, lost, gained, pairs)[0]


@pytest.mark.parametrize("gained", [0.0, 0.02, 0.1])
def test_release_that_drops_as_much_as_allowed_seldom_passes(gained: float) -> None:
    """At the very drop that is not allowed, at most alpha of the rollouts pass, stopping anywhere.

    No pair gained is the hardest case for the bet: a bound for few events.
    """
    verdicts = _verdicts(0.1, lost=0.1 + gained, gained=gained, pairs=300)
    assert verdicts["PASS"] <= (ALPHA + SLACK) * ROLLOUTS, verdicts


@pytest.mark.parametrize("differ", [0.01, 0.1, 0.3])
def test_release_that_drops_nothing_seldom_fails(differ: float) -> None:
    """Where losing is as likely as gaining, at most alpha of the rollouts fail."""
    verdicts = _verdicts(0.05, lost=differ / 2, gained=differ / 2, pairs=300)
    assert verdicts["FAIL"] <= (ALPHA + SLACK) * ROLLOUTS, verdicts


# A run of fixed size is planned for pairs of which a fifth differ, which is twice the allowance.
FIXED = fixed_pairs(0.1, 0.2, ALPHA)


@pytest.mark.parametrize(
    ("lost", "gained", "verdict", "share"),
    [
        (0.0, 0.0, "PASS", 1 / 3),  # answers as before
        (0.005, 0.005, "PASS", 1 / 3),
        (0.025, 0.025, "PASS", 1 / 3),
        (0.04, 0.04, "PASS", 1 / 2),
        (0.22, 0.02, "FAIL", 1 / 2),  # twice the allowance
        (0.3, 0.0, "FAIL", 1 / 3),  # three times
        (1.0, 0.0, "FAIL", 1 / 3),  # forgets everything
    ],
)
def test_clear_release_costs_a_share_of_a_fixed_run(
    lost: float, gained: float, verdict: str, share: float
) -> None:
    """A clearly good or bad release is decided rightly, by half the requests or by a third."""
    verdicts, asked = _rollouts(0.1, lost, gained, FIXED)
    assert verdicts[verdict] >= (1 - ALPHA) * ROLLOUTS, verdicts
    assert asked <= share * FIXED, asked
