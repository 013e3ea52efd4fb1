"""The controller's side of the fleet lock: who asks for it, and whether a holder is surely dead.

The lock itself lies on the GPU hosts (``roles/cell/files/seatrial_fleet_lock.py``), where every
controller sees it.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROC = Path("/proc")
KEEPER = "SEATRIAL_KEEPER"
"""In the environment of a playbook whose starter gave it a kernel lock to hold: which one."""
HELD_BY = "the fleet is locked by"
"""Stands in the sentence of every refusal."""


def request(commit: str, seconds: int, *, what: str = "rollout") -> dict[str, Any]:
    """Return the record with which this run asks for the lock.

    Parameters
    ----------
    commit
        What is rolled out, for people.
    seconds
        After which the lock is stale even if nobody knows what became of its holder.
    """
    return {
        "token": uuid.uuid4().hex,
        "who": getpass.getuser(),
        "what": what,
        "commit": commit,
        "seconds": seconds,
        "controller": _controller(),
        "process": _process(_playbook()),
        "keeper": os.environ.get(KEEPER, ""),
    }


def keeper(descriptor: int) -> str:
    """Name a kernel lock that a playbook holds as long as it runs: its path and inode."""
    path = (PROC / "self/fd" / str(descriptor)).readlink()
    return f"{path} {os.fstat(descriptor).st_ino}"


def is_dead(holder: Mapping[str, Any]) -> bool:
    """Whether the rollout that holds the lock ran on this machine and is surely over.

    Its process is gone, or another one has its number, or the machine has rebooted since, or this
    run holds the kernel lock that the holder had until its end. Of a holder on another machine
    nothing is known, so it is not dead.
    """
    ours, theirs = _controller(), holder.get("controller", {})
    if any(ours[key] != theirs.get(key) for key in ("name", "machine")):
        return False
    if os.environ.get(KEEPER) and holder.get("keeper") == os.environ[KEEPER]:
        return True
    if ours["boot"] != theirs.get("boot"):
        return True
    if ours["pids"] != theirs.get("pids"):  # a container beside this one: its processes are unseen
        return False
    process = holder.get("process", {})
    return bool(_process(int(process.get("pid", 0))) != process)


def sentence(refusals: Mapping[str, Mapping[str, Any]], unlock: str) -> str:
    """Say who holds the lock on which hosts, since when, and how to release it.

    ``refusals`` is the holder's record by host; ``unlock`` the command that releases a token.
    """
    by_token: dict[str, list[str]] = {}
    for host, holder in refusals.items():
        by_token.setdefault(holder["token"], []).append(host)
    said = []
    for token, hosts in by_token.items():
        holder = refusals[hosts[0]]
        where = holder.get("controller", {}).get("name", "unknown")
        said.append(
            f"{', '.join(hosts)}: {HELD_BY} {holder.get('who', 'unknown')} on {where} "
            f"for {holder.get('what', 'something')} {holder.get('commit', 'unknown')[:12]}. "
            f"Wait for its end; if it is surely dead: {unlock} -e unlock_token={token}"
        )
    return " ".join(said)


def _controller() -> dict[str, str]:
    machine = Path("/etc/machine-id")
    return {
        "name": platform.node(),
        "machine": machine.read_text().strip() if machine.exists() else "",
        "boot": (PROC / "sys/kernel/random/boot_id").read_text().strip(),
        "pids": str((PROC / "self/ns/pid").readlink()),
    }


def _playbook() -> int:
    """Return the process that the person started: Ansible's workers are forks of it."""
    pid = os.getpid()
    while (parent := _parent(pid)) > 1 and _words(parent) == _words(pid):
        pid = parent
    return pid


def _process(pid: int) -> dict[str, int]:
    """Return the process's number and when it started (clock ticks since boot), or zeros."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {"pid": 0, "started": 0}
    if fields[0] == "Z":
        return {"pid": 0, "started": 0}
    return {"pid": pid, "started": int(fields[19])}


def _parent(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int) -> bytes:
    return (PROC / str(pid) / "cmdline").read_bytes()


def as_argument(record: Mapping[str, Any]) -> str:
    """Return the record as the host's program takes it."""
    return json.dumps(record, sort_keys=True)
