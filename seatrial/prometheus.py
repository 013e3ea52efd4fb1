"""Counters as the real Prometheus saw them, over the closed window of a load.

A counter is read in raw samples, not through ``rate()``: only raw samples show a reset, a gap or a
scrape that never came, and each of those makes a number that must not be believed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from urllib3.util.retry import Retry

from seatrial.errors import SeatrialError

REQUEST_SECONDS = 10
POLL_SECONDS = 0.5
CLOCK_SECONDS = 2.0
CLOCK_SHARE = 0.02
"""How far Prometheus' clock may run from ours over a load; a question to it takes time, too."""


class PrometheusError(SeatrialError):
    """Prometheus cannot be asked, or what it holds cannot be believed."""


@dataclass(frozen=True)
class Increase:
    """What a counter did between two scrapes.

    Attributes:
        amount: how much it grew, all series together.
        series: how many series were counted.
        scrapes: the fewest samples that any of them has in the window.
    """

    amount: float
    series: int
    scrapes: int


@dataclass(frozen=True)
class Histogram:
    """What a histogram counted between two scrapes, all series together.

    Attributes:
        buckets: upper edge and how many observations were at or below it, edges rising; the last
            edge is infinite.
    """

    buckets: tuple[tuple[float, float], ...]

    @property
    def count(self) -> float:
        """How many observations there were."""
        return self.buckets[-1][1]

    def quantile(self, share: float) -> float:
        """Return the value that ``share`` of the observations do not exceed, as Prometheus does.

        Inside a bucket it is interpolated, so it is no finer than the buckets; above the highest
        finite edge that edge is returned, which is less than the truth (histogram_quantile() in
        Prometheus' promql/quantile.go).

        Raises:
            PrometheusError: there was no observation.
        """
        if not self.count > 0:
            raise PrometheusError("a histogram has no observation in the load's window")
        rank, lower_edge, below = share * self.count, 0.0, 0.0
        for edge, count in self.buckets:
            if count >= rank and count > below:
                if math.isinf(edge):
                    return lower_edge
                return lower_edge + (edge - lower_edge) * (rank - below) / (count - below)
            if not math.isinf(edge):
                lower_edge = edge
            below = count
        return lower_edge


@dataclass(frozen=True)
class Window:
    """What was measured over one load.

    Attributes:
        seconds: how long the load took, by a clock that nobody sets.
        counters: each counter's growth.
        histograms: what each histogram counted.
    """

    seconds: float
    counters: dict[str, Increase]
    histograms: dict[str, Histogram]


class Prometheus:
    """A Prometheus server, asked through prometheus-api-client."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # One attempt: a gate says what it saw, and does not wait for a better answer.
        self._client = PrometheusConnect(
            url=self.url, retry=Retry(total=0), timeout=REQUEST_SECONDS
        )

    def now(self) -> float:
        """Return Prometheus' own clock, in seconds; the hosts' clocks may differ from it."""
        result = self._query("time()")
        if len(result) != 2:
            raise PrometheusError(f"Prometheus at {self.url} does not tell its time")
        return float(str(result[1]))

    def wait_for_scrape(self, selector: str, after: float, timeout_seconds: float) -> float:
        """Wait until every series of ``selector`` has a sample taken at or after ``after``.

        Returns:
            The time of the latest such sample, on Prometheus' clock.

        Raises:
            PrometheusError: there is no series, or no scrape came in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            newest = [max(times) for times in self._times(selector) if times]
            if newest and min(newest) >= after:
                return max(newest)
            if time.monotonic() > deadline:
                state = "its last scrape is older than the load" if newest else "it has no data"
                raise PrometheusError(
                    f"{self.url} has not scraped {selector} within {timeout_seconds:g} s: {state}"
                )
            time.sleep(POLL_SECONDS)

    def increase(self, selector: str, start: float, end: float) -> Increase:
        """Return how much the counters of ``selector`` grew from ``start`` to ``end``.

        Raises:
            PrometheusError: no data, NaN, a counter that reset, or fewer than two scrapes.
        """
        series = [values for _, values in self._window(selector, start, end)]
        return grown(selector, series)

    def histogram(self, selector: str, start: float, end: float) -> Histogram:
        """Return what the ``..._bucket`` series of ``selector`` counted from ``start`` to ``end``.

        Raises:
            PrometheusError: as :meth:`increase`, or series without the label ``le``.
        """
        by_edge: dict[float, list[list[float]]] = {}
        for labels, values in self._window(selector, start, end):
            try:
                edge = float(labels["le"])
            except (KeyError, ValueError):
                raise PrometheusError(f"{selector} is no histogram: it has no label le") from None
            by_edge.setdefault(edge, []).append(values)
        if not by_edge:
            raise PrometheusError(f"Prometheus has no data for {selector} in the load's window")
        if not math.isinf(max(by_edge)):
            raise PrometheusError(f"{selector} lacks its last bucket, le=+Inf")
        buckets = tuple((edge, grown(selector, by_edge[edge]).amount) for edge in sorted(by_edge))
        if any(later[1] < earlier[1] for earlier, later in pairwise(buckets)):
            raise PrometheusError(f"{selector} counts less in a wider bucket: scrapes were mixed")
        return Histogram(buckets)

    def lowest(self, selector: str, start: float, end: float) -> tuple[float, int]:
        """Return the lowest value of a gauge's samples in a window, and how many there were.

        Raises:
            PrometheusError: no sample in the window, or NaN.
        """
        series = [values for _, values in self._window(selector, start, end)]
        values = [value for each in series for value in each]
        if not values or any(not math.isfinite(value) for value in values):
            raise PrometheusError(f"Prometheus has no data for {selector} in the load's window")
        return min(values), min(len(each) for each in series)

    def _window(
        self, selector: str, start: float, end: float
    ) -> list[tuple[dict[str, str], list[float]]]:
        """Return labels and values, in order of time, of each series between two moments."""
        seconds = math.ceil(end - start) + 1
        result = self._query(f"{selector}[{seconds}s]", at=end + 0.001)
        found = []
        for entry in result:
            if isinstance(entry, dict):
                labels = entry.get("metric")
                told = {str(key): str(value) for key, value in (labels or {}).items()}
                found.append((told, _values(entry, start, end)))
        return found

    def _times(self, selector: str) -> list[list[float]]:
        result = self._query(f"{selector}[2m]")
        return [
            [float(moment) for moment, _ in entry.get("values", [])]
            for entry in result
            if isinstance(entry, dict)
        ]

    def _query(self, query: str, at: float | None = None) -> list[object]:
        params = None if at is None else {"time": f"{at:.3f}"}
        try:
            result: object = self._client.custom_query(query, params=params)
        except requests.RequestException as error:
            raise PrometheusError(
                f"Prometheus at {self.url} cannot be asked: {type(error).__name__}"
            ) from None
        except (PrometheusApiClientException, ValueError, KeyError) as error:
            said = " ".join(str(error).split())[:200]
            raise PrometheusError(f"Prometheus at {self.url} refused `{query}`: {said}") from None
        return result if isinstance(result, list) else []


