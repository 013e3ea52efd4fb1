"""The report as one HTML file: everything inside, readable on a desk and on a phone.

What a person asks is answered from top to bottom: did it pass, what failed and by how much, what to
do now; then the plots, every claim, where the time went, and how to repeat it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from seatrial import charts
from seatrial.charts import Plot
from seatrial.report import GateResult, Report
from seatrial.verdict import SIGNS, Verdict, number, words

_PAGE = "page.html.j2"
_ORDER = (
    Verdict.FAIL,
    Verdict.INVALID,
    Verdict.INCONCLUSIVE,
    Verdict.PASS,
    Verdict.NOT_APPLICABLE,
)
MEANING = {
    Verdict.PASS: "measured, and true",
    Verdict.FAIL: "measured, and false",
    Verdict.INCONCLUSIVE: "measured, not decided",
    Verdict.INVALID: "could not be measured",
    Verdict.NOT_APPLICABLE: "listed with its reason",
}


def page(report: Report) -> str:
    """Return the whole report as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "words": words, "svg": Markup}
    counts = Counter(gate.verdict for gate in report.gates if not gate.is_shadow)
    ranked = sorted(report.gates, key=lambda gate: (gate.is_shadow, _ORDER.index(gate.verdict)))
    return environment.get_template(_PAGE).render(
        report=report,
        blocking=list(_blocking(report)),
        counts=[(verdict, counts[verdict]) for verdict in _ORDER if counts[verdict]],
        shadows=sum(gate.is_shadow for gate in report.gates),
        meaning=MEANING,
        gates=ranked,
        plots=list(_plots(report)),
        comparisons=[
            (shown, charts.comparison(shown))
            for gate in report.gates
            for shown in gate.details.comparisons
        ],
        times=report.times(),
        longest=max((time.seconds for time in report.times()), default=0.0),
        signs=SIGNS,
        repeat=_repeat(report),
    )


def _blocking(report: Report) -> Iterator[tuple[GateResult, list[GateResult]]]:
    """Yield each reason that keeps the release from being promoted, with the gates that share it.

    A gate that measured has a reason of its own; gates that could not measure often share one.
    """
    ranked = sorted(
        (gate for gate in report.gates if gate.is_blocking),
        key=lambda gate: (_ORDER.index(gate.verdict), not gate.is_critical),
    )
    shared: dict[tuple[str, ...], list[GateResult]] = {}
    for gate in ranked:
        own = gate.id if gate.measured is not None else ""
        shared.setdefault((gate.verdict, gate.message, own), []).append(gate)
    for same in shared.values():
        yield same[0], same


def _plots(report: Report) -> Iterator[Plot]:
    """Yield the plots of all gates; series of one title share a plot."""
    for gate in report.gates:
        for shown in gate.details.heatmaps:
            if shown.squares:
                yield charts.heatmap(shown)
        drawn = [series for series in gate.details.series if series.points]
        for _, together in groupby(drawn, key=lambda series: series.title):
            yield charts.lines(list(together))


def _repeat(report: Report) -> str:
    """Return the command that asks the same prompts again."""
    where = ["--cell-file", "cell.json"]
    if report.cell.startswith(("http://", "https://")):
        where = ["--url", report.cell, "--thresholds", report.thresholds]
    return shlex.join(["pytest", "gates/", *where, "--seed", str(report.seed)])
