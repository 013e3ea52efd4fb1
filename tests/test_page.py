"""The HTML report is one file, shows what decides first, and trusts no text that it is given."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from seatrial import charts
from seatrial.details import Comparison, Heatmap, Point, Series, Square
from seatrial.page import page
from seatrial.report import Report
from seatrial.verdict import Verdict
from tests import report_example

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def test_page_needs_nothing_from_outside() -> None:
    """No link, script, font or image is fetched: the file can be mailed, and read in ten years."""
    text = page(report_example.failed())
    assert "<script" not in text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", text)
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://10.0.0.9:9090",  # what a gate said
    }


def test_what_failed_and_what_to_do_come_before_everything_else() -> None:
    """The first screen answers three questions: did it pass, what failed, what now."""
    found = report_example.failed()
    text = page(found)
    order = [
        text.index("<h1>FAIL</h1>"),
        text.index("Compare index_topk and index_key_dtype"),
        text.index("A needle is recalled at every length"),
        text.index("Recall in percent"),
        text.index("Every claim"),
    ]
    assert order == sorted(order)
    assert "The same for 1 more: ttft is short." in text


def test_every_plot_is_drawn() -> None:
    """Heatmap, lines of one title together, and comparisons are well-formed and have words."""
    drawn = SVG.findall(page(report_example.failed()))
    assert len(drawn) == 3 + 2
    for one in drawn:
        assert ET.fromstring(one).get("aria-label")  # noqa: S314 - we wrote it
        assert not re.search(r"nan|inf\b|None", one)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_page_of_any_verdict_is_written(verdict: Verdict) -> None:
    """A report without details is a page, too."""
    text = page(report_example.one(verdict))
    assert f'class="top {report_example.one(verdict).verdict.value}"' in text
    assert "What was measured" not in text


def test_text_of_a_model_stays_text() -> None:
    """What a model said is shown, not run."""
    value = report_example.failed().model_dump(by_alias=True)
    for gate in value["gates"]:
        gate["message"] = "<script>alert(1)</script>"
        for shown in (*gate["details"]["heatmaps"], *gate["details"]["series"]):
            shown["title"] = shown["x_label"] = "<img src=x onerror=alert(1)>"
    text = page(Report.model_validate(value))
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_squares_below_the_bound_are_framed() -> None:
    """A person sees which squares are too low without knowing the colours."""
    squares = [
        Square(x=900, y=0, successes=20, samples=20, low=0.84, high=1),
        Square(x=5200, y=0, successes=3, samples=20, low=0.05, high=0.36),
    ]
    shown = Heatmap(title="Recall", x_label="tokens", y_label="depth", squares=squares, bound=0.9)
    svg = charts.heatmap(shown).svg
    assert svg.count('class="below"') == 1
    assert "tokens 5200, depth 0: 3 of 20 (0.05-0.36)" in svg


def test_bound_far_above_is_said_and_not_drawn() -> None:
    """A bound that would press the line onto the axis is named below the plot."""
    series = Series(
        title="First token",
        x_label="at once",
        y_label="ms",
        points=[Point(x=1, y=20.0), Point(x=4, y=30.0)],
        bound=15000,
        bound_is="max",
    )
    far = charts.lines([series])
    assert 'class="bound"' not in far.svg
    assert far.note == "Allowed are up to 15k, far above what is shown."
    near = charts.lines([series.model_copy(update={"bound": 40.0})])
    assert "at most 40" in near.svg


def test_one_point_and_equal_ends_can_be_drawn() -> None:
    """Degenerate numbers make a small plot and no error."""
    point = Series(title="t", x_label="x", y_label="y", points=[Point(x=1, y=0.0)])
    assert charts.lines([point]).svg.endswith("</svg>")
    same = Comparison(
        what="recall",
        last_good_release="r",
        this=1,
        last_good=1,
        change=0,
        low=0,
        high=0,
        allowed=0,
        unit="drop",
        samples=1,
        method="m",
    )
    assert charts.comparison(same).endswith("</svg>")
