"""A check run comes first of all: before a build was made, before anything was deployed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rehearsal import run as rehearsal

GPU_HOSTS = ("gpu-a", "gpu-b", "gpu-c")


def on(host: str, command: str) -> str:
    """Run a command on a host."""
    done = subprocess.run(
        [rehearsal.HOSTS, "ssh", host, command], capture_output=True, text=True, check=True
    )
    return done.stdout


def play(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a playbook of the clone with caches and state of its own."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        [
            *(program, "-i", "inventory/rehearsal", *words),
            *("-e", f"build_artifact_dir={home}/artifacts", "-e", f"build_wheel_dir={home}/wheels"),
            *("-e", f"fleet_state_dir={home}/state"),
        ],
        cwd=rehearsal.REPOSITORY,
        env={**os.environ, "PATH": f"{Path(program).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    return done


@pytest.fixture
def bare_hosts(rehearsal_hosts: Path) -> None:
    """Return hosts with a model and an API key, made ready by bootstrap.yml, and no more."""
    rehearsal.clone(rehearsal.SOURCE, rehearsal.REPOSITORY)
    # What a check run asks of a model: that it is there, and which one.
    revision = yaml.safe_load((rehearsal.REPOSITORY / rehearsal.SPEC).read_text())["serving_spec"][
        "model"
    ]["revision"]
    model = "/opt/seatrial/models/rehearsal"
    for host in GPU_HOSTS:
        on(host, f"mkdir -p {model} && cd {model} && echo {{}} > config.json")
        on(host, f"echo {revision} > {model}/revision")
    on("edge", "mkdir -p /etc/seatrial && echo key > /etc/seatrial/api_keys")
    done = play("playbooks/bootstrap.yml", home=Path("/nowhere"))
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_check_run_on_bare_hosts_passes_and_leaves_them_bare(
    bare_hosts: None, tmp_path: Path
) -> None:
    """It names the build, the releases, the configurations and all cells, and makes none."""
    listing = (
        "find /opt/seatrial /etc/haproxy /etc/prometheus /etc/systemd -printf '%p %T@ %l\\n'; true"
    )
    before = {host: on(host, listing) for host in (*GPU_HOSTS, "edge")}
    done = play("deploy.yml", "--check", "--diff", home=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    said = " ".join(done.stdout.split())
    assert "A real run makes build" in said
    for host in GPU_HOSTS:
        assert f"to {host}." in said
    assert "+++ after: units/sglang-prefill.service" in said
    assert "+++ after: units/sglang-combined.service" in said
    assert said.count("stops nothing of no release") == len(GPU_HOSTS)
    assert "cells one, two" in said
    assert {host: on(host, listing) for host in before} == before
    assert list(tmp_path.iterdir()) == []
    looked = play("playbooks/drift.yml", home=tmp_path)
    assert looked.returncode != 0
    report = json.loads((tmp_path / "state/reports/drift/drift.json").read_text())
    nothing = [one for one in report["differences"] if one["kind"] == "release"]
    assert {(one["host"], one["found"]) for one in nothing} == {
        (host, "nothing") for host in GPU_HOSTS
    }
