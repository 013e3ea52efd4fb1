"""A merge is the order: real pushes to a real repository, a control host of its own, no command.

The pilot steers the light fleet by what is pushed to it; the tests are the chapters, in order.
`make test` runs the telling ones.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults import hosts
from tests.faults.fleet import ROLES, WORK, Fleet
from tests.faults.pilot import ADDRESS, ANN, BOB, HOME, TOLD, USER, Pilot

PLANTED = {
    name: f"planted-{secrets.token_hex(12)}" for name in ("webhook", "chat", "forge", "graf")
}
PROMOTED, DEGRADED = "promoted", ("refused", "reverted", "failed")
INPUTS = {
    "gitops_webhook_kind": "gitea",
    "gitops_webhook_bind": f"{ADDRESS}:9443",
    "gitops_forge": {"kind": "gitea", "api": f"http://{TOLD}/api/v1", "repository": "team/fleet"},
    "gitops_grafana_url": f"http://{TOLD}",
    "gitops_report_url": "https://reports.example.org/{rollout}/",
    # A look by the timer comes late, so that what a test sees came by the door that it tests.
    "gitops_poll_seconds": 600,
    "gitops_drift_seconds": 86400,
}


@pytest.fixture(scope="module")
def pilot(alone: None) -> Iterator[Pilot]:
    """Boot a fleet that serves and a control host that follows a branch; take them down."""
    folder = WORK / "gitops"
    folder.mkdir(parents=True, exist_ok=True)
    fleet = Fleet("light")
    made = Pilot(
        fleet,
        inputs=INPUTS,
        secrets={
            "gitops_webhook_secret": PLANTED["webhook"],
            "gitops_notify_urls": [f"json://{TOLD}/chat/{PLANTED['chat']}"],
            "gitops_forge_token": PLANTED["forge"],
            "gitops_grafana_token": PLANTED["graf"],
        },
    )
    try:
        fleet.up(folder / "up.log")
        made.make(folder / "install.log")
        made.listen()
        yield made
    finally:
        made.stop_listening()
        hosts.verb("down")


def name_release(pilot: Pilot, name: str) -> None:
    """Say another name of the release to every server: the smallest change of all."""

    def change(spec: dict[str, Any]) -> None:
        for role in ROLES:
            spec["roles"][role]["env"] = {**spec["roles"][role]["env"], "REHEARSED_RELEASE": name}

    pilot.edit_spec(change)


def merge(pilot: Pilot, name: str, **options: Any) -> str:
    """Commit a release of this name, signed, and push it; return the commit."""
    name_release(pilot, name)
    commit = pilot.commit(f"Release {name}", **options)
    pilot.push()
    return commit


def serving() -> set[str]:
    """Return the releases that the hosts run and would go back to; nothing may be undecided."""
    found = hosts.look()
    assert not any(host.is_pending for host in found.values()), found
    assert all(host.is_active for host in found.values()), found
    return {release for host in found.values() for release in (host.current, host.last_good)}


def rollouts(pilot: Pilot) -> list[str]:
    """Return the rollouts of the ledger."""
    return [event.rollout for event in pilot.events if event.event == "begin"]


def started_after(pilot: Pilot, moment: float) -> float:
    """Return how many seconds after the moment the reconciler was started last."""
    asked = f"systemctl show {pilot.unit} -P InactiveExitTimestampMonotonic"
    return int(pilot.ssh(asked)) / 1e6 - moment


@pytest.mark.telling
def test_what_was_rolled_out_by_hand_is_taken_over(pilot: Pilot) -> None:
    """The first look knows from the ledger what serves; what nobody would notice moves nothing."""
    first = pilot.git("rev-parse", "HEAD").strip()
    before = serving()
    found = pilot.await_status(first, PROMOTED, "unchanged")
    pilot.await_idle()
    assert found["signer"] == ANN
    assert serving() == before


def test_installing_it_again_changes_nothing(pilot: Pilot) -> None:
    """And a check run says what a real one would do, and does not."""
    log = WORK / "gitops/again.log"
    assert "changed=0 " in pilot.install(log)
    assert "A real run then installs" in pilot.install(log, "--check")


@pytest.mark.telling
def test_a_push_is_rolled_out_and_told_with_nobody_at_a_keyboard(pilot: Pilot) -> None:
    """Hook, rollout, promotion, note, commit status, notification, annotation."""
    before, pushed = serving(), time.monotonic()
    commit = merge(pilot, "r1")
    assert 0 < started_after(pilot, pushed) <= 2 + (time.monotonic() - pushed)
    done = pilot.await_status(commit, PROMOTED, *DEGRADED)
    assert done["status"] == PROMOTED, done["sentence"]
    pilot.await_idle()
    now = serving()
    assert len(now) == 1
    assert now != before
    assert pilot.note(commit).startswith("seatrial: promoted\n")
    states = [told["state"] for told in pilot.heard(f"/api/v1/repos/team/fleet/statuses/{commit}")]
    assert states == ["pending", "success"]
    assert pilot.heard(f"/chat/{PLANTED['chat']}")[-1]["title"].endswith(f"promoted {commit[:12]}")
    assert pilot.heard("/api/annotations")[-1]["tags"][-1] == PROMOTED


def test_the_hook_acts_within_two_seconds(pilot: Pilot) -> None:
    """From the end of the push to the start of the look; a commit of documents moves nothing."""
    (pilot.clone / "docs/note.md").write_text("A note.\n")
    commit = pilot.commit("Write a note")
    before = rollouts(pilot)
    pilot.push()
    pushed = time.monotonic()
    assert pilot.await_status(commit, "unchanged", seconds=20)
    assert started_after(pilot, pushed) <= 2
    pilot.await_idle()
    assert rollouts(pilot) == before


def test_a_poll_that_finds_nothing_costs_little(pilot: Pilot) -> None:
    """At most 0.3 s of CPU, and it writes nothing."""
    pilot.ssh(f"systemctl start {pilot.unit}")  # after a change the first look is a whole one
    costs = []
    for _ in range(3):
        state = f"stat -c '%Y %i' {HOME}/{pilot.fleet.name}/state.json"
        before = pilot.ssh(state)
        pilot.ssh(f"systemctl start {pilot.unit}")
        assert pilot.ssh(state) == before
        costs.append(int(pilot.ssh(f"systemctl show {pilot.unit} -P CPUUsageNSec")) / 1e9)
    print(f"CPU seconds of a poll that finds nothing: {costs}")
    assert min(costs) <= 0.3


def test_a_bad_merge_is_refused_remembered_and_a_revert_deploys(pilot: Pilot) -> None:
    """The gate is named in note and notification; later looks do nothing; git revert mends it."""
    good = serving()
    for role, host in hosts.PLACES.items():
        fault = json.dumps({"release": "r2", "fault": "forget"})
        hosts.on(
            host,
            f"install -d -m 755 /run/seatrial-fault && "
            f"echo '{fault}' >/run/seatrial-fault/{role}.json",
        )
    bad = merge(pilot, "r2")
    done = pilot.await_status(bad, PROMOTED, *DEGRADED)
    assert done["status"] == "reverted", done["sentence"]
    pilot.await_idle()
    assert serving() == good
    assert done["gate"]
    assert f"gate: {done['gate']}" in pilot.note(bad)
    assert done["gate"] in pilot.heard(f"/chat/{PLANTED['chat']}")[-1]["message"]
    before = rollouts(pilot)
    for _ in range(2):
        pilot.ssh(f"systemctl start {pilot.unit} || true")
    assert rollouts(pilot) == before
    assert f"degraded: serving {pilot.state['serves'][:12]}, branch at {bad[:12]}" in (
        pilot.fab("status")
    )
    pilot.git("-c", f"user.name={ANN}", "-c", f"user.email={ANN}", "revert", "-n", bad)
    reverted = pilot.commit("Revert release r2")
    pilot.push()
    assert pilot.await_status(reverted, PROMOTED, *DEGRADED)["status"] == PROMOTED
    assert serving() == good


def test_what_nobody_may_order_is_refused_each_with_its_sentence(pilot: Pilot) -> None:
    """Unsigned, signed by a stranger, forged author, rewritten history: nothing is rolled out."""
    before, good = rollouts(pilot), pilot.git("rev-parse", "HEAD").strip()
    pilot.make_key("mallory@example.org")
    plain = ("-c", "user.name=Ann", "-c", f"user.email={ANN}", "-c", "commit.gpgsign=false")
    said = {}
    orders: dict[str, Callable[[], str]] = {
        "unsigned": lambda: pilot.git(*plain, "commit", "-q", "-a", "-m", "unsigned"),
        "stranger": lambda: pilot.commit("stranger", by="mallory@example.org"),
        "forged": lambda: pilot.commit("forged", options=(f"--author={BOB} <{BOB}>",)),
    }
    for name, order in orders.items():
        name_release(pilot, f"evil-{name}")
        order()
        commit = pilot.git("rev-parse", "HEAD").strip()
        pilot.push("--force", "origin", "main")
        said[name] = pilot.await_status(commit, "refused", seconds=30)["sentence"]
        pilot.git("reset", "-q", "--hard", good)
    older = pilot.git("rev-parse", "HEAD~2").strip()
    pilot.git("reset", "-q", "--hard", older)
    name_release(pilot, "evil-history")
    rewritten = pilot.commit("rewritten")
    pilot.push("--force", "origin", "main")
    said["force-push"] = pilot.await_status(rewritten, "refused", seconds=30)["sentence"]
    pilot.git("reset", "-q", "--hard", good)
    pilot.push("--force", "origin", "main")
    pilot.await_idle()
    print(json.dumps(said, indent=1))
    assert len(set(said.values())) == len(said)
    assert "does not come after" in said["force-push"]
    assert rollouts(pilot) == before


def test_three_pushes_within_a_second_are_one_rollout_of_the_newest(pilot: Pilot) -> None:
    """Plus at most the one that had begun already."""
    before = rollouts(pilot)
    commits = [merge(pilot, f"r3{letter}") for letter in "abc"]
    assert pilot.await_status(commits[-1], PROMOTED, *DEGRADED)["status"] == PROMOTED
    made = rollouts(pilot)[len(before) :]
    assert 1 <= len(made) <= 2
    assert made[-1].endswith(commits[-1][:8])


@pytest.mark.telling
def test_of_two_reconcilers_one_works_and_the_other_says_who_does(pilot: Pilot) -> None:
    """And after kill -9 at the gates the next look brings the rollout to its end."""
    commit = merge(pilot, "r4")
    pilot.await_phase("gate")
    venv = "/opt/seatrial-gitops/venv/bin/python"
    second = pilot.ssh(
        f"cd /opt/seatrial-gitops/source && runuser -u {USER} -- {venv} -m seatrial.gitops "
        f"--fleet {pilot.fleet.name} 2>&1; echo status $?"
    )
    assert "is in the hands of reconciler" in second
    assert second.strip().endswith("status 75")
    pilot.kill()
    pilot.ssh(f"systemctl start --no-block {pilot.unit}")
    done = pilot.await_status(commit, PROMOTED, *DEGRADED)
    assert done["status"] in (PROMOTED, "reverted"), done["sentence"]
    assert len(serving()) == 1


@pytest.mark.telling
def test_a_power_cut_of_the_control_host_ends_well(pilot: Pilot) -> None:
    """In the middle of a switch: the timer of the next boot resumes or reverts."""
    commit = merge(pilot, "r5")
    pilot.await_phase("activate")
    pilot.power_cycle()
    done = pilot.await_status(commit, PROMOTED, *DEGRADED, seconds=600)
    assert done["status"] in (PROMOTED, "reverted"), done["sentence"]
    assert len(serving()) == 1


def test_deliveries_wake_once_and_only_if_they_are_authentic(pilot: Pilot) -> None:
    """The webhook as the forge sees it; nothing of a delivery is used."""
    body = json.dumps({"ref": "refs/heads/main", "after": "0" * 40}).encode()
    signed = hmac.new(PLANTED["webhook"].encode(), body, hashlib.sha256).hexdigest()
    before = rollouts(pilot)
    name = pilot.fleet.name
    assert pilot.post(name, body, {"X-Gitea-Signature": signed})[0] == 200
    assert pilot.post(name, body, {"X-Gitea-Signature": signed})[0] == 409
    assert pilot.post(name, body, {"X-Gitea-Signature": "0" * 64})[0] == 403
    assert pilot.post(name, b"x" * 10_000_000, {"X-Gitea-Signature": signed})[0] == 413
    said = pilot.journal(f"seatrial-gitops-door@{name}.service")
    for words in ("accepted", "refused, 409", "refused, 403", "refused, 413"):
        assert words in said
    pilot.await_idle()
    assert rollouts(pilot) == before


def test_planted_secrets_are_found_in_their_own_files_alone(pilot: Pilot) -> None:
    """After all of the above: no ledger, note, log, journal, argument or environment has one."""
    folder = f"/etc/seatrial/gitops/{pilot.fleet.name}"
    homes = {"webhook": "hooks.json", "chat": "notify", "forge": "forge", "graf": "grafana"}
    assert {name: pilot.places_of(planted) for name, planted in PLANTED.items()} == {
        name: [f"{folder}.{home}"] for name, home in homes.items()
    }
    pilot.git("fetch", "--quiet", "origin", "+refs/notes/*:refs/notes/*")
    everything = subprocess.run(
        ["git", "-C", pilot.clone, "log", "-p", "--all"], capture_output=True, check=True
    ).stdout
    for host in (*hosts.GPU_HOSTS, "edge"):
        everything += hosts.on(host, "journalctl --no-pager -o cat -a").encode(errors="replace")
    assert not [name for name, planted in PLANTED.items() if planted.encode() in everything]
