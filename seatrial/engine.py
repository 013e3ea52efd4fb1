"""The HTTP door: what users and operators of SGLang and its router use, and nothing else."""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any, NoReturn, Self

import requests
import urllib3

from seatrial.errors import SeatrialError

CONNECT_SECONDS = 5.0
PIECE_BYTES = 65536

Message = tuple[str, str]
"""Who speaks (user, assistant), and what."""

_SECRET_FLAG = re.compile(r"(?i)^--\S*(key|token|secret|password)$")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineError(SeatrialError):
    """A server did not do what its users expect of it."""


class EngineUnreachableError(EngineError):
    """No answer came: the connection was refused, was cut, or timed out."""


class EngineRefusedError(EngineError):
    """The server answered with an error status."""


@dataclass(frozen=True)
class Answer:
    """One answer and the server's own account of it.

    Attributes:
        text: what the model said.
        prompt_tokens: tokens of the prompt, as the server counts them.
        completion_tokens: tokens of the answer, as the server counts them.
        cached_tokens: tokens of the prompt that came from the prefix cache; None if not told.
        finish_reason: "stop", "length", "abort", as the server says.
        seconds: from sending the request to its whole answer.
        asked_tokens: tokens that the answer was asked for, at most or (``is_exact``) exactly.
        is_exact: the model was not allowed to end by itself.
        first_seconds: from sending the request to its first token; None unless streamed.
        gap_seconds: between the tokens that followed, one number per token; empty unless streamed.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    finish_reason: str
    seconds: float
    asked_tokens: int = 0
    is_exact: bool = False
    first_seconds: float | None = None
    gap_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One line of a ``/metrics`` page."""

    name: str
    labels: dict[str, str]
    value: float


