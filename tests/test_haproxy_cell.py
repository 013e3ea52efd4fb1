"""The module that opens and closes a cell keeps its word to a real HAProxy, across restarts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

REPOSITORY = Path(__file__).resolve().parents[1]
MODULE = REPOSITORY / "plugins/modules/haproxy_cell.py"
CONFIG = """
global
  stats socket {folder}/admin.sock level admin
  server-state-file {folder}/open-cells.state
defaults
  mode http
  timeout connect 2s
  timeout client 20s
  timeout server 20s
  load-server-state-from-file global
frontend entry
  bind 127.0.0.1:{port}
  default_backend cells
backend cells
  default-server disabled
  server one 127.0.0.1:{router}
  server two 127.0.0.1:{router}
"""
SECONDS_TO_START = 10


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Router(BaseHTTPRequestHandler):
    """Stands in for a cell's router: answers after as many seconds as the path says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with nothing, late."""
        time.sleep(float(self.path.removeprefix("/")))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Entry(NamedTuple):
    """A HAProxy in a folder, in front of one router that both cells share."""

    folder: Path
    port: int
    router: int

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start HAProxy; end it at the close of the block."""
        config = self.folder / "haproxy.cfg"
        config.write_text(CONFIG.format(folder=self.folder, port=self.port, router=self.router))
        (self.folder / "open-cells.state").touch()
        with subprocess.Popen(
            ["/usr/sbin/haproxy", "-db", "-f", config], stderr=subprocess.DEVNULL
        ) as process:
            deadline = time.monotonic() + SECONDS_TO_START
            while not (self.folder / "admin.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            try:
                yield
            finally:
                process.terminate()
        (self.folder / "admin.sock").unlink(missing_ok=True)

    def set(self, cell: str, state: str, **options: Any) -> dict[str, Any]:
        """Run the module as Ansible does, and return its answer."""
        arguments = {
            "cell": cell,
            "state": state,
            "socket": str(self.folder / "admin.sock"),
            "state_file": str(self.folder / "open-cells.state"),
            "address": "127.0.0.1",
            "port": self.router,
            **options,
        }
        done = subprocess.run(
            [sys.executable, MODULE],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
            capture_output=True,
            text=True,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def ask(self, seconds: float = 0) -> int:
        """Return the status of a request that the router answers after so many seconds."""
        return requests.get(f"http://127.0.0.1:{self.port}/{seconds}", timeout=15).status_code


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    """Return an entry whose router runs; HAProxy does not yet."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield Entry(tmp_path, free_port(), server.server_port)
    server.shutdown()
    server.server_close()


def test_a_new_cell_is_closed_until_it_is_opened(entry: Entry) -> None:
    """Nothing enters a cell that no rollout has opened; opening it twice changes nothing."""
    with entry.running():
        assert entry.ask() == 503
        assert entry.set("one", "open")["changed"] is True
        assert entry.ask() == 200
        assert entry.set("one", "open")["changed"] is False


def test_open_and_closed_survive_a_restart(entry: Entry) -> None:
    """HAProxy comes back with the cells as the last rollout left them."""
    with entry.running():
        entry.set("one", "open")
    with entry.running():
        assert entry.ask() == 200
        assert entry.set("one", "open")["changed"] is False
        assert entry.set("one", "closed")["changed"] is True
        assert entry.ask() == 503
    with entry.running():
        assert entry.ask() == 503
        assert entry.set("one", "closed")["changed"] is False


def test_closing_one_cell_leaves_the_other_open(entry: Entry) -> None:
    """A rollout moves one cell while the others serve."""
    with entry.running():
        entry.set("one", "open")
        entry.set("two", "open")
        entry.set("one", "closed")
        assert entry.ask() == 200


def test_closing_waits_for_the_requests_that_run(entry: Entry) -> None:
    """A request that is under way is answered, and the module returns after it."""
    with entry.running():
        entry.set("one", "open")
        statuses: list[int] = []
        client = threading.Thread(target=lambda: statuses.append(entry.ask(2)))
        client.start()
        time.sleep(0.5)
        answer = entry.set("one", "closed")
        client.join()
    assert statuses == [200]
    assert answer["drained_after_seconds"] > 0


def test_closing_gives_up_after_its_bound_and_says_so(entry: Entry) -> None:
    """A request that does not end is counted in the message; the cell stays closed."""
    with entry.running():
        entry.set("one", "open")
        client = threading.Thread(target=lambda: entry.ask(4))
        client.start()
        time.sleep(0.5)
        answer = entry.set("one", "closed", drain_timeout_seconds=0)
        assert answer["failed"] is True
        assert answer["msg"].startswith("1 requests still run on cell 'one' after 0.0 s")
        assert entry.ask() == 503
        client.join()


def test_check_mode_says_what_would_change_and_changes_nothing(entry: Entry) -> None:
    """``--check`` before a rollout is safe."""
    with entry.running():
        assert entry.set("one", "open", _ansible_check_mode=True)["changed"] is True
        assert entry.ask() == 503


def test_a_cell_that_haproxy_does_not_know_is_one_sentence(entry: Entry) -> None:
    """The message says what to do."""
    with entry.running():
        answer = entry.set("nine", "open")
    assert answer["msg"] == (
        "HAProxy has no cell 'nine': apply the role `entry` with a spec that names it"
    )


def test_a_haproxy_that_is_down_is_one_sentence(entry: Entry) -> None:
    """The message names the socket and the unit."""
    answer = entry.set("one", "closed")
    assert answer["failed"] is True
    assert answer["msg"].endswith("start haproxy.service")
