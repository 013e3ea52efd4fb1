"""What the gates found on the last good release, to be asked again of the new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from seatrial.details import Item
from seatrial.errors import SeatrialError
from seatrial.ledger import Event
from seatrial.report import Report
from seatrial.verdict import Verdict


class BaselineError(SeatrialError):
    """A report that should be compared with cannot be."""


class Baseline(BaseModel):
    """The questions of an earlier run and what became of them.

    Attributes:
        release: the digest of the release that was asked.
        where: the rollout or the file that it comes from, for people.
        items: the questions in the order in which they were asked, by gate.
        samples: raw observations, by gate and name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    release: str
    where: str
    items: dict[str, list[Item]]
    samples: dict[str, dict[str, list[float]]] = {}


def of_ledger(events: Sequence[Event], cell: str, release: str) -> Baseline | None:
    """Return what the newest passed run of the gates found on ``release``, for this cell.

    None if there is no such run, or if it was before gates kept their questions.
    """
    if not release:
        return None
    for event in reversed(events):
        # A further cold launch was asked a part of the questions only.
        if event.event != "gates" or event.cell != cell or "launch" in event.data:
            continue
        try:
            report = Report.model_validate(event.data.get("report"))
        except ValidationError:
            continue  # written by an earlier version
        if report.release == release and report.verdict is Verdict.PASS:
            found = _baseline(report, release, event.rollout)
            if found.items or found.samples:
                return found
    return None


def of_report(path: Path) -> Baseline:
    """Return what a report.json tells of its run.

    Raises:
        BaselineError: it cannot be read, or it kept no questions.
    """
    try:
        report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{path}: should be a report.json: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BaselineError(f"{path}: is no report.json: it is no text in UTF-8") from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BaselineError(f"{path}: is no report.json: {where}: {first['msg']}") from None
    found = _baseline(report, report.release or report.cell, str(path))
    if not found.items and not found.samples:
        raise BaselineError(f"{path}: the gates of this run kept nothing to compare with")
    return found


def _baseline(report: Report, release: str, where: str) -> Baseline:
    return Baseline(
        release=release,
        where=where,
        items={gate.id: gate.details.items for gate in report.gates if gate.details.items},
        samples={
            gate.id: dict(gate.details.samples) for gate in report.gates if gate.details.samples
        },
    )
