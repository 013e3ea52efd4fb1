"""The report of a run of gates: for a person, for the ledger, for the exit status."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from seatrial.details import Details
from seatrial.verdict import SIGNS, BoundIs, Verdict, number, words

WIDTH = 96
_INDENT = " " * 10
PASS_STATUS, FAIL_STATUS, UNDECIDED_STATUS = 0, 1, 2


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
        seconds: how long the gate took.
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
    seconds: float = 0.0
    details: Details = Details()

    @property
    def is_settled(self) -> bool:
        """Whether the gate lets a rollout go on."""
        return self.verdict in {Verdict.PASS, Verdict.NOT_APPLICABLE}


class NotSelected(_Strict):
    """A gate that the spec, or a person by hand, left out."""

    id: str
    group: str
    reason: str


class Report(_Strict):
    """The content of ``report.json``.

    Attributes:
        release: digest of the release that was judged; None by hand.
        seed: repeats the run's prompts with ``--seed``.
        server_arguments: how the judged servers were started.
        next: what to do now, one sentence.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    verdict: Verdict
    cell: str
    release: str | None
    commit: str | None
    thresholds: str
    seed: int
    started: str
    seconds: float
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
            for reason in dict.fromkeys(gate.reason for gate in self.not_selected):
                names = [words(gate.id) for gate in self.not_selected if gate.reason == reason]
                lines += _wrapped(f"Not run, {reason}: {'; '.join(names)}.", "")
        lines += ["", *_wrapped(self.next, "")]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _heading(self) -> str:
        what = f" of release {self.release}" if self.release else ""
        return (
            f"Gates{what} on cell {self.cell}: {self.verdict.value}"
            f"   ({self.seconds:.0f} s, thresholds {self.thresholds}, seed {self.seed})"
        )


def read(path: Path) -> Report:
    """Read a ``report.json``."""
    return Report.model_validate_json(path.read_text())


def overall(gates: Sequence[GateResult]) -> Verdict:
    """Return the verdict on the cell: the worst of its gates', INVALID if none was measured."""
    verdicts = {gate.verdict for gate in gates}
    for worst in (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE):
        if worst in verdicts:
            return worst
    return Verdict.PASS if Verdict.PASS in verdicts else Verdict.INVALID


def final_sentence(gates: Sequence[GateResult]) -> str:
    """Return what to do now, naming the gate that decided, measured against bound."""
    verdict = overall(gates)
    if verdict is Verdict.PASS:
        passed = sum(gate.verdict is Verdict.PASS for gate in gates)
        return f"All {passed} gates that apply passed."
    decided = next((gate for gate in gates if gate.verdict is verdict), None)
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


def _short(gate_id: str) -> str:
    return gate_id.removeprefix("test_")


def _row(gate: GateResult, wide: int) -> list[str]:
    """Return a measured gate's line, and why and what next unless it passed."""
    name = textwrap.wrap(words(gate.id), wide)
    measured = "-" if gate.measured is None else number(gate.measured)
    sign = SIGNS[gate.bound_is]
    bound = "" if gate.bound is None else f"{sign} {number(gate.bound)} {gate.unit}"
    samples = f", n = {gate.samples}"
    lines = [f"{gate.verdict.value:9} {name[0]:{wide}} {measured:>9}  {bound}{samples}"]
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
        lines += _wrapped(f"{verdict.value}: {'; '.join(words(gate.id) for gate in same)}", "")
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
