"""Role `router` waits until a router answers, and no longer than it may."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from tests.playing import facts_after

ROLE = Path(__file__).parents[1] / "roles" / "router"


class Router(BaseHTTPRequestHandler):
    """A router that refuses, or keeps silent about, its first requests."""

    refusals: ClassVar[list[int]]
    silence_seconds = 0.0

    def do_POST(self) -> None:
        """Answer 503 as often as there are refusals left, and then 200."""
        time.sleep(self.silence_seconds)
        self.send_response(self.refusals.pop() if self.refusals else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def router(**behaviour: Any) -> Iterator[str]:
    """Serve as a router; yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Behaving", (Router,), behaviour))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def played(url: str, seconds: int, folder: Path) -> dict[str, Any]:
    """Play the role; return the facts that it leaves, and how long it took."""
    given = {"router_url": url, "router_model": "m", "router_ready_seconds": seconds}
    tasks = [{"include_role": {"name": str(ROLE)}, "vars": given}]
    begin = time.monotonic()
    facts = facts_after(folder, tasks, ("router_is_ready", "router_problem"), ("control",))
    return {**facts["control"], "seconds": time.monotonic() - begin}


def test_a_router_that_soon_answers_is_ready(tmp_path: Path) -> None:
    """It refuses until it has counted its servers in."""
    with router(refusals=[503]) as url:
        assert played(url, 30, tmp_path)["router_is_ready"]


def test_a_router_whose_requests_hang_is_given_up_in_time(tmp_path: Path) -> None:
    """As one does whose servers have lost each other: every try may last as long as the wait."""
    with router(refusals=[], silence_seconds=60.0) as url:
        found = played(url, 5, tmp_path)
    assert not found["router_is_ready"]
    assert found["router_problem"].startswith(f"{url}: ")
    assert found["seconds"] < 30
