"""Role `cell` says what it saw of a host whose servers do not become ready."""

import json
import shlex
from pathlib import Path
from typing import Any

from tests.playing import facts_after

ROLE = Path(__file__).parents[1] / "roles" / "cell"
OLD, NEW = "0" * 16, "1" * 16


def waited(folder: Path, programs: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Wait for hosts whose `seatrial-host` is a shell line; return the facts that are left."""
    for host, line in programs.items():
        program = folder / host / "bin" / "seatrial-host"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    given = {"cell_root": f"{folder}/{{{{ inventory_hostname }}}}", "cell_release": NEW}
    tasks = [{"include_role": {"name": str(ROLE), "tasks_from": "ready.yml"}, "vars": given}]
    return facts_after(folder, tasks, ("cell_is_switched", "cell_problem"), list(programs))


def says(**status: Any) -> str:
    """Return a program that finds its units active, or as told."""
    found = {"active": True, "failed": [], "current": NEW, "journal": {}, **status}
    return f"echo {shlex.quote(json.dumps(found))}"


def test_a_host_that_is_not_ready_says_why(tmp_path: Path) -> None:
    """Not only that time is over, and never nothing."""
    crashed = says(active=False, failed=["prefill"], journal={"prefill": ["no memory"]})
    facts = waited(
        tmp_path,
        {
            "good": says(),
            "crashed": crashed,
            "went-back": says(current=OLD),
            "broken": "echo 'seatrial-host wait: systemctl: no answer' >&2; exit 1",
        },
    )
    problems = {host: facts[host]["cell_problem"] for host in facts}
    assert [host for host in facts if facts[host]["cell_is_switched"]] == ["good"]
    assert problems["good"] == ""
    assert problems["crashed"].endswith("ended while starting, and last said: no memory")
    assert f"it runs {OLD} and not {NEW}: it went back by itself" in problems["went-back"]
    assert problems["broken"] == "seatrial-host wait: systemctl: no answer"
