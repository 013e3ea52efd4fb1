"""The HTTP client says what a server said, or one clear sentence."""

from __future__ import annotations

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
