"""A report with everything in it, for the tests of the page and for looking at it.

python -m tests.report_example FOLDER      # writes report.html, for a browser
"""

from __future__ import annotations

import sys
from pathlib import Path

from seatrial import report
from seatrial.details import Comparison, Details, Heatmap, Point, Series, Square
from seatrial.page import page
from seatrial.report import NEXT, GateResult, NotSelected, Report
from seatrial.statistics import wilson_interval
from seatrial.verdict import Verdict

LENGTHS = (900, 2000, 3900, 4300, 5200, 8000, 12000, 16000, 24000, 32000)
DEPTHS = (0, 25, 50, 75, 100)


def failed() -> Report:
    """Return the report of a release that forgets, and of which something else is not known."""
    return _report(
        _gate("test_every_server_is_ready", "readiness", "Every server says that it is ready."),
        _recall(),
        _gate(
            "test_recall_is_not_below_last_good",
            "recall",
            "Recall dropped by no more than the allowed 0.02 against the last good release.",
            Verdict.INCONCLUSIVE,
            measured=0.031,
            bound=0.02,
            bound_is="max",
            unit="drop",
            samples=160,
            message="3 of 160 pairs were lost, 1 was gained; the interval reaches beyond 0.02.",
            details=Details(comparisons=[_drop()]),
        ),
        _gate(
            "test_throughput_is_not_below_last_good",
            "throughput",
            "The cell generates as fast as the last good release, within its noise.",
            measured=0.98,
            bound=0.9,
            unit="of last good",
            samples=64,
            details=_throughput(),
        ),
        _gate(
            "test_margin_stays_under_long_prefills",
            "memory",
            "On every GPU some memory stays free while long prefills run together.",
            measured=1240,
            bound=1024,
            unit="MiB",
            samples=400,
            details=_memory(),
        ),
        _unmeasured("test_queue_time_is_short", "No request waited in a queue for long."),
        _unmeasured("test_ttft_is_short", "The first token comes soon, at the 99th percentile."),
        _gate(
            "test_answers_are_sound",
            "liveness",
            "No answer was a loop, spray or torn off.",
            Verdict.FAIL,
            measured=0.97,
            bound=1.0,
            unit="of answers",
            samples=200,
            is_shadow=True,
        ),
        _gate(
            "test_kernels_agree",
            "kernels",
            "The installed kernels agree with their references.",
            Verdict.NOT_APPLICABLE,
            measured=None,
            message="This release enables no kernels of ours.",
        ),
    )


def passed() -> Report:
    """Return the report of a good release."""
    return _report(
        _gate("test_every_server_is_ready", "readiness", "Every server says that it is ready."),
        _gate("test_needle_is_recalled", "window", "A needle is recalled.", samples=20),
    )


def one(verdict: Verdict, *, is_shadow: bool = False) -> Report:
    """Return the report of a gate that passed beside one of this verdict."""
    measured = 0.5 if verdict in {Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE} else None
    return _report(
        _gate("test_every_server_is_ready", "readiness", "Every server says that it is ready."),
        _gate("test_it", "window", "It holds.", verdict, measured=measured, is_shadow=is_shadow),
    )


def _gate(
    gate_id: str,
    group: str,
    claim: str,
    verdict: Verdict = Verdict.PASS,
    **changed: object,
) -> GateResult:
    values = {
        "id": gate_id,
        "group": group,
        "claim": claim,
        "verdict": verdict,
        "measured": 1.0,
        "bound": 1.0,
        "unit": "recall",
        "samples": 5,
        "next": NEXT[verdict],
        "seconds": 3.2,
        "requests": 5,
    }
    return GateResult.model_validate(values | changed)


def _unmeasured(gate_id: str, claim: str) -> GateResult:
    return _gate(
        gate_id,
        "throughput",
        claim,
        Verdict.INVALID,
        measured=None,
        message="http://10.0.0.9:9090 has not scraped time_to_first_token_seconds within 60 s: "
        "its last scrape is older than the load",
    )


