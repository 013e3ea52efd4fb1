"""The fault matrix: each fault at each phase where it can strike, as a story of a few lines.

A case merges a change that makes a new release, starts `deploy.yml`, waits for the moment, strikes,
and says what must come of it. What must be true after every case stands in `stage.py`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.faults import hosts
from tests.faults.fleet import ARTIFACTS
from tests.faults.stage import HELD, LAST_GOOD, NEW, Stage, own_processes


@dataclass(frozen=True)
class Case:
    """A fault, the phase in which it strikes, and where the fleet must end."""

    name: str
    fault: str
    phase: str
    end: str
    run: Callable[[Stage], None]
    is_telling: bool = False
    is_for_real: bool = False


CASES: dict[str, Case] = {}


def case(
    fault: str,
    phase: str,
    end: str,
    *,
    telling: bool = False,
    real: bool = False,
    name: str = "",
) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Add a function to the matrix."""

    def add(run: Callable[[Stage], None]) -> Callable[[Stage], None]:
        known = name or getattr(run, "__name__", "")
        assert known not in CASES, known
        CASES[known] = Case(known, fault, phase, end, run, telling, real)
        return run

    return add


# --- the controller -------------------------------------------------------------------------


def controller_is_killed(phase: str, stage: Stage) -> None:
    """Kill it at once; the next run, of the same commit, finishes what it began."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase(phase)
    stage.struck()
    deploy.kill()
    stage.repair()


for _phase in ("drain", "activate", "gate", "confirm", "open"):
    case(
        "controller killed (-9)",
        f"{_phase}, cell one",
        NEW,
        telling=_phase == "activate",
        real=_phase == "activate",
        name=f"controller_killed_at_{_phase}",
    )(partial(controller_is_killed, _phase))


@case("controller killed (-9)", "activate, cell two", NEW, real=True)
def controller_killed_with_one_cell_moved(stage: Stage) -> None:
    """One cell is confirmed, the other undecided: the fleet is split, and the next run says so."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate", "two")
    stage.struck()
    deploy.kill()
    stage.repair()


@case("controller killed (-9), and nobody comes", "gate", LAST_GOOD)
def controller_killed_and_nobody_comes(stage: Stage) -> None:
    """The hosts go back by themselves, and the entry opens their cell by itself."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    deploy.kill()
    stage.await_state(stage.is_back, "every host is back on last_good", stage.back_seconds)
    stage.await_open(stage.back_seconds)
    stage.recovered_at = time.time()
    stage.take_back()
    stage.repair()  # which also closes the rollout in the ledger


@case("controller killed (-9)", "revert", NEW)
def controller_killed_while_it_reverts(stage: Stage) -> None:
    """The revert itself dies half-way: the hosts end what they began, or the next run does."""
    stage.merge()
    stage.switch("decode", "forget")
    deploy = stage.deploy()
    deploy.await_phase("revert")
    stage.struck()
    deploy.kill()
    stage.mend()
    stage.repair()


@case("controller killed (-9), one of two hosts confirmed", "confirm", NEW)
def one_of_two_hosts_is_confirmed(stage: Stage) -> None:
    """One host keeps the new release, the other goes back: closed, reported split, and repaired."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    deploy.await_output("Show what was measured")
    stage.cut("gpu-b")
    deploy.await_phase("confirm")
    stage.await_note("gpu-a", "confirmed")
    stage.struck()
    deploy.kill()
    stage.await_own_way_back("gpu-b")
    stage.mend()
    found = hosts.look()
    assert found["gpu-a"].current != stage.base == found["gpu-b"].current
    assert hosts.open_cells() == {"two"}
    stage.repair()


@case("controller's machine rebooted", "gate", NEW)
def controllers_machine_reboots(stage: Stage) -> None:
    """Everything that the run had started there is gone with it, the gates included."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.await_gates()
    stage.struck()
    deploy.kill()
    for pid in own_processes():
        os.kill(pid, signal.SIGKILL)
    stage.repair()


@case("controller cut off the network", "gate", LAST_GOOD)
def controller_is_cut_off(stage: Stage) -> None:
    """It can tell nobody; the hosts go back by themselves, and it says that it cannot see them."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    hosts.verb("cut", "control")
    stage.afterwards(lambda: hosts.verb("mend", "control"))
    stage.fails(deploy)
    time.sleep(max(0.0, stage.struck_at + stage.fleet.dead_man_seconds - time.time()))
    stage.mend()
    stage.await_state(stage.is_back, "every host is back on last_good", stage.back_seconds)
    stage.come_back()


