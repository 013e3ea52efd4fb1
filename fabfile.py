"""The operator's console: questions to hosts and to the ledger, and orders to the reconciler.

    fab -H gpu1 status
    fab -H gpu1,gpu2 logs --role decode --lines 200
    fab -S path/to/ssh_config -H gpu-a history
    fab rollouts                      # what this control machine rolled out, the last one in full
    fab gitops.status                 # on the control host: what serves, what the branch is at, why
    fab gitops.pause --reason 'trade fair until Friday'

Hosts and keys come from the operator's ssh_config, or from the one given with -S. Nothing here
changes a host: for that, use a playbook, or merge.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paramiko
from fabric import Connection, task
from invoke.collection import Collection
from invoke.context import Context

from seatrial import ledger
from seatrial.errors import SeatrialError
from seatrial.gitops import console
from seatrial.host import _trust_only_known_keys as trust_only_known_keys

STATE = Path.home() / ".local/state/seatrial"
HOST_PROGRAM = "/opt/seatrial/bin/seatrial-host"
HOST_JOURNAL = "/opt/seatrial/state/journal.jsonl"
ROLES = ("prefill", "decode", "combined", "router")


@task
def status(c: Connection) -> None:
    """Releases (current, last good, undecided) and units of the host."""
    answer = json.loads(_ask(c, f"{HOST_PROGRAM} status"))
    print("\n".join([c.host, *_status_lines(answer)]))


@task(help={"role": f"one of {', '.join(ROLES)}", "lines": "how many", "follow": "and what comes"})
def logs(c: Connection, role: str, lines: int = 50, *, follow: bool = False) -> None:
    """The journal of a role's unit."""
    command = _logs_command(role, lines, follow=follow)
    with _reached(c):
        c.run(command, in_stream=False)


@task(help={"lines": "how many"})
def history(c: Connection, lines: int = 20) -> None:
    """What the host did to its releases, by order or by itself."""
    told = _ask(c, f"tail -n {int(lines)} {HOST_JOURNAL}")
    print(c.host)
    for line in told.splitlines():
        print(f"  {_history_line(json.loads(line))}")


@task(
    help={
        "fleet": "folder of inventory/ that names the fleet",
        "name": "the rollout to tell in full; the last one if none is named",
        "lines": "how many earlier ones, a line each",
    }
)
def rollouts(_: Context, fleet: str = "production", name: str = "", lines: int = 5) -> None:
    """The ledger of this control machine: rollouts in a line each, and one in full."""
    path = STATE / fleet / "ledger.jsonl"
    try:
        print("\n".join(_rollout_lines(ledger.read(path), name, int(lines))))
    except ledger.LedgerError as error:
        raise SystemExit(f"{path}: {error}") from None
    print(f"\nledger  {path}\nreports {path.parent / 'reports'}")


FLEET_HELP = {"fleet": "the fleet, as its folder of inventory/ is called"}
COMMIT_HELP = {**FLEET_HELP, "commit": "the commit, or its first characters"}


@task(help=FLEET_HELP)
def gitops_status(_: Context, fleet: str = "production") -> None:
    """What serves, what the branch is at and why not, orders that stand, the last attempts."""
    _say(console.status(fleet))


@task(help={**FLEET_HELP, "reason": "for those who wonder"})
def gitops_pause(_: Context, reason: str, fleet: str = "production") -> None:
    """Begin no rollout until `gitops.resume`; one that runs goes on to its end."""
    _say(console.order(fleet, "pause", reason=reason))


@task(help=FLEET_HELP)
def gitops_resume(_: Context, fleet: str = "production") -> None:
    """Follow the branch again."""
    _say(console.resume(fleet))


@task(help={**COMMIT_HELP, "reason": "what is different now"})
def gitops_retry(_: Context, commit: str, reason: str = "", fleet: str = "production") -> None:
    """Try a commit again that was refused or failed."""
    _say(console.order(fleet, "retry", commit, reason=reason))


@task(help={**COMMIT_HELP, "reason": "for the record"})
def gitops_approve(_: Context, commit: str, reason: str = "", fleet: str = "production") -> None:
    """Let a commit begin that waits for approval."""
    _say(console.order(fleet, "approve", commit, reason=reason))


