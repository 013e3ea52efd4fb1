"""The cell answers: in bursts, beside a long prefill, after an idle time, when clients hang up.

SGLang's `/health` is not asked for a verdict. It answers 200 after its scheduler has died, as long
as its HTTP server lives, and 503 beside a long prefill that delays its own probe. An own one-token
request through the cell's door decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import pytest

from seatrial import canary, counters
from seatrial.canary import Reply
from seatrial.cell import Cell
from seatrial.details import Item, Point, Series
from seatrial.engine import Engine, EngineError
from seatrial.haystack import START, Ruler, ask_at_length
from seatrial.load import Bursts, at_once
from seatrial.statistics import wilson_interval
from seatrial.thresholds import Liveness
from seatrial.trend import decay_probability
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.liveness

RUNNING = "num_running_reqs"
QUEUED = "num_queue_reqs"
LOOK_SECONDS = 0.25
WINDOWS = 10
"""Parts of the order of requests that a plot shows."""


@pytest.fixture(scope="module")
def burst(router: Engine, ruler: Ruler, run: Any) -> list[Reply | None]:
    """Send canaries in bursts; return what came back, in the order in which they were asked."""
    bounds: Liveness = run.thresholds.section("liveness")
    # One alone first, which teaches the ruler how long a prompt is.
    replies = [_reply(router, ruler, run.seed, bounds.burst_prompt_tokens)]
    bursts: Bursts[Reply] = Bursts(bounds.bursts, bounds.burst_pause_seconds)
    bursts.send(
        (
            partial(canary.send, router.chat, ruler, run.seed + number, bounds.burst_prompt_tokens)
            for number in range(1, bounds.burst_requests)
        ),
        until=lambda: False,
    )
    return [*replies, *bursts.replies]


@pytest.mark.each_launch
def test_bursts_are_answered_rightly(
    gate: Recorder, burst: list[Reply | None], bounds: Liveness
) -> None:
    """Bursts of short requests are answered, and rightly: steady load misses what bursts find."""
    right = sum(reply is not None and reply.is_right for reply in burst)
    lost = sum(reply is None for reply in burst)
    low, high = wilson_interval(right, len(burst))
    wrong = [one.answer.text.strip() for one in burst if one is not None and not one.is_right]
    gate.details.items += [
        Item(
            key=reply.key if reply is not None else f"lost/{order}",
            order=order,
            is_right=reply is not None and reply.is_right,
            said="" if reply is None or reply.is_right else reply.answer.text.strip()[:60],
        )
        for order, reply in enumerate(burst)
    ]
    measured, bound = gate.record(
        right / len(burst),
        at_least=bounds.burst_right_ratio_min,
        unit="of answers right",
        samples=len(burst),
        message=(
            f"{right} of {len(burst)} right (95 % interval {low:.2f}-{high:.2f}), {lost} without "
            "an answer" + (f"; one said {wrong[0][:60]!r}." if wrong else ".")
        ),
        next_step=(
            "Ask the same alone: if it is right then, look for what requests share (caches, "
            "batching, buffers of the kernels)."
        ),
    )
    assert measured >= bound


def test_answers_do_not_get_worse_with_time(
    gate: Recorder, burst: list[Reply | None], bounds: Liveness
) -> None:
    """Wrong answers do not pile up at the end: a decay is a fault even where the mean passes."""
    outcomes = [reply is not None and reply.is_right for reply in burst]
    if not any(outcomes):
        raise InvalidMeasurementError("No answer was right, so nothing can be said of their order.")
    gate.details.series.append(_order(outcomes))
    measured, bound = gate.record(
        decay_probability(outcomes),
        at_least=bounds.trend_p_min,
        unit="p of this order by chance",
        samples=len(outcomes),
        message=f"{outcomes.count(False)} of {len(outcomes)} wrong, by order {_thirds(outcomes)}.",
        next_step="Something wears out: look for leaks of slots or pages, and at memory over time.",
    )
    assert measured >= bound


def test_one_token_comes_in_time_beside_a_long_prefill(
    gate: Recorder, router: Engine, ruler: Ruler, bounds: Liveness
) -> None:
    """Paced one-token requests are answered in time while a long prefill runs."""
    seed = next(gate.seeds())
    prefill = partial(
        ask_at_length,
        lambda text: router.chat(text, canary.ANSWER_TOKENS),
        ruler,
        seed,
        bounds.prefill_tokens,
        START,
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(prefill)
        seconds, health = [], []
        for number in range(bounds.probes):
            seconds.append(_probe(router, f"Probe {seed} {number}: the harbour is"))
            health.append(_health(router))
            time.sleep(bounds.probe_interval_seconds)
        running.result()
    in_time = sum(one is not None and one <= bounds.probe_seconds_max for one in seconds)
    slowest = max((one for one in seconds if one is not None), default=float("nan"))
    measured, bound = gate.record(
        in_time / len(seconds),
        at_least=bounds.probe_answered_ratio_min,
        unit="of probes in time",
        samples=len(seconds),
        message=(
            f"The slowest took {slowest:.2f} s of {bounds.probe_seconds_max:g} allowed, "
            f"{seconds.count(None)} got no answer; /health, which is not judged, was "
            f"{health.count('200')} times 200{_others(health)}."
        ),
        next_step="If nothing answers, the scheduler is dead: restart, and read its journal.",
    )
    assert measured >= bound


def test_cancelled_requests_leave_nothing_behind(
    gate: Recorder,
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    connect: Callable[[str], Engine],
    bounds: Liveness,
) -> None:
    """Clients that hang up under load free their places, and disturb nobody else's answer."""
    seeds = gate.seeds()
    leaving = [
        partial(router.stream, f"Journal {next(seeds)}: the harbour is", 512, leave_after=2)
        for _ in range(bounds.cancelled_requests)
    ]
    staying = [
        partial(canary.send, router.chat, ruler, next(seeds), bounds.burst_prompt_tokens)
        for _ in range(bounds.cancelled_requests)
    ]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(at_once, leaving, len(leaving))
        stayed = at_once(staying, len(staying))
        gone = others.result()
    hung_up = sum(one.finish_reason == "left" for one in gone.whole)
    urls = [(server.label, server.url) for server in cell.engines] or [(cell.name, cell.router_url)]
    left = _unsettled([(label, connect(url)) for label, url in urls], bounds.settle_seconds)
    after = at_once(
        [partial(canary.send, router.chat, ruler, next(seeds), bounds.burst_prompt_tokens)], 1
    )
    replies = [*stayed.answers, *after.answers]
    right = sum(reply is not None and reply.is_right for reply in replies)
    good = 0 if left else right
    measured, bound = gate.record(
        good / len(replies),
        at_least=bounds.burst_right_ratio_min,
        unit="of others' answers right",
        samples=len(replies),
        message=(
            f"{hung_up} clients hung up; {right} of {len(replies)} others were answered "
            "rightly"
            + (
                f"; still running after {bounds.settle_seconds:g} s: {', '.join(left)}."
                if left
                else "."
            )
        ),
        next_step="Requests of clients that are gone hold slots and KV cache: see abort_request.",
    )
    if measured >= bound and hung_up < len(leaving):
        why = gone.problems[0] if gone.problems else "the answer was over before"
        raise InvalidMeasurementError(
            f"{hung_up} of {len(leaving)} clients could hang up in the middle of an answer: {why}."
        )
    assert measured >= bound