@case("controller frozen, replaced, thawed", "gate", NEW)
def controller_wakes_up_too_late(stage: Stage) -> None:
    """Another run has taken the fleet lock meanwhile: the one that wakes up changes nothing."""
    stage.merge()
    first = stage.deploy()
    first.await_phase("gate")
    stage.struck()
    first.send(signal.SIGSTOP)
    stage.afterwards(lambda: first.send(signal.SIGCONT))
    stage.await_state(stage.is_back, "every host is back on last_good", stage.back_seconds)
    refused = stage.fails(stage.deploy())
    token = re.search(r"unlock_token=\w+", refused.output)
    assert token, refused.output[-3000:]
    stage.succeeds(stage.run("playbooks/unlock.yml", "-e", token[0]))
    stage.repair()
    stage.mend()
    before = hosts.look()
    stage.fails(first)
    assert hosts.look() == before
    stage.late_ends += 1


@case("controller frozen after the drain, thawed", "drain", NEW)
def controller_sleeps_after_the_drain(stage: Stage) -> None:
    """Nothing is pending yet, so the entry opens the cell by itself: it is closed once more."""
    stage.merge()
    deploy = stage.deploy()
    stage.await_closed("one")
    deploy.send(signal.SIGSTOP)
    stage.struck()
    stage.afterwards(lambda: deploy.send(signal.SIGCONT))
    stage.await_open(2 * stage.back_seconds)
    assert "activate" not in {event.phase for event in deploy.events}
    stage.mend()
    stage.succeeds(deploy)


# --- a host ---------------------------------------------------------------------------------


@case("host unreachable", "before", LAST_GOOD)
def host_unreachable_before(stage: Stage) -> None:
    """It is named, and nothing is touched."""
    stage.merge()
    stage.struck("one")
    stage.cut("gpu-b")
    refused = stage.fails(stage.deploy())
    assert "gpu-b" in refused.output
    assert not refused.events
    stage.mend()


@case("host unreachable", "fleet lock", LAST_GOOD)
def host_unreachable_at_the_lock(stage: Stage) -> None:
    """Staged already, it is lost while the hosts give their lock: the others get theirs back."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_output("Take the fleet lock")
    stage.struck("one")
    stage.cut("gpu-b")
    stage.fails(deploy)
    assert "the fleet lock: gpu-b: unreachable" in deploy.output
    assert not hosts.locked(("gpu-a", "gpu-c"))
    assert not deploy.events
    stage.mend()


@case("host unreachable", "arm", LAST_GOOD, telling=True)
def host_unreachable_at_arm(stage: Stage) -> None:
    """No host of the cell stops anything for a move that one of them cannot make."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("arm")
    stage.struck()
    stage.cut("gpu-b")
    stage.fails(deploy)
    assert "gpu-b: unreachable" in deploy.output
    assert "activate" not in {event.phase for event in deploy.events}
    stage.mend()
    stage.come_back()


@case("host unreachable", "ready", LAST_GOOD)
def first_host_is_unreachable_once_ready(stage: Stage) -> None:
    """The host that the rollout itself is told by: it is named, and the ledger has the end."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_output("Every host of the cell runs the new release")
    stage.struck()
    stage.cut("gpu-a")
    stage.fails(deploy)
    assert "gpu-a: unreachable" in deploy.reason
    assert "gate" not in {event.phase for event in deploy.events}
    stage.mend()
    stage.come_back()


def host_is_unreachable_during(phase: str, stage: Stage) -> None:
    """Ansible's rescue does not see it: the reverting play does; the host goes back by itself."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase(phase)
    stage.struck()
    stage.cut("gpu-b")
    stage.fails(deploy)
    if phase == "gate":  # elsewhere the next run comes before the dead man
        stage.await_own_way_back("gpu-b")
        stage.mend()
        stage.await_state(stage.is_back, "every host is back on last_good", stage.back_seconds)
    stage.mend()
    stage.come_back()


for _phase in ("activate", "gate", "confirm"):
    case(
        "host unreachable",
        _phase,
        LAST_GOOD,
        real=_phase == "activate",
        name=f"host_unreachable_at_{_phase}",
    )(partial(host_is_unreachable_during, _phase))


