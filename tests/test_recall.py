"""Questions are fresh, repeatable, as long as asked, and scored exactly."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from seatrial import recall
from seatrial.engine import Answer
from seatrial.haystack import LengthError
from seatrial.recall import (
    Corpus,
    CorpusError,
    Form,
    Outcome,
    Prompt,
    Question,
    Scale,
    ask,
    ask_all,
    compose,
    count_units,
    effective_tokens,
    is_hopeless,
    load_corpus,
    parse,
)

CORPUS_FILE = Path(__file__).resolve().parents[1] / "gates/corpora/us-constitution.txt"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Return the text that ships."""
    return load_corpus(CORPUS_FILE)


def server(prompt: Prompt, said: str | None = None) -> Answer:
    """Answer like a server with 1.3 tokens a word or mark, and a template of 20 around them."""
    units = sum(count_units(text) for _, text in prompt.messages)
    tokens = round(1.3 * units) + 20
    return Answer(prompt.secret if said is None else said, tokens, 1, 0, "stop", 0.1)


@pytest.mark.parametrize("form", list(Form))
def test_question_makes_the_same_prompts_again(form: Form, corpus: Corpus) -> None:
    """What a report keeps of a question is enough to ask it again, word for word."""
    question = Question(form, 900, 0.25, 7, 500, corpus.digest if form is Form.CORPUS else "")
    assert parse(question.key) == question
    assert compose(question, corpus) == compose(parse(question.key) or question, corpus)


@pytest.mark.parametrize("key", ["", "plain", "other t900 d0 s1 u2", "plain t900 d0 s1 u2 c"])
def test_key_of_another_version_is_nobodys(key: str) -> None:
    """A key that is not understood is left out instead of being asked wrongly."""
    assert parse(key) is None


@pytest.mark.parametrize("form", list(Form))
def test_questions_share_neither_prefix_nor_secret(form: Form, corpus: Corpus) -> None:
    """Neither a cache nor a memory can answer: the first words and the value are new."""
    prompts = [compose(Question(form, 0, 0.5, seed, 200), corpus)[0] for seed in range(60)]
    assert len({prompt.secret for prompt in prompts}) == 60
    assert len({prompt.messages[0][1][:17] for prompt in prompts}) == 60


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("tokens", [400, 5000])
def test_prompt_is_as_long_as_asked(form: Form, tokens: int, corpus: Corpus) -> None:
    """Within one percent, by the server's own count."""
    outcome = ask(server, Scale(), Question(form, tokens, 0.5, 3), corpus)
    assert abs(outcome.prompt_tokens - tokens) <= 0.01 * tokens
    assert outcome.is_right


def test_lengths_are_hit_to_the_token() -> None:
    """Each length in a row can be asked for, which is what residues need."""
    scale = Scale()
    for tokens in range(400, 432):
        question = Question(Form.PLAIN, tokens, 0.5, tokens)
        got = ask(server, scale, question, is_exact=True).prompt_tokens
        assert abs(got - tokens) <= 1  # this server cannot count every number


def test_server_that_truncates_is_no_measurement() -> None:
    """A prompt that comes out shorter than asked is refused, whatever was answered."""

    def truncating(prompt: Prompt) -> Answer:
        return Answer(prompt.secret, 512, 1, 0, "stop", 0.1)

    with pytest.raises(LengthError, match="5000 tokens within 1 %"):
        ask(truncating, Scale(), Question(Form.PLAIN, 5000, 0.5, 3))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_stands_where_asked(depth: float) -> None:
    """The share of the prose before the needle is the depth."""
    prompt = compose(Question(Form.PLAIN, 0, depth, 5, 3000))[0]
    share = len(prompt.before) / len(prompt.text)
    assert share == pytest.approx(depth, abs=0.02)


