"""Tells people and machines what happened. A channel that fails stops nothing and nobody else.

Imported when there is something to tell: its libraries cost more than a poll may.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import apprise
import requests

from seatrial.gitops import forge, note
from seatrial.gitops.secret import read_lines, read_secret
from seatrial.gitops.settings import Grafana, Settings
from seatrial.gitops.state import Announcement, Kind
from seatrial.gitops.web import SECONDS, TellError, session

TELL_SECONDS = 20.0
"""A rollout waits no longer than this for those who are told of it."""

_WEIGHT: dict[Kind, str] = {
    "refused": "failure",
    "reverted": "failure",
    "failed": "failure",
    "degraded": "warning",
    "drift": "warning",
    "trouble": "warning",
    "promoted": "success",
    "healed": "success",
    "recovered": "success",
}
_DRAWN: tuple[Kind, ...] = ("began", "promoted", "reverted", "failed", "healed")


class _Channel(NamedTuple):
    name: str
    tell: Callable[[], None]


def announce(settings: Settings, told: Announcement) -> list[str]:
    """Tell every channel of the settings, at once; return a sentence for each that failed.

    Never raises, and returns after `TELL_SECONDS` at the latest.
    """
    channels = list(_channels(settings, told))
    failures: dict[str, str] = {
        channel.name: f"no answer within {TELL_SECONDS:g} s" for channel in channels
    }
    threads = [
        threading.Thread(target=_try, args=(channel, failures), daemon=True) for channel in channels
    ]
    for thread in threads:
        thread.start()
    waiting = threading.Event()
    timer = threading.Timer(TELL_SECONDS, waiting.set)
    timer.daemon = True
    timer.start()
    for thread in threads:
        while thread.is_alive() and not waiting.is_set():
            thread.join(0.1)
    timer.cancel()
    return [f"{name}: {failure}" for name, failure in dict(failures).items() if failure]


def _try(channel: _Channel, failures: dict[str, str]) -> None:
    try:
        channel.tell()
    except TellError as error:
        failures[channel.name] = str(error)
    except Exception as error:  # noqa: BLE001 - another library's; its text could carry a secret
        failures[channel.name] = type(error).__name__
    else:
        failures[channel.name] = ""


def _channels(settings: Settings, told: Announcement) -> Iterator[_Channel]:
    tell = settings.tell
    address = link(settings, told)
    if tell.notify_urls_file:
        urls = tell.notify_urls_file
        yield _Channel("notifications", lambda: _notify(read_lines(urls), told, address))
    if tell.forge:
        of_forge = tell.forge
        yield _Channel("commit status", lambda: forge.set_status(of_forge, told, address))
    if tell.grafana and told.kind in _DRAWN:
        grafana = tell.grafana
        yield _Channel("Grafana", lambda: _draw(grafana, told))


def link(settings: Settings, told: Announcement) -> str:
    """Return where the rollout's report is read by a browser; empty if there is no such place."""
    if not settings.tell.report_url or not told.rollout:
        return ""
    return settings.tell.report_url.replace("{rollout}", told.rollout)


def title(told: Announcement) -> str:
    """Return the headline of a notification."""
    commit = f" {told.commit[:12]}" if told.commit else ""
    return f"seatrial {told.fleet}: {told.kind}{commit}"


def body(told: Announcement, address: str) -> str:
    """Return what a notification says: the sentence, and where the report is."""
    measured = note.measured(told)
    lines = [
        told.sentence,
        f"Gate {told.gate}: measured {measured}" if told.gate and measured else "",
        f"Report: {address or told.report}" if address or told.report else "",
    ]
    return "\n".join(line for line in lines if line)


def _notify(urls: list[str], told: Announcement, address: str) -> None:
    # Its log names addresses with their tokens; what it says goes nowhere.
    logger = logging.getLogger("apprise")
    logger.handlers = [logging.NullHandler()]
    logger.propagate = False
    failed = []
    for number, url in enumerate(urls, start=1):
        one = apprise.Apprise()
        weight = apprise.NotifyType(_WEIGHT.get(told.kind, "info"))
        if not one.add(url):
            failed.append(f"{number} is no address that apprise knows")
        elif not one.notify(body=body(told, address), title=title(told), notify_type=weight):
            failed.append(f"{number} ({one[0].service_name}) was not accepted")
    if failed:
        raise TellError(f"of {len(urls)} addresses, number {', '.join(failed)}")


def _draw(grafana: Grafana, told: Announcement) -> None:
    """Draw the rollout: a line where it began, a region when it has ended."""
    token = read_secret(grafana.token_file)
    moment = int(told.time.timestamp() * 1000)
    drawn = {
        "time": moment,
        "tags": ["seatrial", told.fleet, told.kind],
        "text": f"{title(told)}: {told.sentence}",
    }
    if told.began and told.kind != "began":
        drawn |= {"time": int(told.began.timestamp() * 1000), "timeEnd": moment}
    with session() as http:
        http.headers["Authorization"] = f"Bearer {token}"
        url = f"{grafana.url.rstrip('/')}/api/annotations"
        try:
            answer = http.post(url, json=drawn, timeout=SECONDS, allow_redirects=False)
        except requests.RequestException as error:
            raise TellError(f"{grafana.url}: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise TellError(
            f"{url} answered {answer.status_code}; it needs a token in {grafana.token_file} "
            "that may write annotations"
        )
