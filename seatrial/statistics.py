"""What a handful of samples can say: shares, paired differences, and when to stop asking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil, comb, exp, fsum, inf, lgamma, log, nan, sqrt
from statistics import NormalDist

NEGLIGIBLE = 1e-18
POWER_MAX = 700.0
"""No larger power of e is asked for: beyond 709 it leaves a float's range."""


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


def binomial_tail(successes: int, samples: int, share: float) -> float:
    """Return how likely ``successes`` or more are among ``samples`` that each have ``share``."""
    if successes <= 0:
        return 1.0
    tail = 0.0
    for count in range(successes, samples + 1):
        term = _binomial(count, samples, share)
        tail += term
        if count > share * samples and term < NEGLIGIBLE * tail:
            break  # the terms only become smaller from here on
    return min(1.0, tail)


def _binomial(count: int, samples: int, share: float) -> float:
    """Return how likely exactly ``count`` are, by logarithms: the factors leave a float's range."""
    if not 0 < share < 1:
        return float(count == (samples if share > 0 else 0))
    ways = lgamma(samples + 1) - lgamma(count + 1) - lgamma(samples - count + 1)
    return exp(ways + count * log(share) + (samples - count) * log(1 - share))


def mcnemar_exact(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Of the pairs in which the two sides differ, each direction is as likely as the other if nothing
    changed. Source: Q. McNemar, Psychometrika 12 (1947), 153-157; exact by the binomial.
    """
    return min(1.0, 2 * binomial_tail(max(lost, gained), lost + gained, 0.5))


def drop_interval(
    lost: int, gained: int, pairs: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the score interval of a paired drop: the share lost less the share gained.

    For a number of pairs that was fixed beforehand; :class:`PairedDrop` has bounds that hold
    wherever one stops. Source: T. Tango, "Equivalence test and confidence interval for the
    difference in proportions for the paired-sample design", Stat. Med. 17 (1998), 891-908.
    """
    _check_pairs(lost, gained, pairs)
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def score(drop: float) -> float:
        """Return how many standard errors the counts lie above this drop."""
        total = 2 * pairs
        slope = -lost - gained + (2 * pairs - lost + gained) * drop
        gain = (sqrt(max(0.0, slope * slope - 4 * total * -gained * drop * (1 - drop))) - slope) / (
            2 * total
        )
        variance = pairs * (2 * gain + drop * (1 - drop))
        return (lost - gained - pairs * drop) / sqrt(variance) if variance > 0 else inf

    point = (lost - gained) / pairs
    low = -1.0 if gained == pairs else _root(lambda drop: z - score(drop), -1.0, point)
    high = 1.0 if lost == pairs else _root(lambda drop: -z - score(drop), point, 1.0)
    return low, high


SHARES = (0.3, 0.6, 0.95)
WEIGHTS = (0.25, 0.25, 0.5)
"""How much of its stake the test bets against a drop, and how the stake is split between them.

Half of it on the boldest, which decides soonest when no pair is lost, as with an unchanged release.
"""


@dataclass
class PairedDrop:
    """The drop of a share between two sides that answered the same questions, pair after pair.

    All bounds hold wherever one stops looking, so a test may stop as soon as it is decided. The
    upper bound bets against "the drop is at least d": each pair multiplies a stake by
    1 + g (d - x) / (1 - d), where x is 1 for a pair lost, -1 for one gained, 0 for a tie. While the
    claim is true the stake is not expected to grow, so it passes 1/alpha in at most alpha of all
    runs however long they are (Ville). Source: I. Waudby-Smith, A. Ramdas, "Estimating means of
    bounded random variables by betting", J. R. Stat. Soc. B 86 (2024), 1-27.

    The evidence of a loss is McNemar's test made sequential: the likelihood of the pairs that
    differ, averaged over all shares of losses above one half, against one half. Source: H. Robbins,
    "Statistical methods related to the law of the iterated logarithm", Ann. Math. Stat. 41 (1970).

    Attributes:
        allowed: the drop that is still allowed, above 0 and below 1.
        alpha: the share of wrong decisions that is accepted, in each direction.
        lost: pairs right before and wrong now.
        gained: pairs wrong before and right now.
    """

    allowed: float
    alpha: float = 0.05
    pairs: int = 0
    lost: int = 0
    gained: int = 0

    def add(self, was_right: bool, is_right: bool) -> None:
        """Count one more pair."""
        self.pairs += 1
        self.lost += was_right and not is_right
        self.gained += is_right and not was_right

    @property
    def drop(self) -> float:
        """The drop as it was seen: NaN without a pair."""
        return (self.lost - self.gained) / self.pairs if self.pairs else nan

    @property
    def upper(self) -> float:
        """The one-sided upper bound of the drop."""
        return _bet_bound(self.lost, self.gained, self.pairs, self.alpha)

    @property
    def lower(self) -> float:
        """The one-sided lower bound of the drop, by the same bet the other way round."""
        return -_bet_bound(self.gained, self.lost, self.pairs, self.alpha)

    @property
    def is_kept(self) -> bool:
        """Whether the drop is shown to be below what is allowed."""
        return _stake(self.lost, self.gained, self.pairs, self.allowed) >= log(1 / self.alpha)

    @property
    def is_lost(self) -> bool:
        """Whether there is a drop by McNemar's test, and it was seen to exceed what is allowed."""
        return (
            self.pairs > 0
            and self.drop > self.allowed
            and self.lost >= _least_lost(self.lost + self.gained, self.alpha)
            and mcnemar_exact(self.lost, self.gained) <= 2 * self.alpha
        )

    @property
    def is_decided(self) -> bool:
        """Whether more pairs would change nothing."""
        return self.is_kept or self.is_lost

    def detectable(self, power: float = 0.95) -> float:
        """Return the least drop that as many pairs find with ``power``, given the gains seen."""
        if not self.pairs:
            return nan
        gained = self.gained / self.pairs

        def is_found(drop: float) -> float:
            return loss_power(drop, gained, self.pairs, self.alpha) - power

        most = 1 - 2 * gained
        if is_found(most) < 0:
            return nan
        return max(self.allowed, _root(is_found, 0.0, most, within=1e-4))


def loss_evidence(lost: int, gained: int) -> float:
    """Return by how much more likely the pairs that differ are if losing is likelier than gaining.

    The integral over all shares s from 1/2 to 1 of 2 (2s)^lost (2 - 2s)^gained, in closed form. Its
    expectation is at most 1 while losing is not likelier, however long one looks.
    """
    differ = lost + gained
    below = binomial_tail(gained + 1, differ + 1, 0.5)  # as many as lost, or fewer, of one more
    power = (differ + 1) * log(2) - log(differ + 1) - log(comb(differ, lost))
    return exp(min(power, POWER_MAX)) * below


def loss_power(drop: float, gained: float, pairs: int, alpha: float = 0.05) -> float:
    """Return how often ``pairs`` show a loss when so much is lost net, and so much gained.

    Counted at the last pair only, so a test that looks at each finds it at least as often.
    """
    differ = drop + 2 * gained
    if not differ:
        return 0.0
    share = (drop + gained) / differ
    found = 0.0
    for count in range(pairs + 1):
        likely = _binomial(count, pairs, differ)
        if likely > 1e-9:
            found += likely * binomial_tail(_least_lost(count, alpha), count, share)
    return found


@cache
def _least_lost(differ: int, alpha: float) -> int:
    """Return the least loss among so many pairs that differ which is evidence of one."""
    for fewer in range(0, differ, 100):  # each leans on the one before, so none leans on many
        _least_lost(fewer, alpha)
    least = _least_lost(differ - 1, alpha) if differ else 1
    while least <= differ and loss_evidence(least, differ - least) < 1 / alpha:
        least += 1
    return least


def fixed_pairs(allowed: float, differ: float, alpha: float = 0.05, power: float = 0.95) -> int:
    """Return how many pairs a test of fixed size must plan for, without stopping early.

    They show with ``power`` that a release which changes nothing in the mean, while a share
    ``differ`` of its pairs differs, is not below by more than ``allowed``. Normal approximation
    with the variance of each hypothesis; never fewer than where no pair differs at all.
    """
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha), NormalDist().inv_cdf(power)
    at_limit = max(differ, allowed) - allowed**2
    spread = z_alpha * sqrt(at_limit) + z_power * sqrt(differ)
    return max(ceil((spread / allowed) ** 2), ceil(log(alpha) / log(1 - allowed)))


