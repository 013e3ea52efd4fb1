"""The gates judge a stand-in server rightly, and their exit status and reports say the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial import report
from seatrial.verdict import Verdict
from tests.gate_runs import (
    BY_URL,
    CASE_A,
    RATE,
    ROOT,
    cell_file,
    own_gate,
    run_gates,
    thresholds,
)
from tests.standin import serving

BINARY = "binary.yml"
"""Stands in arguments for a file that is no text."""


def test_good_server_passes_by_hand(tmp_path: Path) -> None:
    """A URL alone is enough for the groups that look through HTTP."""
    with serving() as server:
        outcome = run_gates(tmp_path, "--url", server.url, "--select", BY_URL)
    assert outcome.status == 0, outcome.output
    assert outcome.report is not None
    assert {gate.group for gate in outcome.report.gates} == set(BY_URL.split(","))
    assert {gate.verdict for gate in outcome.report.gates} == {Verdict.PASS}


def test_what_a_url_cannot_answer_is_invalid(tmp_path: Path) -> None:
    """By hand, what needs a host or Prometheus says so; the rest runs; and how to go on."""
    select = "readiness,identity,window,transfer,throughput,memory"
    own = thresholds(tmp_path)
    with serving() as server:
        outcome = run_gates(tmp_path, "--url", server.url, "--select", select, "--thresholds", own)
    assert outcome.status == 2, outcome.output
    assert outcome.report is not None
    assert outcome.gate(CASE_A).verdict is Verdict.PASS
    for gate, reason in {
        "test_unit_files_are_the_released_ones": "There is no release to compare with.",
        "test_canaries_cross_intact": "The cell has no prefill and decode servers of its own.",
        "test_load_reads_prompts_fast_enough": "There is no Prometheus to ask.",
        "test_peak_memory_stays_within_plan": "There is no host to look at.",
    }.items():
        assert outcome.gate(gate).verdict is Verdict.INVALID
        assert outcome.gate(gate).message.startswith(reason)
    assert outcome.report.next.endswith(f"--select {BY_URL}")


def test_good_cell_passes(tmp_path: Path) -> None:
    """In a rollout, the selected groups run, the others are named as left out by the spec."""
    with serving() as server:
        select = ["readiness", "window", "throughput"]
        outcome = run_gates(
            tmp_path,
            "--cell-file",
            cell_file(tmp_path, server, select),
            "--thresholds",
            thresholds(tmp_path),
        )
    assert outcome.status == 0, outcome.output
    assert outcome.report is not None
    assert {gate.group for gate in outcome.report.gates} == set(select)
    assert not {entry.group for entry in outcome.report.not_selected} & set(select)
    case = outcome.gate(CASE_A)
    assert (case.measured, case.bound, case.samples, case.unit) == (1.0, 0.6, 5, "recall")
    rate = outcome.gate("test_load_generates_tokens_fast_enough")
    assert rate.measured is not None
    assert rate.measured > 5
    words = CASE_A.removeprefix("test_").replace("_", " ")
    assert f"{words}: measured 1 recall, bound >= 0.60, samples 5" in outcome.output


def test_report_fits_a_terminal(tmp_path: Path) -> None:
    """The table stays below 100 columns, and ends with the sentence that decides."""
    with serving(sees_tokens=4096) as server:
        run_gates(tmp_path, "--url", server.url, "--select", BY_URL)
    text = (tmp_path / "report.txt").read_text()
    assert max(len(line) for line in text.splitlines()) < 100
    assert text.startswith(f"Gates on cell {server.url}: FAIL")
    assert f"{CASE_A.removeprefix('test_')}: FAIL: measured 0 recall, bound >= 1." in text


def test_server_that_forgets_fails(tmp_path: Path) -> None:
    """A needle beyond the server's sight fails case A alone, in every report."""
    with serving(sees_tokens=4096) as server:
        outcome = run_gates(tmp_path, "--url", server.url, "--select", BY_URL)
    assert outcome.status == 1, outcome.output
    assert outcome.report is not None
    failed = [gate.id for gate in outcome.report.gates if gate.verdict is Verdict.FAIL]
    assert failed == [CASE_A]
    assert outcome.report.verdict is Verdict.FAIL
    assert "0 of 3 needles recalled (95 % interval 0.00-0.56)" in outcome.gate(CASE_A).message
    cases = {case.get("name"): case for case in outcome.cases()}
    assert cases[CASE_A].find("failure") is not None
    assert sum(case.find("failure") is not None for case in cases.values()) == 1
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"prompt_tokens_said": 4000}, "the server counted 4000"),
        ({"truncates_at": 3000}, "the server counted"),
        ({"cached_tokens": 5000}, "came from the prefix cache"),
        ({"dies_after": 2}, "cannot be reached"),
        ({"context_tokens": 2000}, "answered 400: {"),
    ],
    ids=["counts-wrongly", "truncates", "answers-from-cache", "dies", "refuses-long-prompts"],
)
def test_what_cannot_be_measured_is_invalid(
    tmp_path: Path, faults: dict[str, Any], message: str
) -> None:
    """Right answers do not pass when it is not known what they answer."""
    with serving(**faults) as server:
        outcome = run_gates(tmp_path, "--url", server.url, "--select", BY_URL)
    assert outcome.status == 2, outcome.output
    assert outcome.gate(CASE_A).verdict is Verdict.INVALID
    assert message in outcome.gate(CASE_A).message
    assert "Traceback" not in outcome.output


