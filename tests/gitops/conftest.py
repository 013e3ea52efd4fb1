"""People with keys, and a home of their own for git, gpg and the reconciler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gitops.fleet import Fleet, Heard
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


@pytest.fixture(scope="session")
def served(
    tmp_path_factory: pytest.TempPathFactory, alice: Person, bob: Person
) -> tuple[Fleet, Path]:
    """Return a fleet that serves its first commit, and a copy of everything it is made of."""
    root = tmp_path_factory.mktemp("served")
    home, kept = root / "now/home", root / "kept"
    home.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        made = Fleet(root / "now/f", home, alice, bob)
        made.merge(1024)
        assert made.kinds() == ["began", "promoted"]
    shutil.copytree(root / "now", kept, symlinks=True)
    return made, kept


@pytest.fixture
def serving(served: tuple[Fleet, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Return the fleet as it was when it began to serve."""
    made, kept = served
    shutil.rmtree(made.home.parent)
    shutil.copytree(kept, made.home.parent, symlinks=True)
    monkeypatch.setenv("HOME", str(made.home))
    made.heard = Heard()
    yield made
    made.end()
