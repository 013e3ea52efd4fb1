"""Exit status, JUnit XML, JSON and HTML say the same, for every verdict, shadowed or not."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from seatrial import report
from seatrial.verdict import Verdict
from tests.gate_runs import ROOT, own_gate, run_gates, thresholds

ENDINGS = {
    Verdict.PASS: "assert gate.record(1, at_least=1, unit='x', samples=1)[0] >= 1",
    Verdict.FAIL: "assert gate.record(0, at_least=1, unit='x', samples=1)[0] >= 1",
    Verdict.INCONCLUSIVE: (
        "from seatrial.verdict import InconclusiveError; gate.record(0.9, at_least=1, unit='x', "
        "samples=1); raise InconclusiveError('Too few.')"
    ),
    Verdict.INVALID: "gate.record(float('nan'), at_least=1, unit='x', samples=1)",
    Verdict.NOT_APPLICABLE: "raise AssertionError('is not run')",
}
BESIDE = (
    "@pytest.mark.readiness\ndef test_beside(gate):\n    '''It passes.'''\n    "
    + (ENDINGS[Verdict.PASS])
)
STATUS = {
    Verdict.PASS: 0,
    Verdict.NOT_APPLICABLE: 0,
    Verdict.FAIL: 1,
    Verdict.INCONCLUSIVE: 2,
    Verdict.INVALID: 2,
}
JUNIT = {
    Verdict.PASS: None,
    Verdict.NOT_APPLICABLE: "skipped",
    Verdict.FAIL: "failure",
    Verdict.INCONCLUSIVE: "failure",
    Verdict.INVALID: "failure",
}


class _Page(HTMLParser):
    """Reads what a person sees first: the headline, and the verdict in front of each claim."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headline = ""
        self.verdicts: dict[str, str] = {}
        self._in: list[str] = []
        self._row: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        """Remember where we are."""
        if tag in {"h1", "tr", "td"}:
            self._in.append(tag)
        if tag == "tr":
            self._row = []

    def handle_endtag(self, tag: str) -> None:
        """Keep a row that begins with a verdict."""
        if tag in {"h1", "tr", "td"}:
            self._in.pop()
        if tag == "tr" and len(self._row) > 1 and self._row[0] in set(Verdict):
            self.verdicts[self._row[1]] = self._row[0]

    def handle_data(self, data: str) -> None:
        """Keep words of the headline and of cells."""
        where = self._in[-1] if self._in else ""
        if where == "h1":
            self.headline += data.strip()
        elif where == "td" and data.strip():
            self._row.append(data.strip())


@pytest.mark.parametrize("is_shadow", [False, True], ids=["deciding", "shadow"])
@pytest.mark.parametrize("verdict", list(Verdict))
def test_all_four_say_the_same(tmp_path: Path, verdict: Verdict, is_shadow: bool) -> None:
    """One gate of this verdict beside one that passed; in the shadow it decides nothing."""
    listed: dict[str, object] = {"shadow": {"test_own": "being learned"} if is_shadow else {}}
    if verdict is Verdict.NOT_APPLICABLE:
        listed["not_applicable"] = {"test_own": "listed"}
    outcome = run_gates(
        tmp_path / "report",
        *("--url", "http://127.0.0.1:9", "--select", "readiness,window"),
        *("--thresholds", thresholds(tmp_path, **listed)),
        gates=own_gate(tmp_path, ENDINGS[verdict], BESIDE),
    )
    decided = Verdict.PASS if is_shadow or verdict is Verdict.NOT_APPLICABLE else verdict

    assert outcome.status == STATUS[decided], outcome.output

    found = json.loads((tmp_path / "report/report.json").read_text())
    assert found["verdict"] == decided.value
    assert {gate["id"]: gate["verdict"] for gate in found["gates"]} == {
        "test_beside": "PASS",
        "test_own": verdict.value,
    }

    (case,) = (case for case in outcome.cases() if case.get("name") == "test_own")
    expected = "skipped" if is_shadow and verdict is not Verdict.PASS else JUNIT[verdict]
    assert [child.tag for child in case if child.tag != "properties"] == (
        [expected] * bool(expected)
    )
    said = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert (said["verdict"], said["shadow"]) == (verdict.value, str(is_shadow).lower())
    assert _failures(outcome.junit) == (decided is not Verdict.PASS)

    page = _Page((tmp_path / "report/report.html").read_text())
    assert page.headline == decided.value
    assert page.verdicts == {"It passes.": "PASS", "It holds.": verdict.value}

    text = (tmp_path / "report/report.txt").read_text()
    assert text.startswith(f"Gates on cell http://127.0.0.1:9: {decided.value} ")
    assert text in outcome.output


def _failures(junit: Path) -> int:
    suite = ET.parse(junit).getroot().find("testsuite")  # noqa: S314 - pytest wrote it
    assert suite is not None
    return int(suite.get("failures", "")) + int(suite.get("errors", ""))


def test_every_verdict_says_what_to_do_next() -> None:
    """Only what needs nothing done says nothing."""
    quiet = {verdict for verdict, said in report.NEXT.items() if not said}
    assert quiet == {Verdict.PASS, Verdict.NOT_APPLICABLE}
    assert set(report.NEXT) == set(Verdict)


def test_schema_file_is_the_models(tmp_path: Path) -> None:
    """The JSON Schema that others read is the one by which reports are written."""
    file = ROOT / "seatrial/report.schema.json"
    assert file.read_text() == report.schema(), (
        'write it anew: python -c "from seatrial import report; '
        f"open('{file.relative_to(ROOT)}', 'w').write(report.schema())\""
    )


