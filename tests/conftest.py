"""What several test files share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Under `pytest -n`, each worker has rehearsal hosts of its own; rehearsal/hosts.sh says how.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
if WORKER != "0":
    os.environ["SEATRIAL_BERTH"] = WORKER
LOCK = Path(f"/run/lock/seatrial-rehearsal{os.environ.get('SEATRIAL_BERTH', '')}.lock")


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
