"""One reconciler of a fleet at a time on this machine.

The kernel holds the lock, for the process and for the playbook that it starts: it is free as soon
as nobody works any more, so there is no stale lock and nothing to recover. The text in the file is
for people, and for what must be remembered while the disk is full: the file has its one block
already, so writing into it needs none.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from seatrial.errors import SeatrialError

BYTES = 4096


class HeldError(SeatrialError):
    """Somebody else is at work; the message says who."""


class Lock:
    """The lock of the fleet whose state is in ``folder``."""

    def __init__(self, folder: Path, fleet: str) -> None:
        self._path, self._fleet = folder / "lock", fleet
        self.descriptor = -1
        self.remembered: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            HeldError: another reconciler, or the playbook of one that died, has it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = self._sentence(self._read())
            os.close(self.descriptor)
            raise HeldError(said) from None
        self.remembered = self._read().get("remembered", {})
        self.say("looking at the branch")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        os.close(self.descriptor)

    def say(self, doing: str) -> None:
        """Write for others what is being done."""
        self._doing = doing
        self._write()

    def remember(self, topic: str, sentence: str) -> None:
        """Keep a sentence for the next reconciler, even on a full disk; an empty one forgets it."""
        self.remembered[topic] = sentence[:512]
        if not sentence:
            del self.remembered[topic]
        self._write()

    def _write(self) -> None:
        holder = {
            "pid": os.getpid(),
            "host": platform.node(),
            "doing": self._doing,
            "remembered": self.remembered,
        }
        text = json.dumps(holder).encode()[:BYTES].ljust(BYTES)
        try:
            os.pwrite(self.descriptor, text, 0)
        except OSError:  # the very first time, on a full disk: only the words for people are lost
            return

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(os.pread(self.descriptor, BYTES, 0))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _sentence(self, holder: dict[str, Any]) -> str:
        pid, host = holder.get("pid", 0), holder.get("host", "unknown")
        who = f"fleet {self._fleet} is in the hands of reconciler {pid} on {host}"
        if host == platform.node() and not Path(f"/proc/{pid}").exists():
            return (
                f"{who}, which is gone; the playbook that it started still runs "
                f"({holder.get('doing')}). Its end is awaited"
            )
        return f"{who}, {holder.get('doing', 'at work')}; nothing to do here"
