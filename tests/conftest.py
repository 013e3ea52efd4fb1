"""What several test files share."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LOCK = Path("/run/lock/seatrial-rehearsal.lock")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of this checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Return a function that lays files, given as path and content, and returns their root."""

    def lay(files: dict[str, str]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return lay


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Be the one rehearsal on this machine, as `hosts.sh alone` is; wait for another to end."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
