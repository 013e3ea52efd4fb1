"""Freeze windows: when a rollout may begin. Deny beats allow."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim

from seatrial.gitops.settings import Window


class View(NamedTuple):
    """Whether a rollout may begin; if not, until when not (as far as is known), and why."""

    is_open: bool
    until: datetime | None = None
    why: str = ""


def look(windows: Sequence[Window], at: datetime) -> View:
    """Say whether a rollout may begin at this moment.

    Where windows of kind ``allow`` are given, one of them must be open.
    """
    denied = [
        (closes, one) for one in windows if one.kind == "deny" and (closes := closing(one, at))
    ]
    if denied:
        until, window = max(denied, key=lambda pair: pair[0])
        return View(
            False, until, f"no rollout begins before {said(until, window)} ({window.reason})"
        )
    allowing = [one for one in windows if one.kind == "allow"]
    if not allowing or any(closing(one, at) for one in allowing):
        return View(True)
    openings = [(opening(one, at), one) for one in allowing]
    until, window = min(openings, key=lambda pair: pair[0])
    return View(False, until, f"rollouts begin from {said(until, window)} on ({window.reason})")


def closing(window: Window, at: datetime) -> datetime | None:
    """Return when the window closes, if it is open."""
    local = at.astimezone(ZoneInfo(window.timezone)) + timedelta(seconds=1)
    opened = next(CronSim(window.cron, local, reverse=True), None)
    # Backwards, cronsim passes over an hour that clocks show twice; forwards it does not.
    for later in CronSim(window.cron, opened) if opened else ():
        if later.astimezone(UTC) > at:
            break
        opened = later
    closes = opened.astimezone(UTC) + timedelta(minutes=window.minutes) if opened else None
    return closes if closes and closes > at else None


def opening(window: Window, at: datetime) -> datetime:
    """Return when the window opens next; the settings take no cron that never comes."""
    return next(CronSim(window.cron, at.astimezone(ZoneInfo(window.timezone)))).astimezone(UTC)


def said(moment: datetime, window: Window) -> str:
    """Return the moment as people of the window's time zone read it."""
    return f"{moment.astimezone(ZoneInfo(window.timezone)):%Y-%m-%d %H:%M} {window.timezone}"
