"""The repository that the order comes from: a mirror of it, clean work trees, and notes."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from seatrial.errors import SeatrialError
from seatrial.gitops import disk, git

NOTES = "refs/notes/rollouts"
APPROVALS = "refs/tags/approve/"
BRANCH = "refs/followed/branch"
"""Where the mirror keeps the branch: a name of its own, whatever the branch is called."""
AS_IT_IS = "* -text -eol -ident -working-tree-encoding\n"
"""A file of a work tree is the file that was judged, whatever .gitattributes makes of it."""
LOCAL_SECONDS = 300
"""For what git does on this machine alone."""
IDENTITY = ("-c", "user.name=Seatrial", "-c", "user.email=seatrial@localhost")


class RepositoryError(SeatrialError):
    """The repository cannot be asked, or does not hold what it should."""


class UnreachableError(RepositoryError):
    """It does not answer."""


class Step(NamedTuple):
    """What one commit of the branch changes against the one before it."""

    before: str
    commit: str
    paths: list[str]


class Repository:
    """A mirror in ``folder`` of one branch of ``url``, and of the approvals."""

    def __init__(self, folder: Path, url: str, branch: str, seconds: int) -> None:
        self._mirror = folder / "mirror.git"
        self._trees = folder / "trees"
        self._url, self._branch, self._seconds = url, branch, seconds

    def fetch(self) -> str:
        """Bring the mirror up to date; return what the repository listed, as the next poll asks it.

        Raises:
            UnreachableError: it does not answer.
        """
        listed = git.listing(self._url, self._branch, self._seconds)
        if listed.status:
            raise UnreachableError(f"{self._url} does not answer ({listed.last_word})")
        wanted = [f"+{APPROVALS}*:{APPROVALS}*"]
        if f"\trefs/heads/{self._branch}\n" in listed.text:
            wanted.append(f"+refs/heads/{self._branch}:{BRANCH}")
        self._make()
        done = self._git(
            *("-c", "fetch.fsckObjects=true"),
            *("fetch", "--quiet", "--prune", "--no-tags", "--no-auto-gc"),
            *("--no-recurse-submodules", "--", self._url, *wanted),
            seconds=self._seconds,
        )
        if done.status == git.KILLED:
            raise UnreachableError(
                f"{self._url} cannot be fetched within {self._seconds} s: if it is large, the "
                "first time needs more (gitops_git_timeout_seconds)"
            )
        if done.status:
            raise UnreachableError(f"{self._url} cannot be fetched ({done.last_word})")
        if "shallow" in done.err:  # git leaves out what it cannot take, and calls that a success
            raise UnreachableError(
                f"{self._url} is a shallow clone, and without its history nobody can say what a "
                "commit follows: git fetch --unshallow there"
            )
        if len(wanted) == 1:
            self._must("update-ref", "-d", BRANCH)
        return listed.text

    def head(self) -> str:
        """Return the commit that the branch is at; empty if there is no such branch."""
        found = self._git("rev-parse", "--quiet", "--verify", f"{BRANCH}^{{commit}}")
        return found.text.strip() if found.status == 0 else ""

    def has(self, commit: str) -> bool:
        """Whether the mirror holds this commit."""
        return bool(commit) and self._git("cat-file", "-e", f"{commit}^{{commit}}").status == 0

    def approvals(self, commit: str) -> list[str]:
        """Return the approval tags (annotated ones) on ``commit``, by their full names."""
        listed = self._must(
            *("for-each-ref", "--format=%(objecttype) %(*objectname) %(refname)", APPROVALS)
        )
        lines = (line.split(" ", 2) for line in listed.splitlines())
        return [name for kind, target, name in lines if (kind, target) == ("tag", commit)]

    def read(self, kind: str, name: str) -> bytes:
        """Return the raw object ``name``, which must be of this kind."""
        found = self._git("cat-file", kind, name)
        if found.status:
            raise RepositoryError(f"{name}: cannot be read as {kind} ({found.last_word})")
        return found.out

    def file(self, commit: str, path: str) -> bytes | None:
        """Return a file's content at ``commit``; None if it is not there."""
        found = self._git("cat-file", "blob", f"{commit}:{path}")
        return found.out if found.status == 0 else None

    def files(self, commit: str) -> dict[str, str]:
        """Return each file of ``commit`` with its mode and object."""
        listed = self._must("ls-tree", "-r", "-z", "--full-tree", commit)
        entries = (entry.split("\t", 1) for entry in listed.split("\0") if entry)
        return {path: what for what, path in entries}

    def verify(self, what: str, name: str, env: dict[str, str], *config: str) -> git.Answer:
        """Let git verify the signature of ``name``; ``what`` is ``commit`` or ``tag``.

        Raises:
            RepositoryError: nobody could look at it now, so nothing is known of it.
        """
        said = self._git(*config, f"verify-{what}", "--raw", name, env=env)
        if said.err.startswith("error: "):
            raise RepositoryError(f"{name}: its signature cannot be looked at ({said.last_word})")
        return said

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether ``new`` is ``old`` or comes after it; not so if ``old`` is not known any more."""
        return self._git("merge-base", "--is-ancestor", old, new).status == 0

    def steps(self, old: str, new: str) -> list[Step]:
        """Return what each merge of the branch changed since ``old``, oldest first.

        One step for all where ``old`` was not on the branch's own line of first parents.
        """
        line = self._must("rev-list", "--first-parent", new, f"^{old}").split()
        parent = self._git("rev-parse", "--quiet", "--verify", f"{line[-1]}^1" if line else new)
        commits = [old, *reversed(line)] if parent.text.strip() == old else [old, new]
        return [
            Step(before, commit, self.changed(before, commit))
            for before, commit in pairwise(commits)
        ]

    def changed(self, old: str, new: str) -> list[str]:
        """Return the paths of files that differ between two commits."""
        listed = self._must("diff-tree", "-r", "-z", "--no-renames", "--name-only", old, new)
        return [path for path in listed.split("\0") if path]

    def people(self, old: str, new: str) -> set[str]:
        """Return the addresses of everyone who wrote or committed what came after ``old``."""
        listed = self._must("log", "--format=%ae%n%ce", f"{old}..{new}")
        return {address.lower() for address in listed.split()}

    def subject(self, commit: str) -> str:
        """Return the first line of the commit's message."""
        return self._must("log", "-1", "--format=%s", commit).strip()

    def keep(self, name: str, commit: str) -> None:
        """Keep ``commit`` from being cleaned away, even if the branch drops it."""
        self._must("update-ref", f"refs/kept/{name}", commit)

    def tree(self, commit: str) -> Path:
        """Return a clean work tree of ``commit``, made if it is not there or not clean."""
        path = self._trees / commit
        if path.is_dir():
            clean = git.call("-C", str(path), "status", "--porcelain", seconds=LOCAL_SECONDS)
            at = git.call("-C", str(path), "rev-parse", "HEAD", seconds=LOCAL_SECONDS)
            if (clean.status, clean.out, at.text.strip()) == (0, b"", commit):
                return path
            shutil.rmtree(path)
        self._must("worktree", "prune")
        # Twice forced: one whose making was cut off is still locked.
        forced = ("--force", "--force", "--detach")
        self._must("worktree", "add", "--quiet", *forced, str(path), commit)
        return path

    def forget_trees(self, kept: str) -> None:
        """Remove the work trees of all commits but this one, and what no commit needs any more."""
        for path in self._trees.glob("*"):
            if path.name != kept:
                shutil.rmtree(path)
        # In the foreground: nothing works on the mirror without the fleet's lock.
        self._git("-c", "gc.autoDetach=false", "gc", "--auto", "--quiet")

    def note(self, commit: str, text: str) -> None:
        """Add ``text`` to the commit's note and push it, once, whoever else writes notes.

        Raises:
            UnreachableError: it could not be pushed; try again.
        """
        for _ in range(3):
            fetched = self._git(
                *("fetch", "--quiet", "--no-tags", "--", self._url, f"+{NOTES}:{NOTES}"),
                seconds=self._seconds,
            )
            if fetched.status and "find remote ref" not in fetched.err:
                raise UnreachableError(f"{self._url} does not answer ({fetched.last_word})")
            if fetched.status:  # what is here could not be pushed before
                self._must("update-ref", "-d", NOTES)
            shown = self._git("notes", f"--ref={NOTES}", "show", commit)
            if shown.status == 0 and text.strip() in shown.text:
                return
            self._must(*IDENTITY, "notes", f"--ref={NOTES}", "append", "-F", "-", commit, data=text)
            pushed = self._git(
                "push", "--quiet", "--", self._url, f"{NOTES}:{NOTES}", seconds=self._seconds
            )
            if pushed.status == 0:
                return
        raise UnreachableError(f"{self._url} does not take {NOTES} ({pushed.last_word})")

    def _make(self) -> None:
        if not (self._mirror / "HEAD").exists():
            shutil.rmtree(self._mirror, ignore_errors=True)
            made = git.call("init", "--quiet", "--bare", str(self._mirror), seconds=LOCAL_SECONDS)
            if made.status:
                raise RepositoryError(f"{self._mirror}: cannot be made ({made.last_word})")
        # Who fetches holds the fleet's lock, so these are of a git that was killed.
        for left in (*self._mirror.rglob("*.lock"), *self._mirror.glob("objects/pack/tmp_*")):
            left.unlink(missing_ok=True)
        attributes = self._mirror / "info/attributes"
        if not attributes.exists():
            attributes.parent.mkdir(exist_ok=True)
            disk.write(attributes, AS_IT_IS)

    def _git(
        self,
        *words: str,
        seconds: float | None = None,
        data: str = "",
        env: dict[str, str] | None = None,
    ) -> git.Answer:
        done = git.call(
            "-C",
            str(self._mirror),
            *words,
            seconds=seconds or LOCAL_SECONDS,
            data=data.encode(),
            env=env,
        )
        if done.status < 0 and seconds is None:  # killed: that is no answer
            verb = next(word for word in words if word.islower())
            raise RepositoryError(f"{self._mirror}: git {verb} was ended ({done.last_word})")
        return done

    def _must(self, *words: str, data: str = "") -> str:
        done = self._git(*words, data=data)
        if done.status:
            verb = next(word for word in words if word.islower())
            raise RepositoryError(f"{self._mirror}: git {verb}: {done.last_word}")
        return done.text
