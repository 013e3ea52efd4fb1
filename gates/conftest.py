"""How a claim becomes a verdict.

A gate is a test that records what it measured and then asserts it. This file reads the cell and the
thresholds, runs the selected gates in a useful order, turns every outcome of pytest into a verdict
(a skip, an unexpected pass, an error or a gate that measured nothing is INVALID), writes the report
and sets the exit status: 0 when all passed, 1 when one failed, 2 when something is not known.

Gates that measure answers and not time send their requests ahead (see :class:`Ahead`), so that
those of different gates overlap. Every other gate waits until these are answered, and runs alone.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest

from seatrial import baseline as baselines
from seatrial import cell as cells
from seatrial import degenerate
from seatrial import report as reports
from seatrial import thresholds as threshold_files
from seatrial.baseline import Baseline
from seatrial.cell import BY_HAND, Cell, CellError, CellServer
from seatrial.engine import Answer, Engine, EngineError, launch_command
from seatrial.errors import SeatrialError
from seatrial.haystack import Layout, Ruler, ask_at_length
from seatrial.host import Host
from seatrial.page import page
from seatrial.prometheus import Prometheus
from seatrial.recall import Corpus, Examiner, Scale, load_corpus
from seatrial.release import Release
from seatrial.report import NEXT, GateResult, NotSelected, Report
from seatrial.thresholds import Thresholds
from seatrial.verdict import InvalidMeasurementError, Recorder, Verdict, judge, words

GROUPS = {
    "readiness": "the cell answers",
    "identity": "the running servers are the release",
    "kernels": "the installed kernels agree with their references",
    "window": "needles at known places are recalled",
    "recall": "needles are recalled at all lengths and depths",
    "comparison": "no less is recalled than by the last good release",
    "transfer": "the KV cache crosses from prefill to decode intact",
    "throughput": "tokens per second and latency, as Prometheus and we count them",
    "memory": "memory under long prefills, against the plan and the device",
    "liveness": "the cell answers in bursts, beside long prefills, after an idle time",
    "soak": "the same for long",
    "alike": "a combined cell and one with prefill and decode answer alike",
    "answers": "no answer to any of the gates was degenerate",
}
"""The groups that a spec may select, in the order in which they run.

Readiness first, since nothing can be measured on a cell that does not answer; memory late, since it
reads the peak that the gates before it have left; answers last, since it looks at all of them.
"""

ON_REQUEST = ("soak", "alike")
"""Groups that by hand run only when they are named: they take long, or need two cells."""

THRESHOLDS = Path(__file__).parent / "thresholds"
CORPUS = Path(__file__).parent / "corpora/us-constitution.txt"
BY_HAND_THRESHOLDS = "any-server"
CACHED_SHARE_MAX = 0.05
"""A chat template's own first tokens may come from the prefix cache; a haystack must not."""
CURRENT_GATE: ContextVar[str] = ContextVar("gate", default="")
"""The gate on whose behalf a request is sent ahead; empty for the one whose turn it is."""


@dataclass(frozen=True)
class Judged:
    """One answer to a gate: who asked, what is wrong with it, and how it began if it is wrong."""

    gate: str
    faults: list[str]
    said: str


