"""The HTTP client says what a server said, or one clear sentence."""

from __future__ import annotations

import gzip
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

import pytest

from seatrial.engine import (
    Engine,
    EngineRefusedError,
    EngineUnreachableError,
    launch_command,
    parse_metrics,
)
from seatrial.haystack import END, build
from tests.standin import serving


def test_generate_returns_text_and_counts() -> None:
    """The native interface's counts are the server's own."""
    with serving(cached_tokens=3) as server:
        answer = Engine(server.url, 5).generate("one two three", 4, is_exact=True)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 4, 3)
    assert answer.finish_reason == "length"
    assert answer.seconds > 0


def test_chat_returns_text_and_counts() -> None:
    """The chat interface's counts hold the chat template."""
    with serving() as server:
        answer = Engine(server.url, 5).chat(build(1, 400, END), 9)
    assert answer.text == "ZEBRA-4492-OMEGA."
    assert answer.prompt_tokens > 7
    assert answer.cached_tokens is None


def test_nobody_there_is_one_sentence() -> None:
    """A refused connection is told with the address and without a traceback's words."""
    with pytest.raises(
        EngineUnreachableError, match=r"^http://127.0.0.1:9/generate cannot be reac"
    ):
        Engine("http://127.0.0.1:9", 5).generate("x", 1)


def test_cut_connection_is_unreachable() -> None:
    """A server that dies in the middle of a request did not answer."""
    with serving(dies_after=0) as server, pytest.raises(EngineUnreachableError):
        Engine(server.url, 5).generate("x", 1)


def test_error_status_keeps_what_the_server_said() -> None:
    """The server's own reason reaches the reader."""
    with (
        serving() as server,
        pytest.raises(EngineRefusedError, match=r"answered 404.*no such page"),
    ):
        Engine(f"{server.url}/elsewhere", 5).server_info()


@pytest.mark.parametrize("is_ready", [True, False])
def test_readiness_is_the_status(is_ready: bool) -> None:
    """Not ready is an answer and no error."""
    with serving(is_ready=is_ready) as server:
        assert Engine(server.url, 5).is_ready() is is_ready


def test_workers_are_named_by_url() -> None:
    """A router's workers are comparable with the cell's servers."""
    with serving(workers=["http://10.0.0.1:30000/"]) as server:
        assert Engine(server.url, 5).workers() == ["http://10.0.0.1:30000"]


def test_metrics_page_is_read() -> None:
    """Labels keep their escapes' meaning; comments and other metrics are left out."""
    page = '# HELP a b\na{x="1",y="q\\"\\\\"} 2.5\nb 3 1700000000\nbroken'
    first, second = parse_metrics(page)
    assert (first.name, first.labels, first.value) == ("a", {"x": "1", "y": 'q"\\'}, 2.5)
    assert (second.name, second.labels, second.value) == ("b", {}, 3.0)


@pytest.mark.parametrize(
    "said", [["srv", "--api-key", "hush", "--port", "1"], "srv --api-key hush --port 1"]
)
def test_launch_command_hides_secrets(said: object) -> None:
    """A key on somebody's command line does not get into a report."""
    assert launch_command({"launch_command": said}) == "srv --api-key ... --port 1"
    assert launch_command({"launch_command": "srv --api-key=hush"}) == "srv --api-key=..."


@contextmanager
def saying(said: bytes, head: str = "200 OK", every_seconds: float = 0) -> Iterator[str]:
    """Serve one body to whoever connects, byte by byte if it is slow, and yield the URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                peer = listener.accept()[0]
                with peer, suppress(OSError):
                    take(peer)
                    peer.sendall(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode())
                    for start in range(len(said)) if every_seconds else ():
                        peer.sendall(said[start : start + 1])
                        time.sleep(every_seconds)
                    peer.sendall(b"" if every_seconds else said)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def take(peer: socket.socket) -> None:
    """Read a whole request: what is left unread when a socket closes resets the connection."""
    with peer.makefile("rb") as request:
        heads = [line.lower() for line in takewhile(lambda line: line != b"\r\n", request)]
        request.read(sum(int(head[15:]) for head in heads if head.startswith(b"content-length:")))


def answered(**change: Any) -> bytes:
    """Return an answer of `/generate` that is sound but for a change."""
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "stop"}}
    return json.dumps({"text": "so", "meta_info": counts} | change).encode()


def event(tokens: int) -> bytes:
    """Return one event of a stream."""
    return b"data: " + answered(meta_info={"prompt_tokens": 1, "completion_tokens": tokens})


@pytest.mark.parametrize("is_streamed", [True, False])
def test_answer_that_drips_ends_in_time(is_streamed: bool) -> None:
    """A byte now and then does not lengthen the time that a request may take."""
    start = time.monotonic()
    with (
        saying(answered() * 9, every_seconds=0.05) as url,
        pytest.raises(EngineUnreachableError, match=r"did not answer within 0\.3 s"),
    ):
        (Engine.stream if is_streamed else Engine.generate)(Engine(url, 0.3), "x", 1)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("path", ["/generate", "/health"])
def test_nobody_is_followed_elsewhere(path: str) -> None:
    """A server that sends its users to another one is not ready, and is not judged by that one."""
    with serving() as other, saying(b"", f"307 Away\r\nLocation: {other.url}{path}") as url:
        engine = Engine(url, 5)
        assert not engine.is_ready("/health")
        with pytest.raises(EngineRefusedError, match=f"307: it sends its users to {other.url}"):
            engine.generate("x", 1)
    assert other.requests == 0


def test_half_a_character_is_a_lost_one() -> None:
    """Half of a surrogate pair, which no report can hold, is the replacement character."""
    with saying(answered(text="\ud83d so \U0001f600")) as url:
        answer = Engine(url, 5).generate("x", 1)
    assert answer.text == "\N{REPLACEMENT CHARACTER} so \U0001f600"


def test_error_says_nothing_that_a_terminal_obeys() -> None:
    """Control characters in what a server said do not reach the reader's terminal."""
    with (
        saying(b"\x1b[31mred", "500 No") as url,
        pytest.raises(EngineRefusedError, match=r"500: \?\[31mred"),
    ):
        Engine(url, 5).generate("x", 1)


def test_stream_that_counts_wildly_is_refused() -> None:
    """A count far beyond what was asked is an error, and no list of a billion times."""
    with (
        saying(event(1) + b"\n\n" + event(10**12) + b"\n\n") as url,
        pytest.raises(EngineRefusedError, match="counts 1000000000000 tokens of 4 asked"),
    ):
        Engine(url, 5).stream("x", 4)


def test_compressed_stream_is_read() -> None:
    """An entry before the engine may compress."""
    stream = gzip.compress(event(1) + b"\n\ndata: [DONE]\n\n")
    with saying(stream, "200 OK\r\nContent-Encoding: gzip") as url:
        assert Engine(url, 5).stream("x", 1).completion_tokens == 1


def test_answer_without_a_choice_is_none() -> None:
    """No choice is no answer; an empty one would be a wrong answer of the model."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    page = json.dumps({"data": [{"id": "m"}], "choices": [], "usage": usage})
    with saying(page.encode()) as url, pytest.raises(EngineRefusedError, match="without text"):
        Engine(url, 5).chat("x", 1)


def test_value_that_cannot_be_read_is_not_a_number() -> None:
    """A sample whose value is cut off is not skipped, which would count it as zero."""
    assert math.isnan(parse_metrics("sglang:num_aborted_requests_total 1.0.")[0].value)
