"""Rolls one commit out, and brings to its end what was cut off.

What ``deploy.yml`` does to hosts is its own affair: it repairs a split fleet and closes dead
rollouts. What the ledger says of an attempt's rollout is taken. Where it says no end and nobody is
at work, the rollout was cut off: the same commit is rolled out once more, then it is taken back.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from seatrial import fleet_lock, ledger
from seatrial.gitops import plan, playbooks, state, story
from seatrial.gitops.logbook import Logbook
from seatrial.gitops.repository import Repository
from seatrial.gitops.state import Attempt, Status

RUNS = 2
"""A commit is rolled out, and once more if that was cut off."""
REVERTS = 3


class Rollout:
    """Rolls commits of ``source`` out, for one fleet."""

    def __init__(self, book: Logbook, source: Repository) -> None:
        self._book, self._source = book, source

    def begin(self, attempt: Attempt) -> None:
        """Plan, let deploy.yml move the cells, and see to it that it comes to an end."""
        tree = self._source.tree(attempt.commit)
        self._source.keep("attempt", attempt.commit)
        record = self._record(attempt)
        run, found = self.look(tree, record)
        if found is None and run.status < 0 and not run.is_late:
            attempt.again = state.soon()
            self._book.wait(attempt, "its plan was cut off, and is made again", until=attempt.again)
            return
        if found is None:
            attempt.runs = 1  # one attempt for each commit, also where it ends early
            said = f"nothing was moved: {run.sentence}"
            self._book.end(attempt, Status.FAILED, said)
            return
        plan.write(record, found)
        attempt.release = str(found["release"])
        attempt.began = state.now()
        # What the ledger says of an earlier attempt at the same commit is not said of this one.
        attempt.ledger_before = len(self._events())
        override = f" (override by {attempt.override})" if attempt.override else ""
        sentence = f"{plan.summary(found)}{override}"
        self._book.move(attempt, Status.ROLLING, sentence)
        self._book.announce(attempt, "began")
        self._deploy(attempt)
        self.finish()

    def finish(self) -> None:
        """Bring an attempt that has begun to its end, or as far as it goes now."""
        while (attempt := self._book.state.running) is not None:
            if attempt.status is Status.ROLLING:
                self._take_from_ledger(attempt)
            if attempt.is_final or not self._book.has_room():
                return
            if attempt.status is Status.ROLLING and attempt.runs < RUNS:
                self._resume(attempt)
            elif not self._revert(attempt):
                return

    def look(self, tree: Path, record: Path) -> tuple[playbooks.Run, dict[str, Any] | None]:
        """Compare the hosts with a commit's work tree; None if it came to no result."""
        (record / plan.FOUND).unlink(missing_ok=True)  # what an earlier look found
        run = self.play(tree, plan.PLAYBOOK, record, "-e", f"fleet_state_dir={record}")
        return run, plan.found_in(record, run, tree.name)

    def play(self, tree: Path, playbook: str, record: Path, *words: str) -> playbooks.Run:
        """Run a playbook of a commit's work tree, which holds our lock as long as it runs."""
        self._book.lock.say(f"running {playbook} of {tree.name[:12]}")
        return playbooks.run(
            tree,
            self._book.settings.fleet,
            playbook,
            *words,
            record=record,
            lock=self._book.lock.descriptor,
            seconds=self._book.settings.rollout_seconds,
            vault_password_file=self._book.settings.vault_password_file,
        )

    def serve(self, attempt: Attempt, release: str) -> None:
        """Know that the fleet is at the attempt's commit."""
        self._source.keep("serves", attempt.commit)
        self._book.state.serves, self._book.state.release = attempt.commit, release

    def _deploy(self, attempt: Attempt) -> None:
        attempt.runs += 1
        attempt.ledger_before = len(self._events())
        self._book.save()
        tree = self._source.tree(attempt.commit)
        run = self.play(tree, "deploy.yml", self._record(attempt))
        if not self._take_from_ledger(attempt):
            self._take_from_run(attempt, run)
        if run.is_late and attempt.status is Status.ROLLING:
            self._book.move(attempt, Status.REVERTING, f"{run.sentence}.")

    def _take_from_ledger(self, attempt: Attempt) -> bool:
        """Take what the ledger says of the attempt's rollout; return whether it has one."""
        made = self._made_since(attempt)
        told = next((one for one in reversed(made) if one.commit == attempt.commit), None)
        if told is None:
            return False
        self._keep(attempt, told)
        short = attempt.commit[:12]
        if told.outcome == "promoted":
            self.serve(attempt, told.release)
            said = f"{short} is promoted: release {told.release} serves"
            said += f", but {told.closed}" if told.closed else ""
            self._book.end(attempt, Status.PROMOTED, said)
        elif told.outcome == "reverted":
            self._book.end(attempt, Status.REVERTED, told.reason)
        elif told.outcome == "failed":
            if told.is_left:
                self._book.move(attempt, Status.REVERTING, told.reason)
            else:
                self._book.end(attempt, Status.FAILED, told.reason)
        elif made[-1] is not told:
            said = (
                f"{short}: rollout {made[-1].rollout} was made by hand meanwhile; "
                f"fab gitops.retry --commit {short} tries it again"
            )
            self._book.end(attempt, Status.FAILED, said)
        return True

    def _take_from_run(self, attempt: Attempt, run: playbooks.Run) -> None:
        """Take how deploy.yml ended without having begun a rollout."""
        if run.status == 0:
            self.serve(attempt, attempt.release)
            said = f"{attempt.commit[:12]}: every cell serves its release already"
            self._book.end(attempt, Status.PROMOTED, said)
        elif any(fleet_lock.HELD_BY in one.said for one in run.reasons):
            attempt.runs -= 1
            attempt.again = state.soon()
            self._book.wait(attempt, run.sentence, until=attempt.again)
        elif run.status > 0 and not run.is_late:
            said = f"nothing was moved: {run.sentence}"
            self._book.end(attempt, Status.FAILED, said)

    def _resume(self, attempt: Attempt) -> None:
        short, where = attempt.commit[:12], self._cut_off_at(attempt)
        self._book.move(
            attempt,
            Status.ROLLING,
            f"the rollout of {short} was cut off {where}: deploy.yml of it runs once more",
        )
        self._book.announce(attempt, "resumed")
        self._deploy(attempt)

    def _revert(self, attempt: Attempt) -> bool:
        """Bring the fleet back by rollback.yml; return whether that came to an end."""
        if attempt.again and state.now() < attempt.again:
            self._book.sleep(attempt.again)
            return False
        if attempt.status is Status.ROLLING:
            said = f"the rollout of {attempt.commit[:12]} was cut off {self._cut_off_at(attempt)}"
            self._book.move(attempt, Status.REVERTING, f"{said}, for the second time.")
        if attempt.reverts == 0:
            said = f"{attempt.sentence} The fleet is taken back: rollback.yml runs"
            self._book.announce(attempt, "resumed", said)
        attempt.reverts += 1
        self._book.save()
        serves = self._book.state.serves
        tree = self._source.tree(serves if self._source.has(serves) else attempt.commit)
        target = ("-e", f"rollback_release={attempt.previous}") if attempt.previous else ()
        run = self.play(tree, "rollback.yml", self._record(attempt), *target)
        if run.status == 0:
            back = attempt.previous or "the last good release"
            said = f"{attempt.sentence} rollback.yml ran: {back} serves again"
            self._book.end(attempt, Status.REVERTED, said)
        elif attempt.reverts >= REVERTS:
            said = (
                f"{attempt.sentence} IT COULD NOT BE TAKEN BACK: {run.sentence}. Next: look at the "
                "hosts (playbooks/drift.yml), mend them, then rollback.yml by hand"
            )
            self._book.end(attempt, Status.FAILED, said)
        else:
            attempt.again = state.soon()
            self._book.save()
            self._book.sleep(attempt.again)
            return False
        return True

    def _made_since(self, attempt: Attempt) -> list[story.Story]:
        return story.stories(self._events()[attempt.ledger_before :])

    def _events(self) -> list[ledger.Event]:
        return ledger.read(self._book.ledger, is_strict=True)

    def _cut_off_at(self, attempt: Attempt) -> str:
        made = [one for one in self._made_since(attempt) if one.commit == attempt.commit]
        return f"in {made[-1].where}" if made else "before anything moved"

    def _keep(self, attempt: Attempt, told: story.Story) -> None:
        """Take over what the ledger says of the attempt's rollout."""
        attempt.rollout = told.rollout
        attempt.previous = attempt.previous or (told.previous if "," not in told.previous else "")
        if told.gate:
            attempt.gate = told.gate.id.removeprefix("test_")
            attempt.measured, attempt.bound = told.gate.measured, told.gate.bound
            attempt.bound_is, attempt.unit = told.gate.bound_is, told.gate.unit
        reports = self._book.reports / told.rollout
        if reports.is_dir():
            attempt.report = str(reports)
            for name in ("plan.txt", "plan.json"):
                if (made := Path(attempt.record, name)).exists():
                    shutil.copy(made, reports)

    def _record(self, attempt: Attempt) -> Path:
        if not attempt.record:
            name = f"{state.now():%Y%m%dT%H%M%S}-{attempt.commit[:8]}"
            attempt.record = attempt.report = str(self._book.reports / "gitops" / name)
        return Path(attempt.record)
