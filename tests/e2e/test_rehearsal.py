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
from seatrial import ledger, spec
from tests.faults.pilot import ANN, Pilot

REPOSITORY = Path(__file__).resolve().parents[2]
GPU_HOSTS = ("gpu-a", "gpu-b", "gpu-c")
DRIFT_REPORT = rehearsal.LEDGER.with_name("reports") / "drift/drift.json"


class Rolled(NamedTuple):
    """The fleet of the rehearsal, as the pilot takes it over."""

    name: str = "rehearsal"
    repository: Path = rehearsal.REPOSITORY
    ledger: Path = rehearsal.LEDGER


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


def changes(output: str) -> set[tuple[str, str]]:
    """Return ``(task, host)`` of everything that Ansible said it changed, or would."""
    found, task = set(), ""
    for line in output.splitlines():
        if named := re.match(r"(?:TASK|RUNNING HANDLER) \[(.*?)\]", line):
            task = named[1]
        elif said := re.match(r"changed: \[(\S+?)(?: -> \S+)?\]", line):
            found.add((task, said[1]))
    return found


def before_moving(output: str) -> str:
    """Return what a run said before it came to the cells."""
    return output.partition("PLAY [Move the cells, batch by batch]")[0]


def announced(output: str) -> dict[str, tuple[str, ...]]:
    """Return by host what a check run says of a move: what stops, of which release, and so on."""
    text = " ".join(output.split())
    pattern = (
        r"\[(gpu-\w)\] => (?:changed: true )?msg: \W*A real run closes the entry of cell (\w+), "
        r"stops (.*?) of (\w+), starts (.*?) of (\w+), judges it \(.*?\), "
        r"and makes it last_good in place of (\w+)\."
    )
    return {host: tuple(rest) for host, *rest in re.findall(pattern, text)}


def drift() -> dict[str, Any]:
    """Return what the last drift run wrote for programs."""
    found: dict[str, Any] = json.loads(DRIFT_REPORT.read_text())
    return found


