"""What becomes of a merge: real pushes, real signatures, real playbooks; the host is a toy."""

from __future__ import annotations

import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from seatrial.gitops import policy, quiet, state
from seatrial.gitops.reconcile import ReconcilerError
from seatrial.gitops.state import Status
from seatrial.ledger import LedgerError
from tests.gitops.fleet import Fleet
from tests.gitops.people import Person, allow, run


@pytest.fixture
def fleet(tmp_path: Path, home: Path, alice: Person, bob: Person) -> Fleet:
    """Return a fleet that nothing was rolled out to."""
    return Fleet(tmp_path / "f", home, alice, bob)


def test_a_merge_is_rolled_out_once_and_noted(fleet: Fleet) -> None:
    """A second pass does nothing; the plan is in the record, the verdict on the commit."""
    commit = fleet.merge(1024)
    began, promoted = fleet.poll()
    assert (began.kind, promoted.kind) == ("began", "promoted")
    assert began.sentence == "index_topk 1 -> 2 on 1 hosts"
    assert promoted.signer == fleet.alice.address
    assert (promoted.serves, promoted.branch_at) == (commit, commit)
    assert fleet.status == 0
    plan = Path(fleet.attempt(commit).record, "plan.txt").read_text()
    assert "release: index_topk 1 -> 2" in plan
    assert fleet.note(commit) == f"promoted: {promoted.sentence}"
    assert fleet.poll() == []
    assert fleet.rollouts == [commit]


def test_a_promoted_commit_says_which_cell_does_not_serve(fleet: Fleet, home: Path) -> None:
    """The rollout did what it could, and deploy.yml failed all the same."""
    (home / "closed").write_text("cell two does not serve: no answer")
    fleet.merge(1024)
    _began, promoted = fleet.poll()
    assert promoted.kind == "promoted"
    assert promoted.sentence.endswith("serves, but cell two does not serve: no answer")


def test_a_bad_merge_is_reverted_remembered_and_a_newer_one_goes_on(serving: Fleet) -> None:
    """The gate is named with its number; documents on top of it are no newer merge."""
    good, bad = serving.state.serves, serving.merge(512)
    began, reverted = serving.poll()
    assert (began.kind, reverted.kind) == ("began", "reverted")
    assert (reverted.gate, reverted.measured, reverted.bound) == ("needle_is_recalled", 0.05, 0.1)
    assert (reverted.serves, reverted.branch_at) == (good, bad)
    assert "FAIL" in serving.note(bad)
    assert serving.status == 3
    assert serving.poll() == []

    serving.put("docs/why.md", "It was not our fault.")
    serving.alice.commit(serving.work, "Explain")
    serving.push()
    (refused,) = serving.poll()
    assert f"brings nothing that {bad[:12]} did not" in refused.sentence
    assert serving.rollouts == [good, bad]

    serving.alice.git(serving.work, "revert", "--no-edit", "-S", bad)
    serving.push()
    (_began, promoted) = serving.poll()
    assert promoted.kind == "promoted"
    assert "every cell serves its release already" in promoted.sentence
    assert (serving.host["moves"], serving.status) == (2, 0)


def test_a_retry_tries_a_failed_commit_again(serving: Fleet) -> None:
    """And nothing else does."""
    bad = serving.merge(2048, wrong=1)
    assert serving.kinds() == ["failed"]
    serving.order("retry", bad)
    assert serving.kinds() == ["failed"]
    assert serving.poll() == []


def test_of_three_pushes_the_newest_is_rolled_out(serving: Fleet) -> None:
    """They came while nobody looked."""
    for index_topk in (2048, 3072, 4096):
        newest = serving.merge(index_topk)
    serving.poll()
    assert serving.rollouts[1:] == [newest]


def test_a_change_that_no_host_has_rolls_nothing_out(serving: Fleet) -> None:
    """Documents, and gates that were approved; the next commit is compared with it."""
    serving.put("docs/a.md", "a")
    serving.alice.commit(serving.work)
    serving.push()
    assert serving.kinds() == ["unchanged"]
    serving.put("gates/thresholds/toy.yml", "window: {recall_ratio_min: 0.1}")
    gates = serving.alice.commit(serving.work)
    serving.push()
    (waiting,) = serving.poll()
    assert f"git tag -s approve/{gates[:12]}" in waiting.sentence
    assert serving.poll() == []
    serving.bob.approve(serving.work, gates)
    serving.push()
    assert serving.kinds() == ["unchanged"]
    assert serving.attempt(gates).approver == serving.bob.address
    assert (serving.state.serves, serving.status) == (gates, 0)
    assert serving.host["moves"] == 1