@case("host unreachable", "a second cold launch", LAST_GOOD)
def host_unreachable_at_a_cold_launch(stage: Stage) -> None:
    """Its cell does not wait for it: nobody waits to be ready with a host that cannot start."""
    spec = stage.fleet.read_spec()
    spec["gates"]["cold_launches"] = 1
    stage.fleet.write_spec(spec)
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("launch 1")
    stage.struck()
    stage.cut("gpu-b")
    stage.fails(deploy)
    assert "cold launch 1 of 1: gpu-b: unreachable" in deploy.reason
    stage.mend()
    stage.come_back()


@case("host unreachable", "after confirm", NEW)
def host_unreachable_after_confirm(stage: Stage) -> None:
    """A confirmed host that is gone when the rest goes back: split, reported, repaired."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate", "two")
    stage.struck("one")
    stage.all_cells_are_down()  # the other one is being rolled
    stage.cut("gpu-b")
    stage.fails(deploy)
    stage.mend()
    stage.repair()


@case("host powered off, then on", "gate", LAST_GOOD, telling=True, real=True)
def host_reboots_undecided(stage: Stage) -> None:
    """It comes up with last_good, whatever the others do; the cell does not open mixed."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    hosts.verb("poweroff", "gpu-b")
    hosts.verb("poweron", "gpu-b")
    stage.fails(deploy)
    stage.come_back()


@case("host powered off, then on", "after confirm", NEW, real=True)
def host_reboots_confirmed(stage: Stage) -> None:
    """It comes up with the release that it was told to keep."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("open")
    stage.struck("one")
    stage.all_cells_are_down()  # the other one is being rolled
    hosts.verb("poweroff", "gpu-b")
    hosts.verb("poweron", "gpu-b")
    if deploy.wait():
        stage.repair()


@case("link cut between prefill and decode", "gate", LAST_GOOD, real=True)
def link_between_prefill_and_decode_is_cut(stage: Stage) -> None:
    """No release serves over it, the old one neither: the cell stays closed, as each run says."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    hosts.verb("part", "gpu-a", "gpu-b")
    stage.afterwards(lambda: hosts.verb("join", "gpu-a", "gpu-b"))
    stage.fails(deploy)
    assert hosts.open_cells() == {"two"}
    stage.take_back()
    stage.fails(stage.deploy())
    assert hosts.open_cells() == {"two"}
    stage.mend()
    stage.repair()


@case("clock jumps an hour ahead on a host", "gate", NEW)
def clock_jumps_ahead(stage: Stage) -> None:
    """What waits counts seconds, not hours of the day."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    stage.jump_clock("gpu-b", 3600)
    stage.succeeds(deploy)


@case("clock jumps an hour back on a host", "drain", NEW)
def clock_jumps_back(stage: Stage) -> None:
    """As above, the other way."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("drain")
    stage.struck()
    stage.jump_clock("gpu-b", -3600)
    stage.succeeds(deploy)


# --- an engine ------------------------------------------------------------------------------


def engine_shows(role: str, fault: str, stage: Stage) -> None:
    """The new release has the fault, the old one has not: the cell comes back by the run."""
    stage.merge()
    stage.switch(role, fault)
    deploy = stage.deploy()
    deploy.await_phase("activate", "one" if role != "combined" else "two")
    stage.struck()
    stage.fails(deploy)
    assert deploy.outcome == "reverted", deploy.reason


for _name, _role, _fault, _words, _phase, _telling in (
    ("engine_never_ready", "decode", "never-ready", "engine never ready", "activate", False),
    (
        "engine_never_ready_in_the_last_cell",
        "combined",
        "never-ready",
        "engine never ready",
        "activate, cell two",
        True,
    ),
    ("engine_crash_loop", "prefill", "exit-at-start", "engine in a crash loop", "activate", True),
    (
        "engine_dies_when_asked",
        "decode",
        "exit-when-asked",
        "engine dies when first asked",
        "activate",
        False,
    ),
    ("engine_hangs", "prefill", "hang", "engine hangs when first asked", "activate", False),
    (
        "engine_dies_during_gates",
        "decode",
        "exit-after",
        "engine dies again and again",
        "gate",
        True,
    ),
    ("engine_forgets", "decode", "forget", "engine answers wrongly", "gate", False),
):
    case(_words, _phase, LAST_GOOD, telling=_telling, name=_name)(
        partial(engine_shows, _role, _fault)
    )


