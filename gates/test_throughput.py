"""Tokens per second and latency at several levels of concurrency, as Prometheus and we count them.

What users see is timed here, at the cell's router, token by token; what each role did is read from
Prometheus' counters and histograms over the load's own window. Gauges are not read: SGLang's
`gen_throughput` keeps its last value when nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from seatrial import counters
from seatrial.baseline import Baseline
from seatrial.cell import BY_HAND, Cell, CellServer
from seatrial.counters import Counters
from seatrial.details import Comparison, Point, Series
from seatrial.engine import Answer, Engine
from seatrial.haystack import Layout, Ruler, ask_at_length, build
from seatrial.load import Load, at_once, first_token_seconds, gap_seconds, quantile
from seatrial.prometheus import Prometheus, PrometheusError, Window, measured_load, selector
from seatrial.ratio import RatioError, RatioInterval, compare
from seatrial.thresholds import Throughput
from seatrial.verdict import InconclusiveError, InvalidMeasurementError, Recorder

pytestmark = pytest.mark.throughput

NO_NEEDLE = Layout(())
ROUTER = "router"
RATE, FIRST = "tokens_per_second", "first_token_seconds"


@dataclass
class Level:
    """One level of concurrency: its loads, one per repeat, and what Prometheus counted meanwhile.

    Attributes:
        counted: None where there is no Prometheus.
        problem: why Prometheus' numbers are not believed; empty if they are.
    """

    concurrency: int
    loads: list[Load[Answer]] = field(default_factory=list)
    counted: Window | None = None
    problem: str = ""

    @property
    def answers(self) -> list[Answer]:
        """The whole answers of all repeats."""
        return [answer for load in self.loads for answer in load.whole]

    @property
    def seconds(self) -> float:
        """How long its loads took together."""
        return sum(load.seconds for load in self.loads)

    @property
    def rate(self) -> float:
        """Generated tokens per second, as the answers say."""
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds


@dataclass
class Loads:
    """All levels of this run, and how the engines' counters of mishaps grew."""

    levels: list[Level] = field(default_factory=list)
    mishaps: dict[str, float] = field(default_factory=dict)

    @property
    def highest(self) -> Level:
        """The level that is judged."""
        return max(self.levels, key=lambda level: level.concurrency)


@pytest.fixture(scope="module")
def loads(cell: Cell, router: Engine, ruler: Ruler, run: Any, connect: Any) -> Loads:
    """Run each level once, and the highest in repeats, between two scrapes of Prometheus."""
    bounds: Throughput = run.thresholds.section("throughput")
    # Before a window opens, so that its own tokens are not counted: learn how long a prompt is, and
    # stream one answer, so that every series that the window needs is there.
    characters = _characters(router, ruler, run.seed, bounds.prompt_tokens)
    router.stream(build(run.seed, characters, NO_NEEDLE), 2, is_exact=True)
    before = _mishaps(cell, connect)
    done, seed = Loads(), run.seed
    highest = max(bounds.concurrency_levels)
    for concurrency in sorted(bounds.concurrency_levels):
        level = Level(concurrency)
        repeats = bounds.repeats if concurrency == highest else 1
        prompts = []
        for _ in range(repeats):
            prompts.append([seed + 1 + index for index in range(bounds.requests)])
            seed += bounds.requests
        work = partial(_work, router, level, prompts, characters, bounds.answer_tokens)
        _measure(cell, level, work, bounds.scrape_seconds)
        done.levels.append(level)
    for earlier, later in zip(before, _mishaps(cell, connect), strict=True):
        for name, count in counters.growth(earlier, later).items():
            done.mishaps[name] = done.mishaps.get(name, 0.0) + count
    return done


