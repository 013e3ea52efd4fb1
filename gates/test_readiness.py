"""The cell answers: its servers say that they are ready, and an own request proves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seatrial.cell import Cell
from seatrial.engine import Engine, EngineError
from seatrial.thresholds import Readiness
from seatrial.verdict import Recorder

pytestmark = [pytest.mark.readiness, pytest.mark.each_launch]


def test_every_server_is_ready(
    gate: Recorder, cell: Cell, connect: Callable[[str], Engine], bounds: Readiness
) -> None:
    """Every server of the cell, router included, says that it is ready."""
    asked = [
        (s.label, s.url, "/readiness" if s.role == "router" else "/ready") for s in cell.servers
    ]
    if not asked:  # by hand: only a URL, which may be an engine or a router
        asked = [(cell.name, cell.router_url, "/health")]
    silent = [
        problem for label, url, path in asked if (problem := _problem(connect(url), label, path))
    ]
    measured, bound = gate.record(
        (len(asked) - len(silent)) / len(asked),
        at_least=bounds.ready_servers_ratio_min,
        unit="of servers ready",
        samples=len(asked),
        message=" ".join(silent),
        next_step="Read the unit's journal on that host: journalctl -u 'sglang-*' -e.",
    )
    assert measured >= bound


def test_own_request_is_answered(gate: Recorder, router: Engine, bounds: Readiness) -> None:
    """A request of our own, through the cell's router, is answered with tokens."""
    text, tokens = "The harbour is", 0
    try:
        answer = router.generate(text, bounds.answer_tokens, is_exact=True)
        tokens = answer.completion_tokens
        message = f"{answer.completion_tokens} tokens in {answer.seconds:.2f} s."
    except EngineError as error:
        message = f"{error}."  # a cell that does not answer makes this claim false, not unknown
    measured, bound = gate.record(
        tokens,
        at_least=bounds.answered_tokens_min,
        unit="tokens",
        samples=1,
        message=message,
        next_step="Read the journal of the router and of both engines; the cell does not serve.",
    )
    assert measured >= bound


def _problem(server: Engine, label: str, path: str) -> str:
    """Return a sentence if the server is not ready, else nothing."""
    try:
        return "" if server.is_ready(path) else f"{label}: {server.url}{path} does not answer 200."
    except EngineError as error:
        return f"{label}: {error}."
