"""The reconciler: one pass brings a fleet as near to its branch as it may come, and says why.

The story of a commit:

    noticed -> verified -> [waiting] -> planned -> rolling -> promoted
                  |            |           |          |-> reverted   (deploy.yml took it back)
                  v            v           v          `-> reverting -> reverted | failed
               refused      refused     failed
"""

from __future__ import annotations

import errno
import hashlib
import os
from datetime import datetime, timedelta
from pathlib import Path

import seatrial
from seatrial import ledger
from seatrial.errors import SeatrialError
from seatrial.gitops import clock, plan, policy, quiet, signatures, state, story, windows
from seatrial.gitops.lock import HeldError, Lock
from seatrial.gitops.logbook import Channels, Logbook, Teller, log
from seatrial.gitops.repository import Repository, UnreachableError
from seatrial.gitops.rollout import Rollout
from seatrial.gitops.settings import Settings, load
from seatrial.gitops.state import Attempt, DriftSeen, Order, Status

REACHED, NOT_REACHED, HELD = 0, 3, 75
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
ROLLBACK = "rollback"
"""Stands in the ledger in place of a commit."""
LOCK_FILE = "requirements/control.lock"
INSTALLED = Path(seatrial.__file__).resolve().parents[1]


class ReconcilerError(SeatrialError):
    """The reconciler cannot work."""


