"""Why a needle was lost is told from what engines of several widths selected."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from seatrial.diagnosis import Cause, DiagnosisError, Look, diagnose, look
from seatrial.engine import Answer, Engine, EngineRefusedError
from seatrial.recall import Form, Question, compose, count_units

PROMPT = compose(Question(Form.PLAIN, 0, 0.5, 3, 3000))[0]


def looked(width: int, *, held: int, is_recalled: bool = False, tokens: int = 5200) -> Look:
    """Return a look at four layers, of which some held the needle."""
    return Look(width, tokens, tuple(layer < held for layer in range(4)), is_recalled)


@pytest.mark.parametrize(
    ("looks", "cause", "width"),
    [
        ([looked(512, held=0), looked(1024, held=4, is_recalled=True)], Cause.COVERAGE, 1024),
        (
            [looked(512, held=1), looked(1024, held=1), looked(2048, held=3)],
            Cause.COVERAGE,
            2048,
        ),
        ([looked(512, held=0), looked(1024, held=0)], Cause.RANKING, None),
        ([looked(512, held=3), looked(1024, held=4)], Cause.NOT_THE_SELECTOR, None),
        ([looked(512, held=0)], Cause.OPEN, None),
        ([looked(512, held=4, is_recalled=True)], Cause.NOT_REPRODUCED, None),
        (
            # Well inside of what 1024 selects whole: 4 x 1024 + 128 tokens.
            [
                looked(1024, held=4, tokens=2000),
                looked(2048, held=4, is_recalled=True, tokens=2000),
            ],
            Cause.SELECTOR_SUSPECT,
            None,
        ),
    ],
)
def test_cause_follows_from_the_looks(looks: list[Look], cause: Cause, width: int | None) -> None:
    """Each verdict word has its pattern, whatever the order in which servers were asked."""
    found = diagnose(looks[::-1])
    assert (found.cause, found.width) == (cause, width)
    assert found.said.startswith(f"{cause}: ")
    assert all(str(one.width) in found.said for one in looks)


class Selecting(Engine):
    """A server of one token a unit that tells a selection of its choice."""

    def __init__(self, width: int, held: set[int], said: str, layers: int = 2) -> None:
        super().__init__("http://127.0.0.1:9", 1)
        self.width, self.held, self.said, self.layers = width, held, said, layers
        self.asked: list[dict[str, Any]] = []

    def _post(self, _path: str, body: dict[str, Any]) -> object:
        self.asked.append(body)
        prompt = count_units(body["text"])
        tokens = body["sampling_params"]["max_new_tokens"]
        meta = {"prompt_tokens": prompt, "completion_tokens": tokens, "cached_tokens": 0}
        if body.get("return_indexer_topk") and self.width:
            values = array("i", self._rows(prompt + tokens - 1, prompt - 1))
            meta["indexer_topk"] = b64encode(values.tobytes()).decode()
        return {"text": self.said, "meta_info": meta | {"finish_reason": {"type": "length"}}}

    def _rows(self, rows: int, last: int) -> Iterator[int]:
        row = [*sorted(self.held), *[-1] * self.width][: self.width]
        for place in range(rows):
            for _ in range(self.layers):
                yield from row if place == last else [-1] * self.width


def entry_of_value() -> int:
    """Return the entry in which the needle's value begins, for one token a unit."""
    return count_units(f"{PROMPT.before}The secret code is") // 4


def test_look_finds_the_value_in_the_last_rows_selection() -> None:
    """The row of the prompt's last token decides, in each layer."""
    found = look(Selecting(8, {1, entry_of_value()}, " nothing."), PROMPT, 8)
    assert found.layers == (True, True)
    assert not found.is_recalled
    assert look(Selecting(8, {1, 2}, "x"), PROMPT, 8).layers == (False, False)


def test_look_takes_the_value_for_the_answer() -> None:
    """What a completion goes on to say does not count."""
    server = Selecting(8, {1}, f" {PROMPT.secret}.\nThe secret code is ABCDE-1234-FGHIJ.")
    assert look(server, PROMPT, 8).is_recalled


def test_needle_within_the_window_is_seen_in_any_case() -> None:
    """The last 128 tokens need no selection."""
    prompt = compose(Question(Form.PLAIN, 0, 1.0, 3, 3000))[0]
    assert look(Selecting(8, {1}, "x"), prompt, 8).is_selected


def test_engine_that_does_not_tell_is_said() -> None:
    """The message says how to start one that does."""
    with pytest.raises(DiagnosisError, match="--enable-return-indexer-topk"):
        look(Selecting(0, set(), "x"), PROMPT, 8)


def test_selection_of_another_width_is_refused() -> None:
    """A server that selects with another width than it is said to is found out."""
    with pytest.raises(EngineRefusedError, match="another width"):
        look(Selecting(8, {1}, "x", layers=1), PROMPT, 7)


def test_answer_of_a_look_is_counted() -> None:
    """What looks at all answers sees those of a diagnosis too."""
    seen: list[Answer] = []
    server = Selecting(8, {1}, "x")
    server._on_answer = seen.append
    look(server, PROMPT, 8)
    assert len(seen) == 2
