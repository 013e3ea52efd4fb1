"""What is wrong with an answer, whatever it was asked: loops, spray, lost characters, a torn end.

The faults are those that long services of patched engines have shown: a model whose cache or
kernels went wrong repeats itself, sprays punctuation or single characters, emits bytes that are no
text, or stops in the middle without saying why. Each rule needs a length below which it says
nothing, since short answers repeat themselves for good reasons.

An answer that was forced past its end (``is_exact``) is judged by its count alone: what a model
says after it wanted to stop means nothing.
"""

from __future__ import annotations

import re
from collections import Counter

from seatrial.engine import Answer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LOOP_WORDS_MIN = 24
"""Fewer words are not judged for loops: a list or a refrain is no fault."""
LOOP_SHARE_MAX = 0.5
"""Prose repeats under a tenth of its trigrams; a loop, nearly all."""
LOOP_RUN_MIN = 8
"""The same one to six words, so often in a row and nothing else to the answer's end."""
SPRAY_CHARACTERS_MIN = 24
SPRAY_SHARE_MAX = 0.7
"""Dense code has a half of punctuation; rulers and table lines are not counted."""
SINGLES_WORDS_MIN = 16
SINGLES_SHARE_MAX = 0.7
RUN_CHARACTERS_MIN = 24
"""One character so often in a row; rulers and table lines excepted."""

_RULERS = "-=_*#.~|+"
_RUN = re.compile(rf"([^\s{re.escape(_RULERS)}])\1{{{RUN_CHARACTERS_MIN - 1},}}")
_WHOLE = frozenset({"stop", "length", "tool_calls", "function_call"})


def faults(answer: Answer) -> list[str]:
    """Return a short name for each thing that is wrong with an answer; nothing if it is sound."""
    found = []
    if answer.finish_reason not in _WHOLE:
        found.append(f"torn end ({answer.finish_reason})")
    if answer.is_exact:
        if answer.completion_tokens < answer.asked_tokens:
            found.append("fewer tokens than asked")
        return found
    return found + text_faults(answer.text)


def text_faults(text: str) -> list[str]:
    """Return the faults that the text alone shows."""
    found = []
    if REPLACEMENT in text:
        found.append("replacement characters")
    if _is_loop(text):
        found.append("repetition loop")
    if _is_spray(text):
        found.append("punctuation spray")
    if _are_singles(text):
        found.append("single characters")
    return found


def _is_loop(text: str) -> bool:
    if _RUN.search(text):
        return True
    words = text.split()
    if len(words) < LOOP_WORDS_MIN:
        return _ends_in_a_loop(words)
    trigrams = Counter(zip(words, words[1:], words[2:], strict=False))
    total = sum(trigrams.values())
    return (total - len(trigrams)) / total > LOOP_SHARE_MAX or _ends_in_a_loop(words)


def _ends_in_a_loop(words: list[str]) -> bool:
    """Say whether the last words are one short phrase, over and over."""
    for size in range(1, 7):
        run = size * LOOP_RUN_MIN
        if len(words) >= run and all(
            words[-index] == words[-index - size] for index in range(1, run - size + 1)
        ):
            return True
    return False


def _is_spray(text: str) -> bool:
    characters = [each for each in text if not each.isspace() and each not in _RULERS]
    if len(characters) < SPRAY_CHARACTERS_MIN:
        return False
    marks = sum(not character.isalnum() for character in characters)
    return marks / len(characters) > SPRAY_SHARE_MAX


def _are_singles(text: str) -> bool:
    """Say whether most words are one letter of an alphabet; characters of others are words."""
    words = text.split()
    if len(words) < SINGLES_WORDS_MIN:
        return False
    return sum(len(word) == 1 and word.isascii() for word in words) / len(words) > SINGLES_SHARE_MAX