def _stake(lost: int, gained: int, pairs: int, drop: float) -> float:
    """Return the logarithm of the stake of who bets that the drop is less than ``drop``."""
    tie, gain = drop / (1 - drop), (1 + drop) / (1 - drop)
    logs = [
        log(weight)
        + lost * log(1 - share)
        + (pairs - lost - gained) * log(1 + share * tie)
        + gained * log(1 + share * gain)
        for share, weight in zip(SHARES, WEIGHTS, strict=True)
    ]
    most = max(logs)
    return most + log(fsum(exp(each - most) for each in logs))


def _bet_bound(lost: int, gained: int, pairs: int, alpha: float) -> float:
    """Return the least drop that the bets have refuted; 1 if none."""
    most = 1 - 1e-9
    wanted = log(1 / alpha)
    if _stake(lost, gained, pairs, most) < wanted:
        return 1.0
    return _root(lambda drop: _stake(lost, gained, pairs, drop) - wanted, -1 + 1e-9, most)


def _root(
    function: Callable[[float], float], low: float, high: float, within: float = 1e-9
) -> float:
    """Return where a function that grows passes 0, between ``low`` and ``high``."""
    while high - low > within:
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _check_pairs(lost: int, gained: int, pairs: int) -> None:
    if min(lost, gained) < 0 or lost + gained > pairs or pairs < 1:
        raise ValueError(f"{lost} lost and {gained} gained of {pairs} pairs")
