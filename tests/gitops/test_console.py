"""People see why the branch does not serve; their orders are files that the reconciler obeys."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.gitops import console, settings, state
from seatrial.gitops import status as told
from seatrial.gitops.state import Attempt, State, Status, Trouble

OLD, NEW = "a1" * 20, "b2" * 20
WHEN = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)
FLEET = "harbour"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder of a fleet whose branch is at a commit that was refused."""
    folder = tmp_path / "state"
    folder.mkdir()
    nobody = {"notify_urls_file": None, "report_url": None, "forge": None}
    written = {
        "schema": 1,
        "fleet": FLEET,
        "repository": {"url": "/srv/x.git", "branch": "main", "seconds": 5, "notes": True},
        "signers": {"ssh": "/etc/signers", "gpg_home": None, "sign_for_others": []},
        "protected": {"paths": [], "approvers": []},
        "windows": [],
        "approval": None,
        "drift": {"heal": False},
        "tell": {**nobody, "metrics_file": None, "grafana": None},
        "state_dir": str(folder),
        "rollout_seconds": 60,
        "vault_password_file": None,
    }
    (tmp_path / f"{FLEET}.yml").write_text(yaml.safe_dump(written))
    (tmp_path / FLEET).mkdir()
    monkeypatch.setattr(settings, "FOLDER", tmp_path)
    monkeypatch.setattr(console, "KNOCK", tmp_path)
    state.save(folder, refused())
    return folder


def refused() -> State:
    """Return a state whose branch is at a refused commit."""
    attempt = Attempt(
        commit=NEW, status=Status.REVERTED, since=WHEN, sentence="gate x: FAIL.", signer="ann"
    )
    return State(fleet=FLEET, serves=OLD, head=NEW, attempts=[attempt])


def test_a_degraded_fleet_says_what_serves_what_was_wanted_and_why_not() -> None:
    """The sentence of docs/gitops.md."""
    assert told.headline(refused()) == (
        f"degraded: serving {OLD[:12]}, branch at {NEW[:12]}, refused because gate x: FAIL"
    )


def test_a_reason_that_says_the_word_already_is_not_doubled() -> None:
    """`refused: unsigned`, not `refused because refused: unsigned`."""
    known = refused()
    known.attempts[0].sentence = "refused: it is not signed."
    assert told.headline(known).endswith(f"branch at {NEW[:12]}, refused: it is not signed")


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_its_words(status: Status) -> None:
    """None is forgotten."""
    known = refused()
    known.attempts[0].status = status
    assert told.headline(known).startswith(("serving ", "degraded: serving "))
    assert NEW[:12] in told.headline(known)


def test_status_shows_troubles_orders_and_attempts(folder: Path) -> None:
    """Everything that stands in the way, a line each."""
    known = refused()
    known.troubles["repository"] = Trouble(since=WHEN, sentence="does not answer")
    state.save(folder, known)
    list(console.order(FLEET, "pause", reason="trade fair"))
    lines = list(console.status(FLEET))
    assert lines[0].startswith(f"{FLEET}: degraded: ")
    assert lines[1] == "  trouble   repository since 2026-11-29 20:00:00Z: does not answer"
    assert lines[2].startswith("  pause     by ")
    assert lines[2].endswith(": trade fair")
    assert lines[3] == f"  reverted  {NEW[:12]}  2026-11-29 20:00:00Z  ann"


def test_an_order_is_kept_and_the_reconciler_woken(folder: Path, tmp_path: Path) -> None:
    """By the first characters of a commit; who ordered it is on record."""
    said = list(console.order(FLEET, "retry", NEW[:7], reason="disk was full"))
    assert said == [f"{FLEET}: tries {NEW[:12]} again"]
    [order] = state.orders(folder)
    assert (order.kind, order.commit, order.reason) == ("retry", NEW, "disk was full")
    assert order.who
    assert (tmp_path / FLEET / "wake").exists()


def test_a_pause_is_taken_back(folder: Path) -> None:
    """And a second time nothing happens."""
    list(console.order(FLEET, "pause", reason="fair"))
    assert list(console.resume(FLEET)) == [f"{FLEET}: follows its branch again"]
    assert state.orders(folder) == []
    assert list(console.resume(FLEET)) == [f"{FLEET}: was not paused"]


@pytest.mark.parametrize(
    ("commit", "sentence"),
    [
        ("", "nothing is the beginning of none"),
        ("b2", "b2 is the beginning of none"),
        ("c3c3c3", f"the branch is at {NEW[:12]}"),
    ],
)
def test_an_order_for_an_unknown_commit_is_refused(
    folder: Path, commit: str, sentence: str
) -> None:
    """And names the one that the branch is at."""
    with pytest.raises(console.ConsoleError, match=sentence):
        list(console.order(FLEET, "approve", commit))
    assert state.orders(folder) == []


@pytest.mark.parametrize("kind", ["approve", "override"])
def test_nothing_that_cannot_begin_is_said_to_begin(folder: Path, kind: Any) -> None:
    """A commit that the branch has left, or one that came to its end."""
    known = refused()
    known.attempts.insert(0, Attempt(commit=OLD, status=Status.PROMOTED, since=WHEN))
    state.save(folder, known)
    for commit, why in ((OLD, f"the branch is at {NEW[:12]}"), (NEW, "First: fab gitops.retry")):
        with pytest.raises(console.ConsoleError, match=why):
            list(console.order(FLEET, kind, commit, reason="now"))
    assert state.orders(folder) == []


def test_an_order_that_cannot_be_kept_is_said_not_to_be_given(folder: Path) -> None:
    """A full disk, for one."""
    (folder / "orders").write_text("a file")
    with pytest.raises(console.ConsoleError, match="the order was not given"):
        list(console.order(FLEET, "pause", reason="fair"))


def test_an_override_without_a_reason_is_refused(folder: Path) -> None:
    """What breaks the rules is explained in the record."""
    with pytest.raises(console.ConsoleError, match="--reason: should say why"):
        list(console.order(FLEET, "override", NEW, reason=" "))


def test_orders_of_another_user_are_refused_with_the_command_to_type(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the reconciler cannot remove would stand for ever."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(
        console.ConsoleError, match=r"sudo -u \w+ /opt/seatrial-gitops/venv/bin/fab"
    ):
        list(console.order(FLEET, "pause", reason="fair"))


def test_fab_says_in_one_sentence_what_is_missing(repository: Path) -> None:
    """Where no reconciler is installed."""
    program = Path(sys.executable).with_name("fab")
    done = subprocess.run(
        [program, "gitops.status", "--fleet", "no-such-fleet"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "/etc/seatrial/gitops/no-such-fleet.yml: cannot be read (No such file or directory); "
        "playbooks/gitops.yml writes it"
    )
