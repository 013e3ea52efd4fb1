"""The operator's console asks and shows; it changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fabfile


def test_fab_lists_the_console_tasks(repository: Path) -> None:
    """`fab --list` works from the root of the checkout."""
    program = Path(sys.executable).with_name("fab")
    listed = subprocess.run(
        [program, "--list"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert {"status", "logs", "history"} <= set(listed.split())


def test_status_shows_releases_units_and_a_pending_decision() -> None:
    """A line for each, the restarts beside the unit's state."""
    answer = {
        "current": "1111111111111111",
        "last_good": "",
        "pending": {"release": "1111111111111111", "since": 0, "seconds": 1800},
        "releases": {"current": {"commit": "0123456789abcdef" * 2}, "last_good": {}},
        "units": {"sglang-decode.service": {"ActiveState": "active", "NRestarts": "2"}},
    }
    assert list(fabfile._status_lines(answer)) == [
        "  current    1111111111111111  0123456789ab",
        "  last_good  none",
        "  undecided  1111111111111111  reverts after 1800 s",
        "  sglang-decode.service     active, restarts: 2",
    ]


def test_history_shows_time_event_and_facts() -> None:
    """The host's own journal in one readable line an entry."""
    entry = {"time": 0, "event": "reverting", "to": "2222222222222222", "reason": "gate failed"}
    assert fabfile._history_line(entry) == (
        "1970-01-01 00:00:00Z reverting to=2222222222222222 reason=gate failed"
    )


def test_logs_reads_the_units_journal() -> None:
    """The command is built, not run."""
    assert fabfile._logs_command("decode", 20, follow=True) == (
        "journalctl --no-pager -u sglang-decode.service -n 20 -f"
    )


def test_logs_refuses_a_role_that_is_none() -> None:
    """Nothing is sent to a host."""
    with pytest.raises(SystemExit, match="role: should be one of prefill, decode"):
        fabfile._logs_command("decode; reboot", 20, follow=False)
