"""The host's own program keeps its promises: who may change a host, and what stays on it.

It runs here as it lies on a host, under a folder of its own, with a systemd that does as told.
What needs the real one is in `tests/e2e/test_host_program.py`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = REPOSITORY / "roles/cell/files"
OLD, NEW, OTHER, FORGOTTEN = "a" * 16, "b" * 16, "c" * 16, "d" * 16
SYSTEMCTL = """\
#!/bin/sh
# Every unit is active; what was asked is kept; a verb named in `fails` fails.
echo "$*" >>"$SEATRIAL_TEST/asked"
grep -qsx -e "$1" "$SEATRIAL_TEST/fails" && { echo "no space left" >&2; exit 1; }
if [ "$1" = show ]; then
  printf 'ActiveState=active\\nSubState=running\\nMainPID=1\\nNRestarts=0\\n'
  printf 'Result=success\\nActiveEnterTimestampMonotonic=1\\nNeedDaemonReload=no\\n'
fi
"""


class Host:
    """A host's folder of Seatrial, and its program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = root / "etc"
        for folder in ("bin", "state", "releases", "builds", "etc", "path"):
            (root / folder).mkdir(parents=True)
        for path in FILES.glob("seatrial*"):
            text = path.read_text().replace('"/etc/systemd/system"', f'"{self.units}"')
            text = text.replace('"/var/lib/prometheus/node-exporter/', f'"{self.units}/')
            (root / "bin" / path.name).write_text(text)
        for name in ("systemctl", "systemd-run"):
            (root / "path" / name).write_text(SYSTEMCTL)
            (root / "path" / name).chmod(0o755)
        (root / "bin/seatrial-host").chmod(0o755)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the program."""
        path = f"{self.root / 'path'}:{os.environ['PATH']}"
        return subprocess.run(
            ["/usr/bin/env", "python3", "-B", self.root / "bin/seatrial-host", *words],
            env={**os.environ, "PATH": path, "SEATRIAL_TEST": str(self.root)},
            capture_output=True,
            text=True,
            check=False,
        )

    def __call__(self, *words: str) -> dict[str, Any]:
        """Run the program, which succeeds, and return its answer."""
        done = self.call(*words)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def stage(self, digest: str, build: str = "1" * 16) -> None:
        """Lay a release and its build down."""
        (self.root / "builds" / build).mkdir(exist_ok=True)
        (self.root / "builds" / build / "build.json").write_text("{}")
        release = self.root / "releases" / digest
        (release / "units").mkdir(parents=True)
        (release / "units/sglang-light.service").write_text("")
        (release / "release.json").write_text(json.dumps({"digest": digest}))
        (release / "build").symlink_to(f"../../builds/{build}")

    def asked(self) -> str:
        """Return what systemd was asked for."""
        return (self.root / "asked").read_text()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a host on which OLD runs and is last_good, and NEW is staged."""
    found = Host(tmp_path / "seatrial")
    found.stage(OLD)
    found.stage(NEW)
    for verb in (("arm", OLD, "60"), ("activate", OLD), ("confirm", OLD), ("promote", OLD)):
        found(*verb)
    return found


def record(token: str, seconds: int = 60) -> str:
    """Return a request for the fleet lock."""
    facts = {"token": token, "who": "alice", "commit": "c0ffee", "seconds": seconds}
    return json.dumps({**facts, "controller": {}, "process": {}})


def test_the_fleet_lock_is_given_to_one(host: Host) -> None:
    """The second is told who holds it; after its end the lock is free."""
    assert host("lock", record("one"))["locked"]
    refused = host("lock", record("two"))
    assert not refused["locked"]
    assert refused["holder"]["token"] == "one"
    assert not host("unlock", "two")["changed"]
    assert host("unlock", "one")["changed"]
    assert host("lock", record("two"))["locked"]


def test_a_stale_lock_is_taken_over(host: Host) -> None:
    """Its time is over, or its holder is known to be dead; the journal keeps it."""
    host("lock", record("one", seconds=0))
    assert host("lock", record("two"))["locked"]
    assert not host("lock", record("three"), "--instead-of", "one")["locked"]
    assert host("lock", record("three"), "--instead-of", "two")["locked"]
    assert host("journal", "0")["lines"][-1]["event"] == "fleet lock taken over"


def test_a_lock_that_a_power_loss_tore_is_held_by_nobody_known_and_stale(host: Host) -> None:
    """It must not keep the fleet for ever."""
    (host.root / "state/fleet_lock.json").write_text('{"tok')
    assert host("status")["fleet_lock"]["who"] == "unknown"
    assert host("lock", record("two"))["locked"]


