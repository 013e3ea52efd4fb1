"""The fleet lock: one rollout at a time moves the fleet, whichever machine it is steered from.

It lies on every GPU host, where two controllers see the same one. Its holder proves itself with a
token, so that a rollout which was cut off and replaced cannot change anything when it wakes up.
"""

import json
import time
from pathlib import Path

import seatrial_switch as switch
from seatrial_switch import HostError

LOCK = switch.STATE / "fleet_lock.json"
BOOT = Path("/proc/sys/kernel/random/boot_id")


class LockLostError(HostError):
    """Another rollout holds the fleet lock, or nobody does."""


def lock(record: str, instead_of: str) -> dict:
    """Take the lock, unless another rollout holds it; `instead_of` is a holder known to be dead.

    `record` is JSON: token, who, commit, controller, process, seconds (after which it is stale).
    """
    wanted = json.loads(record)
    found = holder()
    if found and found["token"] not in (wanted["token"], instead_of) and not is_stale(found):
        return {"changed": False, "locked": False, "holder": found}
    if found and found["token"] != wanted["token"]:
        switch.note("fleet lock taken over", token=found["token"], who=found["who"])
    boot = {"boot": BOOT.read_text().strip(), "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
    switch.write(LOCK, json.dumps({**wanted, **boot, "since": time.time()}))
    return {"changed": True, "locked": True, "holder": wanted}


def unlock(held: str) -> dict:
    """Give the lock back, if it is held with this token."""
    found = holder()
    if not found or found["token"] != held:
        return {"changed": False, "holder": found}
    LOCK.unlink()
    return {"changed": True, "holder": None}


def prove(token: str) -> None:
    """Refuse a rollout that no longer holds the lock."""
    found = holder()
    if found is None or found["token"] != token:
        by = f"{found['who']}'s rollout of {found['commit'][:12]}" if found else "nobody"
        raise LockLostError(
            f"this rollout holds the fleet lock no longer ({by} does), so it changes nothing more"
        )


def holds() -> dict:
    """Do nothing: who gives a token with this verb learns whether it is still the holder's."""
    return {"changed": False}


def holder() -> "dict | None":
    """Return who holds the lock; a file that cannot be read is held by somebody unknown."""
    try:
        return json.loads(LOCK.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {"token": "unreadable", "who": "unknown", "commit": "unknown", "seconds": 0}


def is_stale(found: dict) -> bool:
    """Whether the time that its rollout asked for is over, by a clock that nobody sets, if any."""
    now = time.time() - found.get("since", 0.0)
    if found.get("boot") == BOOT.read_text().strip():
        now = time.clock_gettime(time.CLOCK_BOOTTIME) - found["boottime"]
    return now > found["seconds"]
