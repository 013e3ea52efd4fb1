"""Describe the build whose Python runs this, make it read-only, and mark it finished.

`build.json` is what marks it, and is written last. Its schema is `seatrial.build.Build`.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import elf
import prune

# The loader and the C library itself: every Linux host has them, and they are not libraries that
# a package could be missing for.
ALWAYS_THERE = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
}

# Users of a library that build.json names: enough to find out what would fail.
SHOWN = 3


def main() -> None:
    """Seal the build."""
    parser = argparse.ArgumentParser(description="Describe a build and make it read-only.")
    parser.add_argument("--digest", required=True)
    parser.add_argument("--platform", required=True)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--kernels-sha256", required=True)
    given = parser.parse_args()
    root = Path(sys.prefix)

    needs = libraries_needed(root)
    plugin = described_by_plugin()
    description = {
        "schema": 1,
        "digest": given.digest,
        "platform": given.platform,
        "python": sysconfig.get_python_version(),
        "sglang": version("sglang"),
        "torch": version("torch"),
        "kernels": {"version": plugin.pop("version"), "sha256": given.kernels_sha256},
        "lock_sha256": hashlib.sha256(given.lock.read_bytes()).hexdigest(),
        **plugin,
        "shared_libraries": sorted(needs),
        "needed_by": {soname: users[:SHOWN] for soname, users in needs.items()},
        "pruned": prune.patterns(given.platform),
        "size_bytes": disk_bytes(root),
    }
    unfinished = root / ".build.json"
    unfinished.write_text(json.dumps(description, indent=2, sort_keys=True) + "\n")
    subprocess.run(["chmod", "-R", "a-w", root], check=True)
    unfinished.rename(root / "build.json")


def described_by_plugin() -> dict[str, Any]:
    """What the kernels wheel says it supports."""
    told = subprocess.run(
        [sys.executable, "-m", "seatrial_kernels.describe"], check=True, stdout=subprocess.PIPE
    )
    answer: dict[str, Any] = json.loads(told.stdout)
    return answer


def libraries_needed(root: Path) -> dict[str, list[str]]:
    """Sonames that the host must have -> the build's files that need them, relative to `root`."""
    inside = {path.name for path in root.rglob("*.so*")}
    needs: dict[str, list[str]] = {}
    for path in elf.elf_files(root):
        for soname in elf.needed(path):
            if soname not in inside | ALWAYS_THERE:
                needs.setdefault(soname, []).append(path.relative_to(root).as_posix())
    return needs


def disk_bytes(root: Path) -> int:
    """Bytes that the tree takes on a disk, in blocks of 4096."""
    files = [p for p in root.rglob("*") if not p.is_symlink()]
    return sum(-(-p.lstat().st_size // 4096) * 4096 for p in files)


if __name__ == "__main__":
    main()