@case("engine of a confirmed cell in a crash loop", "activate, cell two", LAST_GOOD)
def engine_fails_after_confirm(stage: Stage) -> None:
    """The rollout looks again before it promotes, and takes the whole fleet back."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate", "two")
    stage.switch("decode", "exit-at-start")
    stage.struck("one")
    stage.all_cells_are_down()  # the other one is being rolled
    hosts.on("gpu-b", "systemctl kill --kill-whom=main -s KILL sglang-decode")
    stage.fails(deploy)
    assert deploy.outcome == "reverted", deploy.reason


@case("engine killed (-9) once", "gate", NEW, real=True)
def engine_is_killed_once_during_gates(stage: Stage) -> None:
    """It is started again; a gate may see it, and then the cell goes back, or none does."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    hosts.on("gpu-b", "systemctl kill --kill-whom=main -s KILL sglang-decode")
    if deploy.wait():
        assert deploy.outcome == "reverted", deploy.reason
        stage.may_end.add(LAST_GOOD)


@case("engine dies a minute after confirm", "after", NEW, real=True)
def engine_dies_after_the_rollout(stage: Stage) -> None:
    """Nothing is pending any more, so the host changes no release: systemd starts it again."""
    stage.merge()
    stage.succeeds(stage.deploy())
    stage.struck("one")
    hosts.on("gpu-b", "systemctl kill --kill-whom=main -s KILL sglang-decode")


@case("a closed cell refuses requests, and is ready", "before", LAST_GOOD)
def closed_cell_does_not_answer(stage: Stage) -> None:
    """Nothing has to move, and no run opens the cell before it answers."""
    stage.struck()
    hosts.close_cell("one")
    stage.switch("decode", "refuse", stage.base_name)
    refused = stage.fails(stage.deploy())
    assert "cell one does not serve" in refused.output
    assert hosts.open_cells() == {"two"}
    stage.mend()
    stage.repair()


@case("last_good itself in a crash loop", "after", NEW)
def last_good_fails(stage: Stage) -> None:
    """It stays down, the other cell serves on, and the next run brings it up when it can."""
    stage.merge()
    stage.succeeds(stage.deploy())
    stage.struck("one")
    stage.switch("decode", "exit-at-start")
    hosts.on("gpu-b", "systemctl kill --kill-whom=main -s KILL sglang-decode")
    stage.await_unit("gpu-b", "sglang-decode", "failed", 60)
    time.sleep(5)
    assert hosts.on("gpu-b", "systemctl is-active sglang-decode; true").strip() == "failed"
    stage.await_note("gpu-b", "stays as it is")
    stage.mend()
    stage.repair()


@case("old engine ignores SIGTERM", "activate", NEW)
def old_engine_ignores_sigterm(stage: Stage) -> None:
    """It is killed when its time is over; the new one starts when it is gone."""
    stage.switch("decode", "ignore-sigterm", stage.base_name)
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    stage.succeeds(deploy)


@case("somebody holds the port for a while", "activate", NEW)
def port_is_held_for_a_while(stage: Stage) -> None:
    """The start waits for the stranger, who waits for the old engine to stop."""
    stage.merge()
    stage.hold_port("gpu-b", 30001, 2)
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    stage.succeeds(deploy)
    hosts.on("gpu-b", f"test -e {HELD}")


@case("an old process keeps the port", "activate", LAST_GOOD)
def port_is_held_for_good(stage: Stage) -> None:
    """Neither release can start: the host says so, and the cell stays closed meanwhile."""
    stage.merge()
    stage.hold_port("gpu-b", 30001, 600)
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    stage.fails(deploy)
    assert hosts.open_cells() == {"two"}
    stage.mend()
    stage.come_back()


# --- disks and files ------------------------------------------------------------------------


@case("disk full on a host", "before", LAST_GOOD)
def disk_is_full_before(stage: Stage) -> None:
    """It is named, and nothing is touched."""
    stage.merge()
    stage.struck()
    stage.fill_disk()
    refused = stage.fails(stage.deploy())
    assert "gpu-b" in refused.output
    assert not refused.events


@case("disk full on a host", "stage", LAST_GOOD, telling=True)
def disk_fills_up_while_staging(stage: Stage) -> None:
    """What is half there is not a build; nothing that runs is touched."""
    stage.fleet.use_build(stage.release)
    stage.merge()
    deploy = stage.deploy()
    deploy.await_output("Unpack | Copy the artifact")
    stage.struck()
    stage.fill_disk()
    stage.fails(deploy)
    assert not deploy.events


