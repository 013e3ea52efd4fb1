"""Needles are recalled: at all lengths and depths, between distractors, in chats, from the cache.

Every needle and every haystack is new in each run. The lengths follow from the serving spec: while
a prompt has at most 4 x index_topk + 128 tokens every entry is selected, and only beyond that does
the indexer have to choose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from seatrial.cell import Cell
from seatrial.diagnosis import DiagnosisError, diagnose, look
from seatrial.engine import Engine, EngineError, model_override
from seatrial.recall import (
    Examiner,
    Form,
    Outcome,
    Question,
    compose,
    edge_tokens,
    effective_tokens,
    heatmap,
    is_hopeless,
    items_of,
    residue_modulus,
)
from seatrial.statistics import binomial_tail, wilson_interval
from seatrial.thresholds import Asked, Recall
from seatrial.verdict import InconclusiveError, InvalidMeasurementError, Recorder

pytestmark = pytest.mark.recall

ERROR_RATIO = 0.05
"""How often a run may call a place lost that is not, over all places together."""
ROUNDS = 5
"""How often the asked number of samples is asked at most, while too few are right."""
ROOM = 64
"""Tokens of the context that are left for a chat template."""


@dataclass(frozen=True)
class Reach:
    """What the judged server says, or its spec, of how far it can see."""

    topk: int
    context: int
    page: int

    @property
    def edge(self) -> int:
        """The longest prompt of which every entry is selected."""
        return edge_tokens(self.topk)


@dataclass
class Grid:
    """Needles at several lengths and depths, and fresh ones where one was lost."""

    outcomes: list[Outcome]
    confirmed: dict[str, list[Outcome]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def reach(run: Any, cell: Cell, router: Engine) -> Reach:
    """Return where the selection ends, where the context ends, and how long a page is."""
    bounds: Recall = run.thresholds.section("recall")
    try:
        info = router.server_info()
    except EngineError:
        info = {}  # a router need not tell
    if cell.spec is not None:
        topk, context = cell.spec.index_topk, cell.spec.context_length
    else:
        topk = model_override(info).get("index_topk") or bounds.index_topk_by_hand
        context = info.get("context_length") or bounds.length_max_tokens
    longest = min(int(context), bounds.length_max_tokens) - bounds.answer_tokens - ROOM
    if longest < 1:
        raise InvalidMeasurementError(
            f"A context of {context} tokens has no room for a prompt, {bounds.answer_tokens} of an "
            f"answer (recall.answer_tokens) and {ROOM} of a template."
        )
    return Reach(int(topk), longest, int(info.get("page_size") or 1))


@pytest.fixture(scope="module")
def asking(examiner: Callable[[str], Examiner]) -> Examiner:
    """Return who asks."""
    return examiner("recall")


@pytest.fixture(scope="module")
def grid(run: Any, asking: Examiner, reach: Reach) -> Grid:
    """Ask for needles at lengths around the edge of the selection, at each depth."""
    bounds: Recall = run.thresholds.section("recall")
    lengths = [round(share * reach.edge) for share in bounds.around_edge]
    shorter = [tokens for tokens in lengths if tokens <= reach.context]
    if not shorter:
        raise InvalidMeasurementError(
            f"The context has room for prompts of {reach.context} tokens, and the shortest of "
            f"recall.around_edge has {min(lengths)}."
        )
    return _ask_grid(asking, bounds, shorter, f"{run.seed}/grid")


@pytest.fixture
def explain(
    cell: Cell, router: Engine, reach: Reach, diagnostics: dict[int, Engine]
) -> Callable[[Sequence[Outcome]], str]:
    """Return how to say why a needle was lost: coverage, ranking, or not the selector."""

    def said(outcomes: Sequence[Outcome]) -> str:
        lost = next(one for one in outcomes if not one.is_right)
        # The decode side of a P/D pair never saw the prompt's rows: it cannot tell.
        own = {} if cell.with_roles("prefill") else {reach.topk: router}
        prompt = compose(lost.question)[0]
        try:
            looks = [look(one, prompt, width) for width, one in {**own, **diagnostics}.items()]
        except (DiagnosisError, EngineError) as error:
            return str(error)
        if not looks:
            return "Give --diagnostic INDEX_TOPK=URL of a combined server that tells its selection."
        found = diagnose(looks)
        cost = cell.plan.cost_of(found.width) if cell.plan and found.width else ""
        return f"{found.said} {cost}".strip()

    return said


def test_needles_are_recalled_at_all_lengths_and_depths(
    gate: Recorder,
    grid: Grid,
    reach: Reach,
    bounds: Recall,
    explain: Callable[[Sequence[Outcome]], str],
) -> None:
    """Below, at and beyond the edge of the selection, needles at any depth are recalled."""
    measured, bound = _record_grid(gate, grid, reach, bounds, explain)
    assert measured >= bound


def test_no_length_and_no_depth_loses_its_needles(
    gate: Recorder, grid: Grid, bounds: Recall
) -> None:
    """No single length, depth, or place of both loses more needles than the others."""
    lost, places = _lost_places(grid, bounds)
    measured, bound = gate.record(
        1 - len(lost) / places,
        at_least=bounds.kept_places_ratio_min,
        unit="of places kept",
        samples=places,
        message="; ".join(lost) + ("." if lost else ""),
        next_step=(
            "Beyond 4 x index_topk + 128 tokens, compare index_topk and index_key_dtype with "
            "last_good first. Within, a single length or depth that fails is a fault of a kernel, "
            "not of the width: compare kernels, page size and compression."
        ),
    )
    assert measured >= bound


def test_needles_are_recalled_up_to_the_context_limit(
    gate: Recorder,
    asking: Examiner,
    reach: Reach,
    bounds: Recall,
    explain: Callable[[Sequence[Outcome]], str],
) -> None:
    """Prompts as long as the context allows lose no needle."""
    lengths = [round(share * reach.context) for share in bounds.of_context]
    grid = _ask_grid(asking, bounds, sorted(set(lengths)), f"{gate.seed}/{gate.gate_id}")
    measured, bound = _record_grid(gate, grid, reach, bounds, explain)
    assert measured >= bound


def test_no_length_residue_loses_its_needle(
    gate: Recorder, asking: Examiner, reach: Reach, bounds: Recall
) -> None:
    """Prompts of each length modulo compression (4, 128) and page size lose no needle."""
    modulus = residue_modulus(reach.page)
    seeds = gate.seeds()
    asked = [
        Question(Form.PLAIN, bounds.residues.prompt_tokens + step, _depth(step), next(seeds))
        for step in range(modulus * bounds.residues.samples)
    ]
    outcomes = asking.ask_all(asked, is_exact=True)
    outcomes += _missing_residues(asking, outcomes, modulus, bounds, seeds)
    # A few of them, for the next release: their prompts are short, and would outweigh the others.
    gate.details.items = items_of(outcomes[:: max(1, len(outcomes) // 16)])
    lost = _lost_residues(asking, outcomes, modulus, bounds, seeds)
    covered = {one.prompt_tokens % modulus for one in outcomes}
    right = sum(one.is_right for one in outcomes)
    measured, bound = gate.record(
        1 - len(lost) / len(covered),
        at_least=bounds.kept_places_ratio_min,
        unit="of residues kept",
        samples=len(outcomes),
        message=(
            f"{len(covered)} of {modulus} residues of the length met, {right} of {len(outcomes)} "
            f"needles recalled. {_common_residue(lost, modulus)}"
        ).strip(),
        next_step=(
            "Lengths of one residue fail: look at the last, partly filled entry, block or page in "
            "the kernels that this release changed."
        ),
    )
    if measured >= bound and len(covered) < bounds.covered_residues_ratio_min * modulus:
        raise InconclusiveError(
            f"Only {len(covered)} of {modulus} residues were met, since this tokenizer's counts "
            "could not be foreseen; ask for more residues.samples."
        )
    assert measured >= bound


def test_named_needle_is_told_from_others_like_it(
    gate: Recorder, asking: Examiner, bounds: Recall
) -> None:
    """Of several needles that differ by a name, the one that the question names is recalled."""
    measured, bound = _record_form(gate, asking, bounds, Form.NAMED, bounds.named)
    assert measured >= bound


def test_needle_is_told_from_near_misses(gate: Recorder, asking: Examiner, bounds: Recall) -> None:
    """Sentences that nearly read like the needle do not hide it."""
    measured, bound = _record_form(gate, asking, bounds, Form.NEAR, bounds.near)
    assert measured >= bound


def test_needle_of_turn_1_is_recalled_in_turn_12(
    gate: Recorder, asking: Examiner, bounds: Recall
) -> None:
    """What the first turn of a chat said is known in its twelfth."""
    measured, bound = _record_form(gate, asking, bounds, Form.CHAT, bounds.chat)
    assert measured >= bound


def test_needles_in_a_text_of_ones_own_are_recalled(
    gate: Recorder, asking: Examiner, bounds: Recall
) -> None:
    """In a text that people wrote (``--corpus``), needles are recalled too."""
    measured, bound = _record_form(gate, asking, bounds, Form.CORPUS, bounds.corpus)
    assert measured >= bound


def test_needle_behind_a_cached_prefix_is_recalled(
    gate: Recorder, asking: Examiner, bounds: Recall
) -> None:
    """A prompt whose prefix is answered from the prefix cache recalls another needle of it."""
    outcomes = _ask_form(gate, asking, bounds, Form.CACHED, bounds.cached)
    shares = [(one.cached_tokens or 0) / one.prompt_tokens for one in outcomes]
    measured, bound = _record_share(
        gate, outcomes, bounds, f"{min(shares):.0%} to {max(shares):.0%} came from the cache."
    )
    if measured >= bound and min(shares) < bounds.cached_ratio_min:
        raise InconclusiveError(
            f"A prompt that shares its prefix with the one before took {min(shares):.0%} of it "
            "from the cache: the prefix cache is off or too small, so it was not tried."
        )
    assert measured >= bound


def _depth(step: int) -> float:
    """Return depths that wander over 0 to 1 without keeping step with any residue."""
    return round(step * 0.618 % 1, 2)


def _ask_grid(asking: Examiner, bounds: Recall, lengths: Sequence[int], seed: str) -> Grid:
    """Ask for needles at each length and depth; where one is lost, ask again for fresh ones."""
    draw = random.Random(seed)
    asked = [
        Question(Form.PLAIN, tokens, depth, draw.randrange(2**32))
        for _ in range(bounds.samples)
        for tokens in lengths
        for depth in bounds.depths
    ]
    grid = Grid(asking.ask_all(asked, lambda done: is_hopeless(done, bounds.recall_ratio_min)))
    if is_hopeless(grid.outcomes, bounds.recall_ratio_min):
        return grid  # the whole is lost, so no place is worth a second look
    places = dict.fromkeys(
        (one.question.tokens, one.question.depth) for one in grid.outcomes if not one.is_right
    )
    for tokens, depth in places:
        again = [
            Question(Form.PLAIN, tokens, depth, draw.randrange(2**32))
            for _ in range(bounds.confirm_samples)
        ]
        name = f"{tokens} tokens at depth {depth:.0%}"
        grid.confirmed[name] = asking.ask_all(again)
    return grid


def _record_grid(
    gate: Recorder,
    grid: Grid,
    reach: Reach,
    bounds: Recall,
    explain: Callable[[Sequence[Outcome]], str],
) -> tuple[float, float]:
    """Record the recall over a grid, its heatmap and effective length, and why a needle is lost."""
    outcomes = grid.outcomes
    gate.details.items = items_of(outcomes)
    gate.details.heatmaps = [
        heatmap("recall", outcomes, bounds.recall_ratio_min, reach.edge),
    ]
    longest = effective_tokens(outcomes)
    said = ", ".join(f"{tokens} at depth {depth:.0%}" for depth, tokens in longest.items())
    gate.details.facts["effective length"] = said
    also = f"Effective length in tokens: {said}."
    if sum(one.is_right for one in outcomes) < bounds.recall_ratio_min * len(outcomes):
        gate.details.facts["coverage or ranking"] = explain(outcomes)
        also = f"{also} {gate.details.facts['coverage or ranking']}"
    return _record_share(gate, outcomes, bounds, also)


def _lost_places(grid: Grid, bounds: Recall) -> tuple[list[str], int]:
    """Return the places that lose needles, in words, and how many places were looked at.

    A place is lost when so few are recalled there would be rare among all places together: of the
    fresh needles after one was lost there, or of all needles of one length or of one depth.
    """
    rows: dict[str, list[Outcome]] = {}
    for one in grid.outcomes:
        for name in (f"{one.question.tokens} tokens", f"depth {one.question.depth:.0%}"):
            rows.setdefault(name, []).append(one)
    squares = {(one.question.tokens, one.question.depth) for one in grid.outcomes}
    places = len(rows) + len(squares)
    lost = [
        f"{name}: {_count(found)}"
        for name, found in [*grid.confirmed.items(), *rows.items()]
        if _is_lost(found, bounds.recall_ratio_min, places)
    ]
    return lost, places


def _is_lost(outcomes: Sequence[Outcome], ratio: float, places: int) -> bool:
    wrong = sum(not one.is_right for one in outcomes)
    return binomial_tail(wrong, len(outcomes), 1 - ratio) <= ERROR_RATIO / places


def _count(outcomes: Sequence[Outcome]) -> str:
    right = sum(one.is_right for one in outcomes)
    return f"{right} of {len(outcomes)} recalled"


def _missing_residues(
    asking: Examiner,
    outcomes: Sequence[Outcome],
    modulus: int,
    bounds: Recall,
    seeds: Iterator[int],
) -> list[Outcome]:
    """Ask once more for the residues that the first round did not meet."""
    missing = set(range(modulus)) - {one.prompt_tokens % modulus for one in outcomes}
    first = bounds.residues.prompt_tokens
    asked = [
        Question(Form.PLAIN, first + (residue - first) % modulus, _depth(residue), next(seeds))
        for residue in sorted(missing)
    ]
    return asking.ask_all(asked, is_exact=True) if asked else []


def _lost_residues(
    asking: Examiner,
    outcomes: Sequence[Outcome],
    modulus: int,
    bounds: Recall,
    seeds: Iterator[int],
) -> list[int]:
    """Return the residues that lose fresh needles too, after they have lost one."""
    lengths = {
        one.prompt_tokens % modulus: one.prompt_tokens for one in outcomes if not one.is_right
    }
    if is_hopeless(outcomes, bounds.recall_ratio_min):
        return sorted(lengths)
    lost = []
    for residue, tokens in sorted(lengths.items()):
        again = asking.ask_all(
            [
                Question(Form.PLAIN, tokens, _depth(step), next(seeds))
                for step in range(bounds.confirm_samples)
            ],
            is_exact=True,
        )
        same = [one for one in again if one.prompt_tokens % modulus == residue]
        if same and _is_lost(same, bounds.recall_ratio_min, modulus):
            lost.append(residue)
    return lost


def _common_residue(lost: Sequence[int], modulus: int) -> str:
    """Say which residues are lost, by the smallest modulus by which they are one."""
    if not lost:
        return ""
    smaller = [m for m in (2**power for power in range(2, 12)) if modulus % m == 0]
    for m in smaller:
        shared = {residue % m for residue in lost}
        if len(shared) == 1 and len(lost) * m > modulus / 2:
            return f"Lost: lengths that leave {shared.pop()} modulo {m}."
    return f"Lost: lengths that leave {', '.join(map(str, lost[:8]))} modulo {modulus}."


def _ask_form(
    gate: Recorder, asking: Examiner, bounds: Recall, form: Form, asked: Asked
) -> list[Outcome]:
    """Ask so many questions of one form, needles at wandering depths.

    Few of them can miss the bound by one accident, so then more are asked.
    """
    seeds = gate.seeds()
    outcomes: list[Outcome] = []
    while len(outcomes) < ROUNDS * asked.samples:
        questions = [
            Question(form, asked.prompt_tokens, _depth(len(outcomes) + step + 1), next(seeds))
            for step in range(asked.samples)
        ]
        outcomes += asking.ask_all(questions)
        right = sum(one.is_right for one in outcomes)
        is_enough = right >= bounds.recall_ratio_min * len(outcomes)
        if is_enough or is_hopeless(outcomes, bounds.recall_ratio_min):
            break
    gate.details.items = items_of(outcomes)
    return outcomes


def _record_form(
    gate: Recorder, asking: Examiner, bounds: Recall, form: Form, asked: Asked
) -> tuple[float, float]:
    """Ask questions of one form and record their recall."""
    return _record_share(gate, _ask_form(gate, asking, bounds, form, asked), bounds)


def _record_share(
    gate: Recorder, outcomes: Sequence[Outcome], bounds: Recall, also: str = ""
) -> tuple[float, float]:
    """Record which share of the answers named the asked value."""
    right = sum(one.is_right for one in outcomes)
    low, high = wilson_interval(right, len(outcomes))
    lengths = sorted(one.prompt_tokens for one in outcomes)
    wrong = next((one for one in outcomes if not one.is_right), None)
    said = f" Wrong: {wrong.said[:60]!r} at {wrong.prompt_tokens} tokens." if wrong else ""
    return gate.record(
        right / len(outcomes),
        at_least=bounds.recall_ratio_min,
        unit="recall",
        samples=len(outcomes),
        message=(
            f"{right} of {len(outcomes)} needles recalled (95 % interval {low:.2f}-{high:.2f}), "
            f"prompts of {lengths[0]}-{lengths[-1]} tokens. {also}{said}"
        ).strip(),
        next_step=(
            "Compare index_topk and index_key_dtype with last_good: entries beyond "
            "4 x index_topk + 128 tokens are seen only if the indexer ranks them well."
        ),
    )
