"""A reconciler that is killed, at each phase of a rollout: what the next start does."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from seatrial.gitops import state
from seatrial.gitops.state import Status
from tests.gitops.fleet import Fleet, kill, wait_for

PHASES = ("drain", "activate", "gate", "promote", "record")


def killed_in(fleet: Fleet, phase: str, *, playbook: bool) -> str:
    """Merge, let the reconciler come to a phase of the rollout, kill it; return the commit."""
    held, commit = fleet.hold(phase), fleet.merge(2048)
    process = fleet.start()
    wait_for(lambda: any(e.phase == phase for e in fleet.events[fleet_before(fleet) :]))
    kill(process, playbook=playbook)
    held.unlink()
    return commit


def fleet_before(fleet: Fleet) -> int:
    """Return how many events the first rollout left."""
    ends = [index for index, event in enumerate(fleet.events) if event.event == "end"]
    return ends[0] + 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_rollout_that_was_cut_off_is_rolled_out_once_more(serving: Fleet, phase: str) -> None:
    """As after a reboot: nobody is left. The next start says where, and comes to the end."""
    commit = killed_in(serving, phase, playbook=True)
    assert serving.attempt(commit).status is Status.ROLLING
    resumed, promoted = serving.poll()
    assert f"was cut off in phase {phase} of cell one" in resumed.sentence
    assert promoted.kind == "promoted"
    assert (serving.state.serves, serving.attempt(commit).runs) == (commit, 2)
    assert serving.host["current"] == serving.host["last_good"] == serving.state.release
    ends = [event.data["outcome"] for event in serving.events if event.event == "end"]
    assert ends[1] == "died"
    assert serving.poll() == []


def test_a_rollout_goes_on_when_its_reconciler_is_killed_and_its_end_is_taken_over(
    serving: Fleet,
) -> None:
    """Until then nobody else begins: the playbook itself holds the lock."""
    held, commit = serving.hold("gate"), serving.merge(2048)
    process = serving.start()
    wait_for(lambda: any(e.phase == "gate" for e in serving.events[fleet_before(serving) :]))
    kill(process, playbook=False)
    assert serving.start().wait(240) == 75
    assert (
        f"reconciler {process.pid} on {platform.node()}, which is gone; the playbook that it "
        f"started still runs (running deploy.yml of {commit[:12]})"
    ) in serving.said
    held.unlink()
    wait_for(lambda: serving.events[-1].event == "end")
    wait_for(lambda: serving.start().wait() != 75)
    assert serving.state.serves == commit
    assert (serving.attempt(commit).runs, serving.rollouts.count(commit)) == (1, 1)


def test_two_reconcilers_at_once_one_works_and_the_other_says_who(serving: Fleet) -> None:
    """Also when both were woken by the same push."""
    held, commit = serving.hold("gate"), serving.merge(2048)
    first = serving.start()
    wait_for(lambda: any(e.phase == "gate" for e in serving.events[fleet_before(serving) :]))
    assert serving.start().wait(240) == 75
    assert f"fleet toy is in the hands of reconciler {first.pid}" in serving.said
    assert f"running deploy.yml of {commit[:12]}; nothing to do here" in serving.said
    newer = serving.merge(4096)
    held.unlink()
    assert first.wait(240) == 0
    # What came meanwhile is not forgotten: the one that worked has looked again.
    assert serving.rollouts[1:] == [commit, newer]


def test_a_rollout_that_is_cut_off_twice_is_taken_back(serving: Fleet) -> None:
    """Once more could go on for ever."""
    before = serving.host["last_good"]
    commit = killed_in(serving, "gate", playbook=True)
    held = serving.hold("gate")
    process = serving.start()
    wait_for(lambda: serving.rollouts.count(commit) == 2 and serving.events[-1].phase == "gate")
    kill(process, playbook=True)
    held.unlink()
    resumed, reverted = serving.poll()
    assert (
        "cut off in phase gate of cell one, for the second time. The fleet is taken back"
        in resumed.sentence
    )
    assert reverted.kind == "reverted"
    assert (serving.host["current"], serving.host["last_good"]) == (before, before)
    assert serving.status == 3
    assert serving.poll() == []


def test_a_way_back_that_is_cut_off_is_gone_again(serving: Fleet) -> None:
    """Pausing the fleet does not keep it from being brought to rest."""
    before = serving.host["last_good"]
    (serving.home / "no-way-back").touch()
    serving.merge(512)
    held = serving.hold("promote")
    process = serving.start()
    wait_for(lambda: "rollback" in serving.rollouts and serving.events[-1].phase == "promote")
    kill(process, playbook=True)
    held.unlink()
    serving.order("pause")
    assert [one.kind for one in serving.poll()] == ["reverted"]
    assert serving.host["current"] == before


def test_an_attempt_that_was_cut_off_before_it_ran_is_not_taken_for_an_earlier_one(
    serving: Fleet,
) -> None:
    """The ledger has an end for the same commit, from before somebody asked for a retry."""
    bad = serving.merge(512)
    serving.poll()
    serving.order("retry", bad)
    serving.heard.at["began"] = sys.exit
    with pytest.raises(SystemExit):
        serving.poll()
    assert serving.attempt(bad).status is Status.ROLLING
    assert [one.kind for one in serving.poll()] == ["resumed", "reverted"]
    assert serving.rollouts.count(bad) == 2


def test_what_was_done_and_not_told_is_told_by_the_next_start(serving: Fleet) -> None:
    """Killed between the last write and the announcement."""
    commit = serving.merge(2048)
    serving.poll()
    known = serving.state
    known.attempts[-1].is_told = known.attempts[-1].is_noted = False
    state.save(serving.state_dir, known)
    (promoted,) = serving.poll()
    assert (promoted.kind, promoted.commit) == ("promoted", commit)
    assert serving.note(commit) == f"promoted: {promoted.sentence}"
    shutil.rmtree(serving.state_dir / "trees")
    assert serving.poll() == []