@dataclass
class Run:
    """The state of one run of the gates."""

    cell: Cell | None = None
    thresholds: Thresholds | None = None
    seed: int = 0
    is_by_hand: bool = False
    report_dir: Path | None = None
    api_key: str | None = None
    baseline: Baseline | None = None
    problem: str = ""
    select: list[str] = field(default_factory=list)
    server_arguments: dict[str, str] = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)
    expected: dict[str, pytest.Item] = field(default_factory=dict)
    results: dict[str, GateResult] = field(default_factory=dict)
    not_selected: list[NotSelected] = field(default_factory=list)
    final: Report | None = None
    ahead: Ahead | None = None
    turn: str = ""
    answers: list[Judged] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    prepared: dict[str, float] = field(default_factory=dict)

    def listed(
        self, kind: Literal["critical", "shadow", "not_applicable"], item: pytest.Item
    ) -> str:
        """Return the reason with which the thresholds list a gate or its group, or nothing."""
        if self.thresholds is None:
            return ""
        reasons: dict[str, str] = dict(getattr(self.thresholds, kind))
        if kind == "not_applicable":
            if self.baseline is None:
                reasons |= self.thresholds.not_applicable_without_last_good
            if self.cell is not None and self.cell.with_roles("combined"):
                reasons |= self.thresholds.not_applicable_to_combined
        return reasons.get(item.name) or reasons.get(_group(item), "")

    @property
    def asking(self) -> str:
        """The gate on whose behalf a request is sent: ahead of its turn, or in it."""
        return CURRENT_GATE.get() or self.turn

    def count_request(self) -> None:
        """Count a request for the gate on whose behalf it is sent."""
        self.requests[self.asking] = self.requests.get(self.asking, 0) + 1

    def look_at(self, answer: Answer) -> None:
        """Keep what is wrong with an answer, if anything, and which gate asked for it."""
        faults = degenerate.faults(answer)
        self.answers.append(Judged(self.asking, faults, answer.text[:60] if faults else ""))

    @property
    def stopper(self) -> GateResult | None:
        """The critical gate that did not pass, if there is one: nothing is measured after it."""
        return next((gate for gate in self.results.values() if gate.is_critical_stop), None)


Job = Callable[[], Any]
"""One request that can be sent at any time, and what it returns."""
Jobs = Callable[["Prepare", Any], Sequence[Job]]
"""Makes a gate's jobs, given how to prepare a haystack and the thresholds of its group."""
Prepare = Callable[[int, Layout, int], Callable[[], Answer]]
"""Prepares a haystack like :data:`Ask`, and returns the job that asks it."""


