"""What a gate has to show beyond its one number: drawn by a report, read by a later run.

A gate fills ``gate.details`` as it measures; what is there when it ends goes into ``report.json``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]
"""NaN is no measurement: a gate that would write one down is INVALID."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Square(_Strict):
    """One square of a heatmap: a share with its 95 % interval.

    Attributes:
        x: the column, as :attr:`Heatmap.x_label` says (a prompt's tokens).
        y: the row (a needle's depth in percent).
        successes: how many of ``samples`` had the property.
    """

    x: Number
    y: Number
    successes: int
    samples: int
    low: Number
    high: Number


class Heatmap(_Strict):
    """A share over two quantities, such as recall over length and depth.

    Attributes:
        bound: the least share that is enough; None if no square is judged alone.
        mark: a column from which on something changes (the reach of the selection), and its name.
    """

    title: str
    x_label: str
    y_label: str
    squares: list[Square]
    bound: Number | None = None
    mark: Number | None = None
    mark_label: str = ""


class Point(_Strict):
    """One point of a series, with its interval where it has one."""

    x: Number
    y: Number
    low: Number | None = None
    high: Number | None = None


class Series(_Strict):
    """A quantity over another: memory margin over rungs, tokens a second over concurrency.

    Attributes:
        name: which line it is where several share a ``title`` (a GPU, a role).
        bound: the value that must not be passed; None if none.
        bound_is: whether ``bound`` is the least or the most that is allowed.
        last_good: the same series as the last good release gave it, with its noise band.
    """

    title: str
    name: str = ""
    x_label: str
    y_label: str
    points: list[Point]
    bound: Number | None = None
    bound_is: Literal["min", "max"] = "min"
    last_good: list[Point] = []


class Comparison(_Strict):
    """This release against the last good one, by one number.

    Attributes:
        what: which number (recall, decode tok/s at concurrency 4).
        last_good_release: the digest of the release that is compared with.
        change: the difference or ratio that is judged, as ``unit`` says.
        low: the lower end of its 95 % interval.
        high: the upper end of its 95 % interval.
        allowed: how far ``change`` may go.
        detectable: the least change that this run finds with 95 % power; None if not known.
        samples: pairs, or observations on this side.
        method: the test, by name.
    """

    what: str
    last_good_release: str
    this: Number
    last_good: Number
    change: Number
    low: Number
    high: Number
    allowed: Number
    unit: str
    detectable: Number | None = None
    samples: int
    method: str


class Item(_Strict):
    """One question and whether it was answered rightly; a later release is asked the same.

    Attributes:
        key: names the question with all that makes it (seed, tokens, depth, kind).
        order: the how-manieth request of the gate it was.
        said: the beginning of a wrong answer; empty if right.
    """

    key: str
    order: int
    is_right: bool
    said: str = ""


class Details(_Strict):
    """What a gate has to show beyond its one number: a report draws it, a later run reads it.

    Attributes:
        items: outcomes to be replayed on the next release.
        samples: raw observations by name, for comparisons with the next release.
        facts: short findings in words (the diagnosis of a failed recall).
    """

    heatmaps: list[Heatmap] = []
    series: list[Series] = []
    comparisons: list[Comparison] = []
    items: list[Item] = []
    samples: dict[str, list[Number]] = {}
    facts: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return self == Details()