def test_silent_server_fails_and_stops_the_run(tmp_path: Path) -> None:
    """Nobody there: readiness fails, and nothing else waits for time-outs."""
    outcome = run_gates(tmp_path, "--url", "http://127.0.0.1:9")
    assert outcome.status == 1
    assert outcome.gate("test_own_request_is_answered").verdict is Verdict.FAIL
    said = outcome.gate(CASE_A).message
    assert said.startswith("Not measured, since every server is ready gave FAIL. On a cell that")


@pytest.mark.parametrize("key", ["", "another"], ids=["no-key", "wrong-key"])
def test_wrong_api_key_is_one_sentence(tmp_path: Path, key: str) -> None:
    """A server that refuses us does not answer, and the sentence says what to give it."""
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    given = ["--api-key-file", str(file)] if key else []
    with serving(api_key="right") as server:
        outcome = run_gates(tmp_path, "--url", server.url, "--select", BY_URL, *given)
        file.write_text("right\n")
        command = ["--url", server.url, "--select", "readiness", "--api-key-file", str(file)]
        right = run_gates(tmp_path, *command)
    assert outcome.status == 1, outcome.output
    said = outcome.gate("test_own_request_is_answered").message
    assert said.endswith(
        "answered 401: it wants another API key; name the file that holds it with --api-key-file."
    )
    assert "Traceback" not in outcome.output
    assert right.status == 0, right.output


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"scrapes": "none"}, "it has no data"),
        ({"scrapes": "stale"}, "its last scrape is older"),
        ({"scrapes": "nan"}, "is not a number"),
        ({"scrapes": "reset"}, "was reset"),
        ({"uncounted_share": 0.5}, "somebody else used the cell"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else str(next(iter(value.values()))),
)
def test_metrics_that_cannot_be_believed_are_invalid(
    tmp_path: Path, faults: dict[str, Any], message: str
) -> None:
    """A rate needs counters that were scraped, rose, and agree with what the answers say."""
    with serving(**faults) as server:
        outcome = run_gates(
            tmp_path,
            "--cell-file",
            cell_file(tmp_path, server, ["throughput"]),
            "--thresholds",
            thresholds(tmp_path),
        )
    assert outcome.status == 2, outcome.output
    assert outcome.report is not None
    assert outcome.gate(RATE).verdict is Verdict.INVALID
    assert message in outcome.gate(RATE).message


def test_prometheus_that_is_gone_is_invalid(tmp_path: Path) -> None:
    """No Prometheus is no zero and no pass."""
    with serving() as server:
        file = cell_file(tmp_path, server, ["throughput"], prometheus_url="http://127.0.0.1:9")
        outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", thresholds(tmp_path))
    assert outcome.status == 2
    assert outcome.report is not None
    assert "http://127.0.0.1:9 cannot be asked" in outcome.gate(RATE).message


