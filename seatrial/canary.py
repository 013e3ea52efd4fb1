"""Canaries: short questions with one right answer each, that nobody can have cached or memorised.

A canary is a haystack with a fresh secret at its start. It is answered rightly only if the whole
way works at that moment: prefill, the KV cache's way to where the answer is made, the selection,
and the sampling of several tokens. In a cell with prefill and decode the first token of the answer
is made by prefill and all others by decode, from the KV cache that was sent: a secret of several
tokens needs both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from seatrial.engine import Answer
from seatrial.haystack import SECRET, START, Ruler, ask_at_length, fresh_secret, is_recalled

ANSWER_TOKENS = 32
LENGTH_TOLERANCE = 0.15
"""What is asked is whether the way works; no canary's length is at an edge."""


@dataclass(frozen=True)
class Reply:
    """What came back to a canary.

    Attributes:
        key: repeats it: the seed and the tokens.
        is_right: the answer names the secret and nothing else that looks like one.
    """

    key: str
    answer: Answer
    is_right: bool


def send(
    chat: Callable[[str, int], Answer],
    ruler: Ruler,
    seed: int,
    tokens: int,
    answer_tokens: int = ANSWER_TOKENS,
) -> Reply:
    """Ask one canary of ``tokens`` and judge its answer.

    Raises:
        EngineError: no answer, or an error status.
        LengthError: the server does not count the asked length.
    """
    secret = fresh_secret(random.Random(f"canary {seed}"))
    answer = ask_at_length(
        lambda text: chat(text.replace(SECRET, secret), answer_tokens),
        ruler,
        seed,
        tokens,
        START,
        tolerance=LENGTH_TOLERANCE,
    )
    return Reply(f"{seed}/{tokens}", answer, is_recalled(answer.text, secret))
