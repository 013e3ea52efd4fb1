"""What opens and closes a cell keeps its word to a real HAProxy, across restarts.

The module does it for a rollout; `seatrial-entry` for one that died.
"""

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
PROGRAM = REPOSITORY / "roles/entry/files/seatrial-entry"
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
MODELS = '{"data": [{"id": "rehearsal"}]}'


class Host(BaseHTTPRequestHandler):
    """Stands in for a GPU host's node-exporter and router."""

    said = ""
    models = ""
    status = 200

    def do_GET(self) -> None:
        """Say what the host runs, or which model the router has."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write((self.said if self.path == "/metrics" else self.models).encode())

    def do_POST(self) -> None:
        """Answer the model's request, or not, as SGLang does when one half has lost the other."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_right = (self.path, asked["model"]) == ("/v1/chat/completions", "rehearsal")
        self.send_response(self.status if is_right else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def hosts(*said: str, models: str = MODELS, status: int = 200) -> Iterator[list[str]]:
    """Serve what each host says of itself; yield their URLs."""
    servers = []
    for text in said:
        handler = type("Saying", (Host,), {"said": text, "models": models, "status": status})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def runs(release: str, pending: int = 0) -> str:
    """Return what `seatrial-host` lets node-exporter say."""
    return (
        f'node_load1 0.5\nseatrial_release{{link="current",release="{release}"}} 1\n'
        f'seatrial_release{{link="last_good",release="old"}} 1\n'
        f"seatrial_decision_pending {pending}\n"
    )


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

    def reopen(self, line: str, urls: list[str]) -> subprocess.CompletedProcess[str]:
        """Run the program that opens a cell again."""
        return subprocess.run(
            [
                *(sys.executable, PROGRAM, "reopen", "one"),
                *("--socket", self.folder / "admin.sock"),
                *("--state-file", self.folder / "open-cells.state"),
                f"--line={line}",
                f"--router={urls[0]}",
                *(f"--host={url}" for url in urls),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

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


def test_it_tells_which_cells_serve(entry: Entry) -> None:
    """Those that are open and answer; asking changes nothing."""
    with entry.running():
        assert entry.set("one", "seen")["serving"] == []
        entry.set("two", "open")
        seen = entry.set("one", "seen")
        assert (seen["serving"], seen["changed"]) == (["two"], False)


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
        client = threading.Thread(target=lambda: statuses.append(entry.ask(4)))
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


def test_cells_that_move_at_once_all_keep_their_lines(entry: Entry) -> None:
    """Each is read, changed and replaced by one at a time."""
    with entry.running():
        for _ in range(5):
            entry.set("one", "closed")
            entry.set("two", "closed")
            cells = ("one", "two")
            opening = [threading.Thread(target=entry.set, args=(cell, "open")) for cell in cells]
            for thread in opening:
                thread.start()
            for thread in opening:
                thread.join()
            lines = (entry.folder / "open-cells.state").read_text().splitlines()
            assert [line.split()[3] for line in lines[1:]] == ["one", "two"]


def test_a_cell_whose_rollout_died_opens_when_its_hosts_agree(entry: Entry) -> None:
    """And stays open when HAProxy is restarted."""
    with entry.running(), hosts(runs("old"), runs("old")) as urls:
        entry.set("two", "open")
        entry.set("one", "closed")
        line = entry.set("one", "seen")["open_line"]
        done = entry.reopen(line, urls)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "cell one is open: all its hosts run old\n"
        entry.set("two", "closed")
        assert entry.ask() == 200
        assert not entry.set("one", "open")["changed"]
    with entry.running():
        assert entry.ask() == 200


@pytest.mark.parametrize(
    ("said", "router", "why"),
    [
        ([runs("new"), runs("old")], {}, "its hosts run different releases"),
        ([runs("old"), runs("old", pending=1)], {}, "nothing is decided on"),
        ([runs("old"), "node_load1 0.5"], {}, "nothing is decided on"),
        ([runs(""), runs("")], {}, "nothing is decided on"),
        ([runs("old"), runs("old")], {"status": 500}, "/v1/chat/completions: HTTP Error 500"),
        ([runs("old"), runs("old")], {"models": "{}"}, "/v1/models: names no model"),
        ([runs("old"), runs("old")], {"models": "?"}, "/v1/models: names no model"),
    ],
)
def test_a_cell_that_does_not_agree_or_answer_stays_closed(
    entry: Entry, said: list[str], router: dict[str, Any], why: str
) -> None:
    """One sentence says why; systemd tries again."""
    with entry.running(), hosts(*said, **router) as urls:
        entry.set("one", "closed")
        line = entry.set("one", "seen")["open_line"]
        done = entry.reopen(line, urls)
        assert done.returncode == 1
        assert done.stderr.startswith("seatrial-entry reopen one: ")
        assert why in done.stderr
        assert "Traceback" not in done.stderr
        assert entry.ask() == 503


def test_a_host_that_does_not_answer_keeps_its_cell_closed(entry: Entry) -> None:
    """Nobody knows what it runs."""
    with entry.running(), hosts(runs("old")) as urls:
        entry.set("one", "closed")
        line = entry.set("one", "seen")["open_line"]
        done = entry.reopen(line, [*urls, f"http://127.0.0.1:{free_port()}"])
        assert done.returncode == 1
        assert entry.ask() == 503


def test_arming_sets_a_timer_that_tries_until_it_is_done(tmp_path: Path) -> None:
    """What follows the seconds is handed on; an earlier timer is replaced."""
    for name in ("systemctl", "systemd-run"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/asked\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(
        [sys.executable, PROGRAM, "arm", "one", "90", "--socket=/s", "--line=1 cells", "--host=u"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )
    stopped, started = (tmp_path / "asked").read_text().splitlines()
    assert stopped == "systemctl stop seatrial-reopen-one.timer seatrial-reopen-one.service"
    assert "--unit=seatrial-reopen-one --on-active=90" in started
    assert "--property=Restart=on-failure" in started
    assert started.endswith("reopen one --socket=/s --line=1 cells --host=u")
