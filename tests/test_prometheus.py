"""Counters are believed only when their raw samples allow it."""

from __future__ import annotations

import pytest

from seatrial.prometheus import PrometheusError, grown, selector


def test_increase_is_summed_over_series() -> None:
    """Two servers of a role count together."""
    found = grown("m", [[1.0, 2.0, 5.0], [10.0, 20.0]])
    assert (found.amount, found.series, found.scrapes) == (14.0, 2, 2)


def test_idle_counter_grows_by_nothing() -> None:
    """No growth is a measurement; whether it is enough is the gate's to say."""
    assert grown("m", [[3.0, 3.0]]).amount == 0


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ([], "no data"),
        ([[]], "no data"),
        ([[1.0]], "1 sample"),
        ([[1.0, 2.0], [1.0]], "1 sample"),
        ([[1.0, float("nan")]], "not a number"),
        ([[5.0, 1.0, 9.0]], "was reset"),
    ],
)
def test_what_cannot_be_believed_is_refused(series: list[list[float]], message: str) -> None:
    """A gap, a reset or no number never becomes a rate."""
    with pytest.raises(PrometheusError, match=message):
        grown("m", series)


def test_selector_finds_either_spelling() -> None:
    """SGLang's colon becomes an underscore on the way to some versions of Prometheus."""
    assert selector("prompt_tokens_total", ["10.0.0.2:30000", "10.0.0.1:30000"]) == (
        '{__name__=~"sglang[:_]prompt_tokens_total", '
        'instance=~"10\\\\.0\\\\.0\\\\.1:30000|10\\\\.0\\\\.0\\\\.2:30000"}'
    )


def test_selector_finds_an_address_in_brackets() -> None:
    """The brackets of an IPv6 address are no class of characters."""
    assert 'instance=~"\\\\[::1\\\\]:30000"' in selector("m", ["[::1]:30000"])
