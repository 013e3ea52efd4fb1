"""How other machines are told: briefly, and with nothing that was not asked for."""

from __future__ import annotations

import requests

from seatrial.errors import SeatrialError

SECONDS = (5, 10)
"""To connect, and between two bytes of an answer."""


class TellError(SeatrialError):
    """One channel could not be told; the others and the rollout go on."""


def session() -> requests.Session:
    """Return a session that takes nothing from the environment: no .netrc, no proxy's password."""
    made = requests.Session()
    made.trust_env = False
    made.headers["User-Agent"] = "seatrial"
    return made
