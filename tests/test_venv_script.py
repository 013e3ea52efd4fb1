"""requirements/venv.sh makes the environment that a clone works with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "requirements" / "venv.sh"


def test_another_clones_environment_is_replaced(tmp_path: Path) -> None:
    """With that environment's programs first on PATH too, as make has them."""
    script = tmp_path / "requirements" / "venv.sh"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    script.with_name("none.lock").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (programs / name).symlink_to(sys.executable)
    (tmp_path / ".venv" / ".place").write_text("/another/clone\n")
    path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    made = subprocess.run([script, "none"], env=path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / ".venv" / ".place").read_text() == f"{tmp_path}\n"
    assert (tmp_path / ".venv" / "pyvenv.cfg").exists()