def files_everywhere() -> dict[str, str]:
    """Return the names and times of everything that a rollout may write, on all machines."""
    listing = "find /opt/seatrial /etc/haproxy /etc/prometheus /etc/systemd/system /var/lib/haproxy"
    listing += " -not -path '*/site-packages/*' -printf '%p %T@ %C@ %s %l\n' 2>/dev/null | sort"
    found = {host: on(host, f"{listing}; true") for host in (*GPU_HOSTS, "edge")}
    state = sorted(
        f"{path} {path.stat().st_mtime}"
        for path in rehearsal.LEDGER.parent.rglob("*")
        if path.is_file() and path != DRIFT_REPORT  # whose folder bears its time
    )
    return {**found, "control": "\n".join(state)}


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
def kept_rehearsal(alone: None) -> Iterator[None]:
    """Run `make rehearsal KEEP=1`; take the hosts down at the end, whatever happens."""
    subprocess.run([rehearsal.HOSTS, "down"], check=True)
    try:
        done = subprocess.run(
            [sys.executable, REPOSITORY / "rehearsal/run.py", "--keep", "--alone"],
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


def test_a_fleet_that_was_just_rolled_out_has_no_drift() -> None:
    """What roles would lay down is what lies and runs on every host; looking changes nothing."""
    before = files_everywhere()
    looked = play("playbooks/drift.yml")
    assert looked.status == 0
    assert looked.changed() == 0
    assert "No drift" in looked.output
    assert drift()["differences"] == []
    assert files_everywhere() == before


def test_drift_is_named_where_it_is_and_mended_by_what_it_says() -> None:
    """Planted by hand on every host, one of them cut off; the exit status is not 0."""
    current = on("gpu-a", "readlink -f /opt/seatrial/current").strip()
    unit = f"{current}/units/sglang-prefill.service"
    drop_in = "/etc/systemd/system/sglang-prefill.service.d/by-hand.conf"
    on(
        "gpu-a",
        f"cp -a {unit} /root/unit; chmod u+w {unit}; echo '# by hand' >> {unit}; "
        f"touch {current}/notes; mkdir -p $(dirname {drop_in}); echo '[Unit]' > {drop_in}",
    )
    on(
        "gpu-b",
        "echo '# by hand' >> /opt/seatrial/bin/seatrial-host; "
        'echo \'{"release": "x"}\' > /opt/seatrial/state/pending.json; '
        "systemctl disable --quiet --now prometheus-node-exporter; "
        "touch /opt/seatrial/current/build/lib",
    )
    on("edge", "echo '# by hand' >> /etc/haproxy/haproxy.cfg")
    subprocess.run([rehearsal.HOSTS, "cut", "gpu-c"], check=True)
    try:
        looked = play("playbooks/drift.yml")
    finally:
        subprocess.run([rehearsal.HOSTS, "mend", "gpu-c"], check=True)
    try:
        assert looked.status != 0
        assert looked.changed() == 0
        found = {(one["host"], one["kind"], one["what"]) for one in drift()["differences"]}
        release = Path(current).name
        named = {
            ("gpu-c", "unreachable", "the host"),
            ("gpu-a", "files", f"{release}/units/sglang-prefill.service"),
            ("gpu-a", "files", f"{release}/notes"),
            ("gpu-a", "units", f"drop-in {drop_in}"),
            ("gpu-a", "units", "sglang-prefill.service: in systemd's memory"),
            ("gpu-b", "files", "/opt/seatrial/bin/seatrial-host"),
            ("gpu-b", "decision", "undecided release"),
            ("gpu-b", "services", "prometheus-node-exporter.service"),
            ("gpu-b", "services", "prometheus-node-exporter.service at boot"),
            ("edge", "files", "/etc/haproxy/haproxy.cfg"),
            # Its cell is undecided, so its entry should not be open.
            ("edge", "entry", "entry of cell one"),
        }
        assert found >= named
        assert {what for _, kind, what in found - named if kind != "build"} == set()
    finally:
        # What the table says to do: rm and reload by hand, then the playbooks.
        on("gpu-a", f"rm -r {current}/notes $(dirname {drop_in}); systemctl daemon-reload")
        on("gpu-b", "rm /opt/seatrial/state/pending.json")
    assert play("playbooks/bootstrap.yml").status == 0
    before = fleet()
    mended = play("deploy.yml")
    assert mended.status == 0
    assert fleet() == before
    left = play("playbooks/drift.yml")
    assert {one["kind"] for one in drift()["differences"]} <= {"build"}, left.output


# Played by a chapter of its own, with more to say about the result.
CHAPTERS = ("playbooks/drift.yml", "playbooks/gate.yml", "deploy.yml")


def test_every_command_of_the_page_for_3_am_works() -> None:
    """As README.md prints them, with this fleet's names in place of production's."""
    page = (REPOSITORY / "README.md").read_text().partition("## At 3 a.m.")[2].partition("\n## ")[0]
    commands = re.findall(r"`((?:fab|curl|ansible-playbook) [^`]+)`", page)
    assert len(commands) >= 8
    digest = next(iter(fleet().values()))[0]
    before = fleet()
    for command in commands:
        words = command.replace("gpu1", "gpu-b").replace("ENTRY", "10.77.0.10").split()
        words = [word.replace("<digest>", digest) for word in words]
        if words[0] == "ansible-playbook":
            if words[1] not in CHAPTERS:
                assert play(*words[1:]).status == 0, command
            continue
        if words[0] == "fab":
            fab = str(Path(sys.executable).with_name("fab"))
            ssh_config = str(rehearsal.STATE / "ssh_config")
            is_local = words[1] == "rollouts"
            words = [fab, "-S", ssh_config, *words[1:], *(["--fleet=rehearsal"] * is_local)]
        done = subprocess.run(
            [rehearsal.HOSTS, "in", *words],
            cwd=rehearsal.REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout)
        if command == "fab gitops.status":  # this fleet has no reconciler, and is told so
            assert (done.returncode, "playbooks/gitops.yml writes it" in done.stderr) == (1, True)
            continue
        assert done.returncode == 0, command + done.stderr
        assert len(done.stdout.splitlines()) >= 2, command
        if words[0] == "curl":
            assert "200 OK" in done.stdout
    assert fleet() == before


def test_what_a_check_run_says_is_what_a_deploy_does() -> None:
    """`--check --diff` names files, cells, units and releases, and touches nothing anywhere."""
    merge("Use smaller chunks", {"chunked_prefill_size": 16384})
    untouched, before = files_everywhere(), fleet()
    checked = play("deploy.yml", "--check", "--diff")
    assert checked.status == 0
    assert files_everywhere() == untouched
    assert fleet() == before
    assert "+  --chunked-prefill-size 16384" in checked.output

    deployed = play("deploy.yml")
    assert deployed.status == 0
    after = fleet()
    assert changes(before_moving(checked.output)) == changes(before_moving(deployed.output))
    cells = {"gpu-a": "one", "gpu-b": "one", "gpu-c": "two"}
    assert announced(checked.output) == {
        host: (
            cells[host],
            ", ".join(sorted(before[host][3])),
            before[host][0],
            ", ".join(sorted(after[host][3])),
            after[host][0],
            before[host][1],
        )
        for host in GPU_HOSTS
    }
    for host in GPU_HOSTS:
        assert after[host][0] == after[host][1] != before[host][0]
        assert not set(after[host][3].values()) & set(before[host][3].values())


def test_a_rollback_to_what_a_host_does_not_have_is_refused_in_one_sentence() -> None:
    """Which host lacks it, and what there is; nothing moves and no lock stays."""
    before = fleet()
    refused = play("rollback.yml", "-e", "rollback_release=ffffffffffffffff")
    assert refused.status != 0
    assert "lacks the release ffffffffffffffff" in " ".join(refused.output.split())
    assert before["gpu-a"][0] in refused.output
    assert "Traceback" not in refused.output
    assert fleet() == before
    assert (
        json.loads(on("gpu-a", "/opt/seatrial/bin/seatrial-host", "status"))["fleet_lock"] is None
    )


def test_a_rollback_brings_the_named_release_back_proven() -> None:
    """Identity and readiness hold, last_good moves, and the outage of each cell is printed."""
    promoted = [
        event.data["release"] for event in ledger.read(rehearsal.LEDGER) if event.event == "begin"
    ]
    wanted = promoted[-2]
    before = fleet()
    assert {state[0] for state in before.values()} == {promoted[-1]}
    back = play("rollback.yml", "-e", f"rollback_release={wanted}")
    assert back.status == 0
    assert {state[:3] for state in fleet().values()} == {(wanted, wanted, True)}
    events = last_rollout()
    assert events[-1].data["outcome"] == "promoted"
    assert set(ledger.outages(events)) == {"one", "two"}
    assert "entry closed, seconds" in back.output
    gates = [event.data["report"] for event in events if event.event == "gates"]
    assert [report["verdict"] for report in gates] == ["PASS", "PASS"]
    assert {gate["group"] for report in gates for gate in report["gates"]} == {
        "identity",
        "readiness",
    }
    assert rehearsal.ask_the_entry() == 0
    # Git takes the change back too, so the fleet is what it says.
    rehearsal.git("-C", rehearsal.REPOSITORY, *rehearsal.IDENTITY, "revert", "--no-edit", "HEAD")
    play("playbooks/drift.yml")
    assert {one["kind"] for one in drift()["differences"]} <= {"build"}


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
        "-B -m pytest -q -p no:cacheprovider --import-mode=importlib tests",
    )
    assert " passed" in told
    assert "failed" not in told


