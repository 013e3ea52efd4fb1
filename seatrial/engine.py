"""The HTTP door: what users and operators of SGLang and its router use, and nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

import requests

from seatrial.errors import SeatrialError

CONNECT_SECONDS = 5.0

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
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    finish_reason: str
    seconds: float


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
    ) -> None:
        self._on_request = on_request
        self.url = url.rstrip("/")
        self._timeout = (CONNECT_SECONDS, timeout_seconds)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the operator's shell is not the users' door
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
        finish = _mapping(_mapping(meta).get("finish_reason")).get("type")
        return self._answer("/generate", _mapping(content).get("text"), meta, finish, seconds)

    def chat(self, message: str, tokens: int) -> Answer:
        """Send one user message greedily and return the reply of at most ``tokens``.

        Raises:
            EngineError: no answer, an error status, or an answer without token counts.
        """
        body = {
            "model": self.model(),
            "messages": [{"role": "user", "content": message}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        start = time.monotonic()
        content = _mapping(self._post("/v1/chat/completions", body))
        seconds = time.monotonic() - start
        choices = content.get("choices")
        choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
        text = _mapping(choice.get("message")).get("content")
        usage = dict(_mapping(content.get("usage")))
        details = _mapping(usage.get("prompt_tokens_details"))
        usage.setdefault("cached_tokens", details.get("cached_tokens"))
        finish = choice.get("finish_reason")
        # A model that stops at once answers with null instead of an empty text.
        return self._answer("/v1/chat/completions", text or "", usage, finish, seconds)

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
        return self._request("GET", path).status_code == HTTPStatus.OK

    def metrics(self, name: str) -> list[Sample]:
        """Return the samples of metric ``name`` on the server's own ``/metrics`` page.

        Raises:
            EngineError: no answer, or an error status.
        """
        page = self._checked(self._request("GET", "/metrics")).text
        return [sample for sample in parse_metrics(page) if sample.name == name]

    def _get_json(self, path: str) -> object:
        return self._json(self._checked(self._request("GET", path)))

    def _post(self, path: str, body: dict[str, Any]) -> object:
        return self._json(self._checked(self._request("POST", path, body)))

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> requests.Response:
        self._on_request()
        try:
            return self._session.request(
                method, f"{self.url}{path}", json=body, timeout=self._timeout
            )
        except requests.Timeout:
            raise EngineUnreachableError(
                f"{self.url}{path} did not answer within {self._timeout[1]:g} s"
            ) from None
        except requests.RequestException as error:
            raise EngineUnreachableError(
                f"{self.url}{path} cannot be reached: {_reason(error)}"
            ) from None

    def _checked(self, response: requests.Response) -> requests.Response:
        if response.ok:
            return response
        said = " ".join(response.text.split())[:200]
        raise EngineRefusedError(f"{response.url} answered {response.status_code}: {said}")

    def _json(self, response: requests.Response) -> object:
        try:
            content: object = response.json()
        except requests.JSONDecodeError:
            raise EngineRefusedError(
                f"{response.url} answered something that is not JSON"
            ) from None
        return content

    def _answer(
        self, path: str, text: object, counts: object, finish: object, seconds: float
    ) -> Answer:
        usage = _mapping(counts)
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
            finish_reason=str(finish),
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


def parse_metrics(page: str) -> list[Sample]:
    """Return the samples of a page in Prometheus' text format; comments are left out."""
    samples = []
    for line in page.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        labels = {key: _unescaped(value) for key, value in _LABEL.findall(found["labels"] or "")}
        samples.append(Sample(found["name"], labels, float(found["value"])))
    return samples


def _unescaped(value: str) -> str:
    """Undo the escapes of a label value."""
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else str(found[1]), value)


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
