"""Haystacks: fresh, seeded prose of an asked length, with needles at asked places.

Every prompt starts with a number drawn from its seed, so no two prompts share a prefix that a
server could answer from its cache. The prose is generated sentence by sentence; the share of
sentences that occur twice in one prompt is far below one percent, and none of them looks like the
needle, so a model that answers has found the needle and not a rhythm.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from seatrial.errors import SeatrialError

LENGTH_TOLERANCE = 0.01
"""How far a prompt's length, as the server counts it, may be from the asked one."""

SECRET = "ZEBRA-4492-OMEGA"
NEEDLE = f"The secret code is {SECRET}."
QUESTION = "What is the secret code?"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber ancient bright broad calm careful cheap clean clever coarse cold dusty early faded "
    "famous gentle golden grey heavy hollow honest humid idle large late lonely loud narrow new "
    "old pale patient plain proud quiet rapid round rusty sharp short silver simple slow small "
    "smooth steady stiff tall tired warm wide wooden young"
)
NOUNS = _words(
    "anchor artist baker barrel basket bell boat bridge captain carpenter chapel cloud coat "
    "cook cousin doctor drawer driver engine farmer fence ferry field fisher garden gate glass "
    "guard hammer harbour hill horse island judge kettle kitchen ladder lamp lantern letter "
    "library market mill miner mirror nurse oven painter path pilot porter river road sailor "
    "school singer smith station stone tailor teacher tower train valley village wagon wall "
    "watch weaver wheel widow window winter writer"
)
VERBS = _words(
    "admired avoided borrowed bought built carried cleaned counted crossed described drew "
    "followed found guarded hid ignored lifted lost measured mended moved noticed opened packed "
    "painted passed praised pulled pushed reached remembered repaired sold studied touched "
    "trusted turned visited watched weighed"
)
PLACES = _words(
    "above across along around before behind below beside beyond near outside past under within"
)
TIMES = _words(
    "again always early late often once rarely seldom slowly sometimes soon today together twice "
    "usually yesterday"
)
WORDS: tuple[str, ...] = tuple(
    sorted({*ADJECTIVES, *NOUNS, *VERBS, *PLACES, *TIMES, "a", "and", "but", "the", "while"})
)
"""Every word that a haystack is made of, lower case."""

_CODE = re.compile(r"(?<![A-Za-z0-9-])[A-Z0-9]+(?:-[A-Z0-9]+)+(?![A-Za-z0-9-])")


@dataclass(frozen=True)
class Layout:
    """Where the needle stands in a prompt.

    Attributes:
        depths: one number per copy of the needle, 0 (start) to 1 (end), as a share of the prose.
    """

    depths: tuple[float, ...]


START = Layout((0.0,))
END = Layout((1.0,))


def spread(copies: int) -> Layout:
    """Return a layout of ``copies`` needles, evenly spread, none at either end."""
    return Layout(tuple((index + 0.5) / copies for index in range(copies)))


class LengthError(SeatrialError):
    """The server counts another number of tokens in a prompt than was asked for."""


class Counted(Protocol):
    """An answer that tells how many tokens the server saw in the prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as the server counts them."""


A = TypeVar("A", bound=Counted)


@dataclass
class Ruler:
    """Characters per token of one server's tokenizer, learned from the server's own counts.

    Needles cost more tokens than prose, so a length is learned for each number of needles.
    """

    characters_per_token: float = 5.0
    learned: dict[tuple[int, int], int] = field(default_factory=dict)

    def characters(self, tokens: int, layout: Layout) -> int:
        """Return the best guess of how many characters make ``tokens``."""
        known = self.learned.get((tokens, len(layout.depths)))
        return round(tokens * self.characters_per_token) if known is None else known


