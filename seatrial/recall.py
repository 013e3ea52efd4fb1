"""Questions whose answer stands in their own prompt: made fresh, asked, scored, asked again later.

A :class:`Question` says all that makes its prompt, so that a later release can be asked the very
same. Its needle and its haystack are drawn from its seed: no answer can be known beforehand. Its
length is counted in *units*, words and marks, since most tokenizers have a token for each; how many
tokens a unit costs is learned from the server's own counts.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from seatrial.details import Heatmap, Item, Square
from seatrial.engine import Answer, Engine, Message
from seatrial.errors import SeatrialError
from seatrial.haystack import (
    LENGTH_TOLERANCE,
    NOUNS,
    LengthError,
    fresh_secret,
    is_recalled,
    sentence,
    sentence_at,
)
from seatrial.statistics import binomial_tail, wilson_interval
from seatrial.verdict import InvalidMeasurementError

GROUP_TOKENS, BLOCK_TOKENS, WINDOW_TOKENS = 4, 128, 128
"""Tokens of a compressed entry, of a block of the coarse layers, and of the sliding window.

DeepSeek-V4 in SGLang 0.5.23: compress_ratios 4 and 128, sliding_window 128.
"""
TURNS = 12
NAMED_NEEDLES = 6
VALUE_TOKENS = 24
"""Enough for a value that is completed, and no end of its own: some models go on."""
_UNIT = re.compile(r"\w+|[^\w\s]")
_KEY = re.compile(
    r"(?P<form>\w+) t(?P<tokens>\d+) d(?P<depth>[\d.e-]+) s(?P<seed>\d+) u(?P<units>\d+)"
    r"(?: c(?P<corpus>\w+))?"
)


class CorpusError(SeatrialError):
    """A corpus file that cannot be read, or that is no prose."""


class Form(StrEnum):
    """How the needle is hidden and asked for.

    ``plain``: one needle in generated prose. ``corpus``: one needle in a text of the user's choice.
    ``named``: several needles, of which the question names one. ``near``: other sentences that
    nearly read like the needle. ``chat``: a needle in the first turn of a chat, asked for in its
    twelfth. ``cached``: two needles, each completed in a request of its own behind one prefix.
    """

    PLAIN = "plain"
    CORPUS = "corpus"
    NAMED = "named"
    NEAR = "near"
    CHAT = "chat"
    CACHED = "cached"


@dataclass(frozen=True)
class Question:
    """A question and all that makes its prompt.

    Attributes:
        tokens: how long the prompt should be, as the server counts.
        depth: where the needle stands, 0 (start) to 1 (end).
        units: words and marks of the prose; 0 until they are learned.
        corpus: digest of the text that the prose comes from; empty where it is made up.
    """

    form: Form
    tokens: int
    depth: float
    seed: int
    units: int = 0
    corpus: str = ""

    @property
    def key(self) -> str:
        """The question in one line."""
        text = f" c{self.corpus}" if self.corpus else ""
        return f"{self.form} t{self.tokens} d{self.depth:g} s{self.seed} u{self.units}{text}"


def parse(key: str) -> Question | None:
    """Return the question that :attr:`Question.key` wrote down; None if it is not one of ours."""
    found = _KEY.fullmatch(key)
    if found is None or found["form"] not in set(Form):
        return None
    return Question(
        form=Form(found["form"]),
        tokens=int(found["tokens"]),
        depth=float(found["depth"]),
        seed=int(found["seed"]),
        units=int(found["units"]),
        corpus=found["corpus"] or "",
    )


@dataclass(frozen=True)
class Prompt:
    """What is sent, and what the answer should name.

    Attributes:
        secret: the value that was asked for.
        before: the prose up to the needle, for those who ask where in the prompt it stands.
    """

    messages: tuple[Message, ...]
    secret: str
    before: str = ""

    @property
    def text(self) -> str:
        """The last message: the whole prompt where there is only one."""
        return self.messages[-1][1]


@dataclass(frozen=True)
class Outcome:
    """An answered question."""

    question: Question
    is_right: bool
    prompt_tokens: int
    said: str = ""
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Corpus:
    """Sentences of a text that somebody else wrote.

    Attributes:
        digest: names the text, since another one makes another prompt.
    """

    name: str
    digest: str
    sentences: tuple[str, ...]


def load_corpus(path: Path) -> Corpus:
    """Read a text file and cut it into sentences.

    Raises:
        CorpusError: it cannot be read, or has fewer than 50 sentences.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: should be a text in UTF-8: {error}") from None
    parts = re.split(r"(?<=[.;!?])\s+|\n\s*\n", content)
    sentences = tuple(
        text.rstrip(";:,") + ("" if text.endswith((".", "!", "?")) else ".")
        for part in parts
        if 4 <= len((text := " ".join(part.split())).split()) <= 60
    )
    if len(sentences) < 50:
        raise CorpusError(
            f"{path}: has {len(sentences)} sentences of 4 to 60 words; a haystack needs 50"
        )
    return Corpus(path.stem, hashlib.sha256(content.encode()).hexdigest()[:8], sentences)


