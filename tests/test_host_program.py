"""The controller knows which version of the hosts' own program it would install."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from seatrial import host_program

FILES = Path(__file__).resolve().parents[1] / "roles/cell/files"


def test_host_and_controller_compute_the_same_version(tmp_path: Path) -> None:
    """Whatever else lies in the host's bin folder; an edited file is another version."""
    folder = tmp_path / "bin"
    shutil.copytree(FILES, folder)
    (folder / "seatrial-entry").write_text("the entry may live on the same host")
    ask = [sys.executable, "-B", "-c", "import runpy, json, sys; sys.argv = ['x'];"]
    ask[-1] += f"print(json.dumps(runpy.run_path('{folder}/seatrial-host')['program']()))"
    env = {"PYTHONPATH": str(folder)}
    done = subprocess.run(ask, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == host_program.digest(FILES)
    (folder / "seatrial_switch.py").write_text("# edited")
    assert host_program.digest(folder) != host_program.digest(FILES)