def ask_at_length(
    send: Callable[[str], A],
    ruler: Ruler,
    seed: int,
    tokens: int,
    layout: Layout,
    attempts: int = 4,
    tolerance: float = LENGTH_TOLERANCE,
) -> A:
    """Send a haystack of ``tokens`` within ``tolerance``, as the *server* counts, and return it.

    Nobody here knows the server's tokenizer, so a prompt that misses its length is thrown away
    before its answer is looked at, and made again longer or shorter behind another opening.

    Raises:
        LengthError: the server does not count the asked length, however the prompt is cut. That is
            what a server does that truncates.
    """
    characters = ruler.characters(tokens, layout)
    counted: list[int] = []
    short, long = 0, 40 * tokens
    for attempt in range(attempts):
        answer = send(build(seed, characters, layout, opening=attempt))
        counted.append(answer.prompt_tokens)
        if abs(answer.prompt_tokens - tokens) <= tolerance * tokens:
            ruler.learned[tokens, len(layout.depths)] = characters
            return answer
        if answer.prompt_tokens < 1:
            break
        ruler.characters_per_token = characters / answer.prompt_tokens
        if answer.prompt_tokens < tokens:
            short = max(short, characters)
        else:
            long = min(long, characters)
        characters += round((tokens - answer.prompt_tokens) * ruler.characters_per_token)
        if not short < characters < long:  # or it would go to and fro between two lengths
            characters = (short + long) // 2
        characters = max(1, characters)
    seen = ", ".join(str(count) for count in counted)
    raise LengthError(
        f"The prompt should have {tokens} tokens within {100 * tolerance:.0f} %; the server "
        f"counted {seen}. A server that truncates, or counts wrongly, cannot be measured."
    )


def build(seed: int, characters: int, layout: Layout, opening: int = 0) -> str:
    """Return the text of one user message: prose of about ``characters``, needles, the question.

    The same arguments give the same text; another ``opening`` puts another number in front of the
    same prose. The text is as long as asked, to a word; it is never shorter than its needles and
    its question.
    """
    draw = random.Random(seed)
    number = random.Random(f"{seed}/{opening}").randrange(10**8)
    first = f"Journal {number:08d}."
    fixed = len(first) + len(layout.depths) * (len(NEEDLE) + 1) + len(QUESTION) + 3
    prose = _prose(draw, max(0, characters - fixed))
    for depth in sorted(layout.depths, reverse=True):
        prose.insert(sentence_at(prose, depth), NEEDLE)
    return f"{' '.join([first, *prose])}\n\n{QUESTION}"


def is_recalled(answer: str, secret: str = SECRET) -> bool:
    """Say whether the answer names the secret, and no other word that looks like a code."""
    return set(_CODE.findall(answer)) == {secret}


def fresh_secret(draw: random.Random) -> str:
    """Return a code of the shape of :data:`SECRET` that nobody has seen."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    first, last = ("".join(draw.choices(letters, k=5)) for _ in range(2))
    return f"{first}-{draw.randrange(10000):04d}-{last}"


def _prose(draw: random.Random, characters: int) -> list[str]:
    """Return sentences that joined by spaces have ``characters``, to a word."""
    sentences: list[str] = []
    left = characters
    while left > 0:
        drawn = sentence(draw)
        if len(drawn) + 1 > left:
            drawn = _shortened(drawn, left - 1)
            if drawn:
                sentences.append(drawn)
            break
        sentences.append(drawn)
        left -= len(drawn) + 1
    return sentences


def sentence(draw: random.Random) -> str:
    """Return one sentence of nine to eighteen words."""

    def thing() -> str:
        return f"the {draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"

    text = f"{thing()} {draw.choice(VERBS)} {thing()} {draw.choice(PLACES)} {thing()}"
    shape = draw.randrange(3)
    if shape == 1:
        text = f"{draw.choice(TIMES)} {text}"
    elif shape == 2:
        text = f"{text} while {thing()} {draw.choice(VERBS)} {thing()}"
    return f"{text.capitalize()}."


def _shortened(sentence: str, characters: int) -> str:
    """Return the sentence cut to whole words within ``characters``, or nothing."""
    words = sentence.rstrip(".").split(" ")
    while words and len(" ".join(words)) + 1 > characters:
        words.pop()
    return f"{' '.join(words)}." if words else ""


def sentence_at(prose: Sequence[str], depth: float) -> int:
    """Return before which sentence the share ``depth`` of the characters has passed."""
    wanted = depth * sum(len(sentence) + 1 for sentence in prose)
    passed = 0
    for index, sentence in enumerate(prose):
        if passed >= wanted:
            return index
        passed += len(sentence) + 1
    return len(prose)