@pytest.mark.parametrize(
    "verb",
    [("arm", NEW, "60"), ("activate", NEW), ("confirm", OLD), ("promote", OLD), ("revert",)],
)
def test_a_rollout_that_lost_the_lock_changes_nothing(host: Host, verb: tuple[str, ...]) -> None:
    """It was cut off, another took its place, and it wakes up."""
    host("lock", record("two"))
    before = host("status")
    done = host.call("--token", "one", *verb)
    assert done.returncode == 3
    assert "holds the fleet lock no longer (alice's rollout of c0ffee does)" in done.stderr
    assert host("status") == before
    assert host.call("--token", "one", "holds").returncode == 3
    assert host.call("--token", "two", "holds").returncode == 0
    assert host.call("--token", "two", "arm", NEW, "60").returncode == 0


def test_confirming_and_reverting_exclude_each_other(host: Host) -> None:
    """Whoever comes second finds the decision taken; the host never ends in between."""
    for _ in range(5):
        host("arm", NEW, "60")
        host("activate", NEW)
        done: dict[str, int] = {}

        def call(*words: str, done: dict[str, int] = done) -> None:
            done[words[0]] = host.call(*words).returncode

        calls = [("confirm", NEW), ("revert", "--alone")]
        threads = [threading.Thread(target=call, args=words) for words in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = host("status")
        assert found["pending"] is None
        assert found["current"] == (NEW if done["confirm"] == 0 else OLD)
        host("revert")


def test_a_host_goes_back_alone_only_while_the_decision_is_pending(host: Host) -> None:
    """Later the other hosts of its cell serve the new release and would not follow."""
    host("arm", NEW, "60")
    host("activate", NEW)
    host("confirm", NEW)
    assert not host("revert", "--alone", "--reason", "it keeps failing")["changed"]
    assert host("status")["current"] == NEW
    assert host("journal", "0")["lines"][-1]["event"] == "stays as it is"
    host("revert")
    assert host("status")["current"] == OLD


def test_what_does_not_run_as_released_is_restarted(host: Host) -> None:
    """A drop-in that somebody laid over a unit is put away, not lost; the release runs again."""
    drop_in = host.units / "sglang-light.service.d/mine.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nNice=5\n")
    assert "drop-in" in host("status")["drift"]["sglang-light.service"]
    host("arm", OLD, "60")
    assert host("activate", OLD)["changed"]
    assert host("status")["drift"] == {}
    kept = list((host.root / "state").glob("sglang-light.service-mine-*.conf"))
    assert [path.read_text() for path in kept] == ["[Service]\nNice=5\n"]


def test_an_old_server_that_failed_while_stopping_takes_nothing_back(host: Host) -> None:
    """Systemd starts the revert for it too; what counts is whether the new release has failed."""
    host("arm", NEW, "60")
    host("activate", NEW)
    assert not host("revert", "--alone", "--if-failed")["changed"]
    assert host("status")["current"] == NEW
    stub = (host.root / "path/systemctl").read_text()
    (host.root / "path/systemctl").write_text(stub.replace("State=active", "State=failed"))
    assert host("revert", "--alone", "--if-failed")["release"] == OLD


def test_a_broken_host_does_not_say_that_another_rollout_took_the_fleet(host: Host) -> None:
    """Its exit status is another."""
    host("lock", record("one"))
    shutil.rmtree(host.root / "state")
    assert host.call("--token", "one", "holds").returncode == 1


def test_a_revert_that_fails_is_tried_again(host: Host) -> None:
    """The decision stays pending and the timer is set, so that it comes back when it can."""
    host("arm", NEW, "60")
    host("activate", NEW)
    (host.root / "fails").write_text("daemon-reload\n")
    done = host.call("revert", "--alone")
    assert done.returncode == 1
    assert done.stderr == "seatrial-host revert: systemctl daemon-reload: no space left\n"
    assert host("status")["pending"]["release"] == NEW
    assert "--unit=seatrial-deadman --on-active=30" in host.asked()
    (host.root / "fails").unlink()
    assert host("revert", "--alone")["release"] == OLD
    assert host("status")["pending"] is None


def test_without_its_timer_no_release_is_armed(host: Host) -> None:
    """Nobody would bring the host back."""
    (host.root / "fails").write_text("--quiet\n")
    assert host.call("arm", NEW, "60").returncode == 1
    assert host("status")["pending"] is None


def test_no_release_starts_that_nobody_would_take_back(host: Host) -> None:
    """A controller that slept between arming and starting finds that the host decided alone."""
    host("arm", NEW, "60")
    host("revert", "--alone", "--reason", "nobody confirmed")
    refused = host.call("activate", NEW)
    assert refused.returncode == 1
    assert f"no decision about {NEW} is pending" in refused.stderr
    assert host("status")["current"] == OLD


