"""The filter of role `gitops`: its settings, read as the reconciler will read them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# The library of the same checkout, not one that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from seatrial.errors import SeatrialError
from seatrial.gitops import settings
from seatrial.plain import plain


def checked(value: Any) -> dict[str, Any]:
    """Return the settings in plain types, in the order in which people read them."""
    try:
        found = settings.parse(plain(value), "inputs of role gitops")
    except SeatrialError as error:
        raise AnsibleFilterError(str(error)) from None
    return found.model_dump(by_alias=True, mode="json")


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name in playbooks."""
        return {"seatrial_gitops_settings": checked}
