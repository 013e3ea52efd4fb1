#!/usr/bin/python
"""Open or close one cell in HAProxy, at once and across restarts."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: haproxy_cell
short_description: Open or close one cell in HAProxy, at once and across restarts
description:
  - Tells the running HAProxy through its admin socket, and keeps one line for each open cell in
    HAProxy's server state file, from which a reload or restart takes it.
  - A cell without a line is closed, so whatever is interrupted half-way ends closed.
options:
  cell:
    description: The cell, a server of the backend.
    type: str
    required: true
  state:
    description:
      - Whether new requests may enter. Closing also waits until none runs any more.
      - C(seen) changes nothing, and tells which cells serve.
    type: str
    choices: [open, closed, seen]
    required: true
  address:
    description: The address of the cell's router; needed to open.
    type: str
  port:
    description: The port of the cell's router; needed to open.
    type: int
  drain_timeout_seconds:
    description: How long running requests may take to end once the cell is closed, in seconds.
    type: int
    default: 60
  backend:
    description: The backend whose servers are the cells.
    type: str
    default: cells
  socket:
    description: HAProxy's admin socket.
    type: path
    required: true
  state_file:
    description: HAProxy's server-state-file.
    type: path
    required: true
author: Seatrial
"""

EXAMPLES = r"""
- name: Close the cell
  haproxy_cell:
    cell: one
    state: closed
    socket: /run/haproxy/admin.sock
    state_file: /var/lib/haproxy/open-cells.state
"""

RETURN = r"""
drained_after_seconds:
  description: How long the last running request took to end; 0 for a cell that is opened.
  returned: always
  type: float
serving:
  description: The cells that are open and ready, by name.
  returned: when seen
  type: list
router:
  description: Where HAProxy looks for the cell's router now.
  returned: when seen
  type: str
open_line:
  description: The line of the state file with which the cell is open there.
  returned: when seen
  type: str
"""

# HAProxy 2.6, management guide, "show servers state": the number of the format.
STATE_FORMAT = "1"
# include/haproxy/server-t.h: SRV_ADMF_FMAINT, set while somebody holds the server in maintenance.
FORCED_MAINTENANCE = 1


def ask(path: str, command: str) -> str:
    """Return HAProxy's answer to one command; raises OSError when nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(f"{command}\n".encode())
        chunks = []
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks).decode().strip()


def server(states: str, cell: str) -> dict[str, str]:
    """Return the cell's row of ``show servers state``, by column; raises LookupError."""
    lines = states.splitlines()  # the format's number, the names of the columns, the servers
    columns = lines[1].removeprefix("# ").split()
    rows = (dict(zip(columns, line.split(), strict=False)) for line in lines[2:])
    return {row["srv_name"]: row for row in rows}[cell]


def requests_on(statistics: str, cell: str) -> int:
    """Return how many requests run on the cell or wait for it, from ``show stat``."""
    rows = csv.DictReader(statistics.removeprefix("# ").splitlines())
    return next(int(r["scur"]) + int(r["qcur"]) for r in rows if r["svname"] == cell)


def serving(statistics: str) -> list[str]:
    """Return the cells that are open and pass their checks, from ``show stat``."""
    rows = csv.DictReader(statistics.removeprefix("# ").splitlines())
    good = ("UP", "no check")
    return [r["svname"] for r in rows if r["type"] == "2" and r["status"].startswith(good)]


def open_line(backend: str, cell: str, address: str, port: int) -> str:
    """Return the state file's line for an open cell: it starts as ready, and its checks decide.

    The columns are those of ``show servers state``; the fifth to seventh say address, running (2),
    and "configured as disabled, opened since" (4).
    """
    return f"1 {backend} 1 {cell} {address} 2 4 1 1 0 6 3 4 6 0 0 0 - {port} - 0 0 - - 0"