@pytest.mark.each_launch
def test_cell_answers_after_an_idle_time(
    gate: Recorder, router: Engine, ruler: Ruler, bounds: Liveness
) -> None:
    """A cell that nobody asked for a while answers the next request rightly and in time."""
    time.sleep(bounds.idle_seconds)
    seed = next(gate.seeds())
    reply = _reply(router, ruler, seed, bounds.burst_prompt_tokens)
    is_good = (
        reply is not None and reply.is_right and reply.answer.seconds <= bounds.probe_seconds_max
    )
    told = "no answer" if reply is None else f"an answer in {reply.answer.seconds:.2f} s"
    right = "" if reply is None or reply.is_right else f", but it said {reply.answer.text[:60]!r}"
    measured, bound = gate.record(
        1.0 if is_good else 0.0,
        at_least=1.0,
        unit="of probes answered",
        samples=1,
        message=f"After {bounds.idle_seconds:g} s idle: {told}{right}.",
        next_step="Look at sleep-on-idle, keep-alive of the router's connections, and watchdogs.",
    )
    assert measured >= bound


def _reply(router: Engine, ruler: Ruler, seed: int, tokens: int) -> Reply | None:
    """Return what came back to one canary, or None."""
    try:
        return canary.send(router.chat, ruler, seed, tokens)
    except EngineError:
        return None


def _probe(router: Engine, text: str) -> float | None:
    """Return how long one token took, or None if there was no answer."""
    try:
        return router.generate(text, 1).seconds
    except EngineError:
        return None


def _health(router: Engine) -> str:
    """Return the status of `/health`, for the message alone."""
    try:
        return "200" if router.is_ready("/health") else "503"
    except EngineError:
        return "silent"


def _others(health: Sequence[str]) -> str:
    others = sorted({one for one in health if one != "200"})
    return f", else {', '.join(others)}" if others else " and nothing else"


def _unsettled(engines: list[tuple[str, Engine]], seconds: float) -> list[str]:
    """Return which engines still run or queue a request after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        busy = []
        for label, engine in engines:
            told = counters.read(engine, label, (RUNNING, QUEUED)).values
            if sum(told.values()) > 0:
                busy.append(f"{label}: {sum(told.values()):.0f}")
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(LOOK_SECONDS)


def _order(outcomes: Sequence[bool]) -> Series:
    """Return the share of right answers over the order of requests."""
    size = max(1, -(-len(outcomes) // WINDOWS))
    parts = [list(islice(outcomes, at, at + size)) for at in range(0, len(outcomes), size)]
    points = []
    for number, part in enumerate(parts):
        low, high = wilson_interval(sum(part), len(part))
        points.append(Point(x=number * size + 1, y=sum(part) / len(part), low=low, high=high))
    return Series(
        title="Right answers by order of requests",
        x_label="request",
        y_label="of answers right",
        points=points,
    )


def _thirds(outcomes: Sequence[bool]) -> str:
    size = max(1, -(-len(outcomes) // 3))
    parts = [outcomes[at : at + size] for at in range(0, len(outcomes), size)]
    return " / ".join(f"{part.count(False)}" for part in parts)