class Reconciler:
    """One pass over one fleet, under its lock."""

    def __init__(self, settings: Settings, lock: Lock, teller: Teller) -> None:
        self._settings = settings
        source = settings.repository
        self._source = Repository(settings.state_dir, source.url, source.branch, source.seconds)
        self._book = Logbook(settings, lock, teller, self._source)
        self._rollout = Rollout(self._book, self._source)
        self._listed: str | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the fleet serves what the branch says."""
        known = self._book.state
        return bool(known.head) and known.head == known.serves

    def run(self) -> None:
        """Finish what was cut off, then follow the branch until there is nothing more to do."""
        if not self._book.has_room():
            return
        self._book.tell_all()
        self._rollout.finish()
        if self._book.state.running or not self._is_clock_steady():
            return
        while self._follow():
            pass
        self._source.forget_trees(self._book.state.serves)
        self._book.over("control", "the reconciler works again")

    def look_for_drift(self) -> None:
        """Compare the hosts with the commit that serves; tell what is new, and heal if asked to."""
        known = self._book.state
        self._book.orders = state.orders(self._book.folder)
        if known.running or not self._book.has_room() or not self._source.has(known.serves):
            return
        tree = self._source.tree(known.serves)
        record = self._book.reports / "gitops/drift"
        run, found = self._rollout.look(tree, record)
        if found is None:
            self._book.trouble("drift", f"drift could not be looked for: {run.sentence}")
            return
        self._book.over("drift", "drift can be looked for again")
        what = [f"{one['host']}: {one['what']}: {one['found']}" for one in found["differences"]]
        heals = bool(what) and self._settings.drift.heal and not self._book.order("pause")
        # What is only told while the fleet is paused is new again when it may be healed.
        text = "\n".join([*what, *(["healed"] if heals else [])])
        digest = hashlib.sha256(text.encode()).hexdigest()
        was, known.drift = known.drift, DriftSeen(digest=digest, count=len(what))
        if not heals or (was and was.digest == digest):
            self._book.save()  # else when it is healed: a look that is cut off is made again
        if not what and was and was.count:
            self._book.say("recovered", "drift is gone: every host is what git says")
        if not what or (was and was.digest == digest):
            return
        plan.write(record, found)
        more = f", and {len(what) - 2} more" if len(what) > 2 else ""
        todo = "it is healed now" if heals else found["differences"][0]["todo"]
        self._book.say("drift", f"drift: {'; '.join(what[:2])}{more}. Next: {todo}", str(record))
        if heals:
            self._heal(tree, record)

    def _heal(self, tree: Path, record: Path) -> None:
        run = self._rollout.play(tree, "deploy.yml", record)
        if run.status == 0:
            self._book.state.drift = None
            self._book.save()
            said = f"drift is healed: deploy.yml of {tree.name[:12]} ran"
            self._book.say("healed", said, str(record))
        else:
            self._book.save()
            self._book.say("failed", f"drift could not be healed: {run.sentence}", str(record))

    def tell_why_not(self, error: Exception) -> None:
        """Tell, once, what kept the pass from its end."""
        if isinstance(error, SeatrialError):
            self._book.trouble("control", f"the reconciler cannot work: {error}")
        elif not isinstance(error, OSError):
            said = f"the reconciler cannot work: {type(error).__name__}; its journal has the rest"
            self._book.trouble("control", said)
        elif error.errno in NO_ROOM:
            self._book.say_no_room(f"{error.filename or 'the state'}: {error.strerror}")

    def leave(self, seen: quiet.Stamps) -> None:
        """Let Prometheus know what is known, and the next poll what would give it something to do.

        ``seen`` are the files that this pass went by.
        """
        tell, source, wake = self._settings.tell, self._settings.repository, self._book.wake
        if tell.metrics_file:
            from seatrial.gitops import metrics  # noqa: PLC0415 - a pass without it needs no library

            found = self._book.state.drift
            is_paused = self._book.order("pause") is not None
            drift = found.count if found else None
            try:
                metrics.write(tell.metrics_file, self._book.state, is_paused=is_paused, drift=drift)
            except OSError as error:
                log(f"{tell.metrics_file}: cannot be written: {error.strerror}")
        if self._book.state.running and wake is None:
            return  # a disk without room: look again
        quiet.remember(
            self._settings.fleet,
            quiet.Seen(
                files={**seen, **quiet.stamps([self._book.folder / state.FILE])},
                url=source.url,
                branch=source.branch,
                seconds=source.seconds,
                listed=self._listed,
                wake=wake.timestamp() if wake else None,
                status=REACHED if self.is_reached else NOT_REACHED,
                heartbeat=str(tell.metrics_file or ""),
            ),
        )

    # --- noticing

    def _follow(self) -> bool:
        """Look at the branch and act on it; return whether it is worth to look again."""
        known = self._book.state
        self._book.orders = state.orders(self._book.folder)
        self._obey_retries()
        if not self._fetch():
            return False
        head, branch = self._source.head(), self._settings.repository.branch
        if not head:
            self._book.trouble(
                "branch",
                f"{self._settings.repository.url} has no branch {branch} any more; "
                "what serves goes on serving",
            )
            return False
        self._book.over("branch", f"the branch {branch} is back")
        self._adopt()
        known.head = head
        # Of commits that wait only the newest is kept: the one that the branch is at.
        known.attempts = [
            one for one in known.attempts if one.status is not Status.WAITING or one.commit == head
        ]
        attempt = known.attempt(head)
        if head == known.serves or (attempt and self._is_settled(attempt)):
            self._book.save()
            return False
        if attempt is None:
            attempt = Attempt(commit=head, status=Status.WAITING, since=state.now())
            known.attempts.append(attempt)
        self._decide(attempt)
        return attempt.is_final and attempt.runs > 0

    def _fetch(self) -> bool:
        self._listed = None
        try:
            self._listed = self._source.fetch()
        except UnreachableError as error:
            self._book.trouble("repository", f"{error}; what serves goes on serving")
            return False
        self._book.over("repository", f"{self._settings.repository.url} answers again")
        return True

    def _adopt(self) -> None:
        """Know what was rolled out before there was a state, by hand or by a state that is lost."""
        known = self._book.state
        if known.serves or known.attempts:
            return
        made = story.stories(ledger.read(self._book.ledger))
        for one in reversed(made):
            if one.outcome == "promoted" and one.commit != ROLLBACK:
                known.serves, known.release = one.commit, one.release
                return

    def _is_settled(self, attempt: Attempt) -> bool:
        """Whether the attempt has ended, and what refused it, if something did, is as it was."""
        if attempt.status is Status.REFUSED:
            return attempt.inputs == self._inputs()
        # One that served once and does not now: the branch was set back to it.
        return attempt.status in (Status.REVERTED, Status.FAILED)

    def _inputs(self) -> str:
        """Return a digest of what a verdict depends on beside the commit itself."""
        digest = hashlib.sha256((self._listed or "").encode())
        digest.update(self._settings.model_dump_json().encode())
        digest.update(self._book.state.serves.encode())
        for order in self._book.orders:
            digest.update(order.model_dump_json().encode())
        for path in watched(self._settings):
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def _obey_retries(self) -> None:
        """Forget how an attempt ended, and others with the same content."""
        known = self._book.state
        for order in [one for one in self._book.orders if one.kind == "retry"]:
            found = known.attempt(order.commit)
            if found and found.is_final and found.commit != known.serves:
                same = (found.content or found.commit,)
                known.attempts = [
                    one
                    for one in known.attempts
                    if one is not found and (one.commit == known.serves or one.content not in same)
                ]
                self._book.save()
            state.withdraw(self._book.folder, "retry", order.commit)
            self._book.orders.remove(order)

    # --- verifying and deciding

    def _decide(self, attempt: Attempt) -> None:
        """Verify the commit; begin, or say why not."""
        attempt.inputs = self._inputs()
        override = self._book.order("override", attempt.commit)
        attempt.override = f"{override.who}: {override.reason}" if override else ""
        try:
            signer = self._verify(attempt.commit, override)
        except (policy.PolicyError, signatures.SignatureError) as error:
            self._book.end(attempt, Status.REFUSED, str(error))
            return
        attempt.signer = signer.name
        files = self._source.files(attempt.commit)
        attempt.content = policy.content(files, self._settings.fleet)
        try:
            attempt.approver = self._second_person(attempt.commit, signer)
        except policy.PolicyError as error:
            self._book.wait(attempt, str(error))
            return
        if not self._is_nothing_new(attempt) and not self._is_held_up(attempt, override):
            self._rollout.begin(attempt)

    def _verify(self, commit: str, override: Order | None) -> signatures.Signer:
        """Return who signed the commit, if it may follow what serves.

        Raises:
            PolicyError: it may not.
            SignatureError: nobody who may order it has.
        """
        if not (override and override.accept_history):
            self._refuse_rewritten(commit)
        signer = signatures.of_commit(self._source, commit, self._settings.signers)
        policy.refuse_links(self._source.files(commit), self._settings.fleet, commit)
        policy.refuse_loosened(self._changes(commit))
        wanted, installed = self._source.file(commit, LOCK_FILE), INSTALLED / LOCK_FILE
        if wanted is not None and installed.exists() and wanted != installed.read_bytes():
            raise policy.PolicyError(
                f"{commit[:12]} wants another {LOCK_FILE} than the control host has installed; run "
                "playbooks/gitops.yml of that commit for the control host"
            )
        return signer

    def _refuse_rewritten(self, commit: str) -> None:
        serves = self._book.state.serves
        tried = next((one.commit for one in reversed(self._book.state.attempts) if one.runs), "")
        for before in dict.fromkeys((serves, tried)):
            if before and not self._source.is_ancestor(before, commit):
                what = "serves" if before == serves else "was tried last"
                raise policy.PolicyError(
                    f"{commit[:12]} does not come after {before[:12]}, which {what}: the branch "
                    "was rewritten or set back. Push a commit that follows it (git revert takes a "
                    "change back); if it was rewritten on purpose: fab gitops.override "
                    f"--accept-history --commit {commit[:12]}"
                )

    def _changes(self, commit: str) -> list[policy.Change]:
        """Return what the commit brings; nothing if there is nothing yet to compare it with."""
        serves, rules = self._book.state.serves, self._settings.protected
        if not serves or not self._source.has(serves):
            return []
        return policy.changes(self._source, serves, commit, self._settings.fleet, rules.paths)

    def _second_person(self, commit: str, signer: signatures.Signer) -> str:
        rules, signers = self._settings.protected, self._settings.signers
        return policy.approver(self._source, self._changes(commit), signer, rules, signers)

    def _is_nothing_new(self, attempt: Attempt) -> bool:
        """Whether hosts and gates would see nothing new in the commit; then that is its end."""
        known, short = self._book.state, attempt.commit[:12]
        for one in known.attempts:
            is_bad = one.status in (Status.REVERTED, Status.FAILED) and one is not attempt
            if is_bad and one.content == attempt.content:
                said = f"{short} brings nothing that {one.commit[:12]} did not: {one.sentence}"
                self._book.end(attempt, Status.REFUSED, said)
                return True
        tried = [one for one in known.attempts if one.runs]
        is_known = known.serves and self._source.has(known.serves)
        if not is_known or (tried and tried[-1].status is not Status.PROMOTED):
            return False  # what the hosts are at is for deploy.yml to see
        paths = self._source.changed(known.serves, attempt.commit)
        if policy.needs_rollout(paths, self._settings.fleet):
            return False
        self._rollout.serve(attempt, known.release)
        is_of_gates = any(path.startswith(policy.GATES) for path in paths)
        what = "gates, and nothing" if is_of_gates else "nothing"
        said = f"{short} changes {what} that a host has: no rollout"
        self._book.end(attempt, Status.UNCHANGED, said)
        return True

    def _is_held_up(self, attempt: Attempt, override: Order | None) -> bool:
        """Whether something keeps the commit from beginning now; then it waits."""
        now = state.now()
        if pause := self._book.order("pause"):
            said = f"{attempt.commit[:12]} waits: paused by {pause.who}: {pause.reason}"
            self._book.wait(attempt, said)
            return True
        if attempt.again and now < attempt.again:
            self._book.sleep(attempt.again)
            return True
        if override:
            return False
        if self._settings.approval and not self._is_approved(attempt, now):
            return True
        view = windows.look(self._settings.windows, now)
        if not view.is_open:
            self._book.wait(attempt, f"{attempt.commit[:12]} waits: {view.why}", until=view.until)
        return not view.is_open

    def _is_approved(self, attempt: Attempt, now: datetime) -> bool:
        """Whether a person has approved the commit in time; if not, wait until that is over."""
        attempt.asked = attempt.asked or now
        seconds = self._settings.approval.seconds if self._settings.approval else 0
        until = attempt.asked + timedelta(seconds=seconds)
        order = self._book.order("approve", attempt.commit)
        if order and order.time <= until:
            return True
        short, by = attempt.commit[:12], f"{until:%Y-%m-%d %H:%M:%SZ}"
        if now < until:
            said = f"{short} waits for an approval until {by}: fab gitops.approve --commit {short}"
            self._book.wait(attempt, said, until=until)
        else:
            said = f"nobody approved {short} by {by}"
            again = f"fab gitops.retry --commit {short} asks again"
            self._book.end(attempt, Status.REFUSED, f"{said}; {again}")
        return False

    def _is_clock_steady(self) -> bool:
        known, why = clock.look(self._book.state.clock, clock.read())
        self._book.state.clock = known
        if why:
            self._book.sleep(state.soon())
            self._book.trouble("clock", why)
            self._book.save()
            return False
        self._book.over("clock", "this machine's clock is steady again")
        return True


def one_pass(
    path: Path, fleet: str, *, is_drift: bool = False, teller: Teller | None = None
) -> int:
    """Do one pass with the settings in ``path``, and return the exit status of the program.

    Raises:
        SeatrialError: the reconciler itself cannot work.
    """
    settings = load(path)
    if settings.fleet != fleet:
        raise ReconcilerError(f"{path}: fleet: should be {fleet}, is {settings.fleet}")
    folder = settings.state_dir
    _check_user(folder)
    # Before anything is read: what changes meanwhile is for the next poll.
    seen = quiet.stamps([path, folder / state.ORDERS, *watched(settings)])
    quiet.forget(fleet)
    try:
        with Lock(folder, fleet) as lock:
            reconciler = Reconciler(settings, lock, teller or Channels())
            return _pass(reconciler, seen, is_drift=is_drift)
    except HeldError as error:
        log(str(error))
        return HELD
    except OSError as error:
        raise ReconcilerError(f"{error.filename or folder}: {error.strerror or error}") from None


def _check_user(folder: Path) -> None:
    """Refuse whoever would leave files that the reconciler's own user cannot write."""
    owner = folder.stat().st_uid if folder.exists() else os.geteuid()
    if owner != os.geteuid():
        raise ReconcilerError(
            f"{folder} belongs to user {owner}, and this is {os.geteuid()}: run it as that one "
            f"(sudo -u '#{owner}' ...), or let playbooks/gitops.yml do it"
        )


def _pass(reconciler: Reconciler, seen: quiet.Stamps, *, is_drift: bool) -> int:
    try:
        if is_drift:
            reconciler.look_for_drift()
        else:
            reconciler.run()
            reconciler.leave(seen)
    except Exception as error:
        reconciler.tell_why_not(error)
        raise
    return REACHED if reconciler.is_reached else NOT_REACHED


def watched(settings: Settings) -> list[Path]:
    """Return the files beside the settings that a verdict depends on."""
    home = settings.signers.gpg_home
    rings = [home / "pubring.kbx", home / "pubring.gpg"] if home else []
    own = [settings.signers.ssh] if settings.signers.ssh else []
    return [*own, *rings, INSTALLED / LOCK_FILE]