class Ahead:
    """Requests that are sent before their gates' turns, through one bounded pool.

    A gate takes part with ``@pytest.mark.ahead(jobs=...)`` and the fixture ``answers``. What its
    answers say must not depend on what else is asked at the same time; a gate that measures time,
    rates or memory does not take part.
    """

    def __init__(self, concurrency: int) -> None:
        self._pool = ThreadPoolExecutor(concurrency)
        self._sent: dict[str, list[Future[Any]]] = {}

    def send(self, gate: str, jobs: Sequence[Job]) -> None:
        """Send a gate's requests as soon as there is room for them."""
        self._sent[gate] = [self._submit(gate, job) for job in jobs]

    def answers(self, gate: str) -> Iterator[Any]:
        """Yield what came back to a gate, in the order of its jobs; wait where it is not there yet.

        What the gate does not wait for any more is not sent any more.
        """
        try:
            for sent in self._sent[gate]:
                yield sent.result()
        finally:
            for sent in self._sent[gate]:
                sent.cancel()

    def wait_until_idle(self) -> None:
        """Wait until nothing is in flight, so that a gate can measure alone."""
        wait([sent for sents in self._sent.values() for sent in sents])

    def stop(self) -> None:
        """Send nothing more, and wait for what is in flight."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, gate: str, job: Job) -> Future[Any]:
        context = copy_context()
        context.run(CURRENT_GATE.set, gate)
        return self._pool.submit(context.run, job)


Ask = Callable[[int, Layout, int], Answer]
"""Asks a haystack of so many tokens, with needles laid out so, for an answer of so many tokens."""

EACH_LAUNCH = "each_launch"
RUN = pytest.StashKey[Run]()
RECORDER = pytest.StashKey[Recorder]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run."""
    group = parser.getgroup("gates", "what to judge")
    group.addoption("--cell-file", type=Path, help="the cell, as a rollout describes it")
    group.addoption("--url", help="judge the SGLang server or router at http://host:port, by hand")
    group.addoption(
        "--thresholds", help=f"name in gates/thresholds, or a .yml (default: {BY_HAND_THRESHOLDS})"
    )
    group.addoption("--select", help="by hand: the groups to run, like readiness,window")
    group.addoption(
        "--report-dir", type=Path, help="write report.html, .txt, .json, junit.xml here"
    )
    group.addoption("--seed", type=int, help="repeat the prompts of an earlier run")
    group.addoption("--corpus", type=Path, default=CORPUS, help="a text to hide needles in")
    group.addoption(
        "--against", type=Path, help="compare with an earlier run's report.json, by hand"
    )
    group.addoption(
        "--each-launch",
        action="store_true",
        help="run only what is asked after each of several cold launches (marker each_launch)",
    )
    group.addoption(
        "--diagnostic",
        action="append",
        default=[],
        metavar="INDEX_TOPK=URL",
        help="a combined server of that width that tells its selection, to explain a lost needle",
    )
    group.addoption("--api-key-file", type=Path, help="file with the key that the URL asks for")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Read what to judge, before any other plugin reads its options."""
    for name, description in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {description}")
    config.addinivalue_line("markers", "ahead(jobs): its requests overlap those of other gates")
    config.addinivalue_line("markers", f"{EACH_LAUNCH}: asked after each cold launch")
    # A library's warning says nothing about the cell; the unit tests make it an error.
    config.addinivalue_line("filterwarnings", "default")
    run = Run(report_dir=config.option.report_dir)
    config.stash[RUN] = run
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "no"  # an operator needs the sentence, which the table has
    config.option.reportchars = ""  # and the table is the summary
    if hasattr(config, "workerinput"):
        run.report_dir = None  # a worker of -n, which measures nothing, must not write one
    if run.report_dir is not None and config.option.xmlpath is None:
        config.option.xmlpath = str(run.report_dir / "junit.xml")
    try:
        _read_options(config, run)
    except SeatrialError as error:
        run.problem = str(error)
    if run.report_dir is not None and not config.option.collectonly:
        _clear(run.report_dir)


def _clear(folder: Path) -> None:
    """Make the report's folder; an earlier run's report there must not stand for this one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*reports.FILES, "junit.xml"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise pytest.UsageError(
            f"--report-dir {folder}: no report can be written there: {error.strerror}"
        ) from None


def _read_options(config: pytest.Config, run: Run) -> None:
    options = config.option
    run.seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    if (options.cell_file is None) == (options.url is None):
        raise CellError("Say what to judge: --url http://host:port, or --cell-file F.")
    run.is_by_hand = options.url is not None
    if getattr(options, "numprocesses", None):
        raise CellError("Gates measure one after another: leave out -n.")
    if options.select and not run.is_by_hand:
        raise CellError("--select is for --url; a cell file's spec says itself what is selected.")
    if not run.is_by_hand and any("::" in argument for argument in config.args):
        raise CellError("A cell file's gates are judged all together: name no single ones.")
    if options.url is not None:
        unasked = [group for group in GROUPS if group not in ON_REQUEST]
        asked = [name.strip() for name in (options.select or "").split(",")]
        run.select = asked if options.select is not None else unasked
        run.cell = cells.by_hand(options.url, options.thresholds or BY_HAND_THRESHOLDS)
    else:
        run.cell = cells.load(options.cell_file)
        run.select = list(run.cell.spec.gates.select) if run.cell.spec else list(GROUPS)
    run.thresholds = threshold_files.load(THRESHOLDS, options.thresholds or run.cell.thresholds)
    run.baseline = run.cell.baseline
    if options.against is not None:
        run.baseline = baselines.of_report(options.against)
    if options.api_key_file is not None:
        run.api_key = _api_key(options.api_key_file)
    unknown = [name for name in run.select if name not in GROUPS]
    if unknown:
        where = "--select" if run.is_by_hand else "gates.select"
        said = ", ".join(name or "an empty name" for name in unknown)
        raise CellError(f"{where}: should be among {', '.join(GROUPS)}, has {said}")


