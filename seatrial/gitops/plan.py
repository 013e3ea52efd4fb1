"""The plan: what differs between what runs and what a commit wants, before anything moves.

``playbooks/drift.yml`` of the commit looks at every host and changes nothing; what it finds is the
plan. Contents of files and values of environment variables are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.gitops import disk, playbooks

PLAYBOOK = "playbooks/drift.yml"
FOUND = "reports/drift/drift.json"


def found_in(record: Path, run: playbooks.Run, commit: str) -> dict[str, Any] | None:
    """Return what the look in ``record`` found; None if it came to no result."""
    try:
        value = json.loads((record / FOUND).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("commit") != commit or run.is_late:
        return None
    # The commit's own program wrote it, perhaps in a form that this one does not know.
    is_known = isinstance(value.get("differences"), list) and "release" in value
    return value if is_known else None


def write(record: Path, found: Mapping[str, Any]) -> None:
    """Put the plan into the record, for people (plan.txt) and for programs (plan.json)."""
    disk.write(record / "plan.json", json.dumps(found, indent=2, sort_keys=True) + "\n")
    disk.write(record / "plan.txt", text(found))


def text(found: Mapping[str, Any]) -> str:
    """Return the plan for people, host by host."""
    lines = [f"plan for commit {found['commit'][:12]}, release {found['release']}", ""]
    changes, differences = found.get("changes", {}), found.get("differences", [])
    hosts = dict.fromkeys([*changes, *(one["host"] for one in differences)])
    for host in hosts:
        lines.append(host)
        lines += [f"  release: {said}" for said in changes.get(host, [])]
        lines += [
            f"  {one['kind']}: {one['what']}: {one['found']} -> {one['git']}"
            for one in differences
            if one["host"] == host
        ]
    return "\n".join([*lines, *([] if hosts else ["every host is what the commit says"])]) + "\n"


def summary(found: Mapping[str, Any]) -> str:
    """Return the plan in a few words."""
    said = dict.fromkeys(said for host in found.get("changes", {}).values() for said in host)
    if said:
        shown = [one for one in said if not one.startswith("unit ")][:4]
        return f"{', '.join(shown)} on {len(found['changes'])} hosts"
    hosts = {one["host"] for one in found.get("differences", [])}
    return f"no release changes; {len(hosts)} hosts differ" if hosts else "nothing differs"
