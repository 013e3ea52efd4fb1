"""The filter of ``drift.yml``: what roles want and what hosts said, compared in the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# The library of the same checkout, not one that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from seatrial import drift
from seatrial.errors import SeatrialError
from seatrial.plain import plain


def report(
    seen: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]], fleet: str, commit: str
) -> dict[str, Any]:
    """Return ``report`` (the content of drift.json), ``text`` for people, and ``is_clean``.

    ``seen`` is by host what role `drift` found, or why it found nothing; ``wanted`` by host is
    ``cell``, ``release`` (what role `release` wants), ``entry`` and ``laid``: by the playbook that
    lays it down, what roles want.
    """
    try:
        made = drift.report(
            fleet,
            commit,
            {host: _wanted(one) for host, one in wanted.items()},
            {
                host: one if isinstance(one, str) else drift.look(plain(one), host)
                for host, one in seen.items()
            },
            datetime.now(UTC),
        )
    except SeatrialError as error:
        raise AnsibleFilterError(str(error)) from None
    return {
        "report": made.model_dump(by_alias=True, mode="json"),
        "text": drift.text(made),
        "is_clean": made.is_clean,
    }


def _wanted(value: Mapping[str, Any]) -> drift.Wanted:
    wanted = plain(value)
    laid, services = {}, {}
    for playbook, parts in wanted["laid"].items():
        for part in parts:
            for path, file in part.get("files", {}).items():
                laid[path] = drift.WantedFile(playbook=playbook, **file)
            for name in part.get("services", []):
                services[name] = drift.WantedService(playbook=playbook)
    return drift.Wanted(
        cell=wanted["cell"],
        **wanted["release"],
        laid=laid,
        services=services,
        entry=wanted["entry"] or None,
    )


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by the name that the playbook uses."""
        return {"seatrial_drift": report}