def _api_key(path: Path) -> str:
    """Read the key; what cannot be a key is told without its content."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise CellError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not key or " " in key:
        raise CellError(f"{path}: should hold an API key: one word of ASCII characters")
    return key


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say at the top what is judged, how to repeat it, and how long it should take."""
    run = config.stash[RUN]
    name = run.cell.name if run.cell is not None else "none"
    shares = [f"{group} {seconds:g} s" for group, seconds in _budget(run).items()]
    budget = f"{sum(_budget(run).values()):g} s ({', '.join(shares)})" if shares else "none"
    return [
        f"gates: cell {name}, prompts repeat with --seed {run.seed}",
        f"time budget: {budget}",
    ]


def _budget(run: Run) -> dict[str, float]:
    """Return how long each selected group should take."""
    budget = run.thresholds.budget_seconds if run.thresholds is not None else {}
    return {group: budget[group] for group in GROUPS if group in run.select and group in budget}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Choose and order the gates; know each gate that must give a result.

    What pytest's own options deselect inside the wrapped call counts as expected and missing.
    """
    run = config.stash[RUN]
    gates = {item.nodeid: item for item in items}
    groups = {nodeid: _group(item) for nodeid, item in gates.items()}
    _check_names(run, gates)
    selected = run.select
    if run.problem:
        items.clear()
    yield
    if run.problem:
        return
    is_launch = config.option.each_launch
    launch_left_out: list[pytest.Item] = []
    for nodeid, item in gates.items():
        reason = ""
        if groups[nodeid] not in selected:
            reason = "left out by hand" if run.is_by_hand else "not selected by the spec"
        elif is_launch and item.get_closest_marker(EACH_LAUNCH) is None:
            reason = "not asked after each cold launch"
            launch_left_out.append(item)
        elif item not in items and run.is_by_hand:
            reason = "left out by hand"
        if reason:
            run.not_selected.append(NotSelected(id=item.name, group=groups[nodeid], reason=reason))
        else:
            run.expected[nodeid] = item
    left_out = [
        item for item in items if groups[item.nodeid] not in selected or item in launch_left_out
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    order = list(GROUPS)
    items[:] = sorted(
        (item for item in items if item not in left_out),
        key=lambda item: order.index(groups[item.nodeid]),
    )
    missing = [group for group in selected if group not in groups.values()]
    if missing and not run.is_by_hand:
        run.problem = f"No gate of the selected groups {', '.join(missing)} was collected."
        run.expected.clear()
        items.clear()


def _group(item: pytest.Item) -> str:
    """Return the one group that a gate's file is marked with."""
    marked = [name for name in GROUPS if item.get_closest_marker(name)]
    if len(marked) != 1:
        raise pytest.UsageError(f"{item.nodeid}: should be marked with one of {', '.join(GROUPS)}")
    return marked[0]