def compose(question: Question, corpus: Corpus | None = None) -> tuple[Prompt, ...]:
    """Return the prompts of a question: one, or two behind the same prefix for ``cached``.

    The same question (and corpus) gives the same text. The first words are a number drawn from the
    seed, so no two questions share a prefix that a server could have kept.
    """
    draw = random.Random(f"{question.seed}/{question.form}")
    first = f"Journal {draw.randrange(10**8):08d}."
    needles, asked = _needles(question, draw)
    source = _prose_of(question.form, draw, corpus)
    prose = [first, *_fill(source, draw, question.units)]
    if question.form is Form.CHAT:
        return (_conversation(prose, needles[0], asked[0]),)
    for depth, text in sorted(needles, reverse=True):
        prose.insert(1 + sentence_at(prose[1:], depth), text)
    body = " ".join(prose)
    if question.form is Form.CACHED:
        return tuple(
            Prompt((("user", f"{body}\n\n{text.partition(' is ')[0]} is"),), secret)
            for (_, text), (secret, _) in zip(needles, asked, strict=True)
        )
    secret, ask = asked[0]
    before = body.partition(needles[0][1])[0]
    return (Prompt((("user", f"{body}\n\n{ask}"),), secret, before),)


_Needle = tuple[float, str]
_Asked = tuple[str, str]


def _needles(question: Question, draw: random.Random) -> tuple[list[_Needle], list[_Asked]]:
    """Return the needles with their depths, the asked one first, and secret and question."""
    secret = fresh_secret(draw)
    plain = f"The secret code is {secret}."
    if question.form in {Form.PLAIN, Form.CORPUS, Form.CHAT}:
        return [(question.depth, plain)], [(secret, "What is the secret code?")]
    if question.form is Form.NEAR:
        near = [
            f"The secret {noun} is {fresh_secret(draw)}."
            for noun in draw.sample(("number", "word", "name", "door", "road", "letter"), 3)
        ]
        near.append(f"The {draw.choice(NOUNS)} code is {fresh_secret(draw)}.")
        others = [((index + 0.5) / len(near), text) for index, text in enumerate(near)]
        return [(question.depth, plain), *others], [(secret, "What is the secret code?")]
    count = 2 if question.form is Form.CACHED else NAMED_NEEDLES
    names = draw.sample(NOUNS, count)
    secrets = [secret, *(fresh_secret(draw) for _ in names[1:])]
    needles = [
        (
            question.depth if index == 0 else (question.depth + index / count) % 1,
            f"The secret code of the {name} is {value}.",
        )
        for index, (name, value) in enumerate(zip(names, secrets, strict=True))
    ]
    asked = [
        (value, f"What is the secret code of the {name}?")
        for name, value in zip(names, secrets, strict=True)
    ]
    return needles, asked


