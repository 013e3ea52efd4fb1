"""Runs a playbook of a commit's work tree, so that it outlives whoever started it.

``ansible-playbook`` as people type it, its output in a file. Not ansible-runner: that pumps the
output through a terminal, so a playbook whose starter is killed fails at its next word, in the
middle of a cell; it cannot hand our lock on to the playbook; and it writes the whole environment
to disk.
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from seatrial import fleet_lock

HERE = Path(__file__).resolve().parent
# What a playbook may know of its starter's environment: no secret that something else put there.
PASSED = (
    "HOME",
    "LOGNAME",
    "USER",
    "LANG",
    "TZ",
    "TMPDIR",
    "SSH_AUTH_SOCK",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
    "SSL_CERT_FILE",
    "PIP_INDEX_URL",
    "PIP_CERT",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
GRACE_SECONDS = 60
LIMIT = 400


class Reason(NamedTuple):
    """Why a task failed on a host, in the task's words; ``is_silent`` if it does not answer."""

    host: str
    task: str
    is_silent: bool
    said: str


class Run(NamedTuple):
    """A playbook that has ended. ``status`` as Ansible gives it, negative if a signal ended it."""

    playbook: str
    status: int
    is_late: bool
    reasons: list[Reason]
    log: Path

    @property
    def sentence(self) -> str:
        """Why it failed: the last task that did, and which hosts did not answer."""
        if self.is_late:
            return f"{self.playbook} took too long and was ended; see {self.log}"
        silent: dict[str, list[str]] = {}
        for one in self.reasons:
            if one.is_silent:
                silent.setdefault(one.said, []).append(one.host)
        said = [
            f"no answer from {', '.join(dict.fromkeys(hosts))} ({why})"
            for why, hosts in silent.items()
        ]
        loud = [one for one in self.reasons if not one.is_silent]
        if loud:
            last = (one for one in loud if one.task == loud[-1].task)
            said += dict.fromkeys(f"{one.said or one.task}".rstrip(".") for one in last)
        if not said:
            return f"{self.playbook} ended with status {self.status}: {_last_words(self.log)}"
        text = "; ".join(said)
        return text if len(text) <= LIMIT else f"{text[:LIMIT]}...; see {self.log}"


def run(
    tree: Path,
    fleet: str,
    playbook: str,
    *words: str,
    record: Path,
    lock: int,
    seconds: int,
    vault_password_file: Path | None,
) -> Run:
    """Run ``ansible-playbook playbook words`` in ``tree``; keep what it says in ``record``.

    Parameters
    ----------
    lock
        Descriptor of a lock that the playbook shall hold as long as it runs.
    seconds
        After which it is ended.
    """
    record.mkdir(parents=True, exist_ok=True)
    name = Path(playbook).stem
    log, reasons = record / f"{name}.log", record / f"{name}.reasons"
    reasons.unlink(missing_ok=True)
    programs = Path(sys.executable).parent
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(programs / "ansible-playbook"), "-i", f"inventory/{fleet}", playbook, *words],
            cwd=tree,
            env={
                **_environment(tree, programs, reasons, vault_password_file),
                fleet_lock.KEEPER: fleet_lock.keeper(lock),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
    is_late = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        is_late = True
        _end(process)
    return Run(playbook, process.returncode, is_late, _read(reasons), log)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(
    tree: Path, programs: Path, reasons: Path, vault_password_file: Path | None
) -> dict[str, str]:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(tree / "ansible.cfg")
    folders = settings.get("defaults", "callback_plugins", fallback="")
    enabled = settings.get("defaults", "callbacks_enabled", fallback="")
    callbacks = [str(tree / folder) for folder in folders.split(":") if folder]
    vault = {"ANSIBLE_VAULT_PASSWORD_FILE": str(vault_password_file)} if vault_password_file else {}
    return {
        **{name: os.environ[name] for name in PASSED if name in os.environ},
        **vault,
        "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_CALLBACK_PLUGINS": ":".join([*callbacks, str(HERE / "callback")]),
        "ANSIBLE_CALLBACKS_ENABLED": ",".join(filter(None, [enabled, "seatrial_reasons"])),
        "SEATRIAL_REASONS_FILE": str(reasons),
    }


def _read(path: Path) -> list[Reason]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(Reason(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # torn: the playbook was killed while it wrote
    return found


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LIMIT] if lines else f"it said nothing; see {log}"