def _recall() -> GateResult:
    squares = []
    for length in LENGTHS:
        for depth in DEPTHS:
            right = 20 if length < 4200 or depth > 60 else max(0, 17 - length // 900 + depth // 8)
            low, high = wilson_interval(min(20, right), 20)
            squares.append(
                Square(x=length, y=depth, successes=min(20, right), samples=20, low=low, high=high)
            )
    right = sum(square.successes for square in squares)
    return _gate(
        "test_needles_are_recalled_at_every_length_and_depth",
        "recall",
        "A needle is recalled at every length up to the context limit and at every depth.",
        Verdict.FAIL,
        measured=min(square.successes / square.samples for square in squares),
        bound=0.9,
        samples=1000,
        message=f"{right} of 1000 needles recalled; effective length 3,900 tokens at depth 0.",
        next="Compare index_topk and index_key_dtype with last_good: entries beyond "
        "4 x index_topk + 128 tokens are seen only if the indexer ranks them well.",
        seconds=96.0,
        requests=1000,
        is_critical=True,
        details=Details(
            heatmaps=[
                Heatmap(
                    title="Recall in percent",
                    x_label="prompt tokens",
                    y_label="depth %",
                    squares=squares,
                    bound=0.9,
                    mark=3900,
                    mark_label="selection ends",
                )
            ],
            facts={
                "Coverage or ranking": "ranking: in 17 of 21 layers even 2,048 entries would not "
                "have held the needle's; a wider index_topk is no repair."
            },
        ),
    )


def _drop() -> Comparison:
    return Comparison(
        what="recall",
        last_good_release="7d4bd80c0ffee123",
        this=0.95,
        last_good=0.981,
        change=0.031,
        low=-0.004,
        high=0.066,
        allowed=0.02,
        unit="drop",
        detectable=0.045,
        samples=160,
        method="McNemar, exact",
    )


def _throughput() -> Details:
    return Details(
        series=[
            Series(
                title="Generated tokens a second",
                name=role,
                x_label="requests at once",
                y_label="tok/s",
                points=[_point(level, rate * factor) for level, rate in _RATES],
                last_good=[_point(level, rate) for level, rate in _RATES],
                bound=200 if role == "decode" else None,
            )
            for role, factor in (("decode", 0.97), ("router", 0.9))
        ],
        comparisons=[
            Comparison(
                what="tokens a second at 16 at once",
                last_good_release="7d4bd80c0ffee123",
                this=2021,
                last_good=2060,
                change=0.981,
                low=0.955,
                high=1.01,
                allowed=0.9,
                unit="ratio",
                samples=64,
                method="bootstrap of the ratio of medians",
            )
        ],
    )


_RATES = ((1, 180.0), (4, 690.0), (16, 2060.0), (64, 4100.0))


def _point(level: int, rate: float) -> Point:
    return Point(x=level, y=rate, low=rate * 0.94, high=rate * 1.05)


def _memory() -> Details:
    rungs = (8000, 16000, 32000, 64000, 128000)
    return Details(
        series=[
            Series(
                title="Free memory under concurrent prefills",
                name=f"GPU {gpu}",
                x_label="tokens in flight",
                y_label="MiB free",
                points=[
                    Point(x=rung, y=5200 - 700 * index - 130 * gpu)
                    for index, rung in enumerate(rungs)
                ],
                bound=1024,
            )
            for gpu in range(4)
        ]
    )


def _report(*gates: GateResult) -> Report:
    return Report(
        verdict=report.overall(gates),
        cell="one",
        release="0123456789abcdef",
        commit="c" * 40,
        thresholds="deepseek-v4-flash-nvfp4",
        seed=7,
        started="2026-11-29T14:00:00+00:00",
        seconds=131.3,
        budget_seconds={"readiness": 5, "recall": 90, "throughput": 60},
        server_arguments={"prefill": "python -m sglang.launch_server --model-path /models/m"},
        gates=list(gates),
        not_selected=[NotSelected(id="test_soak", group="soak", reason="not selected by the spec")],
        next=report.final_sentence(gates),
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(page(failed()))
    (folder / "passed.html").write_text(page(passed()))