def test_load_is_answered_whole(gate: Recorder, loads: Loads, bounds: Throughput) -> None:
    """Every request of the load gets its whole answer, and no engine aborts or retracts one."""
    _check_router(loads.highest, bounds.client_agreement_ratio_min)
    asked = sum(len(load.answers) for level in loads.levels for load in level.loads)
    whole = sum(
        answer.completion_tokens == bounds.answer_tokens
        for level in loads.levels
        for answer in level.answers
    )
    aborted = loads.mishaps.get("num_aborted_requests_total", 0.0)
    retracted = loads.mishaps.get("num_retracted_requests_total", 0.0)
    told = f"the engines aborted {aborted:.0f} and retracted {retracted:.0f}"
    if not loads.mishaps:
        told = "no engine's counters are known"
    problems = [one for level in loads.levels for load in level.loads for one in load.problems]
    measured, bound = gate.record(
        max(0.0, min(whole, asked - aborted)) / asked,
        at_least=bounds.answered_ratio_min,
        unit="of requests answered whole",
        samples=asked,
        message=f"{whole} of {asked} whole; {told}.{_first(problems)}",
        next_step=(
            "Read the router's and the engines' journal for that time; requests that are "
            "retracted mean that the KV cache is too small for max-running-requests."
        ),
    )
    assert measured >= bound


def test_load_generates_tokens_fast_enough(
    gate: Recorder, loads: Loads, bounds: Throughput
) -> None:
    """The cell generates tokens at the rate that its users were promised."""
    points = [Point(x=level.concurrency, y=level.rate) for level in loads.levels]
    gate.details.series.append(
        Series(
            title="Generated tokens per second",
            name="at the router",
            x_label="requests at once",
            y_label="tok/s",
            points=points,
            bound=bounds.generation_tokens_per_second_min,
        )
    )
    _keep(gate, loads.highest)
    measured, bound = _rate(
        gate,
        loads.highest,
        "generation",
        bounds.generation_tokens_per_second_min,
        bounds.client_agreement_ratio_min,
        lambda answer: answer.completion_tokens,
    )
    assert measured >= bound


def test_load_reads_prompts_fast_enough(gate: Recorder, loads: Loads, bounds: Throughput) -> None:
    """The cell reads prompts at the rate that its users were promised."""
    measured, bound = _rate(
        gate,
        loads.highest,
        "prompt",
        bounds.prompt_tokens_per_second_min,
        bounds.client_agreement_ratio_min,
        lambda answer: answer.prompt_tokens,
    )
    assert measured >= bound


def test_first_token_comes_in_time_at_the_median(
    gate: Recorder, loads: Loads, bounds: Throughput
) -> None:
    """Half of the users see the first token within the promised time."""
    measured, bound = _latency(gate, loads, 0.5, FIRST, bounds.first_token_p50_ms_max)
    assert measured <= bound


def test_first_token_comes_in_time_at_the_99th_percentile(
    gate: Recorder, loads: Loads, bounds: Throughput
) -> None:
    """Nearly all users see the first token within the promised time."""
    measured, bound = _latency(gate, loads, 0.99, FIRST, bounds.first_token_p99_ms_max)
    assert measured <= bound


def test_tokens_follow_in_time_at_the_median(
    gate: Recorder, loads: Loads, bounds: Throughput
) -> None:
    """Tokens follow one another within the promised time, typically."""
    measured, bound = _latency(gate, loads, 0.5, "inter_token", bounds.inter_token_p50_ms_max)
    assert measured <= bound


def test_tokens_follow_in_time_at_the_99th_percentile(
    gate: Recorder, loads: Loads, bounds: Throughput
) -> None:
    """Hardly any token keeps its reader waiting beyond the promised time."""
    measured, bound = _latency(gate, loads, 0.99, "inter_token", bounds.inter_token_p99_ms_max)
    assert measured <= bound


def test_requests_wait_in_queues_no_longer_than_promised(
    gate: Recorder, cell: Cell, loads: Loads, bounds: Throughput
) -> None:
    """On every role, nearly all requests leave the queue within the promised time."""
    counted = _counted(loads.highest)
    queues = {
        name.removeprefix("queue of "): histogram
        for name, histogram in counted.histograms.items()
        if name.startswith("queue of ")
    }
    waits = {role: 1000 * histogram.quantile(0.99) for role, histogram in queues.items()}
    measured, bound = gate.record_most(
        max(waits.values()),
        at_most=bounds.queue_p99_ms_max,
        unit="ms",
        samples=round(min(histogram.count for histogram in queues.values())),
        message="; ".join(f"{role}: p99 {wait:.0f} ms" for role, wait in waits.items()) + ".",
        next_step="Compare max-running-requests and the KV cache's size with last_good.",
    )
    assert measured <= bound


