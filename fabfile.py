"""The operator's console: questions to a host through SSH. Nothing here changes anything.

    fab -H gpu1 status
    fab -H gpu1,gpu2 logs --role decode --lines 200
    fab -S path/to/ssh_config -H gpu-a history

Hosts and keys come from the operator's ssh_config, or from the one given with -S. To change a
host, use a playbook.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fabric import Connection, task

from seatrial.host import _trust_only_known_keys as trust_only_known_keys

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
    trust_only_known_keys(c)
    c.run(_logs_command(role, lines, follow=follow), in_stream=False)


@task(help={"lines": "how many"})
def history(c: Connection, lines: int = 20) -> None:
    """What the host did to its releases, by order or by itself."""
    print(c.host)
    for line in _ask(c, f"tail -n {int(lines)} {HOST_JOURNAL}").splitlines():
        print(f"  {_history_line(json.loads(line))}")


def _ask(c: Connection, command: str) -> str:
    trust_only_known_keys(c)
    return str(c.run(command, hide=True, in_stream=False).stdout)


def _status_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each release that matters and for each unit."""
    for name in ("current", "last_good"):
        release = answer["releases"].get(name) or {}
        commit = str(release.get("commit", ""))[:12]
        yield f"  {name:<10} {answer[name] or 'none':<17} {commit}".rstrip()
    pending = answer["pending"]
    if pending:
        yield f"  undecided  {pending['release']:<17} reverts after {pending['seconds']} s"
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
