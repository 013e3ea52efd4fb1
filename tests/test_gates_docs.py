"""The page about the gates names what there is."""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.thresholds import Thresholds

GROUP = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)


def test_every_group_is_in_the_page_and_has_thresholds(repository: Path) -> None:
    """A group that nobody can read about is not used; one without thresholds cannot judge."""
    groups = {
        GROUP.findall(file.read_text())[0] for file in (repository / "gates").glob("test_*.py")
    }
    page = (repository / "docs/gates.md").read_text()
    assert {group for group in groups if f"| `{group}` |" not in page} == set()
    assert groups - set(Thresholds.model_fields) == set()


def test_page_names_files_that_exist(repository: Path) -> None:
    """A name of a file in the page is a file."""
    page = (repository / "docs/gates.md").read_text()
    named = re.findall(r"`((?:seatrial|tests|gates)/[\w./]+\.\w+)`", page)
    assert len(named) > 4
    assert [name for name in named if not (repository / name).exists()] == []