def test_requests_are_served_as_fast_as_by_last_good(
    gate: Recorder, run: Any, loads: Loads, bounds: Throughput
) -> None:
    """A request's tokens per second do not drop below the last good release's by more than allowed.

    The rule is non-inferiority: PASS when the whole 95 % interval lies above the allowed drop, FAIL
    when it lies below equality and the drop exceeds the allowance, else INCONCLUSIVE.
    """
    old, release = _baseline(run, RATE, loads.highest)
    limits = bounds.last_good
    found = _compared(_samples(loads.highest, RATE), old, limits.noise_ratio)
    least = 1 - limits.rate_drop_ratio_max
    _show(gate, "tokens per second of a request", release, found, least)
    text = _said(found, "as fast as", limits.noise_ratio)
    if found.low < least and not (found.high < 1 and found.ratio < least):
        gate.record(found.ratio, at_least=least, unit="of last good", samples=found.samples)
        raise InconclusiveError(f"{text} Ask for more repeats in the thresholds file.")
    measured, bound = gate.record(
        found.ratio,
        at_least=least,
        unit="of last good",
        samples=found.samples,
        message=text,
        next_step="Compare server arguments, patches and backends with last_good.",
    )
    assert measured >= bound


def test_first_tokens_come_as_fast_as_from_last_good(
    gate: Recorder, run: Any, loads: Loads, bounds: Throughput
) -> None:
    """The time to the first token does not rise above the last good release's by more than allowed.

    The rule is that of the tokens per second, the other way round.
    """
    old, release = _baseline(run, FIRST, loads.highest)
    limits = bounds.last_good
    found = _compared(_samples(loads.highest, FIRST), old, limits.noise_ratio)
    most = 1 + limits.first_token_rise_ratio_max
    _show(gate, "time to the first token", release, found, most)
    text = _said(found, "as long as", limits.noise_ratio)
    if found.high > most and not (found.low > 1 and found.ratio > most):
        gate.record_most(found.ratio, at_most=most, unit="of last good", samples=found.samples)
        raise InconclusiveError(f"{text} Ask for more repeats in the thresholds file.")
    measured, bound = gate.record_most(
        found.ratio,
        at_most=most,
        unit="of last good",
        samples=found.samples,
        message=text,
        next_step="Compare prefill's arguments, chunk size and backends with last_good.",
    )
    assert measured <= bound


def _characters(router: Engine, ruler: Ruler, seed: int, tokens: int) -> int:
    """Return how many characters make ``tokens``, as this server counts."""
    ask_at_length(lambda text: router.generate(text, 1), ruler, seed, tokens, NO_NEEDLE)
    return ruler.characters(tokens, NO_NEEDLE)


def _work(
    router: Engine, level: Level, prompts: list[list[int]], characters: int, tokens: int
) -> float:
    """Do a level's loads, one per list of seeds, and return how long they took."""
    for seeds in prompts:
        requests: list[Callable[[], Answer]] = [
            partial(router.stream, build(seed, characters, NO_NEEDLE), tokens, is_exact=True)
            for seed in seeds
        ]
        level.loads.append(at_once(requests, level.concurrency))
    return level.seconds