class Engine:
    """A server that speaks SGLang's HTTP API: an engine, its router, or an entry before them."""

    def __init__(
        self,
        url: str,
        timeout_seconds: float,
        api_key: str | None = None,
        on_request: Callable[[], None] = lambda: None,
        on_answer: Callable[[Answer], None] = lambda _answer: None,
    ) -> None:
        self._on_request = on_request
        self.url = url.rstrip("/")
        self._on_answer = on_answer
        self._timeout = (CONNECT_SECONDS, timeout_seconds)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the operator's shell is not the users' door
        self._session.headers["Accept-Encoding"] = "identity"  # a stream is read as it comes
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def generate(self, text: str, tokens: int, *, is_exact: bool = False) -> Answer:
        """Continue ``text`` greedily by at most ``tokens``, or by exactly that many.

        Raises:
            EngineError: no answer, an error status, or an answer without token counts.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": is_exact}
        start = time.monotonic()
        content = self._post("/generate", {"text": text, "sampling_params": sampling})
        seconds = time.monotonic() - start
        meta = _mapping(content).get("meta_info")
        answer = self._answer("/generate", _mapping(content).get("text"), meta, seconds)
        return self._seen(replace(answer, asked_tokens=tokens, is_exact=is_exact))

    def selected(
        self, text: str, tokens: int, width: int
    ) -> tuple[Answer, tuple[frozenset[int], ...]] | None:
        """Continue ``text`` and return which entries the sparse attention saw, layer by layer.

        Those of the prompt's last token, with which the answer begins. SGLang returns int32 of
        (tokens - 1) x layers x ``width``, -1 where fewer were selected, for a server started with
        ``--enable-return-indexer-topk``; None from a server that was not.

        Raises:
            EngineError: no answer, or a selection of another size.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling, "return_indexer_topk": True}
        start = time.monotonic()
        content = _mapping(self._post("/generate", body))
        meta = _mapping(content.get("meta_info"))
        answer = self._answer("/generate", content.get("text"), meta, time.monotonic() - start)
        said = meta.get("indexer_topk")
        if not isinstance(said, str):
            return None
        try:
            values = array("i", b64decode(said))
        except ValueError:
            raise EngineRefusedError(f"{self.url} returned a selection that is no int32") from None
        rows = answer.prompt_tokens + answer.completion_tokens - 1
        layers, rest = divmod(len(values), rows * width)
        if rest or not layers:
            raise EngineRefusedError(
                f"{self.url} returned {len(values)} selected entries, which is no multiple of "
                f"{rows} tokens x {width}: it selects with another width"
            )
        first = (answer.prompt_tokens - 1) * layers * width
        row = values[first : first + layers * width]
        parts = (row[width * layer : width * (layer + 1)] for layer in range(layers))
        return self._seen(answer), tuple(frozenset(part) - {-1} for part in parts)

    def stream(
        self, text: str, tokens: int, *, is_exact: bool = False, leave_after: int | None = None
    ) -> Answer:
        """Do what :meth:`generate` does, token by token, and time the tokens as they arrive.

        Args:
            text: what to continue.
            tokens: how many tokens at most, or exactly.
            is_exact: do not let the model end by itself.
            leave_after: hang up after so many tokens, as a client does that went away; the answer
                then has the finish reason "left", unless it was over before.

        Raises:
            EngineError: no answer, an error status, or a stream that ended before it was whole.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": is_exact}
        body = {"text": text, "sampling_params": sampling, "stream": True}
        start = time.monotonic()
        times: list[float] = []
        seen = 0
        has_left = False
        last: dict[str, Any] = {}
        for event in self._events("/generate", body):
            now = time.monotonic() - start
            last = event
            count = _mapping(event.get("meta_info")).get("completion_tokens")
            if isinstance(count, int) and count > tokens + 1:  # one more may end the answer
                raise EngineRefusedError(
                    f"{self.url}/generate counts {count} tokens of {tokens} asked"
                )
            if isinstance(count, int) and count > seen:
                before = times[-1] if times else now
                # Tokens that came in one piece share the time since the piece before.
                step = (now - before) / (count - seen)
                times += [before + step * (index + 1) for index in range(count - seen)]
                seen = count
            if leave_after is not None and seen >= leave_after:
                last = {**event, "meta_info": {**event["meta_info"], "finish_reason": None}}
                has_left = True
                break
        answer = self._answer(
            "/generate", last.get("text"), last.get("meta_info"), time.monotonic() - start
        )
        gaps = tuple(later - earlier for earlier, later in pairwise(times))
        timed = replace(answer, asked_tokens=tokens, is_exact=is_exact, gap_seconds=gaps)
        if has_left:
            return replace(timed, finish_reason="left")
        return self._seen(replace(timed, first_seconds=times[0] if times else None))

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer as they arrive.

        Raises:
            EngineError: no answer, an error status or event, or an end without ``[DONE]``.
        """
        with closing(self._request("POST", path, body)) as response:
            pieces = self._pieces(response, path)
            if not _is_good(response):
                self._refuse(response, path, b"".join(pieces))
            for line in _lines(pieces):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    event = _mapping(_decoded(line[6:]))
                    if "error" in event or not event:
                        said = _shown(str(event.get("error", "nothing that is JSON")))
                        raise EngineRefusedError(f"{self.url}{path} streamed {said}")
                    yield event
        raise EngineUnreachableError(f"{self.url}{path} ended its stream before it was whole")

    def chat(self, message: str | Sequence[Message], tokens: int) -> Answer:
        """Send a user message, or a conversation, greedily; return the reply of at most ``tokens``.

        Raises:
            EngineError: no answer, an error status, or an answer without token counts.
        """
        messages = [("user", message)] if isinstance(message, str) else message
        body = {
            "model": self.model(),
            "messages": [{"role": role, "content": text} for role, text in messages],
            "temperature": 0,
            "max_tokens": tokens,
        }
        start = time.monotonic()
        content = _mapping(self._post("/v1/chat/completions", body))
        seconds = time.monotonic() - start
        choices = content.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        text = choice["message"].get("content") or "" if _mapping(choice.get("message")) else None
        usage = dict(_mapping(content.get("usage")))
        details = _mapping(usage.get("prompt_tokens_details"))
        usage.setdefault("cached_tokens", details.get("cached_tokens"))
        usage["finish_reason"] = choice.get("finish_reason")
        # A model that stops at once answers with null instead of an empty text.
        answer = self._answer("/v1/chat/completions", text, usage, seconds)
        return self._seen(replace(answer, asked_tokens=tokens))

    def model(self) -> str:
        """Return the name under which the server serves its (first) model."""
        if self._model is None:
            content = _mapping(self._get_json("/v1/models"))
            models = content.get("data")
            first = _mapping(models[0]) if isinstance(models, list) and models else {}
            name = first.get("id")
            if not isinstance(name, str):
                raise EngineRefusedError(f"{self.url}/v1/models names no model")
            self._model = name
        return self._model

    def server_info(self) -> dict[str, Any]:
        """Return the server's resolved arguments, as the server tells them.

        Raises:
            EngineError: no answer, an error status, or no JSON object.
        """
        content = self._get_json("/server_info")
        if not isinstance(content, dict):
            raise EngineRefusedError(f"{self.url}/server_info is not a JSON object")
        return content

    def workers(self) -> list[str]:
        """Return the URLs of the servers that a router sends requests to.

        Raises:
            EngineError: no answer, an error status, or no list of workers.
        """
        workers = _mapping(self._get_json("/workers")).get("workers")
        if not isinstance(workers, list):
            raise EngineRefusedError(f"{self.url}/workers names no workers")
        return [str(_mapping(worker).get("url", "")).rstrip("/") for worker in workers]

    def is_ready(self, path: str = "/ready") -> bool:
        """Say whether the server answers ``path`` with 200; a router's path is ``/readiness``.

        Raises:
            EngineUnreachableError: nothing answers at all.
        """
        return self._fetched("GET", path)[0].status_code == HTTPStatus.OK

    def metrics(self, name: str) -> list[Sample]:
        """Return the samples of metric ``name`` on the server's own ``/metrics`` page.

        Raises:
            EngineError: no answer, or an error status.
        """
        return [sample for sample in self.all_metrics() if sample.name == name]

    def all_metrics(self) -> list[Sample]:
        """Return all samples on the server's own ``/metrics`` page.

        Raises:
            EngineError: no answer, or an error status.
        """
        return parse_metrics(self._good("GET", "/metrics").decode("utf-8", "replace"))

    def _get_json(self, path: str) -> object:
        return self._json(path, self._good("GET", path))

    def _post(self, path: str, body: dict[str, Any]) -> object:
        return self._json(path, self._good("POST", path, body))

    def _seen(self, answer: Answer) -> Answer:
        """Show an answer to whoever looks at all of them."""
        self._on_answer(answer)
        return answer

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> requests.Response:
        """Return a response of which only the head was read; nobody is followed elsewhere."""
        self._on_request()
        try:
            return self._session.request(
                method,
                f"{self.url}{path}",
                json=body,
                timeout=self._timeout,
                stream=True,
                allow_redirects=False,
            )
        except requests.Timeout:
            raise self._late(path) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise EngineUnreachableError(
                f"{self.url}{path} cannot be reached: {_reason(error)}"
            ) from None

    def _pieces(self, response: requests.Response, path: str) -> Iterator[bytes]:
        """Yield a body as it comes; no longer than a request may take, however often it comes."""
        ends = time.monotonic() + self._timeout[1]
        try:
            while piece := response.raw.read1(PIECE_BYTES, decode_content=True):
                yield piece
                if time.monotonic() > ends:
                    raise self._late(path)
        except urllib3.exceptions.ReadTimeoutError:
            raise self._late(path) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise EngineUnreachableError(
                f"{self.url}{path} broke off its answer: {_reason(error)}"
            ) from None

    def _late(self, path: str) -> EngineUnreachableError:
        return EngineUnreachableError(
            f"{self.url}{path} did not answer within {self._timeout[1]:g} s"
        )

    def _fetched(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[requests.Response, bytes]:
        with closing(self._request(method, path, body)) as response:
            return response, b"".join(self._pieces(response, path))

    def _good(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the body of an answer that is no error and sends nobody elsewhere."""
        response, content = self._fetched(method, path, body)
        if not _is_good(response):
            self._refuse(response, path, content)
        return content

    def _refuse(self, response: requests.Response, path: str, content: bytes) -> NoReturn:
        status, said = response.status_code, _shown(content.decode("utf-8", "replace"))
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            said = "it wants another API key; name the file that holds it with --api-key-file"
        elif response.is_redirect:
            said = f"it sends its users to {_shown(response.headers['Location'])}; name that URL"
        raise EngineRefusedError(f"{self.url}{path} answered {status}: {said}")

    def _json(self, path: str, content: bytes) -> object:
        value = _decoded(content)
        if value is None:
            raise EngineRefusedError(f"{self.url}{path} answered something that is not JSON")
        return value

    def _answer(self, path: str, text: object, counts: object, seconds: float) -> Answer:
        usage = _mapping(counts)
        finish = usage.get("finish_reason")
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if (
            not isinstance(text, str)
            or not isinstance(prompt, int)
            or not isinstance(completion, int)
        ):
            raise EngineRefusedError(f"{self.url}{path} answered without text and token counts")
        cached = usage.get("cached_tokens")
        return Answer(
            text=text,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached if isinstance(cached, int) else None,
            finish_reason=str(finish.get("type") if isinstance(finish, dict) else finish),
            seconds=seconds,
        )


def launch_command(info: dict[str, Any]) -> str:
    """Return how the server was started, as its ``/server_info`` tells, without secrets."""
    said = info.get("launch_command")
    words = [str(word) for word in said] if isinstance(said, list) else str(said or "").split()
    shown: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and _SECRET_FLAG.search(name):
            shown.append(f"{name}=...")
        elif shown and _SECRET_FLAG.search(shown[-1]):
            shown.append("...")
        else:
            shown.append(word)
    return " ".join(shown) or "unknown"


def model_override(info: dict[str, Any]) -> dict[str, Any]:
    """Return what a server's ``/server_info`` says was changed in the model's configuration."""
    said = info.get("json_model_override_args")
    return said if isinstance(said, dict) else _mapping(_decoded(str(said).encode()))


def parse_metrics(page: str) -> list[Sample]:
    """Return the samples of a page in Prometheus' text format; comments are left out."""
    samples = []
    for line in page.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        labels = {key: _unescaped(value) for key, value in _LABEL.findall(found["labels"] or "")}
        samples.append(Sample(found["name"], labels, _number(found["value"])))
    return samples


def _number(text: str) -> float:
    """Return a number, NaN if it is none: a value that cannot be read is not one of zero."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _unescaped(value: str) -> str:
    """Undo the escapes of a label value."""
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else str(found[1]), value)


def _is_good(response: requests.Response) -> bool:
    return HTTPStatus.OK <= response.status_code < HTTPStatus.MULTIPLE_CHOICES


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines when they come."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)


def _decoded(content: bytes) -> object:
    """Return the JSON value in ``content``, or None; half a character becomes a replacement one."""
    try:
        value: object = json.loads(content.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if b"\\ud" not in content.lower():
        return value
    # A lone surrogate, as broken detokenizing makes it, can stand in no report.
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    whole: object = json.loads(text.decode("utf-16", "replace"))
    return whole


def _shown(said: str) -> str:
    """Return the beginning of a server's words, with nothing that a terminal would obey."""
    words = " ".join(said.split())[:200]
    return "".join(each if each.isprintable() else "?" for each in words)


def _mapping(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _reason(error: BaseException) -> str:
    """Return the innermost reason of a connection error, in a few words."""
    text = str(error)
    for said in ("Connection refused", "No route to host", "Name or service not known"):
        if said in text:
            return said
    inner = error.__context__
    return _reason(inner) if inner is not None else f"{type(error).__name__}"
