"""The rehearsal hosts, for the tests that need real ones."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTS = REPOSITORY / "rehearsal/hosts.sh"


LOCK = Path("/run/lock/seatrial-rehearsal.lock")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Be the one rehearsal on this machine, as `hosts.sh alone` is; wait for another to end."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def rehearsal_hosts(alone: None) -> Iterator[Path]:
    """Boot fresh hosts for a module of tests, and take them down whatever happens."""
    subprocess.run([HOSTS, "down"], check=True)
    try:
        subprocess.run([HOSTS, "up"], check=True)
        yield HOSTS
    finally:
        subprocess.run([HOSTS, "down"], check=True)
