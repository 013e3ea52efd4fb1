"""What a poll costs that finds nothing new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from seatrial.gitops import quiet, state
from tests.gitops.fleet import REPOSITORY, Fleet
from tests.gitops.people import Person

CPU_SECONDS_MAX = 0.3


def test_a_quiet_poll_costs_little_and_imports_nothing_heavy(
    tmp_path: Path, home: Path, alice: Person, bob: Person
) -> None:
    """One question to the repository; the fleet is paused here, so that nothing needs to move."""
    fleet = Fleet(tmp_path / "f", home, alice, bob)
    fleet.order("pause")
    fleet.merge(1024)
    assert fleet.kinds() == ["waiting"]
    command = [sys.executable, "-X", "importtime", "-m", "seatrial.gitops", "--fleet", "toy"]
    costs = []
    for _ in range(3):
        process = subprocess.Popen(
            [*command, "--settings", fleet.settings_file],
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        imported = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stderr.close()
        costs.append(used.ru_utime + used.ru_stime)
    assert process.returncode == 3  # it waits, as it did
    for module in ("pydantic", "yaml", "ansible", "seatrial.gitops.reconcile"):
        assert f" {module}\n" not in imported
    assert min(costs) <= CPU_SECONDS_MAX, costs


def test_a_quiet_poll_lets_the_heartbeat_beat_and_wakes_in_time(tmp_path: Path, home: Path) -> None:
    """The metrics file's time says when the branch was looked at last."""
    beat, settings = tmp_path / "metrics.prom", tmp_path / "toy.yml"
    beat.touch()
    os.utime(beat, (0, 0))
    origin = tmp_path / "origin.git"
    subprocess.run(["git", "init", "-q", "--bare", str(origin)], check=True)
    seen = quiet.Seen(
        files=quiet.stamps([settings]),
        url=str(origin),
        branch="main",
        seconds=20,
        listed="",
        wake=None,
        status=0,
        heartbeat=str(beat),
    )
    quiet.remember("toy", seen)
    assert quiet.is_quiet("toy", settings) == 0
    assert beat.stat().st_mtime > 0
    assert quiet.is_quiet("toy", tmp_path / "another.yml") is None
    now = state.now().timestamp()
    quiet.remember("toy", seen._replace(wake=now + 3600))
    assert quiet.is_quiet("toy", settings) == 0
    quiet.remember("toy", seen._replace(wake=now))
    assert quiet.is_quiet("toy", settings) is None
