"""Haystacks are fresh, repeatable, as long as asked, and hold their needles where asked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from seatrial import haystack
from seatrial.haystack import END, NEEDLE, QUESTION, START, LengthError, Ruler, ask_at_length, build


@dataclass
class Counted:
    """An answer that only counts."""

    prompt_tokens: int
    text: str


def words(text: str) -> Counted:
    """Answer like a server whose tokens are words, with a template of 20 tokens around them."""
    return Counted(len(text.split()) + 20, text)


def test_same_seed_gives_same_text() -> None:
    """A run can be repeated."""
    assert build(7, 5000, START) == build(7, 5000, START)


def test_other_seed_shares_no_prefix() -> None:
    """A prefix cache cannot answer for a prompt that it has not seen."""
    openings = {build(seed, 3000, START)[:17] for seed in range(50)}
    assert len(openings) == 50


@pytest.mark.parametrize("characters", [400, 4000, 40000])
def test_text_is_as_long_as_asked(characters: int) -> None:
    """The length is hit to a word."""
    assert characters - 20 <= len(build(1, characters, END)) <= characters


def test_start_stands_within_first_words() -> None:
    """Case A's needle is the first sentence after the opening number."""
    assert build(1, 20000, START).split(". ", 1)[1].startswith(NEEDLE)


def test_end_stands_right_before_the_question() -> None:
    """Case B's needle is within the last 30 tokens: nothing but the question follows it."""
    assert build(1, 20000, END).endswith(f"{NEEDLE}\n\n{QUESTION}")


def test_spread_needles_are_far_apart() -> None:
    """Case C's eight needles are spread over the whole prompt."""
    parts = build(1, 20000, haystack.spread(8)).split(NEEDLE)
    assert len(parts) == 9
    assert all(len(part) > 1500 for part in parts[1:-1])


def test_prose_hardly_repeats() -> None:
    """A haystack of one repeated block would test addressing and not retrieval."""
    sentences = build(1, 60000, START).split(". ")
    assert len(set(sentences)) > 0.99 * len(sentences)


def test_prose_has_no_other_code() -> None:
    """Nothing in the hay looks like the needle."""
    assert haystack.is_recalled(build(1, 30000, START))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("ZEBRA-4492-OMEGA", True),
        ("The secret code is ZEBRA-4492-OMEGA.", True),
        ("'ZEBRA-4492-OMEGA' (ZEBRA-4492-OMEGA)", True),
        ("ZEBRA-4492-OMEGA-4492", False),
        ("ZEBRA-4492", False),
        ("ZEBRA-4492-OMEGA or FALCON-6741-DELTA", False),
        ("zebra-4492-omega", False),
        ("", False),
    ],
)
def test_recall_is_exact(answer: str, expected: bool) -> None:
    """A part of the value, or several values to choose from, is not recall."""
    assert haystack.is_recalled(answer) is expected


@pytest.mark.parametrize("tokens", [300, 900, 5200])
def test_length_is_what_the_server_counts(tokens: int) -> None:
    """The prompt comes within one percent by the server's own count, whatever its tokenizer."""
    answer = ask_at_length(words, Ruler(), 3, tokens, START)
    assert abs(answer.prompt_tokens - tokens) <= 0.01 * tokens
    assert NEEDLE in answer.text


def test_ruler_learns() -> None:
    """A length that was hit once is hit again at once."""
    asked: list[str] = []

    def send(text: str) -> Counted:
        asked.append(text)
        return words(text)

    ruler = Ruler()
    ask_at_length(send, ruler, 1, 5200, START)
    before = len(asked)
    ask_at_length(send, ruler, 2, 5200, START)
    assert len(asked) - before <= 2


def test_discarded_prompt_shares_no_prefix_with_its_successor() -> None:
    """The prompt that is measured was not prefilled by the one that missed its length."""
    asked: list[str] = []

    def send(text: str) -> Counted:
        asked.append(text)
        return words(text)

    ask_at_length(send, Ruler(characters_per_token=9), 1, 2000, START)
    assert len(asked) > 1
    assert len({text[:17] for text in asked}) == len(asked)


@pytest.mark.parametrize("constant", [0, 4800])
def test_truncation_is_noticed(constant: int) -> None:
    """A server that counts the same whatever it gets has not read the prompt."""
    with pytest.raises(LengthError, match=r"5200 tokens within 1 %; the server counted"):
        ask_at_length(lambda text: Counted(constant, text), Ruler(), 1, 5200, START)
