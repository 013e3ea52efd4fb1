"""Which releases and builds a host keeps: what may be needed to serve, or to go back, stays."""

import json
import shutil
import time
from pathlib import Path

import seatrial_switch as switch


def prune(keep: int, fresh_seconds: int) -> dict:
    """Remove releases and builds that nothing needs.

    Kept are what runs, what is pending, last_good, the `keep` releases that ran most recently
    besides, and what was staged within `fresh_seconds`, for it may belong to a rollout that waits
    for its turn; and every build that one of these links to or that a process runs from.
    """
    for path in switch.ROOT.glob("*/.gone-*"):  # what a power loss kept an earlier call from
        shutil.rmtree(path)
    releases = {path.name: path for path in switch.ROOT.glob("releases/[0-9a-f]*") if path.is_dir()}
    builds = {path.name: path for path in switch.ROOT.glob("builds/[0-9a-f]*") if path.is_dir()}
    in_use = command_lines()
    kept = {
        name
        for name, path in {**releases, **builds}.items()
        if name in in_use or time.time() - path.lstat().st_ctime < fresh_seconds
    }
    kept |= {switch.name_of(switch.CURRENT), switch.name_of(switch.LAST_GOOD)}
    kept.add(switch.pending().get("release", ""))
    others = [name for name in recently_run() if name in releases and name not in kept]
    kept |= set(others[:keep])
    kept |= {(path / "build").resolve().name for name, path in releases.items() if name in kept}
    removed = {
        "releases": sorted(releases.keys() - kept),
        "builds": sorted(builds.keys() - kept),
    }
    for name in [*removed["releases"], *removed["builds"]]:
        path = releases.get(name) or builds[name]
        # Out of sight in one step first: what is half removed must never look whole.
        shutil.rmtree(path.rename(path.with_name(f".gone-{name}")))
    if any(removed.values()):
        switch.note("pruned", **removed)
    return {"changed": any(removed.values()), **removed}


def recently_run() -> list:
    """Return the releases that this host activated, the most recent first."""
    names = []
    if switch.JOURNAL.exists():
        for line in switch.JOURNAL.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # torn by a power loss
                continue
            if event.get("event") == "activated":
                names.append(event["release"])
    return list(dict.fromkeys(reversed(names)))


def command_lines() -> str:
    """Return the command lines of all processes, to look names of releases and builds up in."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:  # the process has ended
            continue
    return "\n".join(found)
