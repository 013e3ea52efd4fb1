"""People with keys, made by ssh-keygen and gpg, and what they do in git."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


def run(*words: object, cwd: Path | None = None, data: str = "", **env: str) -> str:
    """Run a command that must succeed, and return what it prints."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **env},
        input=data,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


@dataclass(frozen=True)
class Person:
    """Somebody with an address and a key. ``config`` is how git signs as them."""

    address: str
    key: str
    config: tuple[str, ...] = field(repr=False)

    def git(self, work: Path, *words: object, **env: str) -> str:
        """Run git as this person."""
        identity = ("-c", f"user.name={self.address}", "-c", f"user.email={self.address}")
        return run("git", *identity, *self.config, *words, cwd=work, **env)

    def commit(self, work: Path, message: str = "Change", *words: str, **env: str) -> str:
        """Commit everything in the work tree, signed unless ``words`` say else; return its name."""
        self.git(work, "add", "-A")
        sign = () if "--no-gpg-sign" in words else ("-S",)
        self.git(work, "commit", "-q", "--allow-empty", *sign, "-m", message, *words, **env)
        return self.git(work, "rev-parse", "HEAD")

    def approve(self, work: Path, commit: str, name: str = "", *words: str, **env: str) -> str:
        """Put a signed approval tag on ``commit``, and return its name."""
        tag = f"approve/{name or commit[:12]}"
        self.git(work, "tag", *(words or ("-s",)), "-m", "approved", tag, commit, **env)
        return tag


def ssh_person(folder: Path, name: str) -> Person:
    """Make somebody who signs with an SSH key."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path)
    public = " ".join(path.with_suffix(".pub").read_text().split()[:2])
    config = ("-c", "gpg.format=ssh", "-c", f"user.signingkey={path}")
    return Person(f"{name}@example.org", public, config)


def gpg_person(home: Path, name: str, expires: str = "never", at: str = "") -> Person:
    """Make somebody who signs with a GPG key of the folder ``home``, made at the time ``at``."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = f"{name}@example.org"
    then = ("--faked-system-time", at) if at else ()
    who = f"{name} <{address}>"
    words = ("gpg", "--homedir", home, "--batch", "--quiet", *then, "--passphrase", "")
    run(*words, "--quick-generate-key", who, "ed25519", "sign", expires)
    listed = run("gpg", "--homedir", home, "--with-colons", "--list-keys", address)
    key = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))
    program = home / "signer"
    program.write_text(f'#!/bin/sh\nexec gpg --homedir {home} {" ".join(then)} "$@"\n')
    program.chmod(0o755)
    config = ("-c", "gpg.format=openpgp", "-c", f"gpg.program={program}")
    return Person(address, key, (*config, "-c", f"user.signingkey={key}"))


def allow(path: Path, *lines: str) -> None:
    """Write a file of allowed signers."""
    path.write_text("".join(f"{line}\n" for line in lines))
