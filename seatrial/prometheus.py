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
        seconds = math.ceil(end - start) + 1
        result = self._query(f"{selector}[{seconds}s]", at=end + 0.001)
        series = [_values(entry, start, end) for entry in result if isinstance(entry, dict)]
        return grown(selector, series)

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
    joined = "|".join(instance.replace(".", "\\\\.") for instance in sorted(instances))
    return f'{{__name__=~"sglang[:_]{metric}", instance=~"{joined}"}}'


def measured_load(
    prometheus: Prometheus,
    selectors: dict[str, str],
    load: Callable[[], float],
    scrape_seconds: float,
) -> tuple[float, dict[str, Increase]]:
    """Run a load between two scrapes and return its seconds and each counter's increase.

    The window opens with a scrape after the call and closes with a scrape after the load, both on
    Prometheus' own clock, so nothing of the load is missed and nothing older is counted.

    Args:
        prometheus: who is asked.
        selectors: a name of the caller's choice for each counter.
        load: does the load, returns how many seconds it took.
        scrape_seconds: how long to wait for each scrape.

    Raises:
        PrometheusError: the counters cannot be believed; see :meth:`Prometheus.increase`.
    """
    begin = prometheus.now()
    for each in selectors.values():
        prometheus.wait_for_scrape(each, begin, scrape_seconds)
    seconds = load()
    end = prometheus.now()
    closes = max(
        prometheus.wait_for_scrape(each, end, scrape_seconds) for each in selectors.values()
    )
    return seconds, {
        name: prometheus.increase(each, begin, closes) for name, each in selectors.items()
    }


def _values(entry: dict[str, object], start: float, end: float) -> list[float]:
    """Return the values of one series between ``start`` and ``end``, in order of time."""
    pairs = entry.get("values")
    if not isinstance(pairs, list):
        return []
    return [float(value) for moment, value in pairs if start <= float(moment) <= end]