def _check_names(run: Run, gates: dict[str, pytest.Item]) -> None:
    """Refuse thresholds that name a gate which does not exist, or wave a critical one through."""
    if run.thresholds is not None and not run.problem:
        waved = {**run.thresholds.shadow, **run.thresholds.not_applicable}
        both = [
            item.name
            for item in gates.values()
            if run.listed("critical", item) and (item.name in waved or _group(item) in waved)
        ]
        if both:
            run.problem = (
                f"The thresholds call {', '.join(both)} or its group critical, so neither can be "
                "under shadow or not_applicable too."
            )
    known = {*GROUPS, *(item.name for item in gates.values())}
    whole = len({_group(item) for item in gates.values()}) == len(GROUPS)
    named = run.thresholds.names if run.thresholds is not None else []
    unknown = [name for name in named if name not in known]
    if unknown and whole and not run.problem:
        run.problem = (
            f"The thresholds name {', '.join(unknown)}; there is no such gate or group. "
            "Is it misspelt?"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what is listed as not applicable; measure nothing after a critical failure."""
    run = item.config.stash[RUN]
    run.turn = item.name
    item.stash[RECORDER] = Recorder(item.name, run.seed, lambda text: _say(item.config, text))
    reason = run.listed("not_applicable", item)
    if reason:
        pytest.skip(reason)
    stopper = run.stopper
    if stopper is not None and stopper.group != _group(item):
        why = run.thresholds.critical if run.thresholds is not None else {}
        raise InvalidMeasurementError(
            f"Not measured, since {words(stopper.id)} gave {stopper.verdict.value}. "
            f"{why.get(stopper.id) or why.get(stopper.group, '')}".strip()
        )
    if run.ahead is not None and item.get_closest_marker("ahead") is None:
        run.ahead.wait_until_idle()


def _say(config: pytest.Config, text: str) -> None:
    """Print a line while the gates run, past pytest's capturing."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if terminal is None or capture is None:
        return
    with capture.global_and_fixture_disabled():
        terminal.ensure_newline()
        terminal.write_line(text)
        terminal.flush()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keep pytest's own dots and file names out: each gate says its own lines."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.showfspath = False


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count a judged gate as pytest does, without a letter for it."""
    is_judged = any(name == "verdict" for name, _ in report.user_properties)
    if is_judged and (report.when != "teardown" or report.failed):
        return report.outcome, "", ""
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn pytest's outcome of one phase into a verdict, and let pytest's report say the same."""
    phase = yield
    run = item.config.stash[RUN]
    if phase.when == "teardown" and not phase.failed:
        return phase
    if phase.when == "setup":
        run.prepared[item.nodeid] = call.duration
        if phase.passed:
            return phase
    result = _judged(item, call, phase, run)
    run.results[item.nodeid] = result
    shadow = " in the shadow" if result.is_shadow else ""
    _say(item.config, f"  {result.verdict.value}{shadow} ({item.name}, {result.seconds:.1f} s)")
    told = [
        ("verdict", result.verdict.value),
        ("measured", str(result.measured)),
        ("bound", str(result.bound)),
        ("samples", str(result.samples)),
        ("shadow", str(result.is_shadow).lower()),
        ("critical", str(result.is_critical).lower()),
    ]
    phase.user_properties += told
    item.user_properties[:] = told  # which JUnit reads when the gate is torn down
    if result.verdict is Verdict.PASS:
        return phase
    if hasattr(phase, "wasxfail"):
        del phase.wasxfail
    if not result.is_blocking:
        phase.outcome = "skipped"
        where = f"shadow {result.verdict.value}" if result.is_shadow else result.verdict.value
        phase.longrepr = (str(item.path), 0, f"{where}: {result.message}")
        return phase
    if phase.outcome != "failed":
        phase.outcome = "failed"
    phase.longrepr = f"{result.verdict.value}: {result.message}"
    return phase


def _judged(
    item: pytest.Item, call: pytest.CallInfo[None], phase: pytest.TestReport, run: Run
) -> GateResult:
    """Return the gate's result, given how pytest saw one of its phases end."""
    recorder = item.stash[RECORDER]
    error = call.excinfo.value if call.excinfo is not None else None
    if hasattr(phase, "wasxfail"):
        verdict, message = Verdict.INVALID, "A gate must not be expected to fail."
    else:
        reason = run.listed("not_applicable", item)
        verdict, message = judge(recorder, phase.outcome, error, reason)
    return GateResult(
        id=item.name,
        group=_group(item),
        claim=_claim(item),
        verdict=verdict,
        measured=recorder.measured,
        bound=recorder.bound,
        bound_is=recorder.bound_is,
        unit=recorder.unit,
        samples=recorder.samples,
        message=message,
        next=(recorder.next if verdict is Verdict.FAIL else "") or NEXT[verdict],
        is_shadow=bool(run.listed("shadow", item)),
        is_critical=bool(run.listed("critical", item)),
        seconds=round(_seconds(run, item, call), 3),
        requests=run.requests.get(item.name, 0),
        details=recorder.details,
    )


def _seconds(run: Run, item: pytest.Item, call: pytest.CallInfo[None]) -> float:
    """Return how long a gate took: what it was given and what it did with it."""
    prepared = run.prepared.get(item.nodeid, 0.0)
    return prepared if call.when == "setup" else prepared + call.duration


def _claim(item: pytest.Item) -> str:
    """Return the first line of the gate's docstring: the claim in a sentence."""
    function = getattr(item, "function", None)
    text = (getattr(function, "__doc__", None) or item.name).strip()
    return str(text.splitlines()[0])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report and let the exit status say the same."""
    run = session.config.stash[RUN]
    if session.config.option.collectonly:
        return
    gates = [*run.results.values(), *_without_result(run, session)]
    run.final = Report(
        verdict=reports.overall(gates),
        cell=run.cell.name if run.cell is not None else "none",
        release=run.cell.release.digest if run.cell is not None and run.cell.release else None,
        commit=run.cell.release.commit if run.cell is not None and run.cell.release else None,
        thresholds=run.thresholds.model if run.thresholds is not None else "none",
        seed=run.seed,
        started=run.started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - run.clock, 3),
        budget_seconds=_budget(run),
        server_arguments=run.server_arguments,
        gates=gates,
        not_selected=run.not_selected,
        next=_final_sentence(run, gates),
    )
    for gate in gates:
        if gate.id not in {result.id for result in run.results.values()}:
            _tell_junit(session, gate)
    if run.report_dir is not None:
        run.final.write(run.report_dir)
        (run.report_dir / "report.html").write_text(page(run.final))
    session.exitstatus = run.final.exit_status


def _tell_junit(session: pytest.Session, gate: GateResult) -> None:
    """Let pytest's own report, and so JUnit's, hold what did not run as well."""
    where = (f"gates/{gate.group}", 0, gate.id)
    told = pytest.TestReport(
        nodeid=f"gates/{gate.group}::{gate.id}",
        location=where,
        keywords={},
        outcome="failed",
        longrepr=f"{gate.verdict.value}: {gate.message}",
        when="call",
        user_properties=[("verdict", gate.verdict.value)],
    )
    session.config.hook.pytest_runtest_logreport(report=told)


def _final_sentence(run: Run, gates: Sequence[GateResult]) -> str:
    """Return what to do now; by hand, how to leave out what a URL alone cannot answer."""
    blocking = [gate for gate in gates if gate.is_blocking]
    passed = [gate for gate in gates if gate.verdict is Verdict.PASS]
    if not (blocking and passed and all(gate.message.endswith(BY_HAND) for gate in blocking)):
        return reports.final_sentence(gates)
    unable = {gate.group for gate in blocking}
    groups = ",".join(dict.fromkeys(g.group for g in passed if g.group not in unable))
    if not groups:
        return reports.final_sentence(gates)
    return (
        f"All {len(passed)} gates that a URL alone can answer passed; {len(blocking)} others are "
        f"INVALID, since they need what a rollout knows. To leave those out: --select {groups}"
    )


def _without_result(run: Run, session: pytest.Session) -> Iterator[GateResult]:
    """Yield an INVALID for what kept the gates from running, and for each gate that did not run."""
    if run.problem:
        yield _invalid("setup", "setup", run.problem)
    elif not run.expected:
        yield _invalid("setup", "setup", "No gate was selected, so nothing was measured.")
    if session.testsfailed and not run.results and not run.problem:
        yield _invalid("collection", "setup", "The gates could not be collected; see the output.")
    for nodeid, item in run.expected.items():
        if nodeid not in run.results:
            yield _invalid(item.name, _group(item), "The gate is selected, and was not run.")


def _invalid(gate_id: str, group: str, message: str) -> GateResult:
    return GateResult(
        id=gate_id,
        group=group,
        claim="The gates can be run.",
        verdict=Verdict.INVALID,
        message=message,
        next=NEXT[Verdict.INVALID],
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """End with the table for people."""
    final = config.stash[RUN].final
    if final is not None:
        terminalreporter.ensure_newline()
        terminalreporter.section("gates")
        terminalreporter.write(final.text())


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    """Return the state of this run."""
    return request.config.stash[RUN]


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Recorder:
    """Return where the gate records what it measures."""
    recorder: Recorder = request.node.stash[RECORDER]
    return recorder


@pytest.fixture(scope="session")
def cell(request: pytest.FixtureRequest) -> Cell:
    """Return the cell that is judged."""
    cell = request.config.stash[RUN].cell
    if cell is None:
        raise InvalidMeasurementError("There is no cell to judge.")
    return cell


@pytest.fixture
def bounds(request: pytest.FixtureRequest, run: Run) -> Any:
    """Return the thresholds of the gate's own group."""
    if run.thresholds is None:
        raise InvalidMeasurementError("There are no thresholds to judge by.")
    return run.thresholds.section(_group(request.node))


@pytest.fixture(scope="session")
def connect(run: Run) -> Iterator[Callable[[str], Engine]]:
    """Return how to reach a server of the cell by its URL; each is connected to once."""
    seconds = run.thresholds.request_seconds if run.thresholds is not None else 60.0
    engines: dict[str, Engine] = {}
    with ExitStack() as stack:

        def reach(url: str) -> Engine:
            if url not in engines:
                engine = Engine(
                    url, seconds, run.api_key, on_request=run.count_request, on_answer=run.look_at
                )
                engines[url] = stack.enter_context(engine)
            return engines[url]

        yield reach


@pytest.fixture(scope="session")
def router(cell: Cell, connect: Callable[[str], Engine]) -> Engine:
    """Return the cell's own door: its router, or the URL given by hand."""
    return connect(cell.router_url)


@pytest.fixture(scope="session", autouse=True)
def server_arguments(
    run: Run, cell: Cell, router: Engine, request: pytest.FixtureRequest
) -> dict[str, str]:
    """Say how the judged servers were started, before anything is asserted about them."""
    if cell.release is not None:
        run.server_arguments = {
            role: shlex.join(server.argv) for role, server in cell.release.servers.items()
        }
    else:
        try:
            run.server_arguments = {cell.name: launch_command(router.server_info())}
        except EngineError:
            run.server_arguments = {cell.name: "unknown, since it does not tell"}
    for name, arguments in run.server_arguments.items():
        _say(request.config, f"{name}: {arguments}")
    return run.server_arguments


@pytest.fixture(scope="session")
def prometheus(cell: Cell) -> Prometheus:
    """Return the Prometheus that watches the cell."""
    if cell.prometheus_url is None:
        raise InvalidMeasurementError(f"There is no Prometheus to ask. {BY_HAND}")
    return Prometheus(cell.prometheus_url)


@pytest.fixture(scope="session")
def release(cell: Cell) -> Release:
    """Return the release that the cell should run."""
    if cell.release is None:
        raise InvalidMeasurementError(f"There is no release to compare with. {BY_HAND}")
    return cell.release


@pytest.fixture(scope="session")
def host_of(cell: Cell) -> Iterator[Callable[[CellServer], Host]]:
    """Return how to reach a server's host; each host is connected to once."""
    if not cell.servers:
        raise InvalidMeasurementError(f"There is no host to look at. {BY_HAND}")
    hosts: dict[str, Host] = {}
    with ExitStack() as stack:

        def reach(server: CellServer) -> Host:
            if server.host not in hosts:
                hosts[server.host] = stack.enter_context(Host(server.host, cell.ssh_config))
            return hosts[server.host]

        yield reach


@pytest.fixture(scope="session")
def ruler() -> Ruler:
    """Return what this run has learned of the server's tokenizer."""
    return Ruler()


@pytest.fixture
def ask(router: Engine, ruler: Ruler, gate: Recorder) -> Ask:
    """Return how to ask a fresh haystack of an exact number of tokens through the cell's router."""
    prepare = _preparing(router, ruler, gate)
    return lambda tokens, layout, answer_tokens: prepare(tokens, layout, answer_tokens)()


@pytest.fixture(scope="session")
def ahead(
    run: Run, router: Engine, ruler: Ruler, request: pytest.FixtureRequest
) -> Iterator[Ahead]:
    """Send the requests of all selected gates that take part, the first time one of them is due."""
    concurrency = run.thresholds.concurrency if run.thresholds is not None else 1
    sender = run.ahead = Ahead(concurrency)
    for item in request.session.items:
        marked = item.get_closest_marker("ahead")
        if marked is not None and not run.listed("not_applicable", item):
            recorder = Recorder(item.name, run.seed, lambda _: None)
            sender.send(item.name, _jobs(run, item, _preparing(router, ruler, recorder)))
    yield sender
    sender.stop()


@pytest.fixture
def answers(ahead: Ahead, bounds: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the answers to the requests that a gate of ``@pytest.mark.ahead`` has prepared."""
    return ahead.answers(request.node.name)


def _jobs(run: Run, item: pytest.Item, prepare: Prepare) -> Sequence[Job]:
    """Return a gate's jobs; none where its thresholds are missing, which is said at its turn."""
    marked = item.get_closest_marker("ahead")
    bounds = getattr(run.thresholds, _group(item), None)
    if marked is None or bounds is None:
        return []
    jobs: Jobs = marked.kwargs["jobs"]
    return jobs(prepare, bounds)


def _preparing(router: Engine, ruler: Ruler, recorder: Recorder) -> Prepare:
    """Return how to prepare haystacks; the seed is drawn when one is prepared, not when asked."""
    seeds = recorder.seeds()

    def prepare(tokens: int, layout: Layout, answer_tokens: int) -> Callable[[], Answer]:
        return partial(_asked, router, ruler, next(seeds), tokens, layout, answer_tokens)

    return prepare


def _asked(
    router: Engine, ruler: Ruler, seed: int, tokens: int, layout: Layout, answer_tokens: int
) -> Answer:
    """Ask a fresh haystack; refuse an answer for which its prompt was not read."""
    answer = ask_at_length(
        lambda text: router.chat(text, answer_tokens), ruler, seed, tokens, layout
    )
    if (answer.cached_tokens or 0) > CACHED_SHARE_MAX * tokens:
        raise InvalidMeasurementError(
            f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens came from the "
            "prefix cache, though the prompt is new: the prefill was not measured."
        )
    return answer


@pytest.fixture(scope="session")
def corpus(request: pytest.FixtureRequest) -> Callable[[], Corpus]:
    """Return how to read the text that needles are hidden in; it is read once, when it is needed.

    A text that cannot be read is the trouble of the gates that want it, and of no other.
    """
    path: Path = request.config.option.corpus
    return cache(lambda: load_corpus(path))


@pytest.fixture(scope="session")
def diagnostics(
    request: pytest.FixtureRequest, connect: Callable[[str], Engine]
) -> dict[int, Engine]:
    """Return the servers, by their index_topk, that a person gave to explain a lost needle."""
    servers = {}
    for given in request.config.option.diagnostic:
        width, _, url = given.partition("=")
        if not width.isdigit() or not url:
            raise CellError(f"--diagnostic should be like 2048=http://host:port, is {given}")
        servers[int(width)] = connect(url)
    return servers


@pytest.fixture(scope="session")
def examiner(run: Run, router: Engine, corpus: Callable[[], Corpus]) -> Callable[[str], Examiner]:
    """Return who asks for needles, with the room for answers that a section of thresholds gives."""
    scale = Scale()

    def with_section(name: str) -> Examiner:
        if run.thresholds is None:
            raise InvalidMeasurementError("There are no thresholds to judge by.")
        tokens = run.thresholds.section(name).answer_tokens
        concurrency = run.thresholds.concurrency
        return Examiner(router, tokens, concurrency, corpus, CACHED_SHARE_MAX, scale)

    return with_section