def test_a_torn_pending_decision_is_pending(host: Host) -> None:
    """At boot the host then starts last_good, as with any undecided release."""
    host("arm", NEW, "60")
    host("activate", NEW)
    (host.root / "state/pending.json").write_text('{"relea')
    assert host.call("confirm", NEW).returncode == 1
    assert host("guard")["release"] == OLD
    assert host("status")["current"] == OLD


def test_a_boot_without_the_release_that_current_names_starts_last_good(host: Host) -> None:
    """Somebody deleted it."""
    host("arm", NEW, "60")
    host("activate", NEW)
    host("confirm", NEW)
    shutil.rmtree(host.root / "releases" / NEW)
    assert host("guard")["release"] == OLD


def test_a_full_disk_leaves_no_half_file_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes what has room and then refuses, as at the limit that is set here."""
    monkeypatch.syspath_prepend(str(FILES))
    switch = importlib.import_module("seatrial_switch")
    monkeypatch.setattr(switch, "JOURNAL", tmp_path / "journal.jsonl")
    switch.note("whole")
    before = switch.JOURNAL.read_text()
    monkeypatch.setattr("sys.stderr", io.StringIO())  # pytest's is a file, with the same limit
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        switch.note("cut off")
        with pytest.raises(OSError, match="too large"):
            switch.write(tmp_path / "pending.json", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert switch.JOURNAL.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_only_what_nothing_needs_is_removed(host: Host) -> None:
    """Not what runs, is pending, or is last_good; of the others those that ran last stay."""
    host.stage(OTHER, build="2" * 16)
    host.stage(FORGOTTEN, build="3" * 16)
    for digest in (OTHER, NEW):
        host("arm", digest, "60")
        host("activate", digest)
    assert host("prune", "1", "--fresh-seconds", "3600")["releases"] == []
    assert host("prune", "1", "--fresh-seconds", "0")["releases"] == [FORGOTTEN]
    assert not (host.root / "builds" / ("3" * 16)).exists()
    removed = host("prune", "0", "--fresh-seconds", "0")
    assert (removed["releases"], removed["builds"]) == ([OTHER], ["2" * 16])
    assert host("status")["staged"] == [OLD, NEW]
    assert not host("prune", "0", "--fresh-seconds", "0")["changed"]


def test_a_build_that_a_process_runs_from_stays(host: Host) -> None:
    """Even when no release links to it any more."""
    build = host.root / "builds" / ("4" * 16)
    build.mkdir()
    process = subprocess.Popen(["/bin/sh", "-c", "sleep 60", str(build)])
    try:
        assert not host("prune", "0", "--fresh-seconds", "0")["builds"]
    finally:
        process.kill()
        process.wait()
    assert host("prune", "0", "--fresh-seconds", "0")["builds"] == ["4" * 16]


def test_the_journal_is_told_from_where_it_was_read_last(host: Host) -> None:
    """Line by line; one that was torn is left out, and a shorter journal is another one."""
    first = host("journal", "0")
    assert [line["event"] for line in first["lines"]][-1] == "promoted"
    with (host.root / "state/journal.jsonl").open("a") as file:
        file.write('{"torn\n')
    host("arm", NEW, "60")
    later = host("journal", str(first["count"]))
    assert [line["event"] for line in later["lines"]] == ["armed"]
    assert host("journal", "9999")["count"] == later["count"]
    assert len(host("journal", "9999")["lines"]) == later["count"] - 1


def test_node_exporter_is_told_what_runs_and_whether_it_is_decided(host: Host) -> None:
    """The entry opens a cell by it whose rollout died."""

    def told() -> list[str]:
        return (host.units / "seatrial.prom").read_text().splitlines()

    assert f'seatrial_release{{link="current",release="{OLD}"}} 1' in told()
    assert "seatrial_decision_pending 0" in told()
    host("arm", NEW, "60")
    host("activate", NEW)
    assert f'seatrial_release{{link="current",release="{NEW}"}} 1' in told()
    assert "seatrial_decision_pending 1" in told()
    host("revert", "--alone")
    assert f'seatrial_release{{link="current",release="{OLD}"}} 1' in told()
    assert "seatrial_decision_pending 0" in told()


def test_undecided_release_is_launched_again(host: Host) -> None:
    """A cold launch stops and starts what is undecided, and nothing that is decided."""
    host("arm", NEW, "60")
    host("activate", NEW)
    before = host.asked()
    assert host("relaunch", NEW) == {"changed": True, "release": NEW}
    words = host.asked().removeprefix(before).splitlines()
    stopped = next(index for index, word in enumerate(words) if word.startswith("stop"))
    started = next(index for index, word in enumerate(words) if word.startswith("start"))
    assert stopped < started
    host("confirm", NEW)
    refused = host.call("relaunch", NEW)
    assert refused.returncode == 1
    assert "a release that is decided is not started again" in refused.stderr