def test_rate_below_its_bound_fails(tmp_path: Path) -> None:
    """A measured rate below the promised one is false, not unknown."""
    with serving() as server:
        outcome = run_gates(
            tmp_path,
            "--cell-file",
            cell_file(tmp_path, server, ["throughput"]),
            "--thresholds",
            thresholds(tmp_path, throughput={"generation_tokens_per_second_min": 1e9}),
        )
    assert outcome.status == 1
    assert outcome.gate("test_load_generates_tokens_fast_enough").verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": {"answer_tokns": 9}}, "window.answer_tokns: is not a key"),
        (
            {"not_applicable": {"test_gone": "why"}},
            "The thresholds name test_gone; there is no such",
        ),
        ({"window": None}, "have no section window"),
    ],
    ids=["misspelt-key", "misspelt-gate", "missing-section"],
)
def test_wrong_thresholds_are_invalid(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A gate does not judge by a default."""
    with serving() as server:
        own = thresholds(tmp_path, **change)
        command = ["--url", server.url, "--thresholds", own, "--select", "readiness,window"]
        outcome = run_gates(tmp_path, *command)
    assert outcome.status == 2, outcome.output
    assert outcome.report is not None
    assert any(message in gate.message for gate in outcome.report.gates), outcome.output


def test_missing_threshold_is_invalid(tmp_path: Path) -> None:
    """A key that is not there is named."""
    own = Path(thresholds(tmp_path))
    value = yaml.safe_load(own.read_text())
    del value["window"]["a"]["recall_ratio_min"]
    own.write_text(yaml.safe_dump(value))
    outcome = run_gates(tmp_path, "--url", "http://127.0.0.1:9", "--thresholds", str(own))
    assert outcome.status == 2
    assert "own.yml: window.a.recall_ratio_min: is missing" in outcome.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Say what to judge"),
        (["--url", "localhost:30000"], "--url should be like http://host:port"),
        (["--cell-file", "/nowhere/cell.json"], "should be a cell file"),
        (["--url", "http://a:1", "--thresholds", "none-such"], "by name there are: any-server"),
        (["--url", "http://a:1", "--select", "readiness,"], "has an empty name"),
        (["--url", "http://a:1", "--select", ""], "has an empty name"),
        (["--url", "http://a:1", "--api-key-file", BINARY], "should hold an API key"),
        (["--url", "http://a:1", "--against", BINARY], "is no text in UTF-8"),
        (["--url", "http://a:1", "--thresholds", BINARY], "should be YAML"),
        (["--cell-file", BINARY], "is no text in UTF-8"),
    ],
    ids=[
        *("nothing", "no-url", "no-file", "no-thresholds", "empty-name", "empty-select"),
        *("binary-key", "binary-report", "binary-thresholds", "binary-cell"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Nothing is measured, the exit status says so, and the sentence says what to change."""
    binary = tmp_path / BINARY
    binary.write_bytes(b"\xff\xfe\x00")
    outcome = run_gates(tmp_path, *(str(binary) if word == BINARY else word for word in arguments))
    assert outcome.status == 2, outcome.output
    assert outcome.report is not None
    assert message in outcome.report.gates[0].message
    assert "Traceback" not in outcome.output
    assert 'failures="1"' in outcome.junit.read_text()


@pytest.mark.parametrize("url", ["http://joe:hunter2@a:1", "http://a:1?key=hunter2"])
def test_secret_in_the_url_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    """A URL stands in every report, so what is secret must not stand in it."""
    outcome = run_gates(tmp_path, "--url", url)
    assert outcome.status == 2
    assert "--url should be like" in outcome.output
    told = [outcome.output, *(file.read_text() for file in tmp_path.iterdir())]
    assert not any("hunter2" in text for text in told)


def test_report_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    """Nobody waits for gates whose report is lost."""
    taken = tmp_path / "taken"
    taken.write_text("")
    with serving() as server:
        outcome = run_gates(taken, "--url", server.url)
        assert server.requests == 0
    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert outcome.report is None


def test_earlier_report_does_not_stand_for_this_run(tmp_path: Path) -> None:
    """While a run has no report, its folder has none."""
    (tmp_path / "report.json").write_text("PASS")
    gone = "import pathlib; assert not pathlib.Path({!r}).exists(); gate.record({})".format(
        str(tmp_path / "report.json"), "1.0, at_least=1.0, unit='', samples=1"
    )
    outcome = run_gates(tmp_path, "--url", "http://127.0.0.1:9", gates=own_gate(tmp_path, gone))
    assert outcome.status == 0, outcome.output


def test_spread_gates_are_refused(tmp_path: Path) -> None:
    """Gates that measure beside each other measure each other; a worker writes no report."""
    command = [sys.executable, "-m", "pytest", "gates/", "-n", "2", "--select", "readiness"]
    command += ["--url", "http://127.0.0.1:9", "--report-dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stdout
    assert "leave out -n" in (tmp_path / "report.txt").read_text()


def test_single_gate_of_a_cell_file_is_refused(tmp_path: Path) -> None:
    """A gate that was not collected would not be missed."""
    with serving() as server:
        file = cell_file(tmp_path, server, ["window"])
        one = f"gates/test_window.py::{CASE_A}"
        outcome = run_gates(tmp_path, "--cell-file", file, gates=one)
    assert outcome.status == 2
    assert "name no single ones" in outcome.output


def test_unknown_group_is_refused(tmp_path: Path) -> None:
    """A misspelt selection must not select nothing."""
    with serving() as server:
        file = cell_file(tmp_path, server, ["readiness", "windw"])
        outcome = run_gates(tmp_path, "--cell-file", file)
    assert outcome.status == 2
    assert "has windw" in outcome.output


@pytest.mark.parametrize("option", [["-k", "readiness"], ["--maxfail=1"]])
def test_gate_that_did_not_run_is_invalid(tmp_path: Path, option: list[str]) -> None:
    """In a rollout, a selected gate that pytest leaves out is not known to hold."""
    with serving(is_ready=False) as server:
        file = cell_file(tmp_path, server, ["readiness", "window"])
        outcome = run_gates(tmp_path, "--cell-file", file, *option)
    assert outcome.gate(CASE_A).verdict is Verdict.INVALID
    assert outcome.status == 1
    assert f'name="{CASE_A}"' in outcome.junit.read_text()


def test_selection_that_leaves_nothing_is_invalid(tmp_path: Path) -> None:
    """An empty run is not a pass, by hand either."""
    with serving() as server:
        outcome = run_gates(tmp_path, "--url", server.url, "-k", "no_such_gate")
    assert outcome.status == 2


def test_hand_may_choose(tmp_path: Path) -> None:
    """By hand, one case can be run alone, and the report says what was left out."""
    with serving() as server:
        outcome = run_gates(tmp_path, "--url", server.url, "-k", "case_d")
    assert outcome.status == 0
    assert outcome.report is not None
    assert {entry.reason for entry in outcome.report.not_selected} == {"left out by hand"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pytest.skip('later')", "The gate was skipped: later"),
        ("pass", "passed without measuring anything"),
        ("assert False", "The gate broke: AssertionError"),
        ("1 / 0", "The gate broke: ZeroDivisionError: division by zero"),
        ("gate.record(float('nan'), at_least=0, unit='x', samples=1)", "Measured nan from 1"),
        ("gate.record(1, at_least=0, unit='x', samples=0)", "Measured 1 from 0 samples"),
        ("pytest.xfail('known')", "must not be expected to fail"),
        ("gate.record(1, at_least=0, unit='x', samples=1); assert False", "though it measured"),
    ],
    ids=["skip", "empty", "assert", "error", "nan", "no-samples", "xfail", "contradiction"],
)
def test_gate_cannot_pass_by_not_measuring(tmp_path: Path, body: str, message: str) -> None:
    """Whatever a gate does instead of measuring, it is INVALID and the status is not 0."""
    outcome = run_gates(
        tmp_path / "report", "--url", "http://127.0.0.1:9", gates=own_gate(tmp_path, body)
    )
    assert outcome.status == 2, outcome.output
    assert outcome.report is not None
    (gate,) = outcome.report.gates
    assert gate.verdict is Verdict.INVALID
    assert message in gate.message, gate.message
    (case,) = outcome.cases()
    assert len(case) > 0


def test_undecided_gate_is_inconclusive(tmp_path: Path) -> None:
    """Measured and not decided is neither a pass nor a failure."""
    body = "from seatrial.verdict import InconclusiveError; raise InconclusiveError('Too few.')"
    gates = own_gate(tmp_path, body)
    outcome = run_gates(tmp_path / "report", "--url", "http://127.0.0.1:9", gates=gates)
    assert outcome.status == 2
    assert outcome.gate("test_own").verdict is Verdict.INCONCLUSIVE


def test_gate_that_forgets_to_assert_fails(tmp_path: Path) -> None:
    """What was measured decides, asserted or not."""
    body = "gate.record(0, at_least=1, unit='x', samples=1)"
    gates = own_gate(tmp_path, body)
    outcome = run_gates(tmp_path / "report", "--url", "http://127.0.0.1:9", gates=gates)
    assert outcome.status == 1


def test_command_line_gives_the_same_status(tmp_path: Path) -> None:
    """The role `gate` reads the exit status of a process."""
    with serving(sees_tokens=4096) as server:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "gates/",
            "--url",
            server.url,
            "--select",
            BY_URL,
        ]
        done = subprocess.run(
            [*command, "--report-dir", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1, done.stdout
    assert done.stderr == ""
    assert report.read(tmp_path / "report.json").verdict is Verdict.FAIL
    assert (tmp_path / "report.txt").read_text() in done.stdout


def test_unit_tests_do_not_collect_gates() -> None:
    """`pytest` and `pytest tests/` run the unit tests alone."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", "needle"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "gates/test" not in done.stdout
