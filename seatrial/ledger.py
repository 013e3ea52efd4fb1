"""The ledger: the append-only record of rollouts, one JSON line per event, synced as it happens."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.errors import SeatrialError

ALONE = ("reverting", "stays as it is", "revert failed", "guard", "fleet lock taken over")
"""Events of a host's own journal that a person should hear of."""


class LedgerError(SeatrialError):
    """The ledger cannot be read or written."""


class Event(BaseModel):
    """One line. ``event`` says what the other fields mean.

    ``begin`` opens a rollout (data: commit, release, previous, who, found: how the hosts
    disagreed); ``phase`` says that a cell entered a phase (or the fleet, where ``cell`` is empty);
    ``gates`` carries a cell's verdicts (data: the gate report); ``host`` what a host noted in its
    own journal since the last such line (data: host, lines, count); ``end`` closes the rollout
    (data: outcome, reason, moved: whether any cell was, superseded: whether another rollout took
    the fleet, closed: which cells do not serve at its end, and why).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    time: datetime
    rollout: Annotated[str, Field(min_length=1)]
    event: Literal["begin", "phase", "gates", "host", "end"]
    cell: str = ""
    phase: str = ""
    data: dict[str, Any] = {}


class Phase(BaseModel):
    """A phase of a rollout and how long it took, in seconds."""

    cell: str
    name: str
    seconds: float


def append(path: Path, event: Event) -> None:
    """Add one line and sync it to the disk, and the folder too when the file is new.

    A line that a power loss tore in half is closed with a newline first, so that it spoils nothing;
    one that a full disk cuts off is taken back, and the error raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    line = json.dumps(event.model_dump(by_alias=True, mode="json"), sort_keys=True) + "\n"
    with path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        rest = line.encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
    if is_new:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def now() -> datetime:
    """Return the present moment in UTC."""
    return datetime.now(UTC)


def read(path: Path, rollout: str = "", *, is_strict: bool = False) -> list[Event]:
    """Return the whole events of a ledger, oldest first; of one ``rollout`` if it is named.

    A torn line (power loss) is left out; so is an event of another version, if not ``is_strict``.

    Raises:
        LedgerError: naming the line of such an event: what came of its rollout is not known.
    """
    events = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            event = Event.model_validate_json(line)
        except ValidationError as error:
            is_torn = any(problem["type"] == "json_invalid" for problem in error.errors())
            if is_strict and not is_torn:
                raise LedgerError(
                    f"{path}: line {number} is an event of another version: use the Seatrial that "
                    "wrote it (playbooks/gitops.yml of that commit)"
                ) from None
            continue
        if not rollout or event.rollout == rollout:
            events.append(event)
    return events


def unfinished(events: list[Event]) -> list[str]:
    """Return the rollouts that began and never ended: their controllers died."""
    ended = {event.rollout for event in events if event.event == "end"}
    began = [event.rollout for event in events if event.event == "begin"]
    return [rollout for rollout in dict.fromkeys(began) if rollout not in ended]


def lines_of(events: list[Event], host: str) -> int:
    """Return how many lines of the host's own journal are in the ledger already."""
    counts = [
        int(event.data["count"])
        for event in events
        if event.event == "host" and event.data.get("host") == host
    ]
    return counts[-1] if counts else 0


def phases(events: list[Event]) -> list[Phase]:
    """Return the phases in order; each lasts until the same cell's next one, or the end."""
    marks = [event for event in events if event.event in ("phase", "end")]
    result = []
    for index, mark in enumerate(marks):
        if mark.event != "phase":
            continue
        later = (
            event.time
            for event in marks[index + 1 :]
            if event.cell == mark.cell or not event.cell or not mark.cell
        )
        end = next(later, mark.time)
        seconds = (end - mark.time).total_seconds()
        result.append(Phase(cell=mark.cell, name=mark.phase, seconds=seconds))
    return result


def outages(events: list[Event]) -> dict[str, float]:
    """Return for how many seconds each cell's entry was closed, from ``drain`` to ``open``."""
    closed: dict[str, datetime] = {}
    total: dict[str, float] = {}
    for event in events:
        if event.event != "phase":
            continue
        if event.phase == "drain":
            closed.setdefault(event.cell, event.time)
        elif event.phase == "open" and event.cell in closed:
            seconds = (event.time - closed.pop(event.cell)).total_seconds()
            total[event.cell] = total.get(event.cell, 0.0) + seconds
    for cell, since in closed.items():
        end = events[-1].time
        total[cell] = total.get(cell, 0.0) + (end - since).total_seconds()
    return total


def summary(events: list[Event]) -> str:
    """Return what a person wants to know of one rollout, in at most 100 columns."""
    if not events:
        raise LedgerError("the ledger has no such rollout; look at the names in the ledger file")
    begin = next((event for event in events if event.event == "begin"), events[0])
    end = next((event for event in reversed(events) if event.event == "end"), None)
    outcome = end.data.get("outcome", "?") if end else "unfinished"
    total = (events[-1].time - events[0].time).total_seconds()
    lines = [
        f"rollout   {begin.rollout}: {outcome.upper()} in {total:.0f} s",
        f"commit    {begin.data.get('commit', '?')[:12]}",
        f"release   {begin.data.get('release', '?')}",
        f"before    {begin.data.get('previous') or 'nothing'}",
        *([f"found     {begin.data['found']}"] if begin.data.get("found") else []),
        "",
        "phase".ljust(34) + "seconds",
    ]
    for phase in phases(events):
        if phase.name == "open":  # the end of what came before, not a step that lasts
            continue
        where = f"{phase.cell}: " if phase.cell else ""
        lines.append(f"{(where + phase.name)[:32]:<34}{phase.seconds:7.1f}")
    closed = outages(events)
    if closed:
        lines += ["", "cell".ljust(34) + "entry closed, seconds"]
        lines += [f"{cell:<34}{seconds:7.1f}" for cell, seconds in closed.items()]
    for event in events:
        if event.event == "gates":
            lines += ["", *event.data.get("lines", [])]
    alone = [*_by_themselves(events)]
    if alone:
        lines += ["", "what hosts did by themselves", *alone]
    if end and end.data.get("reason"):
        lines += ["", end.data["reason"]]
    return "\n".join(lines)


def _by_themselves(events: list[Event]) -> Iterator[str]:
    """Yield what hosts noted that no rollout had told them to do."""
    for event in events:
        if event.event != "host":
            continue
        for line in event.data["lines"]:
            if line["event"] in ALONE:
                when = datetime.fromtimestamp(line["time"], UTC).strftime("%H:%M:%S")
                reason = f": {line['reason']}" if line.get("reason") else ""
                yield f"{when} {event.data['host']} {line['event']}{reason}"
