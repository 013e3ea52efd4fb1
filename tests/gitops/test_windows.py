"""When a rollout may begin."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from seatrial.gitops import windows
from seatrial.gitops.settings import Window


def window(kind: str, cron: str, minutes: int, timezone: str = "Europe/Berlin") -> Window:
    """Return a window of the settings."""
    plain = {"kind": kind, "cron": cron, "minutes": minutes, "timezone": timezone}
    return Window.model_validate({**plain, "reason": f"{kind} it"})


def at(text: str) -> datetime:
    """Return a moment in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


NIGHTS = window("allow", "0 22 * * *", 480)
WEEKEND = window("deny", "0 18 * * FRI", 60 * 60)


@pytest.mark.parametrize(
    ("moment", "is_open", "until"),
    [
        ("2026-11-25T20:59", False, "2026-11-25T21:00"),
        ("2026-11-25T21:00", True, None),
        ("2026-11-26T04:59", True, None),
        ("2026-11-26T05:00", False, "2026-11-26T21:00"),
        ("2026-11-27T21:30", False, "2026-11-30T05:00"),
    ],
    ids=["before", "it opens", "its last minute", "it closes", "deny beats allow"],
)
def test_a_rollout_begins_in_a_window_and_not_in_a_freeze(
    moment: str, is_open: bool, until: str | None
) -> None:
    """Berlin is an hour ahead of UTC in November; the freeze is from Friday to Monday."""
    view = windows.look([NIGHTS, WEEKEND], at(moment))
    assert (view.is_open, view.until) == (is_open, at(until) if until else None)


def test_without_windows_a_rollout_begins_at_any_time() -> None:
    """And with a freeze alone, whenever it is not frozen."""
    assert windows.look([], at("2026-11-28T12:00")).is_open
    assert windows.look([WEEKEND], at("2026-11-25T12:00")).is_open


def test_a_freeze_says_until_when_in_its_own_time_zone() -> None:
    """And why."""
    view = windows.look([WEEKEND], at("2026-11-28T12:00"))
    assert view.why == "no rollout begins before 2026-11-30 06:00 Europe/Berlin (deny it)"


@pytest.mark.parametrize(
    ("moment", "is_open"),
    [
        ("2026-03-29T03:59", True),  # 05:59 there, clocks went forward at two
        ("2026-03-29T04:00", False),
        ("2026-10-25T02:59", True),  # 03:59 there, the hour from two came twice
        ("2026-10-25T03:00", False),
    ],
)
def test_a_window_is_as_long_as_it_says_when_clocks_change(moment: str, is_open: bool) -> None:
    """Four hours from one in the morning are four hours, in spring and in autumn."""
    assert windows.look([window("allow", "0 1 * * *", 240)], at(moment)).is_open is is_open


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/30 * * * *", "0 * * * *"])
@pytest.mark.parametrize("moment", ["2026-10-25T01:01", "2026-10-25T01:16"])
def test_a_freeze_holds_in_the_hour_that_comes_twice(cron: str, moment: str) -> None:
    """It began at half past two, and a little later it is two o'clock again."""
    assert not windows.look([window("deny", cron, 60)], at(moment)).is_open


@pytest.mark.parametrize("cron", ["0 1 30 2 *", "* * * * * *", "@daily"])
def test_a_window_that_never_opens_or_is_said_otherwise_is_no_window(cron: str) -> None:
    """The thirtieth of February; seconds; a word."""
    with pytest.raises(ValidationError, match="should be five fields"):
        window("allow", cron, 60)
