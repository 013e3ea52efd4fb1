"""The report says the same to a person, to a program and to a shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial import report
from seatrial.report import GateResult, NotSelected, Report
from seatrial.verdict import Verdict


def result(verdict: Verdict, gate_id: str = "test_it", measured: float | None = 0.5) -> GateResult:
    """Return a gate's result."""
    return GateResult(
        id=gate_id,
        group="window",
        claim="It holds.",
        verdict=verdict,
        measured=measured,
        bound=0.9,
        unit="recall",
        samples=3,
        message="What a person should know. " * 6,
        next="What to do.",
    )


def whole(*gates: GateResult) -> Report:
    """Return a report of these gates."""
    return Report(
        verdict=report.overall(gates),
        cell="one",
        release="0123456789abcdef",
        commit="c" * 40,
        thresholds="rehearsal",
        seed=7,
        started="2026-11-29T14:00:00+00:00",
        seconds=12.3,
        budget_seconds={"window": 45},
        server_arguments={"prefill": "python -m sglang.launch_server"},
        gates=list(gates),
        not_selected=[
            NotSelected(id="test_other", group="memory", reason="not selected by the spec")
        ],
        next=report.final_sentence(gates),
    )


@pytest.mark.parametrize(
    ("verdicts", "expected", "status"),
    [
        ([Verdict.PASS, Verdict.PASS], Verdict.PASS, 0),
        ([Verdict.PASS, Verdict.NOT_APPLICABLE], Verdict.PASS, 0),
        ([Verdict.PASS, Verdict.INVALID, Verdict.FAIL], Verdict.FAIL, 1),
        ([Verdict.INCONCLUSIVE, Verdict.INVALID], Verdict.INVALID, 2),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], Verdict.INCONCLUSIVE, 2),
        ([Verdict.NOT_APPLICABLE], Verdict.INVALID, 2),
        ([], Verdict.INVALID, 2),
    ],
)
def test_worst_gate_decides(verdicts: list[Verdict], expected: Verdict, status: int) -> None:
    """Only a run in which something passed and nothing else happened promotes."""
    found = whole(*(result(verdict) for verdict in verdicts))
    assert (found.verdict, found.exit_status) == (expected, status)


def test_report_is_read_back(tmp_path: Path) -> None:
    """The JSON has its schema's number and gives the same report."""
    found = whole(result(Verdict.FAIL))
    found.write(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == 2
    assert report.read(tmp_path / "report.json") == found


def test_table_fits_and_explains() -> None:
    """A failed gate has its numbers, its reason and what to do; a passed one only its numbers."""
    text = whole(
        result(Verdict.PASS, "test_good"),
        result(Verdict.FAIL, "test_a_claim_whose_name_is_much_longer_than_a_column_of_the_table"),
        result(Verdict.INVALID, "test_unknown", measured=None),
        result(Verdict.INVALID, "test_unknown_too", measured=None),
    ).text()
    assert max(len(line) for line in text.splitlines()) < 100
    assert "PASS      good" in text
    assert "INVALID: unknown; unknown too" in text
    assert text.count("next: What to do.") == 2
    assert "Not run, not selected by the spec: all 1 of memory." in text


def test_last_sentence_names_gate_and_numbers() -> None:
    """The sentence that a rollout ends with is complete."""
    sentence = report.final_sentence([result(Verdict.PASS), result(Verdict.FAIL, "test_recall")])
    assert sentence == "recall: FAIL: measured 0.50 recall, bound >= 0.90. What to do."
