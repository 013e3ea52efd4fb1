"""Whether this machine's clock can be gone by: keys, windows and approvals have their times.

Since the boot the clock of day and the clock since boot go alike, however the first is steered; a
difference that changes is a jump. After a jump nothing begins until the clock is back, or has stood
for a while: time for people, or for the time service, to set it right.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

JUMP_SECONDS = 300.0
HOLD_SECONDS = 600.0
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Reading(NamedTuple):
    """Which boot this is, the time of day, and the seconds since the boot."""

    boot: str
    wall: float
    since_boot: float

    @property
    def offset(self) -> float:
        """When the boot was, as the clock of day has it."""
        return self.wall - self.since_boot


class Clock(BaseModel):
    """What was known of the clock when the state was written.

    Attributes:
        held_since: seconds since the boot at which a jump was found that is not yet accepted.
    """

    model_config = ConfigDict(extra="forbid")

    boot: str
    wall: float
    offset: float
    held_since: float | None = None


def read() -> Reading:
    """Read both clocks."""
    return Reading(BOOT.read_text().strip(), time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def jump(known: Clock, found: Reading) -> float:
    """Return by how many seconds the clock of day has jumped; over a reboot, only back is seen."""
    if known.boot == found.boot:
        return found.offset - known.offset
    return min(0.0, found.wall - known.wall)


def look(known: Clock | None, found: Reading) -> tuple[Clock, str]:
    """Return what is known now, and why nothing may begin; empty if the clock is steady."""
    steady = Clock(boot=found.boot, wall=found.wall, offset=found.offset)
    if known is None or abs(by := jump(known, found)) <= JUMP_SECONDS:
        return steady, ""
    since = known.held_since
    if since is None or since > found.since_boot:  # the hold began in an earlier boot
        since = found.since_boot
    if found.since_boot - since >= HOLD_SECONDS:
        return steady, ""
    said = (
        f"this machine's clock jumped by {by:+.0f} s, to "
        f"{datetime.fromtimestamp(found.wall, UTC):%Y-%m-%d %H:%M}Z: nothing begins until it is "
        f"back, or has stood for {HOLD_SECONDS / 60:.0f} minutes; see timedatectl"
    )
    return known.model_copy(update={"held_since": since}), said