def test_gates_loosened_in_the_merge_that_they_judge_are_refused(serving: Fleet) -> None:
    """However many have approved it."""
    serving.put("gates/thresholds/toy.yml", "window: {recall_ratio_min: 0.0}")
    commit = serving.commit(512)
    serving.bob.approve(serving.work, commit)
    serving.push()
    (refused,) = serving.poll()
    assert "loosens the gates that would judge it" in refused.sentence
    assert serving.host["moves"] == 1


def test_an_unsigned_merge_is_refused_until_a_signed_one_comes(serving: Fleet) -> None:
    """The sentence is told once, noted on the commit, and nothing is rolled out."""
    bad = serving.commit(2048, "--no-gpg-sign")
    serving.push()
    (refused,) = serving.poll()
    assert refused.kind == "refused"
    assert "is not signed" in serving.note(bad)
    assert serving.poll() == []
    good = serving.merge(3072)
    assert serving.kinds() == ["began", "promoted"]
    assert serving.rollouts[1:] == [good]


def test_a_refusal_is_looked_at_again_when_the_signers_change(serving: Fleet) -> None:
    """Rotating keys needs no retry; and a key that is taken away counts at once."""
    allow(serving.signers, f"{serving.bob.address} {serving.bob.key}")
    commit = serving.merge(2048)
    (refused,) = serving.poll()
    assert "which is not in" in refused.sentence
    both = (serving.alice, serving.bob)
    allow(serving.signers, *(f"{one.address} {one.key}" for one in both))
    serving.order("pause")
    assert serving.kinds() == ["waiting"]
    assert serving.attempt(commit).signer == serving.alice.address


@pytest.mark.parametrize("is_tried", [True, False], ids=["promoted", "reverted"])
def test_a_branch_that_was_set_back_or_rewritten_is_refused(serving: Fleet, is_tried: bool) -> None:
    """Signed or not; an override that a person gives a reason for lets it pass."""
    base, last = serving.state.serves, serving.merge(2048 if is_tried else 512)
    serving.poll()
    serving.alice.git(serving.work, "reset", "-q", "--hard", base)
    if is_tried:
        serving.push("--force")
        (older,) = serving.poll()
        assert "rewritten or set back" in older.sentence
    other = serving.commit(4096)
    serving.push("--force")
    (refused,) = serving.poll()
    assert f"{other[:12]} does not come after {last[:12]}" in refused.sentence
    moves = serving.host["moves"]
    serving.order("override", other, accept_history=True)
    began, promoted = serving.poll()
    assert "override by olga: why" in began.sentence
    assert (promoted.kind, serving.host["moves"]) == ("promoted", moves + 1)


def test_a_commit_that_wants_other_packages_is_refused(serving: Fleet) -> None:
    """The control host would run its playbooks with the wrong Ansible."""
    serving.put("requirements/control.lock", "another")
    serving.alice.commit(serving.work)
    serving.push()
    (refused,) = serving.poll()
    assert "run playbooks/gitops.yml" in refused.sentence


def test_a_spec_that_is_wrong_fails_before_anything_moves(serving: Fleet) -> None:
    """In the words of the playbook; the attempt is remembered."""
    serving.merge(2048, wrong=1)
    (failed,) = serving.poll()
    assert failed.sentence == (
        "nothing was moved: wrong: should be absent: the serving spec has no such key"
    )
    assert serving.poll() == []


def test_a_fleet_that_another_control_host_has_locked_is_waited_for(serving: Fleet) -> None:
    """That is no attempt: the commit is rolled out when the lock is free."""
    lock = serving.home / "locked"
    lock.touch()
    commit = serving.merge(2048)
    _began, waiting = serving.poll()
    assert (waiting.kind, "locked by bob on elsewhere" in waiting.sentence) == ("waiting", True)
    lock.unlink()
    assert serving.poll() == []  # not before a minute is over
    sooner(serving, commit)
    assert serving.kinds() == ["began", "promoted"]


def sooner(fleet: Fleet, commit: str) -> None:
    """Let what should be tried again be due."""
    known = fleet.state
    attempt = known.attempt(commit)
    assert attempt
    attempt.again = state.now() - timedelta(seconds=1)
    state.save(fleet.state_dir, known)


def test_a_pause_holds_a_merge_until_it_is_over(serving: Fleet) -> None:
    """Who paused and why is told, once."""
    serving.order("pause")
    commit = serving.merge(2048)
    (waiting,) = serving.poll()
    assert waiting.sentence == f"{commit[:12]} waits: paused by olga: why"
    assert serving.poll() == []
    state.withdraw(serving.state_dir, "pause")
    assert serving.kinds() == ["began", "promoted"]


