"""What the ledger tells of the rollouts that one attempt has made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pydantic import ValidationError

from seatrial import ledger
from seatrial.report import GateResult, Report, deciding


class Story(NamedTuple):
    """One rollout. ``outcome`` is empty as long as nobody closed it; ``where`` it had come to.

    ``is_left`` says that a failed one leaves the fleet between releases, and that it is ours to
    bring back: cells had moved, or were found apart, and no other rollout took the fleet.
    ``closed`` says which cells do not serve at its end, and why; empty when all do.
    """

    rollout: str
    began: datetime
    commit: str
    release: str
    previous: str
    outcome: str
    is_left: bool
    reason: str
    closed: str
    where: str
    gate: GateResult | None


def stories(events: Sequence[ledger.Event]) -> list[Story]:
    """Return the rollouts that began among these events, in order."""
    return [
        _story(begin, [event for event in events if event.rollout == begin.rollout])
        for begin in events
        if begin.event == "begin"
    ]


def _story(begin: ledger.Event, events: Sequence[ledger.Event]) -> Story:
    end = next((event.data for event in reversed(events) if event.event == "end"), {})
    phases = [event for event in events if event.event == "phase"]
    last = phases[-1] if phases else None
    return Story(
        rollout=begin.rollout,
        began=begin.time,
        commit=str(begin.data.get("commit", "")),
        release=str(begin.data.get("release", "")),
        previous=str(begin.data.get("previous", "")),
        outcome=str(end.get("outcome", "")),
        is_left=not end.get("superseded")
        and bool(end.get("moved", True) or begin.data.get("found"))
        and bool(begin.data.get("previous")),
        reason=str(end.get("reason", "")),
        closed=str(end.get("closed", "")),
        where=f"phase {last.phase} of cell {last.cell}" if last else "before the first phase",
        gate=_gate(events),
    )


def _gate(events: Sequence[ledger.Event]) -> GateResult | None:
    """Return the gate that said no, as the first cell's report that did tells it."""
    for event in events:
        if event.event != "gates":
            continue
        try:
            report = Report.model_validate(event.data.get("report"))
        except ValidationError:
            continue  # of another version; the rollout's own last sentence names the gate
        if report.exit_status:
            return deciding(report.gates)
    return None
