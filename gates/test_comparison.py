"""No less is recalled than by the last good release, on the questions that it was asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from seatrial.baseline import Baseline
from seatrial.details import Comparison as ComparisonDetail
from seatrial.recall import Examiner, Outcome, Question, items_of, parse
from seatrial.statistics import PairedDrop, fixed_pairs, mcnemar_exact
from seatrial.thresholds import Comparison
from seatrial.verdict import InconclusiveError, InvalidMeasurementError, Recorder

pytestmark = pytest.mark.comparison


def test_recall_is_not_below_last_good(
    gate: Recorder, run: Any, examiner: Callable[[str], Examiner], bounds: Comparison
) -> None:
    """Asked the same questions, this release recalls no less than the last good one did.

    PASS when the upper bound of the drop is below what is allowed, FAIL when McNemar's test shows a
    drop and it was seen to exceed what is allowed, else INCONCLUSIVE. Both hold wherever the gate
    stops asking, so it stops as soon as either is shown.
    """
    baseline: Baseline = run.baseline
    asking = examiner("comparison")
    pairs = _pairs(baseline, asking, bounds.pairs)
    if not pairs:
        raise InvalidMeasurementError(
            f"The record of the last good release {baseline.release} ({baseline.where}) has no "
            "question that can be asked again: judge it again with these gates."
        )
    questions = [question for question, _ in pairs]
    before = [was_right for _, was_right in pairs]

    def tested(outcomes: Sequence[Outcome]) -> PairedDrop:
        test = PairedDrop(bounds.drop_ratio_max, bounds.alpha_ratio)
        for was_right, one in zip(before, outcomes, strict=False):
            test.add(was_right, one.is_right)
        return test

    outcomes = asking.ask_all(questions, lambda done: tested(done).is_decided)
    test = tested(outcomes)
    gate.details.items = items_of(outcomes)
    _record(gate, baseline, test, before[: test.pairs], outcomes)
    if not test.is_decided:
        raise InconclusiveError(
            f"{test.pairs} pairs do not show whether recall dropped by more than "
            f"{bounds.drop_ratio_max:.0%}: {test.lost} lost, {test.gained} gained, the drop is "
            f"between {test.lower:.1%} and {test.upper:.1%}. Ask more questions of the next last "
            "good release (recall.samples), or look at what was lost: "
            + "; ".join(_lost(before, outcomes)[:3])
        )
    if test.is_lost:
        assert test.drop <= bounds.drop_ratio_max
    assert test.upper <= bounds.drop_ratio_max


def _pairs(baseline: Baseline, asking: Examiner, most: int) -> list[tuple[Question, bool]]:
    """Return the questions that can be asked again and whether last_good was right, shuffled.

    Shuffled, and always alike: the pairs that a test sees before it stops are a fair sample of all.
    """
    known = {
        item.key: (question, item.is_right)
        for items in baseline.items.values()
        for item in items
        if (question := parse(item.key)) is not None and asking.can_repeat(question)
    }
    keys = sorted(known)
    random.Random(len(keys)).shuffle(keys)
    return [known[key] for key in keys[:most]]


def _record(
    gate: Recorder,
    baseline: Baseline,
    test: PairedDrop,
    before: Sequence[bool],
    outcomes: Sequence[Outcome],
) -> None:
    """Record the bound that is judged and, where a loss is shown, the drop itself."""
    right = sum(one.is_right for one in outcomes)
    detectable = test.detectable()
    gate.details.comparisons = [
        ComparisonDetail(
            what="recall",
            last_good_release=baseline.release,
            this=right / test.pairs,
            last_good=sum(before) / test.pairs,
            change=test.drop,
            low=test.lower,
            high=test.upper,
            allowed=test.allowed,
            unit="drop in recall",
            detectable=detectable if detectable == detectable else None,  # noqa: PLR0124 - NaN
            samples=test.pairs,
            method="paired, betting confidence sequence; McNemar's exact test, sequential",
        )
    ]
    fixed = fixed_pairs(test.allowed, 2 * test.allowed, test.alpha)
    lost = _lost(before, outcomes)
    gate.record_most(
        test.drop if test.is_lost else test.upper,
        at_most=test.allowed,
        unit="drop in recall" if test.is_lost else "drop in recall at most",
        samples=test.pairs,
        message=(
            f"{right} of {test.pairs} recalled, last_good {sum(before)}: {test.lost} lost, "
            f"{test.gained} gained; drop {test.drop:.1%}, with {1 - test.alpha:.0%} confidence "
            f"above {test.lower:.1%} and below {test.upper:.1%}; McNemar p = "
            f"{mcnemar_exact(test.lost, test.gained):.3g}. This run detects a drop of "
            f"{detectable:.1%} with 95 % power; a run of fixed size asks {fixed}."
            + (f" Lost: {'; '.join(lost[:3])}." if lost else "")
        ),
        next_step=(
            "Recall is worse than the last good release's on the same questions: keep last_good, "
            "and compare index_topk, index_key_dtype, kernels and build with it."
        ),
    )


def _lost(before: Sequence[bool], outcomes: Sequence[Outcome]) -> list[str]:
    """Return what was recalled before and is not now, in words."""
    return [
        f"{one.question.form} of {one.prompt_tokens} tokens at depth {one.question.depth:.0%}"
        for was_right, one in zip(before, outcomes, strict=False)
        if was_right and not one.is_right
    ]