def test_a_freeze_holds_a_merge_and_an_override_does_not_wait(serving: Fleet) -> None:
    """The override is recorded with who and why, and is used up."""
    freeze = {"kind": "deny", "cron": "* * * * *", "minutes": 60, "timezone": "UTC"}
    serving.set(windows=[{**freeze, "reason": "the fair"}])
    commit = serving.merge(2048)
    (waiting,) = serving.poll()
    assert "no rollout begins before" in waiting.sentence
    assert "(the fair)" in waiting.sentence
    serving.order("override", commit)
    began, _promoted = serving.poll()
    assert began.sentence.endswith("(override by olga: why)")
    assert serving.attempt(commit).override == "olga: why"
    assert state.orders(serving.state_dir) == []


def test_a_commit_waits_for_its_approval_and_no_longer_than_the_fleet_says(serving: Fleet) -> None:
    """Approved in time it is rolled out; else refused, until somebody asks again."""
    serving.set(approval={"seconds": 3600})
    commit = serving.merge(2048)
    (waiting,) = serving.poll()
    assert f"fab gitops.approve --commit {commit[:12]}" in waiting.sentence
    serving.order("approve", commit)
    assert serving.kinds() == ["began", "promoted"]

    serving.set(approval={"seconds": 1})
    late = serving.merge(3072)
    serving.poll()
    time.sleep(1.1)
    (refused,) = serving.poll()
    assert "nobody approved" in refused.sentence
    serving.order("approve", late)
    assert serving.poll() == []  # too late
    state.withdraw(serving.state_dir, "approve", late)
    serving.order("retry", late)
    assert serving.kinds() == ["waiting"]


def test_an_unreachable_repository_is_told_once_and_survived(serving: Fleet) -> None:
    """And so is its return; what serves goes on serving."""
    away = serving.origin.rename(serving.folder / "away")
    (trouble,) = serving.poll()
    assert "does not answer" in trouble.sentence
    assert serving.poll() == []
    away.rename(serving.origin)
    (recovered,) = serving.poll()
    assert "answers again, after 0 minutes" in recovered.sentence
    assert serving.host["moves"] == 1


def test_a_deleted_branch_is_told_once_and_survived(serving: Fleet) -> None:
    """Nothing is deployed, nothing is taken away."""
    run("git", "update-ref", "-d", "refs/heads/main", cwd=serving.origin)
    (trouble,) = serving.poll()
    assert "has no branch main any more" in trouble.sentence
    assert serving.poll() == []
    serving.push()
    assert serving.kinds() == ["recovered"]


def test_after_a_jump_of_the_clock_nothing_begins(serving: Fleet) -> None:
    """Until it is back."""
    known = serving.state
    assert known.clock
    known.clock.offset -= 86400
    state.save(serving.state_dir, known)
    serving.merge(2048)
    (trouble,) = serving.poll()
    assert "this machine's clock jumped by +86400 s" in trouble.sentence
    assert serving.poll() == []
    known = serving.state
    assert known.clock
    known.clock.offset += 86400
    state.save(serving.state_dir, known)
    serving.order("pause")
    assert serving.kinds() == ["recovered", "waiting"]


def test_a_broken_channel_stops_nothing_and_what_was_not_told_is_told(serving: Fleet) -> None:
    """A note that could not be pushed is pushed by a later pass."""
    hook = serving.origin / "hooks/pre-receive"
    hook.write_text("#!/bin/sh\ngrep -q refs/notes && exit 1 || exit 0\n")
    hook.chmod(0o755)
    serving.heard.is_deaf = True
    commit = serving.merge(2048)
    serving.poll()
    assert (serving.state.serves, serving.attempt(commit).is_noted) == (commit, False)
    hook.unlink()
    assert serving.poll() == []
    assert "promoted" in serving.note(commit)


def test_a_state_that_was_lost_is_taken_from_the_ledger(serving: Fleet) -> None:
    """What was rolled out last still forbids the way back."""
    base, last = serving.state.serves, serving.merge(2048)
    serving.poll()
    shutil.rmtree(serving.state_dir)
    serving.alice.git(serving.work, "reset", "-q", "--hard", base)
    serving.push("--force")
    (refused,) = serving.poll()
    assert f"{base[:12]} does not come after {last[:12]}, which serves" in refused.sentence


def test_drift_is_told_once_and_healed_only_if_the_fleet_asks(serving: Fleet) -> None:
    """Healing is deploy.yml of the commit that serves."""
    spoil(serving)
    (drift,) = serving.poll(is_drift=True)
    assert drift.sentence.startswith(
        "drift: toy: current: 0123456789abcdef. Next: ansible-playbook"
    )
    assert serving.poll(is_drift=True) == []
    serving.set(drift={"heal": True})
    assert [one.kind for one in serving.poll(is_drift=True)] == ["drift", "healed"]
    assert serving.poll(is_drift=True) == []