@task(
    help={
        **COMMIT_HELP,
        "reason": "why it cannot wait; it stays in the record",
        "accept-history": "also if the branch was rewritten",
    }
)
def gitops_override(
    _: Context,
    commit: str,
    reason: str,
    fleet: str = "production",
    *,
    accept_history: bool = False,
) -> None:
    """Let a commit begin in a freeze, and without approval. Signature and gates still count."""
    _say(console.order(fleet, "override", commit, reason=reason, accept_history=accept_history))


def _say(lines: Iterator[str]) -> None:
    """Print the answer, or the one sentence that says what is wrong."""
    try:
        print("\n".join(lines))
    except SeatrialError as error:
        raise SystemExit(str(error)) from None


def _rollout_lines(events: list[ledger.Event], name: str, lines: int) -> Iterator[str]:
    """Yield a line for each of the last rollouts, and the summary of the named or the last one."""
    names = list(dict.fromkeys(event.rollout for event in events))
    if not names:
        raise ledger.LedgerError("no rollout was made from this machine, or another fleet is meant")
    for one in names[-lines:] if lines else []:
        told = [event for event in events if event.rollout == one]
        begin = next((event.data for event in told if event.event == "begin"), {})
        end = next((event.data for event in reversed(told) if event.event == "end"), {})
        releases = f"{begin.get('previous') or 'nothing'} -> {begin.get('release', '?')}"
        who = begin.get("who", "?")
        yield f"{one:<26} {end.get('outcome', 'unfinished'):<10} {releases}  {who}"
    wanted = name or names[-1]
    yield "\n" + ledger.summary([event for event in events if event.rollout == wanted])


@contextmanager
def _reached(c: Context) -> Iterator[None]:
    """Ask a host in this block; say in a sentence if none is named or it is out of reach."""
    if not isinstance(c, Connection):
        raise SystemExit("-H: should name the host to ask, as in fab -H gpu1 status")
    try:
        trust_only_known_keys(c)
        yield
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise SystemExit(
            f"{c.original_host} cannot be reached by SSH: {error or type(error).__name__}; "
            "address, user and key come from your ssh_config, or from the one given with -S"
        ) from None


def _ask(c: Connection, command: str) -> str:
    with _reached(c):
        return str(c.run(command, hide=True, in_stream=False).stdout)


def _status_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each release that matters and for each unit."""
    for name in ("current", "last_good"):
        release = answer["releases"].get(name) or {}
        commit = str(release.get("commit", ""))[:12]
        yield f"  {name:<10} {answer[name] or 'none':<17} {commit}".rstrip()
    pending = answer["pending"]
    if pending:
        timer = "a timer runs" if answer.get("dead_man") else "no timer runs"
        yield f"  undecided  {pending['release']:<17} {timer}"
    lock = answer.get("fleet_lock")
    if lock:
        commit = str(lock.get("commit", ""))[:12]
        yield f"  locked     {lock.get('who', 'unknown'):<17} {commit}".rstrip()
    for unit, facts in answer["units"].items():
        restarts = facts.get("NRestarts", "?")
        yield f"  {unit:<25} {facts.get('ActiveState', 'unknown')}, restarts: {restarts}"


def _history_line(entry: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in entry.items() if key not in ("time", "event")}
    when = datetime.fromtimestamp(entry["time"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return " ".join([when, entry["event"], *(f"{key}={value}" for key, value in facts.items())])


def _logs_command(role: str, lines: int, *, follow: bool) -> str:
    if role not in ROLES:
        raise SystemExit(f"role: should be one of {', '.join(ROLES)}, is {role}")
    unit = shlex.quote(f"sglang-{role}.service")
    return f"journalctl --no-pager -u {unit} -n {int(lines)}{' -f' if follow else ''}"


# `fab --list` shows what this holds.
ns = Collection(status, logs, history, rollouts)
ns.add_collection(
    Collection(
        "gitops",
        status=gitops_status,
        pause=gitops_pause,
        resume=gitops_resume,
        retry=gitops_retry,
        approve=gitops_approve,
        override=gitops_override,
    )
)