def test_named_needle_has_others_beside_it() -> None:
    """Six needles differ by their names and values; the question names one."""
    prompt = compose(Question(Form.NAMED, 0, 0.5, 5, 500))[0]
    assert prompt.text.count("The secret code of the ") == recall.NAMED_NEEDLES
    assert prompt.text.count(prompt.secret) == 1
    name = prompt.text.partition(f" is {prompt.secret}")[0].rpartition(" ")[2]
    assert prompt.text.endswith(f"What is the secret code of the {name}?")


def test_near_misses_are_no_needles() -> None:
    """Other codes stand in sentences that nearly read alike; only one is the secret code's."""
    prompt = compose(Question(Form.NEAR, 0, 0.5, 5, 500))[0]
    assert prompt.text.count("The secret code is") == 1
    assert prompt.text.count(" is ") >= 5


def test_chat_has_twelve_turns() -> None:
    """The first turn holds the needle, the twelfth asks, and each is answered in between."""
    prompt = compose(Question(Form.CHAT, 0, 0.0, 5, 800))[0]
    users = [text for role, text in prompt.messages if role == "user"]
    assert len(users) == recall.TURNS
    assert prompt.secret in users[0]
    assert not any(prompt.secret in text for text in users[1:])
    assert Counter(role for role, _ in prompt.messages)["assistant"] == recall.TURNS - 1


def test_cached_prompts_share_their_prefix() -> None:
    """Two prompts differ by their last line alone, and ask for different values."""
    first, second = compose(Question(Form.CACHED, 0, 0.5, 5, 500))
    assert first.text.partition("\n\n")[0] == second.text.partition("\n\n")[0]
    assert first.secret != second.secret


def test_another_value_beside_the_right_one_is_wrong() -> None:
    """Scoring is exact: an answer that lists codes has not recalled."""

    def chatty(prompt: Prompt) -> Answer:
        return server(prompt, f"{prompt.secret} or ABCDE-1234-FGHIJ")

    outcome = ask(chatty, Scale(), Question(Form.PLAIN, 400, 0.5, 3))
    assert not outcome.is_right
    assert "ABCDE-1234-FGHIJ" in outcome.said


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"Too short.", "has 0 sentences"), (b"\xff\xfe", "should be a text in UTF-8")],
)
def test_corpus_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """One sentence says what is wrong with the file."""
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        load_corpus(path)


def test_decision_does_not_depend_on_who_answers_first() -> None:
    """Only whole beginnings of the questions are looked at, however late the first one comes."""
    questions = [Question(Form.PLAIN, 0, 0.5, seed) for seed in range(8)]
    is_second_done = threading.Event()

    def answer(question: Question) -> Outcome:
        if question.seed == 0:
            is_second_done.wait(5)
        if question.seed == 1:
            is_second_done.set()
        return Outcome(question, is_right=question.seed > 0, prompt_tokens=1)

    seen: list[int] = []

    def is_decided(outcomes: object) -> bool:
        seen.append(len(list(outcomes)))  # type: ignore[call-overload]
        return len(seen) == 3

    outcomes = ask_all(questions, answer, 2, is_decided)
    assert [one.question.seed for one in outcomes] == [0, 1, 2]
    assert seen == [1, 2, 3]


def outcomes_of(*rights: tuple[int, float, bool]) -> list[Outcome]:
    """Return outcomes at lengths and depths."""
    return [
        Outcome(Question(Form.PLAIN, tokens, depth, 0), is_right, tokens)
        for tokens, depth, is_right in rights
    ]


def test_effective_length_ends_where_recall_does() -> None:
    """The longest length up to which all lengths are recalled, for each depth."""
    found = effective_tokens(
        outcomes_of((100, 0, True), (200, 0, False), (300, 0, True), (100, 1, True), (200, 1, True))
    )
    assert found == {0: 100, 1: 200}


def test_hopeless_needs_more_than_bad_luck() -> None:
    """One or two wrong answers end nothing; a run of them does."""
    wrong = outcomes_of((1, 0, False))
    assert not is_hopeless(wrong * 2, 0.9)
    assert is_hopeless(wrong * 4, 0.9)
    assert not is_hopeless(outcomes_of(*[(1, 0, True)] * 20), 0.9)
