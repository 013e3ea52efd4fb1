"""The rehearsal hosts as the fault matrix sees them: commands, and what they say they run."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rehearsal import run as rehearsal

ENTRY = "10.77.0.10:8080"
GPU_HOSTS = ("gpu-a", "gpu-b", "gpu-c")
CELLS = ("one", "two")
PLACES = {"prefill": "gpu-a", "decode": "gpu-b", "combined": "gpu-c"}
SMALL_DISK = "gpu-b"
PROGRAM = "/opt/seatrial/bin/seatrial-host"
NAMESPACE = f"seatrial{rehearsal.BERTH}"
IN_NETWORK = ("nsenter", f"--net=/run/netns/{NAMESPACE}", "--")


class Host(NamedTuple):
    """What one GPU host says of itself."""

    current: str
    last_good: str
    is_pending: bool
    is_active: bool
    units: Mapping[str, str]
    has_timer: bool
    booted: str


def verb(*words: str) -> None:
    """Run a verb of hosts.sh."""
    done = subprocess.run([rehearsal.HOSTS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"hosts.sh {' '.join(words)}: {done.stdout}{done.stderr}"


def on(host: str, command: str, *, check: bool = True, seconds: float = 30) -> str:
    """Run a shell command on a host and return what it prints."""
    words = ("ssh", "-F", rehearsal.STATE / "ssh_config", "-o", "ConnectTimeout=5")
    try:
        done = subprocess.run(
            [*IN_NETWORK, *words, host, command],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        if check:
            raise
        return ""
    if check and done.returncode:
        raise AssertionError(f"{host}: `{command}` failed: {done.stdout}{done.stderr}")
    return done.stdout


def each(command: str, names: Iterable[str] = GPU_HOSTS) -> dict[str, str]:
    """Run a shell command on several hosts at once."""
    names = list(names)
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(lambda name: on(name, command), names), strict=True))


def look() -> dict[str, Host]:
    """Ask every GPU host what it runs."""
    command = (
        f"{PROGRAM} status; systemctl is-active seatrial-deadman.timer; stat -c %Y /proc/1; true"
    )
    found = {}
    for name, text in each(command).items():
        said, timer, booted = text.strip().splitlines()[-3:]
        status = json.loads(said)
        found[name] = Host(
            current=status["current"],
            last_good=status["last_good"],
            is_pending=status["pending"] is not None,
            is_active=status["active"],
            units={unit: state["MainPID"] for unit, state in status["units"].items()},
            has_timer=timer == "active",
            booted=booted,
        )
    return found


def locked(names: Iterable[str] = GPU_HOSTS) -> list[str]:
    """Return the GPU hosts on which somebody holds the fleet lock."""
    found = each("test ! -e /opt/seatrial/state/fleet_lock.json && echo free; true", names)
    return [name for name, said in found.items() if said.strip() != "free"]


def open_cells() -> set[str]:
    """Return the cells whose entry is open, as HAProxy says."""
    rows = [line.split() for line in _ask_entry("show servers state cells")[2:] if line.strip()]
    return {row[3] for row in rows if not int(row[6]) & 1}


def close_cell(cell: str) -> None:
    """Close a cell's entry, as a person does at the entry's console."""
    _ask_entry(f"set server cells/{cell} state maint")


def _ask_entry(command: str) -> list[str]:
    program = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/haproxy/admin.sock'); "
        f"s.sendall({command.encode()!r} + b'\\n'); print(s.makefile().read())"
    )
    return on("edge", f"python3 -c {shlex.quote(program)}").splitlines()