def _measure(cell: Cell, level: Level, work: Callable[[], float], scrape_seconds: float) -> None:
    """Do a level's loads between two scrapes, where there is a Prometheus; keep what went wrong."""
    if cell.prometheus_url is None:
        work()
        level.problem = f"There is no Prometheus to ask. {BY_HAND}"
        return
    ends = _instances(cell.with_roles("decode", "combined"))
    histograms = {
        "first token": selector("time_to_first_token_seconds_bucket", ends),
        "inter token": selector("inter_token_latency_seconds_bucket", ends),
    }
    for server in cell.engines:
        one = selector("queue_time_seconds_bucket", [server.instance])
        histograms[f"queue of {server.label}"] = one
    counted = {
        "generation": selector("generation_tokens_total", ends),
        "prompt": selector(
            "prompt_tokens_total", _instances(cell.with_roles("prefill", "combined"))
        ),
    }
    for server in cell.with_roles("router"):
        counted[ROUTER] = _of_router(cell, server, "smg_router_requests_total")
        histograms[ROUTER] = _of_router(cell, server, "smg_router_request_duration_seconds_bucket")
    try:
        level.counted = measured_load(
            Prometheus(cell.prometheus_url),
            counted,
            work,
            scrape_seconds,
            histograms,
        )
    except PrometheusError as error:
        level.problem = f"{error}."
        if not level.loads:
            work()


def _of_router(cell: Cell, server: CellServer, metric: str) -> str:
    """Return the selector of a metric of SGLang's router, which has a port for metrics."""
    port = cell.spec.roles.router.metrics_port if cell.spec is not None else 0
    return f'{metric}{{instance="{server.address}:{port}", endpoint="generate"}}'


def _instances(servers: list[CellServer]) -> list[str]:
    return [server.instance for server in servers]


def _mishaps(cell: Cell, connect: Callable[[str], Engine]) -> list[Counters]:
    return [
        counters.read(connect(server.url), server.label, counters.PRESSURE)
        for server in cell.engines
    ]


def _check_router(level: Level, agreement_min: float) -> None:
    """See that the cell's router counted the requests that were asked, where it is watched.

    Raises:
        InvalidMeasurementError: it counted others.
    """
    if level.counted is None or ROUTER not in level.counted.counters:
        return
    counted = level.counted.counters[ROUTER].amount
    asked = sum(len(load.answers) for load in level.loads)
    if not min(counted, asked) / max(counted, asked, 1) >= agreement_min:
        raise InvalidMeasurementError(
            f"The router counted {counted:.0f} requests and {asked} were asked: somebody else used "
            "the cell meanwhile, or the load did not go through this router."
        )


def _counted(level: Level) -> Window:
    """Return what Prometheus counted.

    Raises:
        InvalidMeasurementError: there is nothing, or nothing that can be believed.
    """
    if level.counted is None:
        raise InvalidMeasurementError(level.problem)
    return level.counted


def _rate(
    gate: Recorder,
    level: Level,
    name: str,
    bound: float,
    agreement_min: float,
    tokens: Callable[[Answer], int],
) -> tuple[float, float]:
    """Record a rate; refuse it when Prometheus and we counted different loads."""
    window = _counted(level)
    counted = window.counters[name].amount
    ours = sum(tokens(answer) for answer in level.answers)
    agreement = min(counted, ours) / max(counted, ours, 1)
    if not agreement >= agreement_min:
        raise InvalidMeasurementError(
            f"Prometheus counted {counted:.0f} {name} tokens, the load's own answers {ours}: "
            "somebody else used the cell meanwhile, or the metric does not count what it says."
        )
    return gate.record(
        counted / window.seconds,
        at_least=bound,
        unit="tok/s",
        samples=len(level.answers),
        message=(
            f"{counted:.0f} {name} tokens in {window.seconds:.1f} s by Prometheus "
            f"({window.counters[name].scrapes} scrapes), {ours} by the answers, "
            f"{level.concurrency} at once."
        ),
        next_step="Compare server arguments with last_good, and look for another load on the host.",
    )