def grown(selector: str, series: Sequence[Sequence[float]]) -> Increase:
    """Return how much the counters grew, given the values of each series in order of time.

    Raises:
        PrometheusError: no data, NaN, a counter that reset, or fewer than two samples.
    """
    if not series or not any(series):
        raise PrometheusError(f"Prometheus has no data for {selector} in the load's window")
    for values in series:
        if len(values) < 2:
            raise PrometheusError(
                f"Prometheus has {len(values)} sample of {selector} in the load's window; a series "
                "came or went while it was measured"
            )
        if any(not math.isfinite(value) for value in values):
            raise PrometheusError(f"{selector} is not a number in the load's window")
        if any(later < earlier for earlier, later in pairwise(values)):
            raise PrometheusError(f"{selector} was reset in the load's window: a server restarted")
    amount = sum(values[-1] - values[0] for values in series)
    return Increase(amount, len(series), min(len(values) for values in series))


def selector(metric: str, instances: Sequence[str]) -> str:
    """Return the PromQL selector of SGLang's ``metric`` on the targets ``host:port``.

    SGLang names its metrics ``sglang:...``. A Prometheus that asks for OpenMetrics is given
    ``sglang_...`` by SGLang's own prometheus_client, one that asks for plain text is not; which one
    asks for what differs by version, so both are looked for.
    """
    escaped = str.maketrans({mark: f"\\\\{mark}" for mark in ".[]"})  # [::1]:30000 is no class
    joined = "|".join(instance.translate(escaped) for instance in sorted(instances))
    return f'{{__name__=~"sglang[:_]{metric}", instance=~"{joined}"}}'


def measured_load(
    prometheus: Prometheus,
    counters: dict[str, str],
    load: Callable[[], float],
    scrape_seconds: float,
    histograms: dict[str, str] | None = None,
) -> Window:
    """Run a load between two scrapes; return its seconds and what was counted meanwhile.

    The window opens with a scrape after the call and closes with a scrape after the load, both on
    Prometheus' own clock, so nothing of the load is missed and nothing older is counted. The hosts'
    clocks take no part; that Prometheus' clock ran as ours did is checked.

    Args:
        prometheus: who is asked.
        counters: the selector of each counter, by a name of the caller's choice.
        load: does the load, returns how many seconds it took.
        scrape_seconds: how long to wait for each scrape.
        histograms: the selector of each histogram's buckets, by name.

    Raises:
        PrometheusError: the counters cannot be believed; see :meth:`Prometheus.increase`.
    """
    wanted = histograms or {}
    selectors = [*counters.values(), *wanted.values()]
    begin = prometheus.now()
    for each in selectors:
        prometheus.wait_for_scrape(each, begin, scrape_seconds)
    before, clock = prometheus.now(), time.monotonic()
    seconds = load()
    end, passed = prometheus.now(), time.monotonic() - clock
    if abs((end - before) - passed) > CLOCK_SECONDS + CLOCK_SHARE * passed:
        raise PrometheusError(
            f"the load took {passed:.1f} s here and {end - before:.1f} s by the clock of "
            f"{prometheus.url}, which was set or stood still meanwhile"
        )
    closes = max(prometheus.wait_for_scrape(each, end, scrape_seconds) for each in selectors)
    return Window(
        seconds,
        {name: prometheus.increase(each, begin, closes) for name, each in counters.items()},
        {name: prometheus.histogram(each, begin, closes) for name, each in wanted.items()},
    )


def _values(entry: dict[str, object], start: float, end: float) -> list[float]:
    """Return the values of one series between ``start`` and ``end``, in order of time."""
    pairs = entry.get("values")
    if not isinstance(pairs, list):
        return []
    return [float(value) for moment, value in pairs if start <= float(moment) <= end]
