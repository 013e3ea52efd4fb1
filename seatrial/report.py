"""The report of a run of gates: for a person, for the ledger, for the exit status."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from seatrial.details import Details
from seatrial.verdict import SIGNS, BoundIs, Verdict, number, words

FILES = ("report.json", "report.txt", "report.html")
WIDTH = 96
_INDENT = " " * 10
PASS_STATUS, FAIL_STATUS, UNDECIDED_STATUS = 0, 1, 2


NEXT = {
    Verdict.PASS: "",
    Verdict.NOT_APPLICABLE: "",
    Verdict.FAIL: "Do not promote: keep last_good, mend what the numbers show, and merge again.",
    Verdict.INCONCLUSIVE: "Do not promote on this: ask for more samples in the thresholds file.",
    Verdict.INVALID: "Do not promote on this: mend what kept it from measuring, and run it again.",
}
"""What to do on a verdict, unless the gate itself knows better."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GateResult(_Strict):
    """One gate: a claim and what became of it.

    Attributes:
        id: the name of the test.
        group: what ``gates.select`` of the spec calls its file.
        claim: one sentence that can be false.
        measured: what was measured, in ``unit``; None if nothing was.
        bound: the least (or the most) that ``measured`` may be; None if nothing was measured.
        bound_is: whether ``bound`` is the least or the most.
        samples: how many observations ``measured`` stands for.
        message: what a person should know beyond the numbers.
        next: what to do about it; empty for PASS.
        is_shadow: whether the gate runs and is reported without deciding anything.
        is_critical: whether nothing more is measured unless it passes.
        seconds: how long the gate took.
        requests: how many HTTP requests were sent for it.
        details: what it measured beyond its one number.
    """

    id: str
    group: str
    claim: str
    verdict: Verdict
    measured: float | None = None
    bound: float | None = None
    bound_is: BoundIs = "min"
    unit: str = ""
    samples: int = 0
    message: str = ""
    next: str = ""
    is_shadow: bool = False
    is_critical: bool = False
    seconds: float = 0.0
    requests: int = 0
    details: Details = Details()

    @property
    def is_blocking(self) -> bool:
        """Whether the gate keeps a rollout from going on."""
        return not self.is_shadow and self.verdict not in {Verdict.PASS, Verdict.NOT_APPLICABLE}

    @property
    def is_critical_stop(self) -> bool:
        """Whether nothing should be measured after this gate."""
        return self.is_critical and self.is_blocking


class NotSelected(_Strict):
    """A gate that the spec, or a person by hand, left out."""

    id: str
    group: str
    reason: str


class GroupTime(_Strict):
    """How long a group of gates took, against its budget."""

    group: str
    seconds: float
    requests: int
    budget_seconds: float | None

    @property
    def is_late(self) -> bool:
        """Whether the group took longer than it should."""
        return self.budget_seconds is not None and self.seconds > self.budget_seconds


