"""What is really on a host, as one JSON object, for comparing it with git. Changes nothing.

Contents of files stay on the host: checksums leave it. Of a process' environment only the listed
names leave it. The schema of the answer is `seatrial.drift.Look`.
"""

import argparse
import grp
import hashlib
import json
import os
import pwd
import re
import shlex
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

UNITS = Path("/etc/systemd/system")
WANTS = UNITS / "multi-user.target.wants"
PROPERTIES = (
    *("LoadState", "ActiveState", "UnitFileState", "NeedDaemonReload"),
    *("MainPID", "FragmentPath", "DropInPaths", "ExecStart"),
)
# What brings a host back by itself: the timer runs while a decision is pending.
GOING_BACK = ("seatrial-deadman.timer", "seatrial-deadman.service", "seatrial-revert.service")
SHOWN = 5  # names out of a long list: enough to find the place
CLOCK_SECONDS = 2.0  # what is made in one go may bear times that differ this much


def main() -> None:
    """Print what was found; what is not there is null or empty, never an error."""
    parser = argparse.ArgumentParser(description="What is really on a host.")
    parser.add_argument("asked", type=json.loads, help="what to look at, see role drift")
    asked = parser.parse_args().asked
    root = Path(asked["root"]) if asked["root"] else None
    print(
        json.dumps(
            {
                "schema": 1,
                "files": {path: file_facts(Path(path)) for path in asked["files"]},
                "services": {unit: show(unit) for unit in asked["services"]},
                "gpu_host": gpu_host(root, asked) if root else None,
                "entry": entry(asked) if asked["entry_socket"] else None,
            }
        )
    )


def gpu_host(root: Path, asked: dict) -> dict:
    linked = {name: digest_of(root / name) for name in ("current", "last_good")}
    digests = sorted({*linked.values(), asked["release"]} - {""})
    releases = {name: release(root / "releases" / name) for name in digests}
    builds = {asked["build"], *(one["build"] for one in releases.values() if one)} - {""}
    names = sorted({*asked["units"], *units_of(root / "current"), *linked_units()})
    units = {name: unit(name) for name in names}
    return {
        **linked,
        "releases": releases,
        "builds": {name: build(root / "builds" / name) for name in sorted(builds)},
        "links": {str(path): target(path) for path in links_of(names)},
        "units": units,
        "drop_ins": drop_ins(),
        "processes": processes(root, units, listed_names(asked, releases.get(linked["current"]))),
        "strays": strays(root, units),
        "state": state_files(root / "state"),
        "going_back": {name: show(name)["active"] for name in GOING_BACK},
    }


# --- files ----------------------------------------------------------------------------------


def file_facts(path: Path) -> dict | None:
    """A file's checksum, mode and owner; null where there is none."""
    if not path.is_file():
        return None
    found = path.stat()
    return {
        "sha256": sha256(path),
        "mode": f"{stat.S_IMODE(found.st_mode):04o}",
        "owner": f"{named(pwd.getpwuid, found.st_uid)}:{named(grp.getgrgid, found.st_gid)}",
    }


def named(ask: object, number: int) -> str:
    try:
        return ask(number)[0]
    except KeyError:
        return str(number)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of(link: Path) -> str:
    """The name of the release that a link stands for, whether or not it is there."""
    return link.readlink().name if link.is_symlink() else ""


def target(path: Path) -> str:
    """Where a link points; `a file` for what is no link, nothing where nothing is."""
    if path.is_symlink():
        return str(path.readlink())
    return "a file" if path.exists() else ""


def release(path: Path) -> dict | None:
    """Everything in the folder of a release; null where there is none."""
    if not path.is_dir():
        return None
    entries = sorted(found for found in path.rglob("*") if not found.is_dir() or found.is_symlink())
    files = [found for found in entries if not found.is_symlink()]
    return {
        "files": {str(found.relative_to(path)): sha256(found) for found in files},
        "links": {
            str(found.relative_to(path)): str(found.readlink())
            for found in entries
            if found.is_symlink()
        },
        "build": digest_of(path / "build"),
        "description": read_json(path / "release.json"),
        "environment": {found.stem: environment_file(found) for found in path.glob("env/*.env")},
    }


def environment_file(path: Path) -> dict:
    """Name -> checksum of the value, as systemd reads the file."""
    pairs = (line.split("=", 1) for line in path.read_text(errors="replace").splitlines())
    return {pair[0]: checksum(unquoted(pair[1])) for pair in pairs if len(pair) > 1}


def unquoted(value: str) -> str:
    try:
        return "".join(shlex.split(value))
    except ValueError:
        return value


