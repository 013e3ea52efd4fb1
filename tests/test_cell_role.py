"""Role `cell` leaves facts of every host, of one that is broken and of one that is gone too."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.playing import facts_after, played

ROLE = Path(__file__).parents[1] / "roles" / "cell"
OLD, NEW = "0" * 16, "1" * 16
GONE = "gone"
"""A host to which no connection can be made."""


def step(name: str, folder: Path, **given: Any) -> dict[str, Any]:
    """Return the task that includes a step of the role, for hosts of this folder."""
    reached = {
        "ansible_connection": f"{{{{ 'ssh' if inventory_hostname == '{GONE}' else 'local' }}}}",
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
        "ansible_ssh_retries": 0,
        "cell_root": f"{folder}/{{{{ inventory_hostname }}}}",
        "cell_release": NEW,
    }
    return {
        "include_role": {"name": str(ROLE), "tasks_from": f"{name}.yml"},
        "vars": {**reached, **given},
    }


def install(folder: Path, programs: Mapping[str, str]) -> None:
    """Give hosts a `seatrial-host` that is a shell line."""
    for host, line in programs.items():
        program = folder / host / "bin" / "seatrial-host"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)


def after(
    folder: Path, name: str, programs: Mapping[str, str], facts: Sequence[str], **given: Any
) -> dict[str, dict[str, Any]]:
    """Take a step on hosts whose `seatrial-host` is a shell line; return the facts it leaves."""
    install(folder, {host: line for host, line in programs.items() if host != GONE})
    return facts_after(folder, [step(name, folder, **given)], facts, list(programs))


def says(**status: Any) -> str:
    """Return a program that finds its units active, or as told."""
    found = {"active": True, "failed": [], "current": NEW, "journal": {}, **status}
    return f"echo {shlex.quote(json.dumps(found))}"


def test_a_host_that_is_not_ready_says_why(tmp_path: Path) -> None:
    """Not only that time is over, and never nothing."""
    crashed = says(active=False, failed=["prefill"], journal={"prefill": ["no memory"]})
    programs = {
        "good": says(),
        "crashed": crashed,
        "went-back": says(current=OLD),
        "broken": "echo Welcome >&2; echo 'seatrial-host wait: systemctl: no answer' >&2; exit 1",
        "silent": "exit 1",
        "mad": "echo Segmentation fault",
        GONE: "",
    }
    facts = after(tmp_path, "ready", programs, ("cell_is_switched", "cell_problem"))
    problems = {host: facts[host]["cell_problem"] for host in facts}
    assert [host for host in facts if facts[host]["cell_is_switched"]] == ["good"]
    assert problems["good"] == ""
    assert problems["crashed"].endswith("ended while starting, and last said: no memory")
    assert f"it runs {OLD} and not {NEW}: it went back by itself" in problems["went-back"]
    assert problems["broken"] == "seatrial-host wait: systemctl: no answer"
    assert problems["silent"] == "the host cannot run a program"
    assert problems["mad"] == "no answer in JSON: 'Segmentation fault\\n'"
    assert problems[GONE] == "unreachable (Connection refused)"


def test_a_host_that_is_gone_ends_no_step(tmp_path: Path) -> None:
    """It is told apart by facts; a host that Ansible drops would keep its lock, or lose its way."""
    programs = {"good": 'echo "{}"', GONE: ""}
    facts = after(tmp_path, "arm", programs, ("cell_is_armed", "cell_problem"))
    assert facts["good"] == {"cell_is_armed": True, "cell_problem": ""}
    assert not facts[GONE]["cell_is_armed"]
    assert facts[GONE]["cell_problem"].startswith("unreachable")


def test_words_reach_the_host_as_they_were_said(tmp_path: Path) -> None:
    """A reason may hold a quote, a dollar or a line's end; stderr is no part of the answer."""
    reason = 'gates: "recall" isn\'t $HOME\nand `id`'
    program = (
        'printf %s "$3" >$(dirname $0)/said; echo warned >&2; echo hi; echo \'{"release": "x"}\''
    )
    facts = after(
        tmp_path,
        "revert",
        {"good": program},
        ("cell_reverted_to", "cell_problem"),
        cell_reason=reason,
    )
    assert (tmp_path / "good/bin/said").read_text() == reason
    assert facts["good"] == {"cell_reverted_to": "x", "cell_problem": ""}


def test_hosts_that_are_judged_together_fail_together(tmp_path: Path) -> None:
    """Or one would be judged by what it ran before; but what it said then is not forgotten."""
    install(tmp_path, {"good": 'echo "{}"'})
    task = step("status", tmp_path, cell_seen_with="{{ ansible_play_hosts_all }}")
    known = {"set_fact": {"cell_status": {"current": OLD}, "cell_is_seen": True}}
    after_all = {"debug": {"msg": "still {{ cell_status.current }}"}}
    tasks = [known, {"block": [task], "always": [after_all]}]
    ran = played(tmp_path, {"hosts": "all", "tasks": tasks}, "-i", f"good,{GONE},")
    assert ran.returncode == 2
    assert f"{GONE}: unreachable" in ran.stdout
    assert ran.stdout.count("failed=1") == 2
    assert ran.stdout.count(f"still {OLD}") == 2


def test_a_check_run_asks_a_host_only_what_it_runs(tmp_path: Path) -> None:
    """Everything else that the program does is left out."""
    install(tmp_path, {"good": 'echo $* >>$(dirname $0)/asked; echo "{}"'})
    tasks = [step(name, tmp_path, cell_lock={"token": "t"}) for name in ("status", "unlock")]
    ran = played(tmp_path, {"hosts": "all", "tasks": tasks}, "--check", "-i", "good,")
    assert ran.returncode == 0, ran.stdout
    assert (tmp_path / "good/bin/asked").read_text().split() == ["status"]
