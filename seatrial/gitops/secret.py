"""Secrets lie in files of their own, and are read at the moment in which they are used."""

from __future__ import annotations

from pathlib import Path

from seatrial.gitops.web import TellError


def read_secret(path: Path) -> str:
    """Return the one line in the file.

    Raises:
        TellError: the file cannot be read, or holds anything else than one line.
    """
    lines = read_lines(path)
    if len(lines) != 1:
        raise TellError(f"{path}: should hold one line, the token, and holds {len(lines)}")
    return lines[0]


def read_lines(path: Path) -> list[str]:
    """Return the lines of the file that say something; ``#`` begins a comment."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "no UTF-8"
        raise TellError(f"{path}: cannot be read ({said})") from None
    return [line for line in lines if line and not line.startswith("#")]
