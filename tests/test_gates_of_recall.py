"""The gates of recall find what a server forgets, where and when, and compare releases rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.report import GateResult
from seatrial.verdict import Verdict
from tests.gate_runs import Outcome, run_gates, thresholds
from tests.standin import serving

ALL = "test_needles_are_recalled_at_all_lengths_and_depths"
PLACES = "test_no_length_and_no_depth_loses_its_needles"
LIMIT = "test_needles_are_recalled_up_to_the_context_limit"
RESIDUES = "test_no_length_residue_loses_its_needle"
CACHED = "test_needle_behind_a_cached_prefix_is_recalled"
CORPUS = "test_needles_in_a_text_of_ones_own_are_recalled"
COMPARED = "test_recall_is_not_below_last_good"
# A stand-in's words cost it nothing, so its thresholds are the rehearsal's with fewer residues.
SMALL: dict[str, Any] = {"concurrency": 4, "recall": {"samples": 1}, "not_applicable": {}}


def asked(folder: Path, select: str, *arguments: str, **faults: Any) -> Outcome:
    """Run groups by hand on a stand-in with faults."""
    own = thresholds(folder, **SMALL)
    with serving(**faults) as server:
        return run_gates(
            folder,
            *("--url", server.url, "--thresholds", own, "--select", select, "--seed", "1"),
            *arguments,
        )


def failed(outcome: Outcome) -> set[str]:
    """Return the gates that failed."""
    assert outcome.report is not None
    return {gate.id for gate in outcome.report.gates if gate.verdict is Verdict.FAIL}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """Return a run on a server that recalls everything, and its folder."""
    folder = tmp_path_factory.mktemp("good")
    return asked(folder, "recall"), folder


@pytest.mark.parametrize(
    ("context", "message"),
    [(1100, "the shortest of recall.around_edge has 634"), (64, "has no room for a prompt")],
)
def test_context_that_is_too_short_is_said(tmp_path: Path, context: int, message: str) -> None:
    """Where no asked length fits into the context, the reader learns which number to change."""
    own = thresholds(tmp_path, recall={"answer_tokens": 512})
    with serving(info={"context_length": context}) as server:
        arguments = ["--url", server.url, "--thresholds", own, "--select", "recall", "-k", ALL]
        outcome = run_gates(tmp_path, *arguments)
    assert outcome.status == 2
    assert message in outcome.gate(ALL).message


def test_server_that_recalls_passes(good: tuple[Outcome, Path]) -> None:
    """Every claim holds, with a heatmap and an effective length."""
    outcome, _ = good
    assert outcome.status == 0, outcome.output
    grid = outcome.gate(ALL)
    assert [square.x for square in grid.details.heatmaps[0].squares][::3] == [634, 2112, 4224, 5069]
    assert grid.details.heatmaps[0].mark == 4224
    assert grid.details.facts["effective length"].startswith("5069 at depth 0%")
    assert "128 of 128 residues" in outcome.gate(RESIDUES).message


def test_needle_lost_beyond_a_length_fails(tmp_path: Path) -> None:
    """What is more than 3,000 words back is forgotten: the grid fails, the residues do not."""
    outcome = asked(tmp_path, "recall", sees_tokens=3000)
    assert failed(outcome) >= {ALL, PLACES}
    assert outcome.gate(RESIDUES).verdict is Verdict.PASS
    assert "2112 at depth 0%" in outcome.gate(ALL).details.facts["effective length"]


@pytest.mark.parametrize("residue", [(4, 3), (64, 17)])
def test_needle_lost_at_one_residue_fails(tmp_path: Path, residue: tuple[int, int]) -> None:
    """Lengths of one residue alone lose their needles, and the message names it."""
    outcome = asked(tmp_path, "recall", loses_residue=residue)
    assert outcome.gate(RESIDUES).verdict is Verdict.FAIL
    said = f"leave {residue[1]} modulo {residue[0]}."
    assert said in outcome.gate(RESIDUES).message


def test_needle_lost_at_one_depth_fails(tmp_path: Path) -> None:
    """Needles in the middle alone are lost."""
    outcome = asked(tmp_path, "recall", loses_depths=(0.45, 0.55))
    assert PLACES in failed(outcome)
    assert "depth 50%" in outcome.gate(PLACES).message


def test_answers_from_a_cache_are_no_measurement(tmp_path: Path) -> None:
    """A new prompt of which most comes from the cache has not been read."""
    outcome = asked(tmp_path, "recall", cached_tokens=4000)
    assert outcome.gate(ALL).verdict is Verdict.INVALID
    assert "prefix cache" in outcome.gate(ALL).message


def test_cache_that_is_off_was_not_tried(tmp_path: Path) -> None:
    """A server that keeps no prefixes says nothing about recall behind one."""
    outcome = asked(tmp_path, "recall", cached_tokens=0)
    assert outcome.gate(CACHED).verdict is Verdict.INCONCLUSIVE
    assert outcome.gate(ALL).verdict is Verdict.PASS


def test_prompt_that_is_truncated_is_no_measurement(tmp_path: Path) -> None:
    """A server that cuts prompts is found out by its own count."""
    outcome = asked(tmp_path, "recall", truncates_at=2500)
    assert outcome.gate(ALL).verdict is Verdict.INVALID
    assert "4224 tokens within 1 %" in outcome.gate(ALL).message


def test_wrong_corpus_is_its_own_gates_trouble(tmp_path: Path) -> None:
    """A text that is none keeps only the gate from measuring that wants it."""
    text = tmp_path / "text.txt"
    text.write_text("No prose.")
    outcome = asked(tmp_path, "recall", "--corpus", str(text))
    assert outcome.gate(CORPUS).verdict is Verdict.INVALID
    assert "has 0 sentences" in outcome.gate(CORPUS).message
    assert outcome.gate(ALL).verdict is Verdict.PASS


def compared(good: tuple[Outcome, Path], folder: Path, **faults: Any) -> GateResult:
    """Return the verdict on a server that is asked what the good one was asked."""
    report = str(good[1] / "report.json")
    return asked(folder, "comparison", "--against", report, **faults).gate(COMPARED)


def test_same_server_is_not_below_itself(good: tuple[Outcome, Path], tmp_path: Path) -> None:
    """It passes as soon as the allowed drop is excluded, and says what it could have found."""
    gate = compared(good, tmp_path)
    assert gate.verdict is Verdict.PASS
    assert gate.samples == 36
    comparison = gate.details.comparisons[0]
    assert (comparison.change, comparison.allowed) == (0, 0.1)
    assert comparison.high <= comparison.allowed
    assert "detects a drop of 30.3% with 95 % power" in gate.message
    assert len(gate.details.items) == 36


def test_server_that_forgets_is_below(good: tuple[Outcome, Path], tmp_path: Path) -> None:
    """A drop beyond what is allowed fails after a few pairs, by McNemar's test."""
    gate = compared(good, tmp_path, sees_tokens=400)
    assert gate.verdict is Verdict.FAIL
    assert gate.samples < 36
    assert gate.measured is not None
    assert gate.measured > 0.1
    assert "lost, 0 gained" in gate.message


def test_few_pairs_are_inconclusive(
    good: tuple[Outcome, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop that is neither shown nor excluded promotes nothing."""
    monkeypatch.setitem(SMALL, "comparison", {"pairs": 20})
    gate = compared(good, tmp_path)
    assert gate.verdict is Verdict.INCONCLUSIVE
    assert "do not show whether recall dropped" in gate.message


def test_without_last_good_there_is_nothing_to_compare(tmp_path: Path) -> None:
    """Not applicable, with the reason that the thresholds give."""
    gate = asked(tmp_path, "readiness,comparison").gate(COMPARED)
    assert gate.verdict is Verdict.NOT_APPLICABLE
    assert "No last good release" in gate.message
