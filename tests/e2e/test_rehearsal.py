"""The whole story, with real parts: promoted, unchanged, refused, reverted, rolled back.

One rehearsal boots the hosts and is kept; the tests are its chapters, in order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rehearsal import run as rehearsal
from seatrial import ledger

REPOSITORY = Path(__file__).resolve().parents[2]
GPU_HOSTS = ("gpu-a", "gpu-b", "gpu-c")


class Play(NamedTuple):
    """What a playbook came to."""

    status: int
    output: str
    seconds: float

    def changed(self) -> int:
        """Return how many tasks changed something, on all hosts."""
        return sum(int(count) for count in re.findall(r"changed=(\d+)", self.output))


def play(*words: str) -> Play:
    """Run a playbook in the rehearsal's clone."""
    program = Path(sys.executable).with_name("ansible-playbook")
    started = time.monotonic()
    done = subprocess.run(
        [program, "-i", "inventory/rehearsal", *words],
        cwd=rehearsal.REPOSITORY,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    return Play(done.returncode, done.stdout, time.monotonic() - started)


def on(host: str, *words: str) -> str:
    """Run a command on a host."""
    done = subprocess.run(
        [rehearsal.HOSTS, "ssh", host, *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def fleet() -> dict[str, Any]:
    """Return what every GPU host runs: releases and process ids."""
    found = {}
    for host in GPU_HOSTS:
        status = json.loads(on(host, "/opt/seatrial/bin/seatrial-host", "status"))
        pids = {name: unit["MainPID"] for name, unit in status["units"].items()}
        found[host] = (status["current"], status["last_good"], status["active"], pids)
    return found


def last_rollout() -> list[ledger.Event]:
    """Return the events of the newest rollout."""
    events = ledger.read(rehearsal.LEDGER)
    return ledger.read(rehearsal.LEDGER, events[-1].rollout)


def merge(message: str, edit: dict[str, object]) -> None:
    """Commit a change of the spec in the clone."""
    rehearsal.commit(rehearsal.REPOSITORY, message, edit)


@pytest.fixture(scope="module", autouse=True)
def kept_rehearsal() -> Iterator[None]:
    """Run `make rehearsal KEEP=1`; take the hosts down at the end, whatever happens."""
    subprocess.run([rehearsal.HOSTS, "down"], check=True)
    try:
        done = subprocess.run(
            [sys.executable, REPOSITORY / "rehearsal/run.py", "--keep"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-6000:]
        yield
    finally:
        subprocess.run([rehearsal.HOSTS, "down"], check=True)


@pytest.fixture
def merged_back() -> Iterator[None]:
    """Take the last commit of the clone back after a test."""
    yield
    subprocess.run(
        ["git", "-C", rehearsal.REPOSITORY, "reset", "-q", "--hard", "HEAD^"], check=True
    )


def test_the_first_rollout_is_promoted_and_serves() -> None:
    """Both cells run the release, and last_good is that release."""
    end = last_rollout()[-1]
    assert end.data["outcome"] == "promoted"
    releases = {state[:3] for state in fleet().values()}
    assert len(releases) == 1
    current, last_good, active = releases.pop()
    assert current == last_good
    assert active
    assert rehearsal.ask_the_entry() == 0


def test_the_entry_asks_for_the_key() -> None:
    """Without it, 401; the key stands in no unit, argument or journal."""
    answer = subprocess.run(
        [
            rehearsal.HOSTS,
            "in",
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            f"{rehearsal.ENTRY}/v1/models",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "401"
    key = rehearsal.API_KEY_FILE.read_text().strip()
    for host in (*GPU_HOSTS, "edge"):
        seen = on(
            host,
            "cat /proc/[0-9]*/cmdline /etc/systemd/system/*.service /etc/haproxy/*.cfg "
            "2>/dev/null; journalctl --no-pager; true",
        )
        assert key not in seen


def test_a_second_deploy_changes_nothing() -> None:
    """changed=0, the same processes, within 45 seconds."""
    before = fleet()
    second = play("deploy.yml")
    assert second.status == 0
    assert second.changed() == 0
    assert fleet() == before
    assert second.seconds <= 45


def test_a_check_run_of_a_change_shows_it_and_changes_nothing(merged_back: None) -> None:
    """`--check --diff` names the new value; hosts and staged releases stay as they are."""
    before = fleet()
    staged = on("gpu-a", "ls", "/opt/seatrial/releases")
    merge("Use smaller chunks", {"chunked_prefill_size": 16384})
    checked = play("deploy.yml", "--check", "--diff")
    assert checked.status == 0
    assert "--chunked-prefill-size 16384" in checked.output
    assert fleet() == before
    assert on("gpu-a", "ls", "/opt/seatrial/releases") == staged


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"index_topk": 513}, "index_topk: should be a multiple of 64, is 513"),
        ({"index_topk": 4096}, "index_topk: should be one of"),
        ({"mem_fraction_static": 1.2}, "mem_fraction_static: should be less than 1.0, is 1.2"),
        ({"context_length": 1048576}, "context_length: should be at most"),
        ({"index_key_dtype": "fp32"}, "does not fit"),
    ],
)
def test_a_wrong_merge_is_refused_before_anything_is_touched(
    merged_back: None, edit: dict[str, object], message: str
) -> None:
    """One clear message, no traceback; the same processes go on."""
    before = fleet()
    merge("A bad idea", edit)
    refused = play("deploy.yml")
    assert refused.status != 0
    assert message in refused.output
    assert "Traceback" not in refused.output
    assert fleet() == before


@pytest.mark.parametrize(
    ("host", "spoil", "mend", "message"),
    [
        (
            "gpu-a",
            "mv /opt/seatrial/models/rehearsal /opt/seatrial/models/away",
            "mv /opt/seatrial/models/away /opt/seatrial/models/rehearsal",
            "/opt/seatrial/models/rehearsal",
        ),
        (
            "gpu-b",
            "mkdir /away && mv /usr/lib/x86_64-linux-gnu/libibverbs.so* /away && ldconfig",
            "mv /away/libibverbs.so* /usr/lib/x86_64-linux-gnu/ && rmdir /away && ldconfig",
            "libibverbs.so.1",
        ),
    ],
)
def test_a_host_that_lacks_something_is_named_before_anything_is_touched(
    host: str, spoil: str, mend: str, message: str
) -> None:
    """A model that is not there, a library that the build needs."""
    before = fleet()
    on(host, spoil)
    try:
        refused = play("deploy.yml")
    finally:
        on(host, mend)
    assert refused.status != 0
    assert message in refused.output
    assert "Traceback" not in refused.output
    assert fleet() == before


def test_an_unreachable_host_is_named_before_anything_is_touched() -> None:
    """A cable is out."""
    before = fleet()
    subprocess.run([rehearsal.HOSTS, "cut", "gpu-c"], check=True)
    try:
        refused = play("deploy.yml")
    finally:
        subprocess.run([rehearsal.HOSTS, "mend", "gpu-c"], check=True)
    assert refused.status != 0
    assert "gpu-c" in refused.output
    assert fleet() == before


def test_a_release_that_forgets_is_reverted_and_the_old_one_serves(merged_back: None) -> None:
    """index_topk 512 over 1024: gate A fails, the cell reverts, the last sentence says it all."""
    before = fleet()
    builds = on("gpu-a", "ls", "/opt/seatrial/builds")
    merge("Lower index_topk to save index memory", {"index_topk": 512})
    bad = play("deploy.yml")
    assert bad.status != 0
    events = last_rollout()
    assert events[-1].data["outcome"] == "reverted"
    reason = events[-1].data["reason"]
    for words in (
        "case_a_needle",
        "FAIL",
        "measured",
        "bound",
        "index_topk 1024 -> 512",
        "git revert",
    ):
        assert words in reason
    after = fleet()
    assert {host: state[:3] for host, state in after.items()} == {
        host: state[:3] for host, state in before.items()
    }
    # The canary alone was touched: the other cell's processes went on.
    assert after["gpu-c"] == before["gpu-c"]
    assert on("gpu-a", "ls", "/opt/seatrial/builds") == builds
    assert rehearsal.ask_the_entry() == 0
    # From the failed gate to the old release answering: an engine's start and at most 30 s.
    seconds = {phase.name: phase.seconds for phase in ledger.phases(events)}
    assert seconds["revert"] <= seconds["activate"] + 30


def test_gates_judge_what_runs_and_change_nothing() -> None:
    """`gate.yml` on the fleet."""
    before = fleet()
    judged = play("playbooks/gate.yml")
    assert judged.status == 0
    assert fleet() == before


def test_the_kernels_own_tests_hold_inside_the_build() -> None:
    """References, packing and backend run in the very environment that serves."""
    packages = Path(pytest.__file__).resolve().parents[1]
    names = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")
    subprocess.run(
        [rehearsal.HOSTS, "put", "gpu-c", REPOSITORY / "kernels/tests", "/tmp/kernels/tests"],
        check=True,
    )
    for name in names:
        source = packages / name
        subprocess.run(
            [rehearsal.HOSTS, "put", "gpu-c", source, f"/tmp/kernels/lib/{name}"], check=True
        )
    build = on("gpu-c", "readlink -f /opt/seatrial/current/build").strip()
    told = on(
        "gpu-c",
        f"cd /tmp/kernels && PYTHONPATH=lib SGLANG_USE_CPU_ENGINE=1 HOME=/tmp {build}/bin/python "
        "-m pytest -q -p no:cacheprovider --import-mode=importlib tests",
    )
    assert " passed" in told
    assert "failed" not in told