def remembered(lines: list[str], cell: str, line: str | None) -> list[str]:
    """Return the state file's lines with this cell's line put in, or without it."""
    others = [kept for kept in lines if len(kept.split()) > 1 and kept.split()[3] != cell]
    return [STATE_FORMAT, *sorted([*others, *([line] if line else [])])]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one at a time read and replace the state file: several cells may move at once."""
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, lines: list[str]) -> None:
    """Replace the state file in one step."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text("\n".join(lines) + "\n")
        fresh.chmod(0o644)
        fresh.rename(path)
    except OSError:  # such as a full disk
        fresh.unlink(missing_ok=True)
        raise


def await_idle(path: str, backend: str, cell: str, timeout: float) -> tuple[int, float]:
    """Wait up to ``timeout`` seconds; return how many requests are left, and the seconds waited."""
    start = time.monotonic()
    while True:
        left = requests_on(ask(path, f"show stat {backend} 4 -1"), cell)
        elapsed = time.monotonic() - start
        if not left or elapsed >= timeout:
            return left, round(elapsed, 1)
        time.sleep(0.2)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "cell": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["open", "closed", "seen"], "required": True},
            "address": {"type": "str"},
            "port": {"type": "int"},
            "drain_timeout_seconds": {"type": "int", "default": 60},
            "backend": {"type": "str", "default": "cells"},
            "socket": {"type": "path", "required": True},
            "state_file": {"type": "path", "required": True},
        },
        required_if=[("state", "open", ("address", "port"))],
        supports_check_mode=True,
    )
    given = module.params
    cell, backend, admin = given["cell"], given["backend"], given["socket"]
    opens = given["state"] == "open"
    try:
        now = server(ask(admin, f"show servers state {backend}"), cell)
    except LookupError:
        module.fail_json(
            msg=f"HAProxy has no cell '{cell}': apply the role `entry` with a spec that names it"
        )
    except OSError as error:
        module.fail_json(msg=f"HAProxy does not answer on {admin} ({error}): start haproxy.service")
    if given["state"] == "seen":
        cells = serving(ask(admin, f"show stat {backend} 4 -1"))
        address, port = now["srv_addr"], int(now["srv_port"])
        module.exit_json(
            changed=False,
            drained_after_seconds=0.0,
            serving=cells,
            router=f"http://{address}:{port}",
            open_line=open_line(backend, cell, address, port),
        )
    state_file = Path(given["state_file"])
    with alone(state_file):
        old_lines = state_file.read_text().splitlines() if state_file.exists() else []
        line = open_line(backend, cell, given["address"], given["port"]) if opens else None
        new_lines = remembered(old_lines, cell, line)
        is_open = not int(now["srv_admin_state"]) & FORCED_MAINTENANCE
        is_elsewhere = opens and [now["srv_addr"], now["srv_port"]] != [
            given["address"],
            str(given["port"]),
        ]
        changed = is_open != opens or is_elsewhere or old_lines != new_lines
        if module.check_mode:
            module.exit_json(changed=changed, drained_after_seconds=0.0)

        # What is interrupted between the two steps leaves no more than a cell that closes again.
        server_name = f"{backend}/{cell}"
        if opens:
            ask(admin, f"set server {server_name} addr {given['address']} port {given['port']}")
            said = ask(admin, f"set server {server_name} state ready")
            write(state_file, new_lines)
        else:
            write(state_file, new_lines)
            said = ask(admin, f"set server {server_name} state maint")
        if said:
            module.fail_json(msg=f"HAProxy refused to make cell '{cell}' {given['state']}: {said}")
    left, seconds = (
        (0, 0.0) if opens else await_idle(admin, backend, cell, given["drain_timeout_seconds"])
    )
    if left:
        module.fail_json(
            msg=f"{left} requests still run on cell '{cell}' after {seconds} s; it is closed, so "
            "no new ones enter: wait longer (entry_drain_timeout_seconds) or end them"
        )
    module.exit_json(changed=changed, drained_after_seconds=seconds)


if __name__ == "__main__":
    main()
