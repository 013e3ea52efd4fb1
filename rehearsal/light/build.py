"""Packs the light engine as a build that role `build` finds kept, and ships like any other.

The role's own way of making a build (locked wheels, proof, seal) is not used: nothing is installed
here. Its way of naming, packing, shipping, verifying and unpacking one is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from seatrial.build import build_digest

from . import engine

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PYTHON = "3.11"
ROOT = "/opt/seatrial"
# What a unit or a gate names -> what stands there.
STUBS = {
    "sglang/__init__.py": "",
    "sglang/launch_server.py": "from light.engine import main\n\nmain()\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins.py": "def load_plugins() -> None:\n    pass\n",
    "sglang/srt/server_args.py": (
        "from light.engine import add_arguments\n\n\n"
        "class ServerArgs:\n    add_cli_args = staticmethod(add_arguments)\n"
    ),
    "sglang_router/__init__.py": "",
    "sglang_router/launch_router.py": "from light.router import main\n\nmain()\n",
    "seatrial_kernels/__init__.py": "",
    "seatrial_kernels/report.py": "def digest() -> str:\n    return 'light'\n",
}
PROGRAMS = ("__init__.py", "engine.py", "router.py", "web.py")


def lock(version: str) -> str:
    """Return the text that names a light build: its files' hashes, and a version to vary it by."""
    files = {name: (HERE / name).read_text() for name in PROGRAMS} | STUBS
    lines = [f"{name} {hashlib.sha256(text.encode()).hexdigest()}" for name, text in files.items()]
    return "\n".join(["# The light build. Not for pip.", f"version {version}", *lines]) + "\n"


def make(lock_file: Path, kernels: Path, artifacts: Path) -> str:
    """Pack the build that ``lock_file`` names, unless it is kept; return its digest."""
    digest = build_digest("cpu", PYTHON, ROOT, lock_file, kernels)
    artifacts.mkdir(parents=True, exist_ok=True)
    with (artifacts / "light.lock").open("a") as file, tempfile.TemporaryDirectory() as scratch:
        fcntl.flock(file, fcntl.LOCK_EX)
        if (artifacts / f"{digest}.tar.zst.sha256").exists():
            return digest
        tree = Path(scratch, digest)
        _lay(tree)
        described = json.dumps(_description(digest, lock_file, tree), indent=2, sort_keys=True)
        (tree / "build.json").write_text(described + "\n")
        (artifacts / f"{digest}.json").write_text(described + "\n")
        subprocess.run(["chmod", "-R", "a-w,a+rX", tree], check=True)
        pack = REPOSITORY / "roles/build/files/pack.py"
        to = artifacts / f"{digest}.tar.zst"
        subprocess.run(
            [sys.executable, pack, f"--build={tree}", f"--to={to}", "--level=3"], check=True
        )
    return digest


def _lay(tree: Path) -> None:
    """Write what `python -m venv` would, with the programs in it."""
    packages = tree / f"lib/python{PYTHON}/site-packages"
    files = {f"light/{name}": (HERE / name).read_text() for name in PROGRAMS} | STUBS
    for name, text in files.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "bin").mkdir()
    (tree / "bin/python").symlink_to(f"/usr/bin/python{PYTHON}")
    (tree / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
    )


def _description(digest: str, lock_file: Path, tree: Path) -> dict[str, object]:
    """Return the content of build.json."""
    return {
        "schema": 1,
        "digest": digest,
        "platform": "cpu",
        "python": PYTHON,
        "sglang": engine.VERSION,
        "torch": "none",
        "kernels": {"version": "light", "sha256": hashlib.sha256(b"light").hexdigest()},
        "lock_sha256": hashlib.sha256(lock_file.read_bytes()).hexdigest(),
        "patches": ["light"],
        "supported_index_topk": [512, 1024, 2048],
        "supported_index_key_dtypes": ["fp8_e4m3", "bf16", "fp32"],
        "index_key_bytes_per_token": {"bf16": 2048, "fp32": 4096, "fp8_e4m3": 1024},
        "architectures": ["cpu"],
        "shared_libraries": [],
        "needed_by": {},
        "pruned": [],
        "size_bytes": sum(4096 for path in tree.rglob("*")),
    }
