"""The logbook of a pass: each move is on disk before anybody hears of it, and is told once.

Whatever is cut off between the two is told by the next pass.
"""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Protocol

from seatrial.errors import SeatrialError
from seatrial.gitops import state
from seatrial.gitops.lock import Lock
from seatrial.gitops.repository import Repository
from seatrial.gitops.settings import Settings
from seatrial.gitops.state import Announcement, Attempt, Kind, Order, Status, Trouble

FREE_BYTES = 64 * 2**20
"""Below this on the disk of ledger or state nothing begins: its record might be torn."""
TOLD = {
    "commit",
    "sentence",
    "gate",
    "measured",
    "bound",
    "bound_is",
    "unit",
    "report",
    "rollout",
    "signer",
    "began",
}
KINDS: dict[Status, Kind] = {
    Status.WAITING: "waiting",
    Status.REFUSED: "refused",
    Status.UNCHANGED: "unchanged",
    Status.PROMOTED: "promoted",
    Status.REVERTED: "reverted",
    Status.FAILED: "failed",
}
"""What is told of an attempt that stands here."""


class Teller(Protocol):
    """Whoever makes announcements, and words notes."""

    def announce(self, settings: Settings, announcement: Announcement, /) -> None:
        """Tell people and machines."""

    def note(self, announcement: Announcement) -> str:
        """Return the text of the note on the commit."""


class Channels:
    """The teller of a real pass. Its libraries come in when there is something to tell."""

    def announce(self, settings: Settings, announcement: Announcement) -> None:
        """Tell every channel of the settings; those that fail are named in the log."""
        from seatrial.gitops import tell  # noqa: PLC0415 - see the class

        for failure in tell.announce(settings, announcement):
            log(f"not told: {failure}")

    def note(self, announcement: Announcement) -> str:
        """Return the text of the note on the commit."""
        from seatrial.gitops import note  # noqa: PLC0415 - see the class

        return note.text(announcement)


