"""The mirror, its work trees, and notes that several control hosts write."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest

from seatrial import release
from seatrial.gitops import git
from seatrial.gitops.repository import Repository, RepositoryError, UnreachableError
from tests.gitops.people import Person, run

DENIED = """\
git@x: Permission denied (publickey).
fatal: Could not read from remote repository.

Please make sure you have the correct access rights
and the repository exists.
"""


@pytest.fixture
def work(tmp_path: Path, alice: Person) -> Path:
    """Return a work tree whose commit is on the branch of a bare repository."""
    run("git", "init", "-q", "--bare", tmp_path / "origin.git")
    run("git", "init", "-q", "-b", "main", tmp_path / "work")
    (tmp_path / "work/file").write_text("one")
    alice.commit(tmp_path / "work")
    push(tmp_path / "work")
    return tmp_path / "work"


def push(work: Path, *words: str) -> None:
    """Push the branch."""
    run("git", "push", "-q", *words, work.parent / "origin.git", "HEAD:main", cwd=work)


def mirror(work: Path, name: str = "state") -> Repository:
    """Return a mirror of its own."""
    found = Repository(work.parent / name, str(work.parent / "origin.git"), "main", 20)
    found.fetch()
    return found


def test_a_tree_is_the_commit_and_is_mended_when_somebody_touched_it(work: Path) -> None:
    """What is rolled out is named by a commit."""
    source = mirror(work)
    tree = source.tree(source.head())
    assert release.commit_of(tree) == source.head()
    (tree / "file").write_text("by hand")
    (tree / "new").write_text("by hand")
    tree = source.tree(source.head())
    assert release.commit_of(tree) == source.head()
    source.forget_trees("")
    assert not tree.exists()


def test_a_commit_that_the_branch_drops_is_still_known(work: Path, alice: Person) -> None:
    """Else nobody could say any more that the new one does not follow it."""
    source = mirror(work)
    old = source.head()
    source.keep("serves", old)
    alice.git(work, "commit", "-q", "--amend", "-S", "-m", "Another")
    push(work, "--force")
    source.fetch()
    run("git", "gc", "-q", "--prune=now", cwd=work.parent / "state/mirror.git")
    assert source.head() != old
    assert (source.has(old), source.is_ancestor(old, source.head())) == (True, False)


def test_a_deleted_branch_is_no_branch(work: Path) -> None:
    """Not the commit that it was at when it was seen last."""
    source = mirror(work)
    run("git", "update-ref", "-d", "refs/heads/main", cwd=work.parent / "origin.git")
    source.fetch()
    assert source.head() == ""


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    """It takes the connection, and that is all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"git://127.0.0.1:{server.getsockname()[1]}/x"
        began = time.monotonic()
        with pytest.raises(UnreachableError, match=r"does not answer \(no answer within 1 s"):
            Repository(tmp_path, url, "main", 1).fetch()
        assert time.monotonic() - began < 10


def test_notes_of_two_control_hosts_come_together_and_each_once(work: Path) -> None:
    """The second one pushes on top of the first, and a third time changes nothing."""
    one, two = mirror(work, "one"), mirror(work, "two")
    commit = one.head()
    one.note(commit, "promoted: by one\n")
    two.note(commit, "promoted: by two\n")
    one.note(commit, "promoted: by one\n")
    shown = run("git", "notes", "--ref=rollouts", "show", commit, cwd=work.parent / "origin.git")
    assert shown.split("\n\n") == ["promoted: by one", "promoted: by two"]


def test_a_note_that_is_not_taken_is_not_thought_to_be_there(work: Path) -> None:
    """It is pushed when the repository takes it."""
    source, origin = mirror(work), work.parent / "origin.git"
    hook = origin / "hooks/pre-receive"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    for _ in range(2):
        with pytest.raises(UnreachableError, match="does not take refs/notes/rollouts"):
            source.note(source.head(), "promoted\n")
    hook.unlink()
    source.note(source.head(), "promoted\n")
    shown = run("git", "notes", "--ref=rollouts", "show", source.head(), cwd=origin)
    assert shown == "promoted"


def test_what_a_git_that_was_killed_left_behind_stops_nothing(work: Path) -> None:
    """A lock, half a pack, a work tree whose making was cut off: a power cut leaves all of them."""
    source, home = mirror(work), work.parent / "state/mirror.git"
    tree = source.tree(source.head())
    shutil.rmtree(tree)
    (home / "worktrees" / tree.name / "locked").write_text("initializing")
    source.keep("serves", source.head())
    (home / "refs/kept/serves.lock").touch()
    half = home / "objects/pack/tmp_pack_abc"
    half.touch()
    source.fetch()
    source.keep("serves", source.head())
    assert source.tree(source.head()).is_dir()
    assert not half.exists()


def test_a_git_that_was_ended_has_given_no_answer(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow disk would say that the branch was rewritten, or is gone."""
    source = mirror(work)
    monkeypatch.setattr(git, "call", lambda *_, **__: git.Answer(git.KILLED, b"", "no answer"))
    for ask in (source.head, lambda: source.is_ancestor("a", "b"), lambda: source.has("a")):
        with pytest.raises(RepositoryError, match=r"was ended \(no answer\)"):
            ask()


def test_a_branch_may_take_a_name_below_its_old_one(work: Path) -> None:
    """Git could not keep `main` and `main/eu` at once."""
    mirror(work)
    run("git", "push", "-q", work.parent / "origin.git", ":main", "HEAD:main/eu", cwd=work)
    found = Repository(work.parent / "state", str(work.parent / "origin.git"), "main/eu", 20)
    found.fetch()
    assert found.head() == run("git", "rev-parse", "HEAD", cwd=work)


def test_a_shallow_clone_is_not_taken_for_a_repository_without_news(
    work: Path, alice: Person
) -> None:
    """Git would fetch nothing of it, and say that all is well."""
    mirror(work)
    alice.commit(work, "Two")
    origin = work.parent / "origin.git"
    shutil.rmtree(origin)
    run("git", "clone", "-q", "--bare", "--depth=1", f"file://{work}", origin)
    with pytest.raises(UnreachableError, match=r"is a shallow clone.*git fetch --unshallow"):
        mirror(work)


def test_a_file_of_a_tree_is_the_file_that_was_judged(work: Path, alice: Person) -> None:
    """Attributes could make another of it, or one that git takes for changed."""
    (work / "file").write_bytes(b"$Id$\r\n")
    alice.commit(work)
    (work / ".gitattributes").write_text("file text ident working-tree-encoding=UTF-16\n")
    run("git", "add", ".gitattributes", cwd=work)
    alice.git(work, "commit", "-q", "-S", "-m", "Attributes")
    push(work)
    source = mirror(work)
    tree = source.tree(source.head())
    assert (tree / "file").read_bytes() == source.file(source.head(), "file") == b"$Id$\r\n"
    assert release.commit_of(tree) == source.head()


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (DENIED, "git@x: Permission denied (publickey).; Could not read from remote repository."),
        ("fatal: '/x' does not appear to be a git repository\nfatal: more\n", "'/x' does not"),
        ("error: cannot lock ref 'x': File exists.\n\nremove the file\n", "cannot lock ref 'x'"),
        ("", "status 1"),
    ],
)
def test_why_git_failed_is_said_without_its_advice(said: str, word: str) -> None:
    """Its last line is as a rule no reason."""
    assert git.Answer(1, b"", said).last_word.startswith(word)
