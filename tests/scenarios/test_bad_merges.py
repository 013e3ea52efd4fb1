"""Every bad merge of rehearsal/scenarios.yml, as a person would try it; minutes each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal import run as rehearsal

DRIVER = Path(rehearsal.__file__)
# What the driver exits with when the bad merge was promoted.
PROMOTED = (0, 3)


@pytest.mark.parametrize("name", rehearsal.scenarios())
def test_a_bad_merge_ends_with_the_old_release(name: str) -> None:
    """The first rollout is promoted, the merge after it is not, and the exit status says so."""
    done = subprocess.run(
        [sys.executable, DRIVER, "--scenario", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert f"merge: {rehearsal.scenarios()[name]['merge']}" in done.stdout, done.stdout[-6000:]
    assert done.returncode not in PROMOTED
