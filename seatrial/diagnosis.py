"""Coverage or ranking: the engine's own selection tells why a needle was not recalled.

Sparse attention sees the ``index_topk`` compressed entries that its indexer ranks best, and the
last tokens in any case. A needle can be lost because the selection is too narrow to hold it
(*coverage*: a wider one holds it), because the indexer does not rank it (*ranking*: even twice the
width does not hold it), or although it was selected (*not the selector*). An engine that was
started with ``--enable-return-indexer-topk`` tells what it selected; SGLang 0.5.23 can where
attention is not split over ranks (``state_capturer/indexer_topk.py`` asserts attention TP 1), so
on a diagnostic cell, and so can this project's CPU backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from seatrial.engine import Engine
from seatrial.errors import SeatrialError
from seatrial.haystack import is_recalled
from seatrial.recall import GROUP_TOKENS, WINDOW_TOKENS, Prompt, edge_tokens

MOSTLY = 0.5
"""A needle counts as selected when at least this share of the layers holds it."""
WELL_INSIDE = 0.9
"""Shorter than this share of what is selected whole, width cannot be what a failure is about."""


class DiagnosisError(SeatrialError):
    """The engine does not tell what it selected; the message says how to start one that does."""


class Cause(StrEnum):
    """Why a needle was not recalled."""

    COVERAGE = "coverage"
    RANKING = "ranking"
    NOT_THE_SELECTOR = "not the selector"
    SELECTOR_SUSPECT = "selector suspect"
    NOT_REPRODUCED = "not reproduced"
    OPEN = "open"


@dataclass(frozen=True)
class Look:
    """What one server of one width did with the same question.

    Attributes:
        width: its index_topk.
        prompt_tokens: length of the prompt, as it counts.
        layers: for each layer with an indexer, whether it selected the needle's value.
        is_recalled: whether it answered rightly.
    """

    width: int
    prompt_tokens: int
    layers: tuple[bool, ...]
    is_recalled: bool

    @property
    def is_selected(self) -> bool:
        """Whether most layers hold the needle."""
        return sum(self.layers) >= MOSTLY * len(self.layers)

    @property
    def said(self) -> str:
        """The look in words."""
        held = f"selected in {sum(self.layers)} of {len(self.layers)} layers"
        return f"{self.width}: {held}, {'recalled' if self.is_recalled else 'not recalled'}"


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure and what it rests on.

    Attributes:
        width: the width that would have held the needle, for ``coverage``.
    """

    cause: Cause
    looks: tuple[Look, ...]
    width: int | None = None
    also: str = ""

    @property
    def said(self) -> str:
        """The diagnosis in a sentence."""
        looks = "; ".join(look.said for look in self.looks)
        return f"{self.cause}: {_MEANING[self.cause].format(width=self.width)} ({looks}){self.also}"


_MEANING = {
    Cause.COVERAGE: "index_topk {width} would have held the needle",
    Cause.RANKING: "even twice the width does not select the needle, so the indexer ranks it badly",
    Cause.NOT_THE_SELECTOR: "the needle is selected, and the answer is wrong all the same",
    Cause.SELECTOR_SUSPECT: (
        "a wider index_topk cures a prompt that is selected whole at this width; that is no fix, "
        "look at the selection's kernels"
    ),
    Cause.NOT_REPRODUCED: "asked again as a completion, the needle is recalled",
    Cause.OPEN: "the needle is not selected at this width; ask a server of twice the width",
}


def look(engine: Engine, prompt: Prompt, width: int) -> Look:
    """Ask a server of one width the question as a completion, and for its selection.

    The row of the prompt's last token is the selection with which the answer begins. A value's
    first token stands in entry t // 4, and in the next one too where entries overlap.

    Raises:
        DiagnosisError: the server does not tell its selection.
        EngineError: no answer.
    """
    needle = f"The secret code is {prompt.secret}."
    body, _, _ = prompt.text.rpartition("\n\n")
    start = engine.generate(f"{prompt.before}The secret code is", 1, is_exact=True).prompt_tokens
    completed = engine.selected(f"{body}\n\nThe secret code is", 24, width)
    if completed is None:
        raise DiagnosisError(
            f"{engine.url} does not tell what it selects, so whether the selection held the needle "
            "is not known. Start a diagnostic cell with --enable-return-indexer-topk and "
            "attention TP 1, and ask it the same with --seed."
        )
    if needle not in body:
        raise DiagnosisError("This form of question has no needle to look for in a selection.")
    answer, rows = completed
    first = start // GROUP_TOKENS
    value = answer.text.strip().split("\n")[0].partition(".")[0]
    is_near = answer.prompt_tokens - start < WINDOW_TOKENS
    return Look(
        width=width,
        prompt_tokens=answer.prompt_tokens,
        layers=tuple(is_near or bool({first, first + 1} & row) for row in rows),
        is_recalled=is_recalled(value, prompt.secret),
    )


def diagnose(looks: Sequence[Look]) -> Diagnosis:
    """Return the cause of a failure, given looks at this width first and then at wider ones."""
    here, *wider = sorted(looks, key=lambda one: one.width)
    all_looks = (here, *wider)
    if here.is_recalled:
        return Diagnosis(Cause.NOT_REPRODUCED, all_looks)
    cured = [one for one in wider if one.is_recalled]
    if cured and here.prompt_tokens < WELL_INSIDE * edge_tokens(here.width):
        return Diagnosis(Cause.SELECTOR_SUSPECT, all_looks)
    if here.is_selected:
        return Diagnosis(Cause.NOT_THE_SELECTOR, all_looks)
    held = [one for one in wider if one.is_selected]
    if held:
        return Diagnosis(Cause.COVERAGE, all_looks, width=held[0].width)
    if any(one.width >= 2 * here.width for one in wider):
        return Diagnosis(Cause.RANKING, all_looks)
    return Diagnosis(Cause.OPEN, all_looks)