def disk_fills_up(phase: str, stage: Stage) -> None:
    """A host that can write nothing must still go back; once armed, it can even confirm."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase(phase)
    stage.struck()
    stage.fill_disk()
    if phase == "gate" and deploy.wait() == 0:
        stage.may_end = {NEW}
        return
    stage.fails(deploy)
    stage.mend()
    stage.come_back()


for _phase in ("drain", "gate"):
    case(
        "disk full on a host",
        _phase,
        LAST_GOOD,
        name=f"disk_full_at_{_phase}",
    )(partial(disk_fills_up, _phase))


@case("disk full on the controller", "activate", LAST_GOOD)
def controllers_disk_fills_up(stage: Stage) -> None:
    """Its ledger cannot be written: the rollout fails, and the hosts go back all the same."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    stage.fill_state()
    stage.fails(deploy)
    assert not hosts.locked(), hosts.locked()
    stage.mend()
    stage.take_back()
    stage.repair()  # which also closes the rollout in the ledger


@case("disk of the controller turns read-only", "arm", LAST_GOOD)
def controllers_disk_turns_read_only(stage: Stage) -> None:
    """No line of the ledger can be written, so no host of the cell stops anything."""
    stage.merge()
    before = hosts.look()
    deploy = stage.deploy()
    deploy.await_phase("arm")
    stage.struck()
    stage.freeze_state()
    stage.fails(deploy)
    assert not hosts.locked(), hosts.locked()
    assert "This is not in the ledger" in deploy.output
    started = [name for name, host in hosts.look().items() if host.units != before[name].units]
    assert not started, f"started again: {started}"
    stage.mend()
    stage.take_back()
    stage.repair()  # which also closes the rollout in the ledger


