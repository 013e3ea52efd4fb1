"""One call of git, bounded in time. Imports little: every poll comes through here."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import NamedTuple

# Nobody is there to be asked; a host that says nothing is given up; no URL of a commit's making
# starts a program.
QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=10",
    "GIT_ALLOW_PROTOCOL": "file:git:ssh:https:http",
    "LC_ALL": "C.UTF-8",
}
KILLED = -1


class Answer(NamedTuple):
    """What git said. ``status`` is KILLED if it took too long."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """What it printed, as text."""
        return self.out.decode(errors="replace")

    @property
    def last_word(self) -> str:
        """What it said of what went wrong, and what ssh said before; not the advice after it."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        at = [n for n, line in enumerate(lines) if line.startswith(("fatal: ", "error: "))]
        said = lines[max(0, at[0] - 1) : at[0] + 1] if at else lines[-1:]
        words = [line.removeprefix("fatal: ").removeprefix("error: ") for line in said]
        return "; ".join(words) or f"status {self.status}"


def call(
    *words: str, seconds: float, data: bytes = b"", env: dict[str, str] | None = None
) -> Answer:
    """Run ``git words``; it and whatever it started are ended after ``seconds``."""
    process = subprocess.Popen(
        ["git", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **QUIET, **(env or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(data, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Answer(KILLED, b"", f"no answer within {seconds:g} s")
    return Answer(process.returncode, out, err.decode(errors="replace"))


def listing(url: str, branch: str, seconds: float) -> Answer:
    """Ask the repository where its branch and its approvals are: cheap, and fetches nothing."""
    patterns = (f"refs/heads/{branch}", "refs/tags/approve/*")
    return call("ls-remote", "--", url, *patterns, seconds=seconds)
