"""Rewrite `engine-<platform>.lock`: exact versions, each with the SHA-256 of its one wheel.

    python3.11 roles/build/files/lock.py cuda13
    python3.11 roles/build/files/lock.py cpu      # after cuda13, whose versions it follows
    python3.11 roles/build/files/lock.py nvcc     # kernels/nvcc.lock, the kernels' own compiler

Needs the package index (or the wheel folder) that pip is set up for. pip reads each wheel's
metadata; wheels whose metadata the index does not serve apart are downloaded (some GB for cuda13).
The locks are for CPython 3.11 on Linux x86_64, so that is what this must run on.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[2] / "kernels"
# They differ between the platforms on purpose: one is built with CUDA, the other without.
PLATFORM_BOUND = {"torch", "torchvision"}


def main() -> None:
    """Resolve the platform named on the command line and write its lock."""
    parser = argparse.ArgumentParser(description="Rewrite engine-<platform>.lock.")
    parser.add_argument("platform", choices=["cuda13", "cpu", "nvcc"])
    chosen = parser.parse_args().platform
    here = (platform.python_implementation(), sys.version_info[:2], platform.system().lower())
    if (*here, platform.machine()) != ("CPython", (3, 11), "linux", "x86_64"):
        sys.exit("The locks are for CPython 3.11 on Linux x86_64: run this with that Python.")

    stem = KERNELS / "nvcc" if chosen == "nvcc" else HERE / f"engine-{chosen}"
    wheels = resolved(stem.with_suffix(".in"), constraints(chosen))
    alone = stem.with_name(f"{stem.name}-alone.in")
    if alone.exists():
        wheels |= resolved(alone, [], "--no-deps")
    lock = stem.with_suffix(".lock")
    lock.write_text(
        f"# Written by `lock.py {chosen}` for CPython 3.11 on Linux x86_64. Do not edit.\n"
        + "".join(
            f"{name}=={version} \\\n    --hash=sha256:{digest}\n"
            for name, (version, digest) in sorted(wheels.items())
        )
    )
    print(f"{lock}: {len(wheels)} wheels")


def constraints(chosen: str) -> list[str]:
    """Pins that the platform shares with production: a rehearsal runs what the fleet runs."""
    if chosen != "cpu":
        return []
    locked = re.findall(
        r"^([\w.-]+)==(\S+)", (HERE / "engine-cuda13.lock").read_text(), re.MULTILINE
    )
    return [f"{name}=={version}" for name, version in locked if name not in PLATFORM_BOUND]


def resolved(wanted: Path, pins: list[str], *options: str) -> dict[str, tuple[str, str]]:
    """What pip would install for `wanted`: name -> (version, SHA-256 of the wheel)."""
    with tempfile.TemporaryDirectory() as scratch:
        report, pinned = Path(scratch, "report.json"), Path(scratch, "pins.txt")
        pinned.write_text("\n".join(pins))
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
                *("--only-binary", ":all:", f"--report={report}", *options),
                *(f"--constraint={pinned}", f"--requirement={wanted}"),
            ],
            check=True,
        )
        installs = json.loads(report.read_text())["install"]
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): (
            item["metadata"]["version"],
            sha256(item["download_info"]),
        )
        for item in installs
    }


def sha256(download: dict[str, Any]) -> str:
    """The wheel's SHA-256: the index's word, or computed for a wheel from a local folder."""
    known = download["archive_info"].get("hashes", {}).get("sha256")
    if known:
        return str(known)
    return hashlib.sha256(Path(unquote(urlparse(download["url"]).path)).read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
