"""Which version of the host's own program this checkout would install."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """Return 16 hex digits over the program's files, as ``seatrial-host status`` computes them."""
    found = hashlib.sha256()
    for path in [folder / "seatrial-host", *sorted(folder.glob("seatrial_*.py"))]:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
