"""The four cases of the field report: the model really sees its whole window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seatrial.engine import Answer
from seatrial.haystack import END, SECRET, START, Layout, is_recalled, spread
from seatrial.statistics import wilson_interval
from seatrial.thresholds import NeedleCase, Window
from seatrial.verdict import Recorder

Ask = Callable[[int, Layout, int], Answer]

pytestmark = pytest.mark.window


def test_case_a_needle_at_start_of_5200_tokens_is_recalled(
    gate: Recorder, ask: Ask, bounds: Window
) -> None:
    """A: a needle at the start of a prompt of about 5,200 tokens is recalled."""
    measured, bound = _recall(gate, ask, START, bounds.a, bounds.answer_tokens)
    assert measured >= bound


def test_case_b_needle_in_last_30_tokens_is_recalled(
    gate: Recorder, ask: Ask, bounds: Window
) -> None:
    """B: a needle within about the last 30 tokens of as long a prompt is recalled."""
    measured, bound = _recall(gate, ask, END, bounds.b, bounds.answer_tokens)
    assert measured >= bound


def test_case_c_needle_repeated_8_times_is_recalled(
    gate: Recorder, ask: Ask, bounds: Window
) -> None:
    """C: a needle that stands eight times in as long a prompt is recalled."""
    layout = spread(bounds.c.copies)
    measured, bound = _recall(gate, ask, layout, bounds.c, bounds.answer_tokens)
    assert measured >= bound


def test_case_d_needle_at_start_of_900_tokens_is_recalled(
    gate: Recorder, ask: Ask, bounds: Window
) -> None:
    """D: a needle at the start of a prompt of about 900 tokens is recalled."""
    measured, bound = _recall(gate, ask, START, bounds.d, bounds.answer_tokens)
    assert measured >= bound


def _recall(
    gate: Recorder, ask: Ask, layout: Layout, case: NeedleCase, answer_tokens: int
) -> tuple[float, float]:
    """Ask a case's prompts; record which share of the answers names the secret."""
    answers = [ask(case.prompt_tokens, layout, answer_tokens) for _ in range(case.samples)]
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