def test_report_satisfies_its_schema(tmp_path: Path) -> None:
    """What a run writes is what the schema promises, and it refuses another version."""
    gates = own_gate(tmp_path, ENDINGS[Verdict.FAIL], BESIDE)
    run_gates(tmp_path / "report", "--url", "http://127.0.0.1:9", gates=gates)
    found = json.loads((tmp_path / "report/report.json").read_text())
    validator = jsonschema.Draft202012Validator(json.loads(report.schema()))
    assert list(validator.iter_errors(found)) == []
    assert list(validator.iter_errors(found | {"schema": 1})) != []
    assert list(validator.iter_errors(found | {"more": 1})) != []


CRITICAL = {"critical": {"test_beside": "It is asked first."}}
FAILING = BESIDE.replace(ENDINGS[Verdict.PASS], ENDINGS[Verdict.FAIL])


def test_nothing_is_measured_after_a_critical_failure(tmp_path: Path) -> None:
    """The gate that stopped the run decides, and the others say that they were not measured."""
    outcome = run_gates(
        tmp_path / "report",
        *("--url", "http://127.0.0.1:9", "--thresholds", thresholds(tmp_path, **CRITICAL)),
        gates=own_gate(tmp_path, ENDINGS[Verdict.PASS], FAILING),
    )
    assert outcome.status == 1, outcome.output
    assert outcome.gate("test_beside").is_critical
    own = outcome.gate("test_own")
    assert own.verdict is Verdict.INVALID
    assert own.message == "Not measured, since beside gave FAIL. It is asked first."
    assert outcome.report is not None
    assert outcome.report.next.startswith("beside: FAIL")


def test_critical_gate_cannot_be_waved_through(tmp_path: Path) -> None:
    """A file that calls a gate critical and shadowed is refused."""
    own = thresholds(tmp_path, **CRITICAL, shadow={"test_beside": "why"})
    gates = own_gate(tmp_path, ENDINGS[Verdict.PASS], BESIDE)
    arguments = ["--url", "http://127.0.0.1:9", "--thresholds", own]
    outcome = run_gates(tmp_path / "report", *arguments, gates=gates)
    assert outcome.status == 2
    assert "test_beside is critical, so it cannot be under shadow" in outcome.output


def test_gate_of_a_critical_group_cannot_be_waved_through(tmp_path: Path) -> None:
    """A file that calls a group critical and one of its gates shadowed is refused."""
    critical = {"critical": {"window": "why"}, "shadow": {"test_own": "why"}}
    own = thresholds(tmp_path, **critical)
    gates = own_gate(tmp_path, ENDINGS[Verdict.PASS])
    arguments = ["--url", "http://127.0.0.1:9", "--thresholds", own]
    outcome = run_gates(tmp_path / "report", *arguments, gates=gates)
    assert outcome.status == 2
    assert "call test_own or its group critical" in outcome.output


AHEAD = '''
import threading, time

lock, running, seen = threading.Lock(), [0], []

def job():
    with lock:
        running[0] += 1
        seen.append(running[0])
    time.sleep(0.15)
    with lock:
        running[0] -= 1
    return max(seen)

def jobs(prepare, bounds):
    return [job, job, job]

@pytest.mark.window
@pytest.mark.ahead(jobs=jobs)
def test_first(gate, answers):
    """Its first answer is enough."""
    assert gate.record(next(answers), at_least=1, unit="x", samples=1)[0] >= 1

@pytest.mark.window
@pytest.mark.ahead(jobs=jobs)
def test_second(gate, answers):
    """Its requests ran beside those of the first."""
    assert gate.record(max(answers), at_least=2, unit="at once", samples=3)[0] >= 2
'''


def test_requests_of_several_gates_overlap(tmp_path: Path) -> None:
    """Gates that do not measure time send ahead; the one that does waits until it is alone."""
    body = "assert gate.record(-running[0], at_least=0, unit='x', samples=1)[0] >= 0"
    outcome = run_gates(
        tmp_path / "report",
        *("--url", "http://127.0.0.1:9", "--select", "window"),
        *("--thresholds", thresholds(tmp_path, concurrency=2)),
        gates=own_gate(tmp_path, body, AHEAD),
    )
    assert outcome.status == 0, outcome.output
    assert outcome.gate("test_second").measured == 2


def test_time_is_told_against_its_budget(tmp_path: Path) -> None:
    """The run says how long it should take, how long it took and what was late."""
    body = f"import time; time.sleep(0.2); {ENDINGS[Verdict.PASS]}"
    own = thresholds(tmp_path, budget_seconds={"readiness": 5, "window": 0.1, "memory": 9})
    outcome = run_gates(
        tmp_path / "report",
        *("--url", "http://127.0.0.1:9", "--select", "readiness,window", "--thresholds", own),
        gates=own_gate(tmp_path, body, BESIDE),
    )
    assert outcome.status == 0, outcome.output
    assert "time budget: 5.1 s (readiness 5 s, window 0.1 s)" in outcome.output
    assert outcome.report is not None
    said = outcome.report.time_sentence()
    assert said.startswith("Time: readiness 0.0 of 5 s (1 requests), window 0.2 of 0.1 s")
    assert said.endswith("Over its budget: window.")
    assert "Over its budget: window." in " ".join(outcome.output.split())
