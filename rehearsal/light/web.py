"""What the light engine and its router share: a web server, a client, and the fault switches."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

RELEASE = os.environ.get("REHEARSED_RELEASE", "none")
"""How the serving spec names the release that this process was started from."""

SERVERS = "X-Light-Servers"
"""The header in which an answer says which release and host stood behind each role of it."""

SWITCHES = Path("/run/seatrial-fault")
"""One file for each role, `<role>.json`: {"release": ..., "fault": ...}."""


Route = Callable[[str, Any], tuple[int, Any, str]]
"""A path and a body, None for GET -> status, JSON or text, and who stands behind the answer."""


def switch(role: str) -> dict[str, Any]:
    """Return the fault that this release should show in this role now; empty for none."""
    try:
        found: dict[str, Any] = json.loads((SWITCHES / f"{role}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if found.get("release") == RELEASE else {}


def fault(role: str) -> str:
    """Return the name of that fault."""
    return str(switch(role).get("fault", ""))


def call(url: str, body: Any = None, timeout: float = 30) -> tuple[Any, str]:
    """Ask another server; return its JSON and the header that says who answered.

    Raises:
        OSError: no answer, or an error status.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
        return json.loads(text) if text else {}, answer.headers.get(SERVERS, "")


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP; what is answered is `route`'s business."""

    protocol_version = "HTTP/1.1"
    route: Route

    def log_message(self, *_: Any) -> None:
        """Say nothing: five questions a second would fill the journal."""

    def do_GET(self) -> None:
        """Answer what is read."""
        self._answer(None)

    def do_POST(self) -> None:
        """Answer what is asked."""
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        status, content, who = type(self).route(self.path.partition("?")[0], body)
        page = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "text/json")
        self.send_header("Content-Length", str(len(page)))
        if who:
            self.send_header(SERVERS, who)
        self.end_headers()
        self.wfile.write(page)


def handler(route: Route) -> type[Handler]:
    """Return a handler that answers with these pages."""
    return type("Bound", (Handler,), {"route": staticmethod(route)})


class Server(ThreadingHTTPServer):
    """Many at a time; those that wait are accepted."""

    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        """Bind without asking a name service, which a host of a rehearsal does not have."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


def serve(
    address: str,
    ports: list[int],
    route: Route,
    *,
    is_deaf: bool = False,
) -> None:
    """Serve on each port, the first one in this thread, until SIGTERM, or past it when deaf."""
    held = _mapped()
    servers = [Server((address, port), handler(route)) for port in ports]

    def stop(_number: int, _frame: FrameType | None) -> None:
        for server in servers:
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else stop)
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    servers[0].serve_forever(0.1)
    time.sleep(0.2)  # what is being answered gets its last bytes out
    held.close()


def _mapped() -> mmap.mmap:
    """Map a file of the build: the identity gate asks for it, and a real one maps its libraries."""
    with Path(__file__).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
