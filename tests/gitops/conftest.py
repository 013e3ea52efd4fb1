"""People with keys, and a home of their own for git, gpg and the reconciler."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gitops.people import Person, ssh_person


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder for keys, and end the agents that gpg starts in it."""
    folder = tmp_path_factory.mktemp("k")
    yield folder
    for home in folder.glob("*/"):
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)


@pytest.fixture(scope="session")
def alice(keys: Path) -> Person:
    """Somebody who may order a rollout."""
    return ssh_person(keys, "alice")


@pytest.fixture(scope="session")
def bob(keys: Path) -> Person:
    """Another one who may."""
    return ssh_person(keys, "bob")


@pytest.fixture(scope="session")
def mallory(keys: Path) -> Person:
    """Somebody with a key that nobody allowed."""
    return ssh_person(keys, "mallory")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without anybody's git configuration."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    for name in ("XDG_CONFIG_HOME", "GNUPGHOME", "SSH_AUTH_SOCK"):
        monkeypatch.delenv(name, raising=False)
    return path
