"""Counters of what should not happen, read from the engines' own ``/metrics`` pages.

SGLang makes these series when the first such event happens, so a page without them says zero. That
is believed only of a page that has SGLang's other metrics: a page of nothing says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from seatrial.engine import Engine
from seatrial.errors import SeatrialError

PRESSURE = ("num_aborted_requests_total", "num_retracted_requests_total")
TRANSFER = (
    "num_transfer_failed_reqs_total",
    "num_bootstrap_failed_reqs_total",
    "num_prefill_retries_total",
)
TRANSFERS = "kv_transfer_latency_ms_count"
"""Grows by one per request whose KV cache was sent (srt/observability/metrics_collector.py)."""
_PREFIXES = ("sglang:", "sglang_")


class CountersError(SeatrialError):
    """An engine's counters cannot be read, or what they say cannot be believed."""


@dataclass(frozen=True)
class Counters:
    """Some counters of one engine at one moment; what has never happened is 0."""

    where: str
    values: dict[str, float]


def read(engine: Engine, where: str, names: tuple[str, ...]) -> Counters:
    """Read counters (names without SGLang's prefix) from an engine's page, labels summed.

    Raises:
        CountersError: the page has none of SGLang's metrics, or a counter is not a number.
        EngineError: no answer, or an error status.
    """
    samples = engine.all_metrics()
    if not any(sample.name.startswith(_PREFIXES) for sample in samples):
        raise CountersError(
            f"{where}: {engine.url}/metrics has none of SGLang's metrics; start it with "
            "--enable-metrics"
        )
    values = dict.fromkeys(names, 0.0)
    for sample in samples:
        name = sample.name.removeprefix("sglang:").removeprefix("sglang_")
        if name in values:
            values[name] += sample.value
    wrong = [name for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise CountersError(f"{where}: {', '.join(wrong)} is not a number")
    return Counters(where, values)


def growth(before: Counters, after: Counters) -> dict[str, float]:
    """Return how much each counter grew.

    Raises:
        CountersError: one went back, which a restart does.
    """
    back = [name for name, value in after.values.items() if value < before.values[name]]
    if back:
        raise CountersError(f"{after.where}: {', '.join(back)} was reset: the server restarted")
    return {name: value - before.values[name] for name, value in after.values.items()}
