"""Who holds the fleet lock is said in a sentence, and only a surely dead holder is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial import fleet_lock

REPOSITORY = Path(__file__).resolve().parents[1]
ASK = "import json; from seatrial import fleet_lock; print(json.dumps(fleet_lock.request('c', 9)))"


def asked_by(program: str) -> dict[str, Any]:
    """Return the request of another process, which has ended since."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_holder_that_lives_is_not_dead() -> None:
    """This very process."""
    assert not fleet_lock.is_dead(fleet_lock.request("c", 9))


def test_a_holder_whose_process_ended_is_dead() -> None:
    """Killed, or a closed terminal."""
    assert fleet_lock.is_dead(asked_by(ASK))


def test_another_process_with_its_number_is_not_the_holder() -> None:
    """Numbers come again; the time of the start tells them apart."""
    ours = fleet_lock.request("c", 9)
    assert fleet_lock.is_dead({**ours, "process": {**ours["process"], "started": 1}})


def test_a_holder_before_a_reboot_is_dead() -> None:
    """The controller's machine was rebooted."""
    ours = fleet_lock.request("c", 9)
    assert fleet_lock.is_dead({**ours, "controller": {**ours["controller"], "boot": "before"}})


def test_of_a_holder_elsewhere_nothing_is_known() -> None:
    """Another machine, or a container beside this one with processes that are not seen."""
    ended = asked_by(ASK)
    for key in ("name", "machine", "pids"):
        controller = {**ended["controller"], key: "elsewhere"}
        assert not fleet_lock.is_dead({**ended, "controller": controller})
    assert not fleet_lock.is_dead({"token": "unreadable"})


def test_a_holder_is_dead_when_we_hold_the_kernel_lock_that_it_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container that was started again neither its processes nor its boot can be seen."""
    with (tmp_path / "lock").open("w") as lock:
        monkeypatch.setenv(fleet_lock.KEEPER, fleet_lock.keeper(lock.fileno()))
    ours = fleet_lock.request("c", 9)
    before = {**ours, "controller": {**ours["controller"], "pids": "gone"}}
    assert fleet_lock.is_dead(before)
    assert not fleet_lock.is_dead({**before, "keeper": "another lock"})
    assert not fleet_lock.is_dead(
        {**before, "controller": {**before["controller"], "name": "elsewhere"}}
    )
    monkeypatch.delenv(fleet_lock.KEEPER)
    assert not fleet_lock.is_dead({**before, "keeper": ""})


def test_a_worker_asks_in_the_name_of_the_playbook() -> None:
    """Ansible forks a worker for each host; the person's process is the one that counts."""
    forked = (
        "import os, json; from seatrial import fleet_lock\n"
        "if os.fork(): os.wait(); raise SystemExit\n"
        "print(json.dumps([os.getppid(), fleet_lock.request('c', 9)['process']['pid']]))"
    )
    parent, found = asked_by(forked)
    assert found == parent


def test_the_refusal_names_holder_hosts_and_the_way_out() -> None:
    """Who, where, what, how to release it."""
    record = {**fleet_lock.request("c0ffee" * 7, 9), "token": "t1", "who": "alice"}
    record["controller"] = {"name": "bridge"}
    said = fleet_lock.sentence({"gpu-a": record, "gpu-b": record}, "ansible-playbook unlock.yml")
    assert said == (
        "gpu-a, gpu-b: the fleet is locked by alice on bridge for rollout c0ffeec0ffee. Wait for "
        "its end; if it is surely dead: ansible-playbook unlock.yml -e unlock_token=t1"
    )