def test_drift_that_could_not_be_healed_yet_is_healed_later(serving: Fleet) -> None:
    """The fleet was paused, or the look was cut off before it healed."""
    serving.set(drift={"heal": True})
    spoil(serving)
    serving.order("pause")
    assert [one.kind for one in serving.poll(is_drift=True)] == ["drift"]
    state.withdraw(serving.state_dir, "pause")
    serving.heard.at["drift"] = sys.exit
    with pytest.raises(SystemExit):
        serving.poll(is_drift=True)
    serving.heard.at.clear()
    assert [one.kind for one in serving.poll(is_drift=True)] == ["drift", "healed"]


def test_what_an_earlier_look_found_is_not_found_again(serving: Fleet) -> None:
    """The look itself fails this time: that is told, and no drift."""
    serving.poll(is_drift=True)
    spoil(serving)
    serving.set(vault_password_file=str(serving.folder / "away"))
    (trouble,) = serving.poll(is_drift=True)
    assert "drift could not be looked for" in trouble.sentence


def test_a_ledger_of_another_version_is_not_taken_for_an_empty_one(serving: Fleet) -> None:
    """What the rollout came to stands in it; it is read when the reconciler knows it."""
    path = serving.home / ".local/state/seatrial/toy/ledger.jsonl"
    known = path.read_text()
    path.write_text(known + known.splitlines()[0].replace('"schema": 1', '"schema": 2') + "\n")
    commit = serving.merge(2048)
    with pytest.raises(LedgerError, match=r"line \d+ is an event of another version"):
        serving.poll()
    assert "the reconciler cannot work" in serving.heard.told[-1].sentence
    assert serving.attempt(commit).status is Status.WAITING
    path.write_text(known + '{"torn')
    assert [one.kind for one in serving.poll()][-3:] == ["began", "promoted", "recovered"]


def test_a_fault_of_the_reconciler_itself_is_told_once(
    serving: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else only its journal would know, every half minute."""
    monkeypatch.setattr(policy, "content", {}.__getitem__)
    serving.merge(2048)
    for told in (["trouble"], []):
        with pytest.raises(TypeError):
            serving.poll()
        assert [one.kind for one in serving.heard.told] == told
    assert "TypeError" in serving.state.troubles["control"].sentence


def test_another_user_leaves_no_files_behind(
    serving: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root by hand, once, and the unit could write no more."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ReconcilerError, match="run it as that one"):
        serving.poll()


def spoil(fleet: Fleet) -> None:
    """Somebody changes the host."""
    path = fleet.home / "host.json"
    path.write_text(path.read_text().replace(fleet.state.release, "0123456789abcdef"))


def test_a_rollout_that_deploy_could_not_take_back_is_taken_back(serving: Fleet) -> None:
    """By rollback.yml, to the release before."""
    before = serving.host["last_good"]
    (serving.home / "no-way-back").touch()
    commit = serving.merge(512)
    kinds = serving.kinds()
    assert kinds == ["began", "resumed", "reverted"]
    assert (serving.host["current"], serving.host["last_good"]) == (before, before)
    assert serving.attempt(commit).status is Status.REVERTED


def test_a_rollout_that_takes_too_long_is_ended_and_taken_back(serving: Fleet) -> None:
    """It would hold the fleet for ever."""
    before, held = serving.host["last_good"], serving.hold("gate")
    serving.heard.at["resumed"] = held.unlink
    serving.set(rollout_seconds=20)
    serving.merge(2048)
    _began, resumed, reverted = serving.poll()
    assert "deploy.yml took too long and was ended" in resumed.sentence
    assert (reverted.kind, serving.host["current"]) == ("reverted", before)


def test_a_quiet_poll_knows_when_there_is_something_to_do(serving: Fleet) -> None:
    """A push, an order, another key, other settings, or an hour that has come."""

    def seen() -> int | None:
        return quiet.is_quiet("toy", serving.settings_file)

    serving.poll()
    assert seen() == 0
    serving.order("pause")
    assert seen() is None
    serving.poll()
    assert seen() == 0
    commit = serving.merge(2048)
    assert seen() is None
    serving.poll()
    assert seen() == 3
    serving.bob.approve(serving.work, commit)
    serving.push()
    assert seen() is None
    serving.poll()
    allow(serving.signers, f"{serving.bob.address} {serving.bob.key}")
    assert seen() is None
    serving.poll()
    serving.set(rollout_seconds=61)
    assert seen() is None
    away = serving.origin.rename(serving.folder / "away")
    serving.poll()
    assert seen() == 3  # away, as was told
    away.rename(serving.origin)
    assert seen() is None
