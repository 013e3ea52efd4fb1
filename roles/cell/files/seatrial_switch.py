"""Switch a GPU host's release, and take it back: all that changes what the host runs.

Rolling out, rolling back and reverting are one operation: `activate` another release. While the
decision about a release is pending, the cell's entry is closed; then, and only then, a host may go
back to last_good alone (nobody confirmed, the restart budget is used up, it rebooted). Later it
stays down instead: an older release on one host of a serving cell would mix two.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "state"
CURRENT = ROOT / "current"
LAST_GOOD = ROOT / "last_good"
PENDING = STATE / "pending.json"
JOURNAL = STATE / "journal.jsonl"
UNIT_LINKS = Path("/etc/systemd/system")
WANTS = UNIT_LINKS / "multi-user.target.wants"
DEAD_MAN = "seatrial-deadman"  # the installed service; its timer exists while a decision is pending
RETRY_SECONDS = 30


class HostError(Exception):
    """One sentence: what is wrong on this host and what to do."""


# --- back -----------------------------------------------------------------------------------


def revert(reason: str, alone: bool, if_failed: bool) -> dict:
    """Go back to last_good.

    `alone` says that the host does so by itself, not told by a rollout; `if_failed`, only if a unit
    of the release has failed for good: the old one's may have, too, when it was stopped.
    """
    good, running = name_of(LAST_GOOD), name_of(CURRENT)
    if if_failed and "failed" not in [show(unit)["ActiveState"] for unit in units_of(CURRENT)]:
        return {"changed": False, "release": running}
    if alone and not PENDING.exists():
        note("stays as it is", release=running, reason=f"{reason}, and its release is decided")
        return {"changed": False, "release": running}
    note("reverting", release=running, to=good, reason=reason)
    if running != good and not PENDING.exists():
        # A host that loses power half-way must come up with the old release.
        with contextlib.suppress(OSError):
            write_pending(running)
    try:
        result = switch_to(good) if good else deactivate()
    except (HostError, OSError) as error:
        note("revert failed", release=running, to=good, reason=str(error))
        start_timer(RETRY_SECONDS)
        raise
    stop_timer()
    PENDING.unlink(missing_ok=True)
    return result


def guard() -> dict:
    """Before any engine starts at boot: an undecided release does not start, last_good does."""
    is_whole = not CURRENT.is_symlink() or (CURRENT / "release.json").is_file()
    if is_whole and not PENDING.exists():
        return {"changed": False}
    good = name_of(LAST_GOOD)
    reason = "rebooted with the decision pending" if PENDING.exists() else "its release is gone"
    note("guard", release=name_of(CURRENT), to=good, reason=reason)
    if good:
        point(CURRENT, LAST_GOOD.resolve())
        link_units(units_of(CURRENT))
    else:
        link_units([])
        CURRENT.unlink(missing_ok=True)
    systemctl("daemon-reload")
    PENDING.unlink(missing_ok=True)
    # This boot has planned the units of the other release; those of this one may be others.
    if units_of(CURRENT):
        systemctl("start", "--no-block", *units_of(CURRENT))
    return {"changed": True, "release": good}


# --- forth ----------------------------------------------------------------------------------


def activate(digest: str) -> dict:
    """Switch to a release while the decision about it is pending: else nobody takes it back."""
    must_be_whole(digest)
    if pending().get("release") != digest:
        raise HostError(
            f"no decision about {digest} is pending: this host was not armed, or has gone back by "
            "itself since, see state/journal.jsonl"
        )
    return switch_to(digest)


def must_be_whole(digest: str) -> None:
    """Refuse a release that could not start, before anything stops."""
    release = ROOT / "releases" / digest
    if not (release / "release.json").is_file():
        raise HostError(f"{release}: no such release on this host; stage it with deploy.yml")
    if not (release / "build" / "build.json").exists():
        raise HostError(f"{release / 'build'}: the release's build is gone; run deploy.yml")


def switch_to(digest: str) -> dict:
    """Stop what runs, point `current` at the release, start it. Nothing to do is no change."""
    must_be_whole(digest)
    previous = name_of(CURRENT)
    if previous == digest and is_running(units_of(CURRENT)) and not drift():
        return {"changed": False, "release": digest, "previous": previous}
    stop_all()
    put_away_drop_ins()
    point(CURRENT, ROOT / "releases" / digest)
    link_units(units_of(CURRENT))
    systemctl("daemon-reload")
    systemctl("reset-failed", *units_of(CURRENT), check=False)
    systemctl("start", "--no-block", *units_of(CURRENT))
    note("activated", release=digest, previous=previous)
    return {"changed": True, "release": digest, "previous": previous}


def relaunch(digest: str) -> dict:
    """Stop the undecided release and start it again, as cold as the first time."""
    if name_of(CURRENT) != digest or pending().get("release") != digest:
        raise HostError(
            f"this host runs {name_of(CURRENT) or 'nothing'}, not an undecided {digest}; "
            "a release that is decided is not started again for a trial"
        )
    stop_all()
    systemctl("reset-failed", *units_of(CURRENT), check=False)
    systemctl("start", "--no-block", *units_of(CURRENT))
    note("launched again", release=digest)
    return {"changed": True, "release": digest}


def deactivate() -> dict:
    """Stop every unit and serve nothing: what a revert means before the first promotion."""
    previous = name_of(CURRENT)
    stop_all()
    link_units([])
    CURRENT.unlink(missing_ok=True)
    systemctl("daemon-reload")
    note("deactivated", previous=previous)
    return {"changed": bool(previous), "release": "", "previous": previous}


def arm(digest: str, seconds: int) -> dict:
    """Write down that a decision is pending, and start the timer that reverts without one."""
    start_timer(seconds)
    try:
        write_pending(digest)
    except OSError:
        stop_timer()
        raise
    note("armed", release=digest, seconds=seconds)
    return {"changed": True, "release": digest}


def confirm(digest: str) -> dict:
    """Take the decision for the release that runs: the timer stops."""
    if name_of(CURRENT) != digest or pending().get("release") != digest:
        raise HostError(
            f"this host runs {name_of(CURRENT) or 'nothing'}, not an undecided {digest}; "
            "it went back by itself, see state/journal.jsonl"
        )
    for unit in units_of(CURRENT):
        if show(unit)["ActiveState"] != "active" or has_crashed(unit):
            raise HostError(f"{unit} ended since it was judged; see journalctl -u {unit}")
    PENDING.unlink()
    sync(STATE)
    stop_timer()
    note("confirmed", release=digest)
    return {"changed": True, "release": digest}


def promote(digest: str) -> dict:
    """Make the confirmed release the one to come back to."""
    if name_of(CURRENT) != digest or PENDING.exists():
        raise HostError(f"{digest} is not confirmed on this host, so it cannot become last_good")
    if name_of(LAST_GOOD) == digest:
        return {"changed": False, "release": digest}
    point(LAST_GOOD, ROOT / "releases" / digest)
    note("promoted", release=digest)
    return {"changed": True, "release": digest}


# --- helpers --------------------------------------------------------------------------------


def run(*words: str, check: bool = True) -> str:
    """Run a program; return what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if check and done.returncode:
        raise HostError(f"{' '.join(words[:4])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def systemctl(*words: str, check: bool = True) -> str:
    """Ask systemd for something."""
    return run("systemctl", *words, check=check)


def show(unit: str) -> dict:
    """Return what systemd knows of a unit."""
    wanted = (
        "ActiveState,SubState,MainPID,NRestarts,Result,ActiveEnterTimestampMonotonic,"
        "NeedDaemonReload"
    )
    lines = systemctl("show", unit, f"--property={wanted}").splitlines()
    return dict(line.split("=", 1) for line in lines)


def has_crashed(unit: str) -> bool:
    """Whether the unit ended by itself since the release was armed; not if that is decided."""
    found = show(unit)
    began = int(found["ActiveEnterTimestampMonotonic"]) / 1e6
    armed = pending().get("monotonic", float("inf"))
    is_old = found["ActiveState"] == "active" and began < armed
    return int(found["NRestarts"]) > 0 and not is_old


def drift() -> dict:
    """Say, by unit, how what systemd runs differs from the release that `current` points to."""
    path = CURRENT / "release.json"
    released = json.loads(path.read_text()).get("servers", {}) if path.is_file() else {}
    found = {}
    for unit in linked_units():
        role = unit.removeprefix("sglang-").removesuffix(".service")
        said = differences(unit, released.get(role, {}))
        if said:
            found[unit] = ", ".join(said)
    return found


def differences(unit: str, server: dict) -> list:
    """Compare a unit and its main process with the server that release.json describes."""
    known = show(unit)
    said = ["changed since systemd read it"] if known["NeedDaemonReload"] == "yes" else []
    said += [f"has the drop-in {path}" for path in drop_ins(unit)]
    try:
        process = Path("/proc") / known["MainPID"]
        argv = process.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
        environ = process.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return said
    if not argv:  # it is ending
        return said
    # SGLang's router writes its title over its arguments; its unit then stands for them.
    if server and argv != server["argv"] and not argv[0].startswith("sglang::"):
        said.append("runs with other arguments")
    wrong = [key for key, value in server.get("env", {}).items() if f"{key}={value}" not in environ]
    return said + ([f"runs with another {', '.join(wrong)}"] if wrong else [])


def drop_ins(unit: str) -> list:
    """Return the settings that somebody laid over a unit of ours."""
    folders = (UNIT_LINKS, Path("/run/systemd/system"))
    return [path for folder in folders for path in folder.glob(f"{unit}.d/*.conf")]


def put_away_drop_ins() -> None:
    """Move them to state/, so that what runs is the release and nothing is lost."""
    for unit in linked_units():
        for path in drop_ins(unit):
            kept = STATE / f"{unit}-{path.stem}-{int(time.time())}.conf"
            with contextlib.suppress(OSError):  # a full disk must not keep a host from going back
                shutil.copyfile(path, kept)
                path.unlink()
                note("drop-in put away", unit=unit, path=str(path), kept=str(kept))


def name_of(link: Path) -> str:
    """Return the digest of the release that a link points to, or nothing."""
    return link.resolve().name if link.is_symlink() else ""


def units_of(release: Path) -> list:
    """Engines first: the router looks for them when it starts, and stops before them."""
    names = [path.name for path in (release / "units").glob("*.service")]
    return sorted(names, key=lambda name: ("router" in name, name))


def linked_units() -> list:
    """Return the units that systemd knows through `current`."""
    return sorted(link.name for link in UNIT_LINKS.glob("sglang-*.service"))


def is_running(units: list) -> bool:
    """Whether exactly these units run or start."""
    states = {show(unit)["ActiveState"] for unit in units}
    return bool(units) and units_known(units) and not states - {"active", "activating"}


def units_known(units: list) -> bool:
    """Whether systemd knows exactly these units."""
    return set(units) == set(linked_units())


def stop_all() -> None:
    """Stop the router, then the engines, each with the time that its unit allows."""
    units = linked_units()
    routers = [unit for unit in units if "router" in unit]
    for group in (routers, [unit for unit in units if unit not in routers]):
        if group:
            systemctl("stop", *group)


def point(link: Path, target: Path) -> None:
    """Flip a symbolic link in one step: readers see the old target or the new one."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    fresh.rename(link)
    sync(link.parent)


def link_units(units: list) -> None:
    """Make exactly these units known to systemd, and started at boot."""
    WANTS.mkdir(exist_ok=True)
    for folder in (UNIT_LINKS, WANTS):
        for link in folder.glob("sglang-*.service"):
            if link.name not in units:
                link.unlink()
        for unit in units:
            link = folder / unit
            target = CURRENT / "units" / unit
            if not link.is_symlink() or link.readlink() != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
        sync(folder)


def start_timer(seconds: int) -> None:
    """Have the installed service revert after so many seconds, by a clock that nobody sets."""
    stop_timer()
    run(
        "systemd-run",
        "--quiet",
        f"--unit={DEAD_MAN}",
        f"--on-active={seconds}",
        "--timer-property=AccuracySec=1s",
    )


def stop_timer() -> None:
    """Stop the dead man's timer; the pending decision stays until it is taken."""
    systemctl("stop", f"{DEAD_MAN}.timer", check=False)


def write_pending(digest: str) -> None:
    """Write down which release is undecided, and since when."""
    facts = {"release": digest, "since": time.time(), "monotonic": time.monotonic()}
    write(PENDING, json.dumps(facts))


def pending() -> dict:
    """Return the pending decision; one that cannot be read is one about an unknown release."""
    try:
        return json.loads(PENDING.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        return {"release": "unknown"}


def write(path: Path, text: str) -> None:
    """Write a file so that a power loss leaves the old content or the new, never half."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:  # such as a full disk
        fresh.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Have the folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def note(event: str, **facts: object) -> None:
    """Add a line to this host's own journal; a full disk must not keep a host from going back."""
    line = json.dumps({"time": time.time(), "event": event, **facts})
    whole = f"{line}\n".encode()
    try:
        with JOURNAL.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(whole) < len(whole):  # a full disk: no half lines
                file.truncate(end)
                print(f"{JOURNAL}: no room for: {line}", file=sys.stderr)
            os.fsync(file.fileno())
    except OSError as error:
        print(f"{JOURNAL}: {error}: {line}", file=sys.stderr)
