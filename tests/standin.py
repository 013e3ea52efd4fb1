"""A tiny server in this process that speaks SGLang's and Prometheus' wire formats, with faults.

It recalls needles as a model would, streams, counts what it does on `/metrics` and in the answers
of its Prometheus, and takes the time that it is told to take. Every fault that the mutation pack
plants is an attribute of :class:`StandIn`. With ``engine`` it stands before a real SGLang, which
answers and counts the tokens, and spoils what comes back.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TEMPLATE_TOKENS = 7  # what a chat template adds to a prompt
QUESTION = re.compile(r"(?:What is )?([Tt]he secret code[\w ]*?)(?: is|\?)$")
EDGES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf)
HANG_SECONDS = 30.0
"""How long a request to a hung server is kept waiting; longer than any client of a test waits."""
ENGINE_SECONDS = 180.0
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "queue_time_seconds",
)


@dataclass(frozen=True)
class Needle:
    """The needle that a prompt asks for.

    Attributes:
        value: what is asked for.
        behind: words between the needle and the end.
        depth: where it stands, 0 (start) to 1 (end).
    """

    value: str
    behind: int
    depth: float


def asked_needle(text: str) -> Needle | None:
    """Return the needle that the end of the text asks for, if the text has it."""
    asked = QUESTION.search(text)
    if asked is None:
        return None
    name = asked[1][0].upper() + asked[1][1:]
    found = [*re.finditer(rf"{name} is ([A-Z0-9]+(?:-[A-Z0-9]+)+)\.", text)]
    if not found:
        return None
    last = found[-1]
    return Needle(last[1], len(text[last.end() :].split()), last.start() / len(text))


@dataclass
class Said:
    """One answer: its words and what is counted of it."""

    words: list[str]
    prompt: int
    cached: int
    is_aborted: bool = False
    tokens: int | None = None
    """As the real engine counted; a stand-in's token is a word."""

    @property
    def text(self) -> str:
        """What the model said."""
        return " ".join(self.words)