def _latency(
    gate: Recorder, loads: Loads, share: float, what: str, bound_ms: float
) -> tuple[float, float]:
    """Record a quantile of what the users saw at the highest level, and show all levels."""
    by_level = {level.concurrency: _seconds(level, what) for level in loads.levels}
    judged = by_level[loads.highest.concurrency]
    gate.details.series.append(
        Series(
            title=f"{what.removesuffix('_seconds').replace('_', ' ')}, p{100 * share:.0f}",
            x_label="requests at once",
            y_label="ms",
            points=[
                Point(x=concurrency, y=1000 * quantile(seconds, share))
                for concurrency, seconds in by_level.items()
                if seconds
            ],
            bound=bound_ms,
            bound_is="max",
        )
    )
    counted = loads.highest.counted
    name = "first token" if what == FIRST else "inter token"
    theirs = ""
    if counted is not None:
        told = counted.histograms[name]
        theirs = (
            f"; the engines, in buckets: {1000 * told.quantile(share):.0f} ms of {told.count:.0f}"
        )
        if ROUTER in counted.histograms:
            whole = 1000 * counted.histograms[ROUTER].quantile(share)
            theirs += f"; the router, for whole requests: {whole:.0f} ms"
    levels = ", ".join(
        f"{1000 * quantile(seconds, share):.0f} ms with {concurrency} at once"
        for concurrency, seconds in by_level.items()
    )
    return gate.record_most(
        1000 * quantile(judged, share),
        at_most=bound_ms,
        unit="ms",
        samples=len(judged),
        message=f"At the router: {levels}{theirs}.",
        next_step="Compare chunked_prefill_size and the backends with last_good.",
    )


def _seconds(level: Level, what: str) -> list[float]:
    return [
        value
        for load in level.loads
        for value in (first_token_seconds if what == FIRST else gap_seconds)(load.whole)
    ]


def _samples(level: Level, name: str) -> list[list[float]]:
    """Return a level's observations, one list per repeat."""
    if name == FIRST:
        return [first_token_seconds(load.whole) for load in level.loads]
    return [
        [answer.completion_tokens / answer.seconds for answer in load.whole] for load in level.loads
    ]


def _keep(gate: Recorder, level: Level) -> None:
    """Keep a level's observations for the comparison of the next release."""
    for name in (RATE, FIRST):
        for repeat, values in enumerate(_samples(level, name)):
            gate.details.samples[f"{name}/{level.concurrency}/{repeat}"] = values


def _baseline(run: Any, name: str, level: Level) -> tuple[list[list[float]], str]:
    """Return the last good release's observations of the same cell, and its digest.

    Raises:
        InvalidMeasurementError: there are none.
    """
    baseline: Baseline | None = run.baseline
    if baseline is None:
        raise InvalidMeasurementError(
            "Nothing is known of a last good release to compare with; where that is so at first, "
            "the thresholds file lists this gate under not_applicable_without_last_good."
        )
    found = [
        values
        for samples in baseline.samples.values()
        for key, values in samples.items()
        if key.startswith(f"{name}/{level.concurrency}/")
    ]
    if not found:
        raise InvalidMeasurementError(
            f"{baseline.where} has no observations of a load with {level.concurrency} requests at "
            "once, so there is nothing to compare with."
        )
    return found, baseline.release


def _compared(new: list[list[float]], old: list[list[float]], noise_ratio: float) -> RatioInterval:
    try:
        return compare(new, old, noise_ratio)
    except RatioError as error:
        raise InvalidMeasurementError(f"{error}.") from None


def _said(found: RatioInterval, how: str, noise_ratio: float) -> str:
    return (
        f"{100 * found.ratio:.0f} % {how} last good (95 % interval {100 * found.low:.0f}-"
        f"{100 * found.high:.0f} %, with {100 * noise_ratio:.0f} % between runs of one release)."
    )


def _show(gate: Recorder, what: str, release: str, found: RatioInterval, allowed: float) -> None:
    gate.details.comparisons.append(
        Comparison(
            what=what,
            last_good_release=release,
            this=found.ratio,
            last_good=1.0,
            change=found.ratio,
            low=found.low,
            high=found.high,
            allowed=allowed,
            unit="ratio",
            samples=found.samples,
            method="Hodges-Lehmann on logarithms, Mann-Whitney interval widened by the repeats",
        )
    )


def _first(problems: list[str]) -> str:
    return f" First of {len(problems)} problems: {problems[0]}." if problems else ""
