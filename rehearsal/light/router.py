"""The light router: what `sglang_router.launch_router` is in a light build."""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

from . import web


def main() -> None:
    """Serve in front of the workers that the command line names."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--prometheus-host")
    parser.add_argument("--prometheus-port", type=int)
    parser.add_argument("--worker-urls", nargs="+", default=[])
    parser.add_argument("--pd-disaggregation", action="store_true")
    parser.add_argument("--prefill", nargs=2, action="append", default=[])
    parser.add_argument("--decode", action="append", default=[])
    given = parser.parse_args()
    router = Router(given)
    web.serve(given.host, [given.port, given.prometheus_port], router.route)


class Router:
    """Sends a request to the prefill server and then to the decode server, or to a combined one."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.who = f"router={web.RELEASE}@{given.host}"
        self.prefill = [(url.rstrip("/"), port) for url, port in given.prefill]
        self.last = [url.rstrip("/") for url in [*given.decode, *given.worker_urls]]
        self.workers = [*(url for url, _ in self.prefill), *self.last]

    def route(self, path: str, body: Any) -> tuple[int, Any, str]:
        """Answer a page."""
        if path in {"/readiness", "/health"}:
            return (200 if all(_is_healthy(url) for url in self.workers) else 503), {}, self.who
        if path == "/workers":
            return 200, {"workers": [{"url": url} for url in self.workers]}, self.who
        if path == "/metrics":
            return 200, "smg_workers 1\n", self.who
        try:
            if body is not None:
                for url, port in self.prefill:
                    web.call(f"{url}{path}", body)
                    body = {**body, "light_kv": f"http://{urlsplit(url).hostname}:{port}"}
            content, who = web.call(f"{self.last[0]}{path}", body)
        except OSError as error:
            return 502, {"error": str(error)}, self.who
        return 200, content, f"{self.who} {who}"


def _is_healthy(url: str) -> bool:
    try:
        web.call(f"{url}/health", timeout=2)
    except OSError:
        return False
    return True