def _conversation(prose: Sequence[str], needle: _Needle, asked: _Asked) -> Prompt:
    """Return a chat of twelve turns: the needle in the first, the question in the last."""
    talked = TURNS - 1
    first, *rest = prose
    secret, ask = asked
    before, messages = "", []
    for number in range(talked):
        said = " ".join(rest[len(rest) * number // talked : len(rest) * (number + 1) // talked])
        if number == 0:
            before = f"{first} {said}".rstrip() + " "
            said = before + needle[1]
        messages += [("user", said or "Go on."), ("assistant", "I have read it.")]
    return Prompt((*messages, ("user", ask)), secret, before)


def _prose_of(form: Form, draw: random.Random, corpus: Corpus | None) -> Iterator[str]:
    """Yield sentences without end: of the corpus from a place drawn at random, or made up."""
    if form is not Form.CORPUS:
        while True:
            yield sentence(draw)
    if corpus is None:
        raise CorpusError("a question in a corpus needs the corpus")
    while True:
        at = draw.randrange(len(corpus.sentences))
        # From one place on, to the end and round, each sentence once; then from another place.
        yield from corpus.sentences[at:]
        yield from corpus.sentences[:at]


def _fill(source: Iterator[str], draw: random.Random, units: int) -> list[str]:
    """Return sentences that have exactly ``units`` words and marks, or none for fewer than two."""
    sentences: list[str] = []
    left = units
    while left >= 2:
        text = next(source)
        cost = count_units(text)
        if left - cost in {0, *range(2, left)}:
            sentences.append(text)
            left -= cost
            continue
        words = re.findall(r"\w+", text)[: left - 1]
        while len(words) < left - 1:
            words.append(draw.choice(NOUNS))
        sentences.append(f"{' '.join(words)}.")
        left = 0
    return sentences


def count_units(text: str) -> int:
    """Return how many words and marks a text has."""
    return len(_UNIT.findall(text))


@dataclass
class Scale:
    """What a server's tokenizer makes of our units, learned from its own counts.

    Attributes:
        seen: units and tokens of the prompts that were counted, by form.
    """

    seen: dict[Form, list[tuple[int, int]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def units(self, form: Form, tokens: int) -> int:
        """Return how many units of prose make ``tokens``, as well as is known."""
        with self.lock:
            slope, offset = self._line(form)
        return max(0, round((tokens - offset) / slope))

    def learn(self, form: Form, units: int, tokens: int) -> None:
        """Take in what a server counted."""
        with self.lock:
            self.seen.setdefault(form, []).append((units, tokens))

    def per_unit(self, form: Form) -> float:
        """Return the tokens of one more unit."""
        with self.lock:
            return self._line(form)[0]

    def _line(self, form: Form) -> tuple[float, float]:
        """Return slope and offset: through the shortest and the longest prompt that was counted."""
        seen = self.seen.get(form, [])
        if not seen:
            return 1.1, 60.0
        (few, least), (many, most) = min(seen), max(seen)
        if many - few < 100:  # one length says nothing of the slope
            return 1.1, sum(tokens - 1.1 * units for units, tokens in seen) / len(seen)
        slope = (most - least) / (many - few)
        return slope, sum(tokens - slope * units for units, tokens in seen) / len(seen)


Send = Callable[[Prompt], Answer]


def ask(
    send: Send,
    scale: Scale,
    question: Question,
    corpus: Corpus | None = None,
    *,
    attempts: int = 5,
    is_exact: bool = False,
) -> Outcome:
    """Ask a question at its length within one percent, as the *server* counts.

    A question with known units is sent as it is: it is a later release's turn. A prompt that misses
    its length is thrown away before its answer is looked at. To the token, if ``is_exact``, as far
    as the attempts reach; within one percent in any case.

    Raises:
        LengthError: the server does not count the asked length. That is what truncating looks like.
        EngineError: no answer.
    """
    counted: list[int] = []
    tolerance = 0 if is_exact else LENGTH_TOLERANCE * question.tokens
    units = question.units or scale.units(question.form, question.tokens)
    attempts = 1 if question.units else attempts
    for attempt in range(1, attempts + 1):
        sized = replace(question, units=max(units, 2))
        prompts = compose(sized, corpus)
        outcome = _scored(send, sized, prompts)
        counted.append(outcome.prompt_tokens)
        scale.learn(question.form, sized.units, outcome.prompt_tokens)
        missed = question.tokens - outcome.prompt_tokens
        if attempt == attempts:
            tolerance = LENGTH_TOLERANCE * question.tokens
        if abs(missed) <= tolerance:
            return outcome
        units = sized.units + round(missed / max(0.2, scale.per_unit(question.form)))
        units = min(units, 4 * question.tokens)
    seen = ", ".join(str(count) for count in counted)
    raise LengthError(
        f"The prompt should have {question.tokens} tokens within 1 %; the server counted {seen}. "
        "A server that truncates, or counts wrongly, cannot be measured."
    )


def calibrate(send: Send, scale: Scale, form: Form, seed: int, corpus: Corpus | None) -> None:
    """Learn from two short prompts what a form costs, so that the long ones fit at once."""
    for units in (60, 360):
        sized = Question(form, 0, 0.5, seed, units)
        scale.learn(form, units, _scored(send, sized, compose(sized, corpus)).prompt_tokens)


def _scored(send: Send, question: Question, prompts: Sequence[Prompt]) -> Outcome:
    """Send the prompts one after another; all of them have to be answered rightly."""
    answers = [send(prompt) for prompt in prompts]
    wrong = [
        answer.text.strip()
        for prompt, answer in zip(prompts, answers, strict=True)
        if not is_recalled(answer.text, prompt.secret)
    ]
    return Outcome(
        question=question,
        is_right=not wrong,
        prompt_tokens=answers[-1].prompt_tokens,
        said=wrong[0][:80] if wrong else "",
        cached_tokens=answers[-1].cached_tokens,
    )


def ask_all(
    questions: Iterable[Question],
    answer: Callable[[Question], Outcome],
    concurrency: int,
    is_decided: Callable[[Sequence[Outcome]], bool] = lambda _: False,
) -> list[Outcome]:
    """Answer questions with at most ``concurrency`` at once, until done or decided.

    The outcomes come in the order of the questions as far as they were asked; the first that was
    not answered ends them all. A decision looks only at whole beginnings of the questions: which
    answer comes first must not decide what is counted.

    Raises:
        SeatrialError: whatever ``answer`` raises.
    """
    left = iter(questions)
    done: list[Outcome] = []
    running: dict[Future[Outcome], int] = {}
    answered: dict[int, Outcome] = {}
    asked = 0
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while len(running) < concurrency and (question := next(left, None)) is not None:
                    running[pool.submit(answer, question)] = asked
                    asked += 1
                if not running:
                    return done
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    answered[running.pop(future)] = future.result()
                while len(done) in answered:
                    done.append(answered.pop(len(done)))
                    if is_decided(done):
                        return done
        finally:
            for future in running:
                future.cancel()


def edge_tokens(index_topk: int) -> int:
    """Return the longest prompt in which the selection still holds every entry, and the window."""
    return GROUP_TOKENS * index_topk + WINDOW_TOKENS


def residue_modulus(page_tokens: int) -> int:
    """Return how many lengths in a row are all different to compression and to the pages."""
    return math.lcm(GROUP_TOKENS, BLOCK_TOKENS, max(1, page_tokens))


@dataclass
class Examiner:
    """Asks one server, and refuses answers that come from its cache.

    Attributes:
        answer_tokens: how much room an answer gets.
        concurrency: requests at once.
        corpus: the text of one's own, read when it is needed.
        cached_ratio_max: the share of a new prompt that may come from the prefix cache: a chat
            template's own first tokens may, a haystack must not.
    """

    engine: Engine
    answer_tokens: int
    concurrency: int
    corpus: Callable[[], Corpus]
    cached_ratio_max: float
    scale: Scale = field(default_factory=Scale)

    def prepare(self, forms: Iterable[Form], seed: int) -> None:
        """Learn what the forms cost that were not asked yet, from two short prompts each."""
        for form in dict.fromkeys(forms):
            if form not in self.scale.seen:
                calibrate(self._send(form), self.scale, form, seed, self._corpus(form))

    def ask(self, question: Question, *, is_exact: bool = False) -> Outcome:
        """Ask a question, at its length to the token if ``is_exact``.

        Raises:
            InvalidMeasurementError: the answer came from the cache where it must not.
        """
        form = question.form
        corpus = self._corpus(form)
        if corpus is not None:
            question = replace(question, corpus=corpus.digest)
        outcome = ask(self._send(form), self.scale, question, corpus, is_exact=is_exact)
        cached = outcome.cached_tokens or 0
        if form is not Form.CACHED and cached > self.cached_ratio_max * outcome.prompt_tokens:
            raise InvalidMeasurementError(
                f"{cached} of {outcome.prompt_tokens} prompt tokens came from the prefix cache, "
                "though the prompt is new: the prefill was not measured."
            )
        return outcome

    def ask_all(
        self,
        questions: Sequence[Question],
        is_decided: Callable[[Sequence[Outcome]], bool] = lambda _: False,
        *,
        is_exact: bool = False,
    ) -> list[Outcome]:
        """Ask questions, so many at once as there is concurrency, until done or decided."""
        self.prepare((question.form for question in questions), questions[0].seed)
        asking = partial(self.ask, is_exact=is_exact)
        return ask_all(questions, asking, self.concurrency, is_decided)

    def can_repeat(self, question: Question) -> bool:
        """Whether an earlier run's question can be asked word for word: its text is at hand."""
        return not question.corpus or question.corpus == self.corpus().digest

    def _corpus(self, form: Form) -> Corpus | None:
        return self.corpus() if form is Form.CORPUS else None

    def _send(self, form: Form) -> Send:
        if form is not Form.CACHED:
            return lambda prompt: self.engine.chat(prompt.messages, self.answer_tokens)

        # Completed, not chatted: a chat template could put the question before the prefix, and
        # /generate always tells what came from the cache. What follows the value does not count.
        def complete(prompt: Prompt) -> Answer:
            answer = self.engine.generate(prompt.text, VALUE_TOKENS, is_exact=True)
            first = answer.text.strip().split("\n")[0].partition(".")[0]
            return replace(answer, text=first)

        return complete


def items_of(outcomes: Sequence[Outcome]) -> list[Item]:
    """Return outcomes as a report keeps them, so that a later release can be asked the same."""
    return [
        Item(key=one.question.key, order=order, is_right=one.is_right, said=one.said)
        for order, one in enumerate(outcomes)
    ]


def is_hopeless(outcomes: Sequence[Outcome], ratio: float) -> bool:
    """Whether so many answers are wrong that a share of ``ratio`` right ones is out of reach.

    At most one run in a thousand stops wrongly at any one look.
    """
    wrong = sum(not one.is_right for one in outcomes)
    return wrong > 2 and binomial_tail(wrong, len(outcomes), 1 - ratio) < 0.001


def effective_tokens(outcomes: Iterable[Outcome], ratio: float = 0.95) -> dict[float, int]:
    """Return for each depth the longest length up to which every length is recalled that often.

    0 where the shortest is not.
    """
    places: dict[float, dict[int, list[bool]]] = {}
    for one in outcomes:
        depths = places.setdefault(one.question.depth, {})
        depths.setdefault(one.question.tokens, []).append(one.is_right)
    longest = {}
    for depth, lengths in sorted(places.items()):
        longest[depth] = 0
        for tokens, right in sorted(lengths.items()):
            if sum(right) < ratio * len(right):
                break
            longest[depth] = tokens
    return longest


def heatmap(title: str, outcomes: Sequence[Outcome], bound: float, edge: int) -> Heatmap:
    """Return recall over length and depth, with intervals, for a report to draw."""
    squares = []
    places = dict.fromkeys((one.question.tokens, one.question.depth) for one in outcomes)
    for tokens, depth in sorted(places):
        right = [
            one.is_right
            for one in outcomes
            if (one.question.tokens, one.question.depth) == (tokens, depth)
        ]
        low, high = wilson_interval(sum(right), len(right))
        squares.append(
            Square(
                x=tokens,
                y=100 * depth,
                successes=sum(right),
                samples=len(right),
                low=low,
                high=high,
            )
        )
    return Heatmap(
        title=title,
        x_label="tokens of the prompt",
        y_label="needle's depth, %",
        squares=squares,
        bound=bound,
        mark=edge,
        mark_label="beyond this the indexer has to choose",
    )
