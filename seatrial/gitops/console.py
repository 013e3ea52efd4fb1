"""What people ask the reconciler and order it, on the control host: ``fab gitops.*``.

An order is a file; the reconciler is woken and obeys at its next look.
"""

from __future__ import annotations

import getpass
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from seatrial.errors import SeatrialError
from seatrial.gitops import settings as settings_file
from seatrial.gitops import state
from seatrial.gitops import status as told
from seatrial.gitops.settings import Settings
from seatrial.gitops.state import Order

KNOCK = Path("/run/seatrial-gitops")


class ConsoleError(SeatrialError):
    """The order was not given."""


def status(fleet: str) -> Iterator[str]:
    """Yield what the fleet does, and why it does not do more.

    Raises:
        SeatrialError: the settings or the state cannot be read.
    """
    settings = _settings(fleet)
    known = state.load(settings.state_dir, fleet)
    yield from told.lines(settings, known, state.orders(settings.state_dir))


def order(
    fleet: str,
    kind: Literal["pause", "retry", "approve", "override"],
    commit: str = "",
    *,
    reason: str = "",
    accept_history: bool = False,
) -> Iterator[str]:
    """Give an order, wake the reconciler, and yield what it will do.

    Raises:
        SeatrialError: it is no commit that the reconciler knows, or this user may not order.
    """
    settings = _settings(fleet)
    _check_user(settings)
    if kind in ("pause", "override") and not reason.strip():
        raise ConsoleError("--reason: should say why; it stays in the record")
    whole = _known(settings, commit) if kind != "pause" else ""
    if kind in ("approve", "override"):
        _check_can_begin(settings, kind, whole)
    made = Order(
        kind=kind,
        commit=whole,
        who=_who(),
        reason=reason.strip(),
        time=state.now(),
        accept_history=accept_history,
    )
    try:
        state.give(settings.state_dir, made)
    except OSError as error:
        where = error.filename or settings.state_dir
        raise ConsoleError(f"{where}: {error.strerror}; the order was not given") from None
    yield _said(fleet, kind, whole)
    yield from _wake(fleet)


def resume(fleet: str) -> Iterator[str]:
    """Take a pause back, wake the reconciler, and yield what it will do.

    Raises:
        SeatrialError: this user may not order.
    """
    settings = _settings(fleet)
    _check_user(settings)
    was = state.withdraw(settings.state_dir, "pause")
    yield f"{fleet}: follows its branch again" if was else f"{fleet}: was not paused"
    yield from _wake(fleet)


def _settings(fleet: str) -> Settings:
    return settings_file.load(settings_file.FOLDER / f"{fleet}.yml")


def _check_user(settings: Settings) -> None:
    """Refuse whoever would leave files that the reconciler cannot remove."""
    try:
        owner = settings.state_dir.stat().st_uid
    except OSError as error:
        raise ConsoleError(
            f"{settings.state_dir}: {error.strerror}; playbooks/gitops.yml makes it"
        ) from None
    if os.geteuid() != owner:
        name = pwd.getpwuid(owner).pw_name
        raise ConsoleError(
            f"orders are given as {name}, whose files they are: "
            f"sudo -u {name} /opt/seatrial-gitops/venv/bin/fab -r /opt/seatrial-gitops/source ..."
        )


def _known(settings: Settings, given: str) -> str:
    """Return the whole commit of which these are the first characters."""
    known = state.load(settings.state_dir, settings.fleet)
    commits = {known.head, *(attempt.commit for attempt in known.attempts)} - {""}
    found = [commit for commit in sorted(commits) if len(given) >= 4 and commit.startswith(given)]
    if len(found) == 1:
        return found[0]
    at = f"the branch is at {told.short(known.head)}" if known.head else "the branch was not seen"
    many = "of more than one" if found else "of none that the reconciler has seen"
    raise ConsoleError(f"--commit: {given or 'nothing'} is the beginning {many}; {at}")


def _check_can_begin(settings: Settings, kind: str, commit: str) -> None:
    """Refuse an order that would change nothing."""
    known, of = state.load(settings.state_dir, settings.fleet), told.short(commit)
    if commit != known.head:
        raise ConsoleError(
            f"--commit: {of} does not begin: the branch is at {told.short(known.head)}"
        )
    attempt = known.attempt(commit)
    if attempt and attempt.is_final and (kind == "approve" or attempt.status != "refused"):
        again = f"fab gitops.retry --fleet {settings.fleet} --commit {of}"
        raise ConsoleError(f"{of} was {attempt.status}: {attempt.sentence} First: {again}")


def _who() -> str:
    return os.environ.get("SUDO_USER") or getpass.getuser()


def _said(fleet: str, kind: str, commit: str) -> str:
    of = told.short(commit)
    return {
        "pause": f"{fleet}: begins no rollout until fab gitops.resume --fleet {fleet}",
        "retry": f"{fleet}: tries {of} again",
        "approve": f"{fleet}: {of} may begin",
        "override": f"{fleet}: {of} may begin now, whatever windows and approval say",
    }[kind]


def _wake(fleet: str) -> Iterator[str]:
    try:
        (KNOCK / fleet / "wake").touch()
    except OSError:
        yield "it could not be woken and looks by itself within its poll interval"
