"""What the control machine must be like, besides having the programs."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from seatrial.errors import SeatrialError


class ControllerError(SeatrialError):
    """A rollout cannot be steered from here."""


def check_home() -> bool:
    """Return true if HOME is the home of the user.

    Ansible starts a background job in the one and looks for it in the other; a rollout would end
    at its first gate with "could not find job".

    Raises:
        ControllerError: they are two folders.
    """
    user = pwd.getpwuid(os.geteuid())
    home = os.environ.get("HOME", "")
    if not home or Path(home).resolve() != Path(user.pw_dir).resolve():
        raise ControllerError(
            f"HOME should be {user.pw_dir}, the home of {user.pw_name}, is {home or 'not set'}: "
            f"Ansible would not find its own background jobs; export HOME={user.pw_dir}"
        )
    return True