def test_the_spec_takes_one_spelling_of_each_flag_of_the_real_parser() -> None:
    """Where SGLang's own parser has two, `spec.SPELLINGS` names all but one."""
    build = on("gpu-c", "readlink -f /opt/seatrial/current/build").strip()
    program = (
        "import argparse, json; from sglang.srt.server_args import ServerArgs; "
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser); "
        "print(json.dumps([a.option_strings for a in parser._actions "
        "if not isinstance(a, argparse.BooleanOptionalAction)]))"
    )
    told = on("gpu-c", f"SGLANG_USE_CPU_ENGINE=1 HOME=/tmp {build}/bin/python -B -c '{program}'")
    for options in json.loads(told.splitlines()[-1]):
        names = [option[2:] for option in options if option.startswith("--")]
        kept = [name for name in names if name not in spec.SPELLINGS]
        assert len(kept) == 1, names
        assert {spec.SPELLINGS[name] for name in names if name not in kept} <= set(kept), names


@pytest.fixture(scope="module")
def pilot() -> Pilot:
    """Boot a control host that follows a branch, and let it take the fleet over."""
    made = Pilot(Rolled())
    made.make(rehearsal.WORK / "pilot.log")
    first = made.git("rev-parse", "HEAD").strip()
    made.await_status(first, "promoted", "unchanged")
    made.await_idle()
    return made


def test_a_push_that_makes_the_model_forget_is_reverted_with_nobody_at_a_keyboard(
    pilot: Pilot,
) -> None:
    """index_topk 512 over 1024: gate A fails, the cell reverts, the last sentence says it all."""
    before = fleet()
    builds = on("gpu-a", "ls", "/opt/seatrial/builds")
    pilot.edit_spec(lambda spec: spec.update(index_topk=512))
    bad = pilot.commit("Lower index_topk to save index memory")
    pilot.push()
    done = pilot.await_status(bad, "promoted", "reverted", "refused", "failed", seconds=900)
    assert done["status"] == "reverted"
    assert "case_a_needle" in done["gate"]
    events = [event for event in pilot.events if event.rollout == pilot.events[-1].rollout]
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
    assert "case_a_needle" in pilot.note(bad)
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


def test_the_push_that_takes_it_back_is_promoted_and_moves_nothing(pilot: Pilot) -> None:
    """What git wants is what serves again."""
    before, bad = fleet(), pilot.git("rev-parse", "HEAD").strip()
    pilot.git("-c", f"user.name={ANN}", "-c", f"user.email={ANN}", "revert", "-n", bad)
    mended = pilot.commit("Take index_topk 1024 again")
    pilot.push()
    done = pilot.await_status(mended, "promoted", "reverted", "refused", "failed", seconds=900)
    assert done["status"] == "promoted", done["sentence"]
    assert fleet() == before
    assert pilot.note(mended).startswith("seatrial: promoted\n")
