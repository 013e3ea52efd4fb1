"""The rehearsal hosts, for the tests that need real ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTS = REPOSITORY / "rehearsal/hosts.sh"


@pytest.fixture(scope="module")
def rehearsal_hosts(alone: None) -> Iterator[Path]:
    """Boot fresh hosts for a module of tests, and take them down whatever happens."""
    subprocess.run([HOSTS, "down"], check=True)
    try:
        subprocess.run([HOSTS, "up"], check=True)
        yield HOSTS
    finally:
        subprocess.run([HOSTS, "down"], check=True)
