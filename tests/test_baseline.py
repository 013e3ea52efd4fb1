"""What the last good release was asked is found in the ledger, or in a report by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial import baseline, ledger
from seatrial.baseline import BaselineError
from seatrial.details import Details, Item
from seatrial.report import GateResult, Report
from seatrial.verdict import Verdict

RELEASE = "1" * 16


def report(verdict: Verdict = Verdict.PASS, key: str = "q1", release: str = RELEASE) -> Report:
    """Return the report of a run that asked one question."""
    items = [Item(key=key, order=0, is_right=True)] if key else []
    gate = GateResult(
        id="test_recall",
        group="recall",
        claim="Needles are recalled.",
        verdict=verdict,
        details=Details(items=items),
    )
    return Report(
        verdict=verdict,
        cell="one",
        release=release,
        commit=None,
        thresholds="rehearsal",
        seed=1,
        started="2026-11-29T00:00:00",
        seconds=1,
        budget_seconds={},
        server_arguments={},
        gates=[gate],
        not_selected=[],
        next="",
    )


def event(found: Report | dict[str, Any], cell: str = "one", rollout: str = "r") -> ledger.Event:
    """Return the ledger's line about a run of the gates."""
    value = found.model_dump(mode="json", by_alias=True) if isinstance(found, Report) else found
    return ledger.Event(
        time=ledger.now(), rollout=rollout, event="gates", cell=cell, data={"report": value}
    )


def test_newest_passed_run_on_last_good_counts() -> None:
    """Not another cell's, not another release's, not a failed one."""
    events = [
        event(report(key="old")),
        event(report(key="new"), rollout="r2"),
        event(report(key="other"), cell="two"),
        event(report(key="failed", verdict=Verdict.FAIL)),
        event(report(key="later", release="2" * 16)),
    ]
    found = baseline.of_ledger(events, "one", RELEASE)
    assert found is not None
    assert found.where == "r2"
    assert [item.key for item in found.items["test_recall"]] == ["new"]


@pytest.mark.parametrize("release", ["", "3" * 16])
def test_unknown_release_has_no_baseline(release: str) -> None:
    """The first rollout, and one whose last good release was never judged here, have none."""
    assert baseline.of_ledger([event(report())], "one", release) is None


@pytest.mark.parametrize("found", [{}, {"schema": 0}, report(key="")])
def test_report_that_kept_no_questions_is_no_baseline(found: Report | dict[str, Any]) -> None:
    """What an earlier version wrote keeps no rollout from being judged."""
    assert baseline.of_ledger([event(found)], "one", RELEASE) is None


def test_report_by_hand_is_read(tmp_path: Path) -> None:
    """``--against report.json`` compares with any earlier run."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report().model_dump(mode="json", by_alias=True)))
    assert baseline.of_report(path).release == RELEASE


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "should be a report.json"), ("{}", "is no report.json"), ("", "is no report.json")],
)
def test_what_is_no_report_is_one_sentence(
    tmp_path: Path, content: str | None, message: str
) -> None:
    """A wrong file is named with what is wrong."""
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BaselineError, match=message):
        baseline.of_report(path)


def test_report_without_questions_is_refused_by_hand(tmp_path: Path) -> None:
    """By hand somebody asked for it, so it is said."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(key="").model_dump(mode="json", by_alias=True)))
    with pytest.raises(BaselineError, match="kept nothing to compare with"):
        baseline.of_report(path)
