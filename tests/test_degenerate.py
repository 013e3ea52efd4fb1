"""Degenerate answers are told from sound ones, in both directions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from seatrial.degenerate import faults, text_faults
from seatrial.engine import Answer
from seatrial.haystack import Layout, build

SOUND = Answer("It is ZEBRA-4492-OMEGA.", 900, 8, 0, "stop", 1.0, asked_tokens=24)
CODE = """def f(x):
    return {"a": [1, 2, (x + 3)], "b": x ** 2}  # {x}

print(f(3)["a"][0], f(4)["b"])
"""
TABLE = """| case | tokens | recalled |
|------|--------|----------|
| A    | 5200   | 20/20    |
| B    | 5186   | 20/20    |
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("the code is " * 20, "repetition loop"),
        ("no no no no no no no no no no", "repetition loop"),
        ("It said " + "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "repetition loop"),
        ("The answer: ,,.;:!?,,.;:!?,,.;:!?,,.;:!?,,.;:", "punctuation spray"),
        ("The caf\N{REPLACEMENT CHARACTER} is open.", "replacement characters"),
        (" ".join(random.Random(1).choices("abcdefghij", k=40)), "single characters"),
    ],
    ids=["phrase", "word", "letter", "marks", "bytes", "letters"],
)
def test_fault_is_named(text: str, fault: str) -> None:
    """Each kind of degenerate text is found and named."""
    assert fault in text_faults(text)


@pytest.mark.parametrize(
    "text",
    ["", "Yes.", "I do not know", "no, no, no!", CODE, TABLE, "-" * 60, "1. 2. 3.", "你好 世 界"],
    ids=["empty", "word", "words", "emphasis", "code", "table", "ruler", "list", "characters"],
)
def test_sound_text_has_no_fault(text: str) -> None:
    """Short answers, code, tables and other scripts are not degenerate."""
    assert text_faults(text) == []


def test_prose_has_no_fault() -> None:
    """Two hundred pieces of generated prose raise no alarm."""
    for seed in range(200):
        assert text_faults(build(seed, 1500, Layout(()))) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"finish_reason": "abort"}, ["torn end (abort)"]),
        ({"finish_reason": "None"}, ["torn end (None)"]),
        ({"finish_reason": "length"}, []),
        ({"is_exact": True, "asked_tokens": 8, "text": "x " * 99}, []),
        ({"is_exact": True, "asked_tokens": 24}, ["fewer tokens than asked"]),
    ],
    ids=["sound", "abort", "cut", "full", "forced", "short"],
)
def test_answer_is_judged_by_its_end_too(change: dict[str, object], expected: list[str]) -> None:
    """An answer must end for a reason, and have what it was forced to have."""
    assert faults(replace(SOUND, **change)) == expected  # type: ignore[arg-type]