def checksum(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def build(path: Path) -> dict | None:
    """What a build says of itself, and what was touched since it was put there."""
    if not path.is_dir():
        return None
    # Sealing and unpacking both end with the folder itself: what bears a later time was touched
    # afterwards. A status change cannot be dated back, unlike a modification.
    finished = path.lstat().st_ctime + CLOCK_SECONDS
    count, touched = 0, []
    for entry in below(str(path)):
        count += 1
        if entry.stat(follow_symlinks=False).st_ctime > finished:
            touched.append(os.path.relpath(entry.path, path))
    return {
        "description": read_json(path / "build.json"),
        "entries": count,
        "touched": len(touched),
        "touched_first": sorted(touched)[:SHOWN],
        "has_python": os.access(path / "bin/python", os.X_OK),
    }


def below(folder: str) -> Iterator[os.DirEntry]:
    """Every entry under a folder; quicker than pathlib, for a build has tens of thousands."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from below(entry.path)


def state_files(folder: Path) -> dict:
    """The decisions and locks that this host keeps: small JSON files, by name."""
    return {path.stem: read_json(path) or {} for path in sorted(folder.glob("*.json"))}


def read_json(path: Path) -> dict | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# --- systemd --------------------------------------------------------------------------------


def output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


def show(name: str) -> dict:
    """What systemd has in memory of a unit."""
    wanted = (f"--property={name}" for name in PROPERTIES)
    lines = output("systemctl", "show", name, *wanted).splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    command = re.search(r"argv\[\]=(.*?) ; ignore_errors=", found.get("ExecStart", ""))
    return {
        "load": found.get("LoadState", ""),
        "active": found.get("ActiveState", ""),
        "enabled": found.get("UnitFileState", ""),
        "is_stale": found.get("NeedDaemonReload") == "yes",
        "pid": int(found.get("MainPID", "0") or 0),
        "file": found.get("FragmentPath", ""),
        "drop_ins": found.get("DropInPaths", "").split(),
        "command": command[1] if command else "",
    }


def unit(name: str) -> dict:
    """The same of a unit of SGLang, and the file that stands behind all links."""
    found = show(name)
    return {**found, "file": os.path.realpath(found["file"]) if found["file"] else ""}


def units_of(release: Path) -> list:
    return [path.name for path in release.glob("units/*.service")]


def linked_units() -> list:
    return [path.name for folder in (UNITS, WANTS) for path in folder.glob("sglang-*.service")]


def links_of(names: list) -> list:
    return [folder / name for folder in (UNITS, WANTS) for name in names]


def drop_ins() -> list:
    """Files that would change a unit of SGLang at the next reload, loaded or not."""
    folders = ("/etc/systemd/system", "/run/systemd/system", "/etc/systemd/system.control")
    return sorted(
        str(path) for folder in folders for path in Path(folder).glob("sglang-*.service.d/*.conf")
    )


# --- processes ------------------------------------------------------------------------------


def processes(root: Path, units: dict, names: dict) -> dict:
    """Unit -> the main process: arguments, listed environment, the build that it has loaded."""
    return {
        name: process(root, found["pid"], names.get(name, []))
        for name, found in units.items()
        if found["pid"] and Path(f"/proc/{found['pid']}").exists()
    }


def listed_names(asked: dict, running: dict | None) -> dict:
    """Unit -> the names of the environment that git or the running release lists."""
    servers = ((running or {}).get("description") or {}).get("servers", {})
    listed = {f"sglang-{role}.service": sorted(one["env"]) for role, one in servers.items()}
    return {
        name: sorted({*listed.get(name, []), *asked["environment"].get(name, [])})
        for name in {*listed, *asked["environment"]}
    }


def process(root: Path, pid: int, names: list) -> dict:
    proc = Path(f"/proc/{pid}")
    pairs = (pair.split("=", 1) for pair in words(proc / "environ"))
    environment = {pair[0]: pair[1] for pair in pairs if len(pair) > 1}
    maps = read_text(proc / "maps")
    return {
        "argv": words(proc / "cmdline"),
        "environment": {name: environment[name] for name in names if name in environment},
        "builds": sorted(set(re.findall(rf" {re.escape(str(root))}/builds/([^/\n]+)/", maps))),
    }


def strays(root: Path, units: dict) -> list:
    """Servers out of our builds that no unit of SGLang runs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        argv = words(folder / "cmdline")
        is_server = argv[0].startswith(f"{root}/builds/") and any(
            word.startswith("sglang") for word in argv[1:4]
        )
        groups = read_text(folder / "cgroup")
        if is_server and not any(f"/{name}" in groups for name in units):
            found.append({"pid": int(folder.name), "command": " ".join(argv[:4])})
    return found


def words(path: Path) -> list:
    """The zero-ended words of a file under /proc; one empty word where it cannot be read."""
    return read_text(path).removesuffix("\0").split("\0")


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process ended
        return ""


# --- the entry ------------------------------------------------------------------------------


def entry(asked: dict) -> dict:
    """HAProxy's own words about each cell, and the cells that its state file would open."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(asked["entry_socket"])
            connection.sendall(b"show servers state cells\n")
            told = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    except OSError as error:
        return {"problem": str(error), "cells": {}, "remembered": []}
    lines = told.strip().splitlines()
    columns = lines[1].removeprefix("# ").split() if len(lines) > 1 else []
    rows = [dict(zip(columns, line.split(), strict=False)) for line in lines[2:]]
    kept = read_text(Path(asked["entry_state_file"])).splitlines()
    return {
        "problem": "" if rows else told.strip()[:200],
        "cells": {
            row["srv_name"]: {
                "address": f"{row['srv_addr']}:{row['srv_port']}",
                # SRV_ADMF_FMAINT of HAProxy: somebody holds the server in maintenance.
                "is_open": not int(row["srv_admin_state"]) & 1,
            }
            for row in rows
        },
        "remembered": sorted(line.split()[3] for line in kept if len(line.split()) > 3),
    }


if __name__ == "__main__":
    main()