class Report(_Strict):
    """The content of ``report.json``.

    Attributes:
        release: digest of the release that was judged; None by hand.
        seed: repeats the run's prompts with ``--seed``.
        seconds: how long the run took.
        budget_seconds: how long each selected group should have taken.
        server_arguments: how the judged servers were started.
        next: what to do now, one sentence.
    """

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    verdict: Verdict
    cell: str
    release: str | None
    commit: str | None
    thresholds: str
    seed: int
    started: str
    seconds: float
    budget_seconds: dict[str, float]
    server_arguments: dict[str, str]
    gates: list[GateResult]
    not_selected: list[NotSelected]
    next: str

    @property
    def exit_status(self) -> int:
        """0 if every gate passed or was listed as not applicable, 1 if one failed, else 2."""
        if self.verdict is Verdict.PASS:
            return PASS_STATUS
        return FAIL_STATUS if self.verdict is Verdict.FAIL else UNDECIDED_STATUS

    def write(self, folder: Path) -> None:
        """Write ``report.json`` and ``report.txt`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        text = self.model_dump_json(by_alias=True, indent=2)
        (folder / "report.json").write_text(f"{text}\n")
        (folder / "report.txt").write_text(self.text())

    def text(self) -> str:
        """Return the table for people, under 100 columns."""
        measured = [gate for gate in self.gates if gate.measured is not None]
        lines = [*_wrapped(self._heading(), ""), ""]
        if measured:
            wide = min(max(len(_short(gate.id)) for gate in measured), 50)
            lines.append(f"{'verdict':9} {'gate':{wide}} {'measured':>9}  bound")
        for gate in measured:
            lines += _row(gate, wide)
        lines += _unmeasured([gate for gate in self.gates if gate.measured is None])
        if self.not_selected:
            lines.append("")
        for sentence in self.left_out():
            lines += _wrapped(sentence, "")
        lines += ["", *_wrapped(self.time_sentence(), "")]
        lines += ["", *_wrapped(self.next, "")]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def left_out(self) -> list[str]:
        """Return a sentence for each reason why gates did not run; a whole group by its name."""
        ran = {gate.group for gate in self.gates}
        sentences = []
        for reason in dict.fromkeys(gate.reason for gate in self.not_selected):
            same = [gate for gate in self.not_selected if gate.reason == reason]
            groups = dict.fromkeys(gate.group for gate in same if gate.group not in ran)
            single = [words(gate.id) for gate in same if gate.group in ran]
            whole = [f"all {sum(g.group == group for g in same)} of {group}" for group in groups]
            sentences.append(f"Not run, {reason}: {'; '.join([*whole, *single])}.")
        return sentences

    def times(self) -> list[GroupTime]:
        """Return where the time went, group by group, in the order in which they ran."""
        return [
            GroupTime(
                group=group,
                seconds=sum(gate.seconds for gate in self.gates if gate.group == group),
                requests=sum(gate.requests for gate in self.gates if gate.group == group),
                budget_seconds=self.budget_seconds.get(group),
            )
            for group in dict.fromkeys(gate.group for gate in self.gates)
        ]

    def time_sentence(self) -> str:
        """Return where the time went, in a sentence, and which groups took longer than planned."""
        parts = []
        for time in self.times():
            budget = f" of {time.budget_seconds:g}" if time.budget_seconds else ""
            parts.append(f"{time.group} {time.seconds:.1f}{budget} s ({time.requests} requests)")
        total = sum(self.budget_seconds.values())
        budget = f" of {total:g}" if total else ""
        late = [time.group for time in self.times() if time.is_late]
        said = f" Over its budget: {', '.join(late)}." if late else ""
        return f"Time: {', '.join(parts)}; in all {self.seconds:.1f}{budget} s.{said}"

    def _heading(self) -> str:
        what = f" of release {self.release}" if self.release else ""
        return (
            f"Gates{what} on cell {self.cell}: {self.verdict.value}"
            f"   ({self.seconds:.0f} s, thresholds {self.thresholds}, seed {self.seed})"
        )


def schema() -> str:
    """Return the JSON Schema of ``report.json``, as ``report.schema.json`` here keeps it."""
    value = Report.model_json_schema(by_alias=True, mode="serialization")
    value["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    value["title"] = "The report of a run of Seatrial's gates"
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def read(path: Path) -> Report:
    """Read a ``report.json``."""
    return Report.model_validate_json(path.read_text())


def overall(gates: Sequence[GateResult]) -> Verdict:
    """Return the verdict on the cell: the worst of its gates', INVALID if none was measured.

    A gate in the shadow decides nothing.
    """
    verdicts = {gate.verdict for gate in gates if not gate.is_shadow}
    for worst in (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE):
        if worst in verdicts:
            return worst
    return Verdict.PASS if Verdict.PASS in verdicts else Verdict.INVALID


def deciding(gates: Sequence[GateResult]) -> GateResult | None:
    """Return the gate that made the verdict on the cell what it is, if one did."""
    verdict = overall(gates)
    same = [gate for gate in gates if gate.verdict is verdict and not gate.is_shadow]
    return next(iter(sorted(same, key=lambda gate: not gate.is_critical)), None)


def final_sentence(gates: Sequence[GateResult]) -> str:
    """Return what to do now, naming the gate that decided, measured against bound."""
    verdict = overall(gates)
    if verdict is Verdict.PASS:
        passed = sum(gate.verdict is Verdict.PASS for gate in gates if not gate.is_shadow)
        return f"All {passed} gates that apply passed.{_shadows(gates)}"
    decided = deciding(gates)
    if decided is None:
        return "Nothing was measured, so nothing is known: select gates and run again."
    numbers = ""
    if decided.measured is not None and decided.bound is not None:
        numbers = (
            f": measured {number(decided.measured)} {decided.unit}, "
            f"bound {SIGNS[decided.bound_is]} {number(decided.bound)}"
        )
    why = numbers or f": {decided.message}"
    return f"{_short(decided.id)}: {verdict.value}{why.rstrip('.')}. {decided.next}".strip()


def _shadows(gates: Sequence[GateResult]) -> str:
    """Say how gates in the shadow would have decided, if they would have."""
    would = [
        gate
        for gate in gates
        if gate.is_shadow and gate.verdict not in {Verdict.PASS, Verdict.NOT_APPLICABLE}
    ]
    if not would:
        return ""
    said = ", ".join(f"{_short(gate.id)} {gate.verdict.value}" for gate in would)
    return f" In the shadow, deciding nothing: {said}."


def _short(gate_id: str) -> str:
    return gate_id.removeprefix("test_")


def _row(gate: GateResult, wide: int) -> list[str]:
    """Return a measured gate's line, and why and what next unless it passed."""
    name = textwrap.wrap(words(gate.id), wide)
    measured = "-" if gate.measured is None else number(gate.measured)
    sign = SIGNS[gate.bound_is]
    bound = "" if gate.bound is None else f"{sign} {number(gate.bound)} {gate.unit}"
    samples = f", n = {gate.samples}"
    shadow = ", shadow" if gate.is_shadow else ""
    lines = [f"{gate.verdict.value:9} {name[0]:{wide}} {measured:>9}  {bound}{samples}{shadow}"]
    lines += [f"{'':9} {rest}" for rest in name[1:]]
    if gate.verdict is not Verdict.PASS:
        lines += _wrapped(gate.message, _INDENT)
        lines += _wrapped(f"next: {gate.next}" if gate.next else "", _INDENT)
    return lines


def _unmeasured(gates: Sequence[GateResult]) -> list[str]:
    """Return a block for each reason why gates measured nothing, with the gates that share it."""
    lines: list[str] = []
    for verdict, message in dict.fromkeys((gate.verdict, gate.message) for gate in gates):
        same = [gate for gate in gates if (gate.verdict, gate.message) == (verdict, message)]
        names = "; ".join(
            f"{words(gate.id)}{' (shadow)' if gate.is_shadow else ''}" for gate in same
        )
        lines += _wrapped(f"{verdict.value}: {names}", "")
        lines += _wrapped(message, _INDENT)
        lines += _wrapped(f"next: {same[0].next}" if same[0].next else "", _INDENT)
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for part in text.splitlines():
        lines += textwrap.wrap(
            part, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return lines
