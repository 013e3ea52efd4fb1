"""The four cases of the field report: the model really sees its whole window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from seatrial.engine import Answer
from seatrial.haystack import END, SECRET, START, Layout, is_recalled, spread
from seatrial.statistics import wilson_interval
from seatrial.thresholds import NeedleCase, RepeatedNeedleCase, Window
from seatrial.verdict import Recorder

pytestmark = pytest.mark.window

Job = Callable[[], Answer]
Prepare = Callable[[int, Layout, int], Job]


def prompts(name: Literal["a", "b", "c", "d"]) -> Callable[[Prepare, Window], list[Job]]:
    """Return how to prepare the prompts of one case."""

    def jobs(prepare: Prepare, bounds: Window) -> list[Job]:
        case: NeedleCase = getattr(bounds, name)
        layout = END if name == "b" else START
        if isinstance(case, RepeatedNeedleCase):
            layout = spread(case.copies)
        return [
            prepare(case.prompt_tokens, layout, bounds.answer_tokens) for _ in range(case.samples)
        ]

    return jobs


@pytest.mark.ahead(jobs=prompts("a"))
def test_case_a_needle_at_start_of_5200_tokens_is_recalled(
    gate: Recorder, answers: Iterator[Answer], bounds: Window
) -> None:
    """A: a needle at the start of a prompt of about 5,200 tokens is recalled."""
    measured, bound = _recall(gate, answers, bounds.a)
    assert measured >= bound


@pytest.mark.ahead(jobs=prompts("b"))
def test_case_b_needle_in_last_30_tokens_is_recalled(
    gate: Recorder, answers: Iterator[Answer], bounds: Window
) -> None:
    """B: a needle within about the last 30 tokens of as long a prompt is recalled."""
    measured, bound = _recall(gate, answers, bounds.b)
    assert measured >= bound


@pytest.mark.ahead(jobs=prompts("c"))
def test_case_c_needle_repeated_8_times_is_recalled(
    gate: Recorder, answers: Iterator[Answer], bounds: Window
) -> None:
    """C: a needle that stands eight times in as long a prompt is recalled."""
    measured, bound = _recall(gate, answers, bounds.c)
    assert measured >= bound


@pytest.mark.ahead(jobs=prompts("d"))
def test_case_d_needle_at_start_of_900_tokens_is_recalled(
    gate: Recorder, answers: Iterator[Answer], bounds: Window
) -> None:
    """D: a needle at the start of a prompt of about 900 tokens is recalled."""
    measured, bound = _recall(gate, answers, bounds.d)
    assert measured >= bound


def _recall(gate: Recorder, given: Iterator[Answer], case: NeedleCase) -> tuple[float, float]:
    """Record which share of a case's answers names the secret."""
    answers = list(given)
    recalled = sum(is_recalled(answer.text) for answer in answers)
    low, high = wilson_interval(recalled, len(answers))
    lengths = sorted(answer.prompt_tokens for answer in answers)
    wrong = [answer.text.strip() for answer in answers if not is_recalled(answer.text)]
    said = f" Instead of {SECRET} it said {wrong[0][:60]!r}." if wrong else ""
    return gate.record(
        recalled / len(answers),
        at_least=case.recall_ratio_min,
        unit="recall",
        samples=len(answers),
        message=(
            f"{recalled} of {len(answers)} needles recalled (95 % interval {low:.2f}-{high:.2f}), "
            f"prompts of {lengths[0]}-{lengths[-1]} tokens.{said}"
        ),
        next_step=(
            "Compare index_topk and index_key_dtype with last_good: entries beyond "
            "4 x index_topk + 128 tokens are seen only if the indexer ranks them well."
        ),
    )
