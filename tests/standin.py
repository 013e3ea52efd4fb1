"""A tiny server in this process that speaks SGLang's and Prometheus' wire formats, with faults."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "queue_time_seconds")
EDGES = (0.001, 0.01, 0.1, 1.0, 10.0, math.inf)
LOOP = "the code is the code is " * 12
TEMPLATE_TOKENS = 7  # what a chat template adds to a prompt


QUESTION = re.compile(r"(?:What is )?([Tt]he secret code[\w ]*?)(?: is|\?)$")


def recalled(text: str, sees_tokens: float = math.inf) -> str:
    """Return the value that the end of the text asks for, if no more words than that follow it."""
    asked = QUESTION.search(text)
    if asked is None:
        return ""
    name = asked[1][0].upper() + asked[1][1:]
    found = [*re.finditer(rf"{name} is ([A-Z0-9]+(?:-[A-Z0-9]+)+)\.", text)]
    if not found or len(text[found[-1].end() :].split()) > sees_tokens:
        return ""
    return found[-1][1]


@dataclass
class StandIn:
    """A server of one model. Each attribute after ``url`` is a fault that a test switches on.

    A token is a word. The model recalls the needle if no more than ``sees_tokens`` follow it.
    """

    url: str = ""
    sees_tokens: float = math.inf
    truncates_at: float = math.inf
    context_tokens: float = math.inf
    prompt_tokens_said: int | None = None
    cached_tokens: int | None = None
    dies_after: float = math.inf
    is_ready: bool = True
    scrapes: str = "good"
    uncounted_share: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    metrics: str = ""
    # Time: of a thousand prompt tokens, to the first token, per token; one in so many is slower.
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    token_seconds: float = 0.0
    slow_every: int = 0
    slow_seconds: float = 0.0
    noise: float = 0.0
    # What goes wrong after so many requests, or with this share of them.
    forgets_after: float = math.inf
    loops_after: float = math.inf
    aborts_every: int = 0
    tears_streams: bool = False
    keeps_cancelled: bool = False
    hangs_after_idle: float = math.inf
    is_busy_unhealthy: bool = False
    retracts: bool = False
    transfers: bool = False
    fails_transfers: bool = False
    spoils_transfers: bool = False
    hides_metrics: bool = False
    # What it has done.
    running: int = 0
    answered: float = 0.0
    observed: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})
    events: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    prefixes: set[str] = field(default_factory=set)
    counters: dict[str, float] = field(default_factory=lambda: {"generation": 1.0, "prompt": 1.0})
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, text: str, limit: int, *, is_exact: bool, extra: int) -> dict[str, Any]:
        """Return text and counts of an answer."""
        words = text.split()
        with self.lock:
            self.requests += 1
            number, self.running = self.requests, self.running + 1
        try:
            if time.time() - self.answered > self.hangs_after_idle and self.answered:
                time.sleep(60)
            return self._answer(words, limit, number, is_exact=is_exact, extra=extra)
        finally:
            with self.lock:
                self.running -= 1
                self.answered = time.time()

    def _answer(
        self, words: list[str], limit: int, number: int, *, is_exact: bool, extra: int
    ) -> dict[str, Any]:
        seen = " ".join(words[-int(min(len(words), self.truncates_at)) :])
        prompt = len(seen.split()) + extra
        said = recalled(seen, self.sees_tokens) or "I do not know"
        if number > self.forgets_after or (self.spoils_transfers and self.running > 1):
            said = "I do not know"
        said = LOOP if number > self.loops_after else said
        completion = limit if is_exact else min(limit, len(said.split()) + 1)
        draw = random.Random(number)
        first = self.first_seconds + self.prefill_seconds * prompt / 1000
        if self.slow_every and number % self.slow_every == 0:
            first += self.slow_seconds
        step = self.token_seconds * draw.lognormvariate(0, self.noise)
        is_aborted = bool(self.aborts_every and number % self.aborts_every == 0)
        time.sleep(first)
        with self.lock:
            self._count("num_aborted_requests_total", is_aborted)
            self._count("num_retracted_requests_total", self.retracts)
            self._count("kv_transfer_latency_ms_count", self.transfers)
            self._count("num_transfer_failed_reqs_total", self.fails_transfers)
            self.observed["time_to_first_token_seconds"].append(first)
            self.observed["inter_token_latency_seconds"] += [step] * max(1, completion - 1)
            self.observed["queue_time_seconds"].append(0.0005)
            counted = 1 - self.uncounted_share
            self.counters["generation"] += completion * counted
            self.counters["prompt"] += prompt * counted
        if self.prompt_tokens_said is not None:
            prompt = self.prompt_tokens_said
        return {
            "text": f"{said}.",
            "prompt": prompt,
            "completion": completion,
            "finish": "abort" if is_aborted else "length" if is_exact else "stop",
            "step": step,
        }

    def _count(self, event: str, happened: bool) -> None:
        if happened:
            self.events[event] = self.events.get(event, 0) + 1

    def page(self) -> str:
        """Return the page of metrics: what has never happened is not there, as SGLang does it."""
        if self.hides_metrics:
            return self.metrics
        with self.lock:
            lines = [f"sglang:num_running_reqs{{role='x'}} {self.running}".replace("'", '"')]
            lines += [f"sglang:{name} {count}" for name, count in self.events.items()]
        return "\n".join(lines) + "\n" + self.metrics

    def cached(self, text: str, tokens: int) -> int:
        """Return how many of a completion's tokens stood in the one before it, and keep it."""
        with self.lock:
            before, self.prefixes = self.prefixes, {text.partition("\n\n")[0], *self.prefixes}
        if self.cached_tokens is not None:
            return self.cached_tokens
        return tokens - 10 if text.partition("\n\n")[0] in before else 0

    def scraped(self, query: str) -> list[dict[str, Any]]:
        """Answer a range selector: each question is also a scrape."""
        metric = re.search(r"sglang\[:_\](\w+)_tokens_total", query)
        times = re.search(r"sglang\[:_\](\w+)_bucket", query)
        if self.scrapes == "none" or (metric is None and times is None):
            return []
        now = time.time()
        with self.lock:
            values = dict(self.counters)
            for name, seen in self.observed.items():
                for edge in EDGES:
                    values[f"{name}/{edge}"] = float(sum(one <= edge for one in seen))
            if self.scrapes == "nan":
                values = dict.fromkeys(values, math.nan)
            if self.scrapes == "reset" and self.samples:
                values = {name: value / (len(self.samples) + 1) for name, value in values.items()}
            if self.scrapes != "stale" or not self.samples:
                self.samples.append((now, values))
            if metric is not None:
                pairs = [[at, str(found[metric[1]])] for at, found in self.samples]
                return [{"metric": {}, "values": pairs}]
            name = times[1] if times is not None else ""
            return [
                {
                    "metric": {"le": "+Inf" if math.isinf(edge) else str(edge)},
                    "values": [[at, str(found[f"{name}/{edge}"])] for at, found in self.samples],
                }
                for edge in EDGES
            ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    standin: StandIn

    def log_message(self, *_: Any) -> None:
        """Say nothing: the test's output is the gates'."""

    def do_GET(self) -> None:
        """Answer what is read."""
        if self._is_dead():
            return
        url = urlsplit(self.path)
        server = self.standin
        if url.path == "/health" and server.is_busy_unhealthy and server.running:
            time.sleep(0.2)
            self._send({}, 503)
        elif url.path in {"/ready", "/readiness", "/health"}:
            self._send({}, 200 if server.is_ready else 503)
        elif url.path == "/server_info":
            self._send(server.info)
        elif url.path == "/workers":
            self._send({"workers": [{"url": worker} for worker in server.workers]})
        elif url.path == "/v1/models":
            self._send({"data": [{"id": "stand-in"}]})
        elif url.path == "/metrics":
            self._send(server.page(), kind="text/plain")
        elif url.path == "/api/v1/query":
            query = parse_qs(url.query)["query"][0]
            result: Any = [time.time(), str(time.time())] if query == "time()" else None
            self._send({"data": {"result": result or server.scraped(query)}})
        else:
            self._send({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        """Answer what is asked."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_dead():
            return
        server = self.standin
        if len(json.dumps(body).split()) > server.context_tokens:
            self._send({"object": "error", "message": "The input is longer than the context."}, 400)
        elif self.path == "/generate":
            given = body["sampling_params"]
            said = server.answer(
                body["text"], given["max_new_tokens"], is_exact=given["ignore_eos"], extra=0
            )
            meta = {
                "prompt_tokens": said["prompt"],
                "completion_tokens": said["completion"],
                "cached_tokens": server.cached(body["text"], said["prompt"]),
                "finish_reason": {"type": said["finish"]},
            }
            if body.get("stream"):
                self._stream(said, meta)
            else:
                time.sleep(said["step"] * said["completion"])
                self._send({"text": said["text"], "meta_info": meta})
        else:
            text = "\n".join(message["content"] for message in body["messages"])
            said = server.answer(text, body["max_tokens"], is_exact=False, extra=TEMPLATE_TOKENS)
            usage: dict[str, Any] = {
                "prompt_tokens": said["prompt"],
                "completion_tokens": said["completion"],
                "prompt_tokens_details": None,
            }
            if server.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": server.cached_tokens}
            time.sleep(said["step"] * said["completion"])
            choice = {"message": {"content": said["text"]}, "finish_reason": said["finish"]}
            self._send({"choices": [choice], "usage": usage})

    def _is_dead(self) -> bool:
        """Cut the connection, as a server does that was killed."""
        if self.standin.requests < self.standin.dies_after:
            return False
        self.close_connection = True
        return True

    def _stream(self, said: dict[str, Any], meta: dict[str, Any]) -> None:
        """Send an answer token by token, as SGLang does: the text so far in each event."""
        server = self.standin
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with server.lock:
            server.running += 1
        is_gone = False
        try:
            for count in range(1, said["completion"] + 1):
                is_last = count == said["completion"]
                now = {**meta, "completion_tokens": count}
                now["finish_reason"] = meta["finish_reason"] if is_last else None
                event = {"text": said["text"], "meta_info": now}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                if server.tears_streams and count > 1:
                    return
                time.sleep(said["step"])
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            is_gone = True
        finally:
            with server.lock:
                server.running -= 0 if is_gone and server.keeps_cancelled else 1

    def _send(self, content: Any, status: int = 200, kind: str = "application/json") -> None:
        page = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


@contextmanager
def serving(**faults: Any) -> Iterator[StandIn]:
    """Serve a stand-in on a free port of this machine until the block ends."""
    standin = StandIn(**faults)
    handler = type("Handler", (_Handler,), {"standin": standin})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