class Logbook:
    """What is known of one fleet, and who was told.

    Attributes:
        wake: from when the next poll must look at everything, though nothing has changed.
    """

    def __init__(self, settings: Settings, lock: Lock, teller: Teller, source: Repository) -> None:
        self.settings, self.lock = settings, lock
        self._teller, self._source = teller, source
        self.folder = settings.state_dir
        self.reports = Path.home() / ".local/state/seatrial" / settings.fleet / "reports"
        self.ledger = self.reports.parent / "ledger.jsonl"
        self.state = state.load(self.folder, settings.fleet)
        self.orders: list[Order] = []
        self.wake: datetime | None = None
        self._takes_notes = settings.repository.notes

    def save(self) -> None:
        """Write down what is known."""
        state.save(self.folder, self.state)

    def order(self, kind: str, commit: str = "") -> Order | None:
        """Return the order of this kind that stands."""
        return next((one for one in self.orders if (one.kind, one.commit) == (kind, commit)), None)

    def sleep(self, until: datetime) -> None:
        """Have the next poll look at everything from ``until`` on."""
        self.wake = min(self.wake, until) if self.wake else until

    def has_room(self) -> bool:
        """Whether what happens could be written down."""
        for folder in (self.folder, self.ledger.parent):
            folder.mkdir(parents=True, exist_ok=True)
            there = os.statvfs(folder)
            free = there.f_bavail * there.f_frsize
            if free < FREE_BYTES or (there.f_files and not there.f_favail):
                self.say_no_room(
                    f"{folder} has {free // 2**20} MiB free, and needs {FREE_BYTES // 2**20}"
                )
                return False
        if self.lock.remembered.get("disk"):
            self.lock.remember("disk", "")
            self.say("recovered", "the disk of the control host has room again")
        return True

    def say_no_room(self, problem: str) -> None:
        """Tell it once; that it was told is kept in the lock file, which needs no room."""
        if not self.lock.remembered.get("disk"):
            said = f"{problem}: nothing begins until there is room on the control host"
            self.lock.remember("disk", said)
            self.say("trouble", said)

    def trouble(self, topic: str, sentence: str) -> None:
        """Tell it once; the words of a later poll may differ, the trouble is the same."""
        if topic not in self.state.troubles:
            self.state.troubles[topic] = Trouble(since=state.now(), sentence=sentence)
            self.save()
            self.say("trouble", sentence)

    def over(self, topic: str, sentence: str) -> None:
        """Tell that a trouble is over, if there was one."""
        trouble = self.state.troubles.pop(topic, None)
        if trouble:
            self.save()
            minutes = (state.now() - trouble.since).total_seconds() / 60
            self.say("recovered", f"{sentence}, after {minutes:.0f} minutes")

    def move(self, attempt: Attempt, status: Status, sentence: str) -> None:
        """Let the attempt stand at ``status``."""
        if (attempt.status, attempt.sentence) != (status, sentence):
            attempt.status, attempt.sentence = status, sentence
            attempt.since, attempt.is_told, attempt.is_noted = state.now(), False, False
        self.save()

    def wait(self, attempt: Attempt, sentence: str, until: datetime | None = None) -> None:
        """Let the attempt wait, at the longest until then without another look."""
        if until:
            self.sleep(until)
        self.move(attempt, Status.WAITING, sentence)
        self.tell(attempt)

    def end(self, attempt: Attempt, status: Status, sentence: str) -> None:
        """Let the attempt be over. Orders that were given for it have done their work."""
        attempt.again = None
        self.move(attempt, status, sentence)
        if status is not Status.REFUSED:
            for kind in ("approve", "override"):
                state.withdraw(self.folder, kind, attempt.commit)
        self.tell(attempt)

    def tell_all(self) -> None:
        """Tell what a pass before was cut off from telling, and push notes again."""
        for attempt in self.state.attempts:
            self.tell(attempt)

    def tell(self, attempt: Attempt) -> None:
        """Announce where the attempt stands, once, and note its end on the commit."""
        kind = KINDS.get(attempt.status)
        if kind is None or not attempt.sentence:  # a look was cut off before it came to a verdict
            return
        if not attempt.is_told:
            self.announce(attempt, kind)
            attempt.is_told = True
            self.save()
        if attempt.is_final and not attempt.is_noted and self._takes_notes:
            try:
                text = self._teller.note(self._announcement(attempt, kind))
                self._source.note(attempt.commit, text)
            except SeatrialError as error:
                self._takes_notes = False  # for this pass; the next one tries again
                self.sleep(state.soon())
                log(f"note on {attempt.commit[:12]}: {error}")
                return
            attempt.is_noted = True
            self.save()

    def announce(self, attempt: Attempt, kind: Kind, sentence: str = "") -> None:
        """Tell something of an attempt."""
        made = self._announcement(attempt, kind)
        self._send(made.model_copy(update={"sentence": sentence}) if sentence else made)

    def say(self, kind: Kind, sentence: str, report: str = "") -> None:
        """Tell something that is about no commit."""
        self._send(
            Announcement(
                time=state.now(),
                fleet=self.settings.fleet,
                kind=kind,
                sentence=sentence,
                report=report,
                serves=self.state.serves,
                branch_at=self.state.head,
            )
        )

    def _announcement(self, attempt: Attempt, kind: Kind) -> Announcement:
        return Announcement(
            time=attempt.since,
            fleet=self.settings.fleet,
            kind=kind,
            serves=self.state.serves,
            branch_at=self.state.head,
            **attempt.model_dump(include=TOLD),
        )

    def _send(self, announcement: Announcement) -> None:
        log(f"{announcement.kind}: {announcement.sentence}")
        try:
            self._teller.announce(self.settings, announcement)
        except Exception as error:  # noqa: BLE001 - no channel keeps a rollout from its end
            log(f"not told: {type(error).__name__}")


def log(words: str) -> None:
    """Say it to whoever started this, which is the journal as a rule."""
    print(words, file=sys.stderr, flush=True)  # noqa: T201