@dataclass
class StandIn:
    """A server of one model. Each attribute after ``url`` is a fault that a test switches on.

    A token is a word. The model recalls the needle if no more than ``sees_tokens`` follow it.

    Attributes:
        engine: the URL of a real SGLang; empty: the stand-in makes the answers up.
        loses_residue: modulus and residue of the prompt lengths that lose their needle.
        loses_depths: from where to where, 0 to 1, a needle is lost.
        loses_beside: so many requests at once lose their needles.
        forgets_after: from this request on no needle is recalled.
        decays_after: from this request on every second needle is lost.
        spoils_tail: the tokens after the first are spoiled, as by a KV cache that crossed wrongly.
        spoils_transfers: a needle is lost when another request runs.
        loops_after: from this request on answers repeat themselves.
        aborts_every: one in so many requests is aborted.
        is_hung: no request for tokens is answered, though the HTTP server lives.
        hangs_after_idle: that happens once nothing was asked for so many seconds.
        is_busy_unhealthy: `/health` answers late and 503 while a long prompt is read.
        prefill_seconds: what a thousand tokens of a prompt take.
        first_seconds: what the first token takes beside that.
        token_seconds: what each later token takes.
        noise: standard deviation of these times in logarithms, request by request.
        slow_every: one in so many requests waits ``slow_seconds`` more for its first token.
        tears_streams: a stream ends after two tokens.
        refuses_streams: no answer is streamed, as behind an entry that forbids it.
        keeps_cancelled: requests of clients that hung up go on running.
        retracts: every request is retracted once.
        transfers: each request's KV cache is sent, and counted.
        fails_transfers: each transfer fails once.
        hides_metrics: the page has none of SGLang's metrics.
        leaks_mib: memory that grows with every request.
        spikes_mib: memory that two long prefills together need.
    """

    url: str = ""
    engine: str = ""
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
    api_key: str = ""
    loses_residue: tuple[int, int] | None = None
    loses_depths: tuple[float, float] | None = None
    loses_beside: float = math.inf
    forgets_after: float = math.inf
    decays_after: float = math.inf
    spoils_tail: bool = False
    spoils_transfers: bool = False
    loops_after: float = math.inf
    aborts_every: int = 0
    is_hung: bool = False
    hangs_after_idle: float = math.inf
    is_busy_unhealthy: bool = False
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    token_seconds: float = 0.0
    noise: float = 0.0
    slow_every: int = 0
    slow_seconds: float = 0.0
    tears_streams: bool = False
    refuses_streams: bool = False
    keeps_cancelled: bool = False
    retracts: bool = False
    transfers: bool = False
    fails_transfers: bool = False
    hides_metrics: bool = False
    leaks_mib: float = 0.0
    spikes_mib: float = 0.0
    # What it has done.
    requests: int = 0
    running: int = 0
    long_running: int = 0
    events: dict[str, int] = field(default_factory=dict)
    last_asked: float = field(default_factory=time.monotonic)
    prefixes: set[str] = field(default_factory=set)
    counters: dict[str, float] = field(default_factory=lambda: {"generation": 1.0, "prompt": 1.0})
    observed: dict[str, list[float]] = field(
        default_factory=lambda: {name: [0.001] for name in HISTOGRAMS}
    )
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)

    def begin(self, text: str) -> int:
        """Count a request that comes in, and return its number."""
        with self.lock:
            self.requests += 1
            self.running += 1
            self.long_running += len(text.split()) > LONG_TOKENS
            idle, self.last_asked = time.monotonic() - self.last_asked, time.monotonic()
            self.is_hung = self.is_hung or (self.requests > 1 and idle > self.hangs_after_idle)
            return self.requests

    def end(self, text: str) -> None:
        """Count a request that is over."""
        with self.lock:
            self.running -= 1
            self.long_running -= len(text.split()) > LONG_TOKENS
            self.last_asked = time.monotonic()

    @property
    def extra_mib(self) -> float:
        """Memory that the faults use now."""
        spike = self.spikes_mib if self.long_running > 1 else 0.0
        return self.leaks_mib * self.requests + spike

    def answer(self, text: str, limit: int, number: int, *, is_exact: bool, extra: int) -> Said:
        """Return the answer to a prompt."""
        words, real = text.split(), None
        seen = " ".join(words[-int(min(len(words), self.truncates_at)) :])
        prompt = len(seen.split()) + extra
        if self.engine:
            sent = seen if len(words) > self.truncates_at else text
            real = self._asked(sent, limit, is_exact=is_exact, is_chat=extra > 0)
            prompt = real.prompt
        said = self._words(seen, prompt, number, real)
        if number > self.loops_after:
            said = ["the", "harbour"] * limit
        said = said[:limit]
        if is_exact and real is None:
            said = (said * (1 + limit // len(said)))[:limit]
        cached = self._cached(text, prompt) if real is None else real.cached
        if self.cached_tokens is not None:
            cached = self.cached_tokens
        is_aborted = bool(self.aborts_every and number % self.aborts_every == 0)
        with self.lock:
            self._count("num_aborted_requests_total", is_aborted)
            self._count("num_retracted_requests_total", self.retracts)
            self._count("kv_transfer_latency_ms_count", self.transfers)
            self._count("num_transfer_failed_reqs_total", self.fails_transfers)
            if not is_aborted:
                counted = 1 - self.uncounted_share
                self.counters["generation"] += (len(said) + (not is_exact)) * counted
                self.counters["prompt"] += prompt * counted
        told = self.prompt_tokens_said
        told = prompt if told is None else told
        tokens = None if real is None or is_aborted else real.tokens
        return Said([] if is_aborted else said, told, cached, is_aborted, tokens)

    def times(self, prompt: int, tokens: int, number: int) -> list[float]:
        """Return how long each token of an answer takes, and count it."""
        noise = random.Random(number).lognormvariate(0, self.noise)
        first = noise * (self.first_seconds + self.prefill_seconds * prompt / 1000)
        if self.slow_every and number % self.slow_every == 0:
            first += self.slow_seconds
        later = noise * self.token_seconds
        with self.lock:
            self.observed["time_to_first_token_seconds"].append(first)
            self.observed["queue_time_seconds"].append(0.001)
            self.observed["inter_token_latency_seconds"] += [later] * (tokens - 1)
        return [first, *[later] * (tokens - 1)]

    def is_healthy(self) -> bool:
        """Say what `/health` says."""
        if self.is_busy_unhealthy and self.long_running:
            self.is_over.wait(0.2)
            return False
        return self.is_ready

    def page(self) -> str:
        """Return the `/metrics` page: what has never happened is not there, as SGLang does it."""
        if self.hides_metrics:
            return self.metrics
        with self.lock:
            lines = [
                f"sglang:num_running_reqs {self.running}.0",
                "sglang:num_queue_reqs 0.0",
                *(f"sglang:{name} {count}" for name, count in self.events.items()),
            ]
        return "\n".join([*lines, self.metrics, ""])

    def scraped(self, query: str) -> list[dict[str, Any]]:
        """Answer a range selector: each question is also a scrape."""
        named = re.search(r"sglang\[:_\](\w+)", query)
        if named is None or self.scrapes == "none":
            return []
        metric = named[1]
        with self.lock:
            now = time.time() - (60 if self.scrapes == "delayed" else 0)
            values = {f"{name}_tokens_total": value for name, value in self.counters.items()}
            for name, observed in self.observed.items():
                for edge in EDGES:
                    values[f"{name}_bucket {edge}"] = sum(value <= edge for value in observed)
            if self.scrapes in {"nan", "zero"}:
                values = dict.fromkeys(values, math.nan if self.scrapes == "nan" else 0.0)
            if self.scrapes == "frozen" and self.samples:
                values = self.samples[0][1]
            if self.scrapes == "reset" and self.samples:
                values = {name: value / (len(self.samples) + 1) for name, value in values.items()}
            if self.scrapes == "missing":
                values.pop(f"{metric}", None)
            if self.scrapes != "stale" or not self.samples:
                self.samples.append((now, values))
            samples = list(self.samples)
        series = [name for name in samples[-1][1] if name.partition(" ")[0] == metric]
        return [
            {
                "metric": {"le": _edge(name)} if " " in name else {},
                "values": [[at, str(found[name])] for at, found in samples if name in found],
            }
            for name in series
        ]

    def _count(self, event: str, happened: bool) -> None:
        if happened:
            self.events[event] = self.events.get(event, 0) + 1

    def _asked(self, text: str, limit: int, *, is_exact: bool, is_chat: bool) -> Said:
        """Let the real engine answer."""
        body: dict[str, Any] = {
            "text": text,
            "sampling_params": {
                "max_new_tokens": limit,
                "ignore_eos": is_exact,
                "temperature": 0,
            },
        }
        if is_chat:
            message = {"role": "user", "content": text}
            body = {"model": "m", "messages": [message], "max_tokens": limit, "temperature": 0}
        request = urllib.request.Request(
            f"{self.engine}/{'v1/chat/completions' if is_chat else 'generate'}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ENGINE_SECONDS) as response:
            answer = json.load(response)
        if is_chat:
            said, used = answer["choices"][0]["message"]["content"], answer["usage"]
            return Said(said.split(), used["prompt_tokens"], 0, tokens=used["completion_tokens"])
        meta = answer["meta_info"]
        return Said(
            answer["text"].split(),
            meta["prompt_tokens"],
            meta["cached_tokens"],
            tokens=meta["completion_tokens"],
        )

    def _words(self, seen: str, prompt: int, number: int, real: Said | None) -> list[str]:
        needle = asked_needle(seen)
        if needle is None and real is not None:
            return real.words
        if needle is None or self._is_lost(needle, prompt, number):
            return ["I", "do", "not", "know."]
        if self.spoils_tail:
            return [f"{needle.value.partition('-')[0]}-0000-NOTHING."]
        return real.words if real is not None else [f"{needle.value}."]

    def _is_lost(self, needle: Needle, prompt: int, number: int) -> bool:
        if needle.behind > self.sees_tokens or self.running >= self.loses_beside:
            return True
        if number > self.forgets_after or (number > self.decays_after and number % 2):
            return True
        if self.spoils_transfers and self.running > 1:
            return True
        if self.loses_depths is not None:
            low, high = self.loses_depths
            if low <= needle.depth <= high:
                return True
        if self.loses_residue is None:
            return False
        modulus, residue = self.loses_residue
        return prompt % modulus == residue

    def _cached(self, text: str, tokens: int) -> int:
        """Return how many of a prompt's tokens stood in the one before it, and keep it."""
        prefix = text.partition("\n\n")[0]
        with self.lock:
            is_known = prefix in self.prefixes
            self.prefixes.add(prefix)
        return max(0, tokens - 10) if is_known else 0


LONG_TOKENS = 300
"""A prompt longer than this counts as a long prefill."""


def _edge(name: str) -> str:
    edge = name.partition(" ")[2]
    return "+Inf" if edge == "inf" else edge


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Or each answer would wait 40 ms for the client's delayed acknowledgement of its headers.
    disable_nagle_algorithm = True
    standin: StandIn

    def log_message(self, *_: Any) -> None:
        """Say nothing: the test's output is the gates'."""

    def do_GET(self) -> None:
        """Answer what is read."""
        if self._is_dead():
            return
        url = urlsplit(self.path)
        server = self.standin
        if url.path in {"/ready", "/readiness", "/health"}:
            self._send({}, 200 if server.is_healthy() else 503)
        elif url.path == "/metrics":
            self._send(server.page(), kind="text/plain")
        elif url.path == "/api/v1/query":
            query = parse_qs(url.query)["query"][0]
            result: Any = [time.time(), str(time.time())] if query == "time()" else None
            self._send({"data": {"result": result or server.scraped(query)}})
        elif self._is_refused():
            return
        elif url.path == "/server_info":
            self._send(server.info)
        elif url.path == "/workers":
            self._send({"workers": [{"url": worker} for worker in server.workers]})
        elif url.path == "/v1/models":
            self._send({"data": [{"id": "stand-in"}]})
        else:
            self._send({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        """Answer what is asked."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_dead() or self._is_refused():
            return
        server = self.standin
        text = body.get("text") or "\n".join(one["content"] for one in body["messages"])
        if len(text.split()) > server.context_tokens:
            self._send({"object": "error", "message": "The input is longer than the context."}, 400)
            return
        if server.refuses_streams and body.get("stream"):
            self._send({"error": "Nothing is streamed here."}, 403)
            return
        number = server.begin(text)
        try:
            if server.is_hung:
                server.is_over.wait(HANG_SECONDS)
                self.close_connection = True
            elif self.path == "/generate":
                self._generate(server, body, text, number)
            else:
                self._chat(server, body, text, number)
        except (BrokenPipeError, ConnectionResetError):
            if server.keeps_cancelled:
                server.is_over.wait(HANG_SECONDS)
        finally:
            server.end(text)

    def _generate(self, server: StandIn, body: dict[str, Any], text: str, number: int) -> None:
        given = body["sampling_params"]
        limit, is_exact = given["max_new_tokens"], given["ignore_eos"]
        said = server.answer(text, limit, number, is_exact=is_exact, extra=0)
        tokens = len(said.words) + (not is_exact and not said.is_aborted)
        tokens = tokens if said.tokens is None else said.tokens
        times = server.times(said.prompt, tokens, number) if tokens else [0.0]
        if not body.get("stream"):
            server.is_over.wait(sum(times))
            self._send({"text": said.text, "meta_info": _meta(said, tokens, is_last=True)})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for count, seconds in enumerate(times, start=1):
            server.is_over.wait(seconds)
            meta = _meta(said, count, is_last=count == len(times))
            self._event({"text": " ".join(said.words[:count]), "meta_info": meta})
            if server.tears_streams and count > 1:
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def _chat(self, server: StandIn, body: dict[str, Any], text: str, number: int) -> None:
        limit = body["max_tokens"]
        said = server.answer(text, limit, number, is_exact=False, extra=TEMPLATE_TOKENS)
        server.is_over.wait(sum(server.times(said.prompt, len(said.words) + 1, number)))
        usage: dict[str, Any] = {
            "prompt_tokens": said.prompt,
            "completion_tokens": len(said.words) + 1 if said.tokens is None else said.tokens,
            # SGLang tells this only with --enable-cache-report.
            "prompt_tokens_details": None,
        }
        if server.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": said.cached}
        finish = "abort" if said.is_aborted else "stop"
        self._send(
            {
                "choices": [{"message": {"content": said.text}, "finish_reason": finish}],
                "usage": usage,
            }
        )

    def _is_dead(self) -> bool:
        """Cut the connection, as a server does that was killed."""
        if self.standin.requests < self.standin.dies_after:
            return False
        self.close_connection = True
        return True

    def _is_refused(self) -> bool:
        """Refuse who has not the key."""
        key = self.standin.api_key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send({"error": "Unauthorized"}, 401)
        return True

    def _send(self, content: Any, status: int = 200, kind: str = "application/json") -> None:
        page = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst of connections beyond the queue would wait for TCP to try again, for a second or more.
    request_queue_size = 128


def _meta(said: Said, count: int, *, is_last: bool) -> dict[str, Any]:
    finish: dict[str, Any] | None = {"type": "length"} if is_last else None
    if said.is_aborted:
        finish = {"type": "abort", "message": "Aborted", "status_code": 503}
    return {
        "prompt_tokens": said.prompt,
        "completion_tokens": 0 if said.is_aborted else count,
        "cached_tokens": said.cached,
        "finish_reason": finish,
    }


@contextmanager
def serving(**faults: Any) -> Iterator[StandIn]:
    """Serve a stand-in on a free port of this machine until the block ends."""
    standin = StandIn(**faults)
    handler = type("Handler", (_Handler,), {"standin": standin})
    server = _Server(("127.0.0.1", 0), handler)
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield standin
    finally:
        standin.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
