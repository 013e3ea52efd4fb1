"""Tokens per second of a short load, as Prometheus counted them and as we did."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from seatrial.cell import Cell
from seatrial.engine import Answer, Engine
from seatrial.haystack import Layout, Ruler, ask_at_length, build
from seatrial.prometheus import Increase, Prometheus, measured_load, selector
from seatrial.thresholds import Throughput
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.throughput

NO_NEEDLE = Layout(())


@dataclass
class Load:
    """The one load of this run, and what both sides counted of it."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    counted: dict[str, Increase] = field(default_factory=dict)


@pytest.fixture(scope="module")
def load(cell: Cell, prometheus: Prometheus, router: Engine, ruler: Ruler, run: Any) -> Load:
    """Run the load once, between two scrapes of the real Prometheus."""
    bounds: Throughput = run.thresholds.section("throughput")
    done = Load()
    # Before the window opens, so that its own tokens are not counted: learn how long a prompt is.
    characters = _characters(router, ruler, run.seed, bounds.prompt_tokens)

    def work() -> float:
        seeds = range(run.seed + 1, run.seed + 1 + bounds.requests)

        def one(seed: int) -> Answer:
            return router.generate(
                build(seed, characters, NO_NEEDLE), bounds.answer_tokens, is_exact=True
            )

        start = time.monotonic()
        with ThreadPoolExecutor(bounds.concurrency) as pool:
            done.answers = list(pool.map(one, seeds))
        return time.monotonic() - start

    done.seconds, done.counted = measured_load(
        prometheus,
        {
            "generation": selector(
                "generation_tokens_total",
                [server.instance for server in cell.with_roles("decode", "combined")],
            ),
            "prompt": selector(
                "prompt_tokens_total",
                [server.instance for server in cell.with_roles("prefill", "combined")],
            ),
        },
        work,
        bounds.scrape_seconds,
    )
    return done


def _characters(router: Engine, ruler: Ruler, seed: int, tokens: int) -> int:
    """Return how many characters make ``tokens``, as this server counts."""
    ask_at_length(lambda text: router.generate(text, 1), ruler, seed, tokens, NO_NEEDLE)
    return ruler.characters(tokens, NO_NEEDLE)


def test_load_generates_tokens_fast_enough(gate: Recorder, load: Load, bounds: Throughput) -> None:
    """The cell generates tokens at the rate that its users were promised."""
    measured, bound = _rate(
        gate,
        load,
        "generation",
        bounds.generation_tokens_per_second_min,
        bounds.client_agreement_ratio_min,
        lambda answer: answer.completion_tokens,
    )
    assert measured >= bound


def test_load_reads_prompts_fast_enough(gate: Recorder, load: Load, bounds: Throughput) -> None:
    """The cell reads prompts at the rate that its users were promised."""
    measured, bound = _rate(
        gate,
        load,
        "prompt",
        bounds.prompt_tokens_per_second_min,
        bounds.client_agreement_ratio_min,
        lambda answer: answer.prompt_tokens,
    )
    assert measured >= bound


def _rate(
    gate: Recorder,
    load: Load,
    name: str,
    bound: float,
    agreement_min: float,
    tokens: Callable[[Answer], int],
) -> tuple[float, float]:
    """Record a rate; refuse it when Prometheus and we counted different loads."""
    counted, ours = load.counted[name].amount, sum(tokens(answer) for answer in load.answers)
    agreement = min(counted, ours) / max(counted, ours, 1)
    if not agreement >= agreement_min:
        raise InvalidMeasurementError(
            f"Prometheus counted {counted:.0f} {name} tokens, the load's own answers {ours}: "
            "somebody else used the cell meanwhile, or the metric does not count what it says."
        )
    return gate.record(
        counted / load.seconds,
        at_least=bound,
        unit="tok/s",
        samples=len(load.answers),
        message=(
            f"{counted:.0f} {name} tokens in {load.seconds:.1f} s by Prometheus "
            f"({load.counted[name].scrapes} scrapes), {ours} by the answers."
        ),
        next_step="Compare server arguments with last_good, and look for another load on the host.",
    )