@case("half-copied artifact", "stage", LAST_GOOD)
def artifact_is_half_copied(stage: Stage) -> None:
    """Its checksum tells; nothing is unpacked, nothing is touched."""
    digest = stage.fleet.use_build(stage.release)
    stage.merge()
    artifact = ARTIFACTS / f"{digest}.tar.zst"
    whole = artifact.read_bytes()
    artifact.write_bytes(whole[: len(whole) // 2])
    stage.afterwards(artifact.unlink)
    stage.struck()
    refused = stage.fails(stage.deploy())
    assert "SHA-256" in refused.output
    assert not refused.events


@case("controller killed (-9)", "stage", NEW)
def controller_killed_while_staging(stage: Stage) -> None:
    """The next run takes what is whole and makes the rest again."""
    stage.fleet.use_build(stage.release)
    stage.merge()
    deploy = stage.deploy()
    deploy.await_output("Verify it, unpack it")
    stage.struck()
    deploy.kill()
    stage.repair()


@case("ledger line torn by a power loss", "before", NEW)
def ledger_line_is_torn(stage: Stage) -> None:
    """It spoils no other line."""
    stage.merge()
    stage.struck()
    stage.tear_ledger()
    stage.succeeds(stage.deploy())


@case("current points to a deleted release", "before", NEW)
def current_points_nowhere(stage: Stage) -> None:
    """The host's processes run on, and the next release replaces them."""
    stage.merge()
    stage.struck()
    stage.delete_current("gpu-b")
    stage.succeeds(stage.deploy())


@case("a unit edited by hand", "gate", LAST_GOOD, real=True)
def unit_is_edited_by_hand(stage: Stage) -> None:
    """The identity gate compares it with what was released."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate")
    deploy.await_output("Wait until every unit is active")
    stage.struck()
    hosts.on(
        "gpu-b",
        "file=$(readlink -f /etc/systemd/system/sglang-decode.service) && "
        "echo '# only a comment' >>$file",
    )
    stage.fails(deploy)
    assert deploy.outcome == "reverted", deploy.reason
    assert "unit files" in deploy.output


@case("a build deleted by hand", "drain", LAST_GOOD)
def build_is_deleted_by_hand(stage: Stage) -> None:
    """Nothing is stopped for a release that cannot start; the next run ships the build again."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("drain")
    stage.struck()
    hosts.on("gpu-b", "rm -rf /opt/seatrial/builds/*")
    stage.fails(deploy)
    stage.come_back()


# --- two people -----------------------------------------------------------------------------


@case("two deploys at once", "before", NEW)
def two_deploys_at_once(stage: Stage) -> None:
    """One rolls, the other is told who does."""
    stage.merge()
    stage.struck()
    first, second = stage.deploy(), stage.deploy()
    statuses = sorted((first.wait(), second.wait()))
    assert statuses[0] == 0, first.output[-3000:] + second.output[-3000:]
    ends = [event for event in first.events if event.event == "end"]
    assert [event.data["outcome"] for event in ends] == ["promoted"]


@case("a deploy of another commit while one is pending", "gate", NEW, real=True)
def second_commit_while_one_is_pending(stage: Stage) -> None:
    """It is refused, and names the holder of the lock; the first one goes on."""
    stage.merge()
    colleague = stage.colleague()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck()
    refused = stage.fails(stage.deploy(colleague))
    assert "locked by" in refused.output
    stage.succeeds(deploy)


@case(
    "ledger line torn, current to a deleted release, a clock that jumps, another commit's deploy",
    "before, gate",
    NEW,
    telling=True,
)
def small_faults_at_once(stage: Stage) -> None:
    """What must not keep a rollout from its end does not, all in one."""
    stage.merge()
    colleague = stage.colleague()
    stage.struck()
    stage.tear_ledger()
    stage.delete_current("gpu-b")
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.jump_clock("gpu-b", 3600)
    refused = stage.fails(stage.deploy(colleague))
    assert "locked by" in refused.output
    stage.succeeds(deploy)


# --- what stands around ---------------------------------------------------------------------


@case("daemon-reload fails for a while", "activate", LAST_GOOD)
def daemon_reload_fails(stage: Stage) -> None:
    """The way back needs it too: the host tries again until it works."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("drain")
    stage.struck()
    stage.break_daemon_reload("gpu-b")
    stage.fails(deploy)
    stage.mend()
    stage.await_state(stage.is_back, "every host is back on last_good", stage.back_seconds)
    stage.come_back()


def entry_socket_is_gone(phase: str, stage: Stage) -> None:
    """Nobody can close or open a cell: no host moves, or it goes back behind a closed entry."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase(phase)
    stage.struck()
    hosts.on("edge", "mv /run/haproxy/admin.sock /run/haproxy/away.sock")
    stage.afterwards(lambda: hosts.on("edge", "mv /run/haproxy/away.sock /run/haproxy/admin.sock"))
    stage.fails(deploy)
    stage.mend()
    stage.come_back()


for _phase in ("drain", "gate"):
    case(
        "entry's control socket gone",
        _phase,
        LAST_GOOD,
        telling=_phase == "drain",
        real=_phase == "drain",
        name=f"entry_socket_gone_at_{_phase}",
    )(partial(entry_socket_is_gone, _phase))


@case("entry host powered off, then on", "gate", NEW)
def entry_host_reboots(stage: Stage) -> None:
    """It comes up with the cells open that were open, and the rollout goes on or goes back."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    stage.struck("edge")
    hosts.verb("poweroff", "edge")
    hosts.verb("poweron", "edge")
    if deploy.wait():
        stage.repair()


@case("entry host off", "before", LAST_GOOD)
def entry_host_is_off(stage: Stage) -> None:
    """It is named, nothing moves, and no host keeps the fleet lock."""
    stage.merge()
    stage.struck("edge")
    hosts.verb("poweroff", "edge")
    stage.afterwards(lambda: hosts.verb("poweron", "edge"))
    refused = stage.fails(stage.deploy())
    assert "edge could not be reached" in refused.output
    assert not refused.events
    assert not hosts.locked()
    back = stage.fails(stage.run("playbooks/rollback.yml"))
    assert "cell one does not serve: entry" in back.output
    assert not hosts.locked()
    stage.mend()
    stage.take_back()
    stage.repair()


@case("Prometheus gone", "gate", LAST_GOOD)
def prometheus_is_gone(stage: Stage) -> None:
    """What cannot be measured is INVALID, and INVALID is not promoted."""
    spec = stage.fleet.read_spec()
    spec["gates"]["select"] = ["readiness", "throughput"]
    stage.fleet.write_spec(spec)
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("activate")
    stage.struck()
    hosts.on("edge", "systemctl stop prometheus")
    stage.afterwards(lambda: hosts.on("edge", "systemctl start prometheus"))
    stage.fails(deploy)
    assert deploy.outcome == "reverted", deploy.reason
    assert "INVALID" in deploy.reason


@case("gate process killed (-9)", "gate", LAST_GOOD, telling=True, real=True)
def gate_process_is_killed(stage: Stage) -> None:
    """No verdict is no PASS."""
    stage.merge()
    deploy = stage.deploy()
    deploy.await_phase("gate")
    pids = stage.await_gates()
    stage.struck()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    stage.fails(deploy)
    assert deploy.outcome == "reverted", deploy.reason
