"""Say, as one JSON object, what of a host decides whether it can run a build. Changes nothing.

Standard library only, any Python from 3.10 on: it runs with the host's own interpreter.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path

GPU_FIELDS = ("index", "name", "driver_version", "compute_cap", "persistence_mode")


def main() -> None:
    """Print what was found; a fact that cannot be had is null or empty, never an error."""
    parser = argparse.ArgumentParser(description="What decides whether a host can run a build.")
    parser.add_argument("--root", type=Path, required=True, help="folder of Seatrial")
    parser.add_argument("--build", type=Path, required=True, help="folder of the build to come")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--interpreter", required=True, help="Python that builds borrow")
    parser.add_argument("--ports", required=True, help="comma-separated ports that must be usable")
    given = parser.parse_args()
    print(
        json.dumps(
            {
                "os": os_release(),
                "machine": platform.machine(),
                "programs_absent": [name for name in ("tar", "zstd") if not shutil.which(name)],
                "interpreter": interpreter_version(given.interpreter),
                "gpus": gpus(),
                "has_build": (given.build / "build.json").is_file(),
                "disk_free_bytes": disk_free_bytes(given.root),
                "memory_bytes": memory_bytes(),
                "ports_taken": ports_taken([int(p) for p in given.ports.split(",") if p]),
                "is_clock_synchronised": is_clock_synchronised(),
                "has_model_config": (given.model / "config.json").is_file(),
                "libraries": libraries(),
            }
        )
    )


def output(*argv: str) -> str:
    """What a command prints; nothing when it is not there or fails."""
    try:
        told = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return ""
    return told.stdout if told.returncode == 0 else ""


def os_release() -> dict[str, str]:
    """`id` and `version` of the distribution, from /etc/os-release."""
    lines = Path("/etc/os-release").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    return {
        "id": pairs.get("ID", "").strip('"'),
        "version": pairs.get("VERSION_ID", "").strip('"'),
    }


def interpreter_version(interpreter: str) -> str | None:
    """`3.11` and the like."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    return output(interpreter, "-c", program).strip() or None


def gpus() -> list[dict[str, str]]:
    """NVIDIA's GPUs as nvidia-smi tells them."""
    told = output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    rows = (re.split(r",\s*", line.strip()) for line in told.splitlines() if line.strip())
    return [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]


def disk_free_bytes(root: Path) -> int:
    """Free bytes where `root` is or will be."""
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def memory_bytes() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ports_taken(ports: list[int]) -> dict[str, str]:
    """Each port on which somebody listens -> the systemd unit that does, or `unknown`."""
    owners = socket_owners()
    return {str(port): owners.get(port, "unknown") for port in ports if is_taken(port)}


def is_taken(port: int) -> bool:
    """Whether a server could not bind the port now. Binds it for an instant to know."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier process that linger are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def socket_owners() -> dict[int, str]:
    """Listening TCP port -> systemd unit of the process that holds it."""
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                inodes[fields[9]] = int(fields[1].rsplit(":", 1)[1], 16)
    owners: dict[int, str] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the process ended, or closed it
        inode = target[len("socket:[") : -1] if target.startswith("socket:[") else ""
        if inode in inodes:
            owners[inodes[inode]] = unit_of(link.parts[2])
    return owners


def unit_of(pid: str) -> str:
    """The systemd unit that a process belongs to."""
    try:
        groups = Path("/proc", pid, "cgroup").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", groups, re.MULTILINE)
    return found.group(1) if found else "unknown"


def is_clock_synchronised() -> bool:
    """What systemd knows of the clock."""
    return output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip() == "yes"


def libraries() -> list[str]:
    """Sonames that ld.so finds by itself: what its cache names and the disk still has."""
    cache = output("/sbin/ldconfig", "-p")
    found = re.findall(r"^\s+(\S+) \(.*x86-64.*\) => (\S+)$", cache, re.MULTILINE)
    return sorted({soname for soname, path in found if Path(path).exists()})


if __name__ == "__main__":
    main()
