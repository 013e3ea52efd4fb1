"""The operator's console asks and shows; it changes no host."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fabric import Connection
from invoke.context import Context

import fabfile
from seatrial import ledger


def test_fab_lists_the_console_tasks(repository: Path) -> None:
    """`fab --list` works from the root of the checkout."""
    program = Path(sys.executable).with_name("fab")
    listed = subprocess.run(
        [program, "--list"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    assert {"status", "logs", "history", "rollouts", "gitops.status", "gitops.override"} <= set(
        listed.split()
    )


def test_status_shows_releases_units_and_a_pending_decision() -> None:
    """A line for each, the restarts beside the unit's state."""
    answer = {
        "current": "1111111111111111",
        "last_good": "",
        "pending": {"release": "1111111111111111", "since": 0},
        "dead_man": True,
        "fleet_lock": {"who": "ann", "commit": "fedcba9876543210"},
        "releases": {"current": {"commit": "0123456789abcdef" * 2}, "last_good": {}},
        "units": {"sglang-decode.service": {"ActiveState": "active", "NRestarts": "2"}},
    }
    assert list(fabfile._status_lines(answer)) == [
        "  current    1111111111111111  0123456789ab",
        "  last_good  none",
        "  undecided  1111111111111111  a timer runs",
        "  locked     ann               fedcba987654",
        "  sglang-decode.service     active, restarts: 2",
    ]


def test_history_shows_time_event_and_facts() -> None:
    """The host's own journal in one readable line an entry."""
    entry = {"time": 0, "event": "reverting", "to": "2222222222222222", "reason": "gate failed"}
    assert fabfile._history_line(entry) == (
        "1970-01-01 00:00:00Z reverting to=2222222222222222 reason=gate failed"
    )


def event(rollout: str, kind: str, **data: str) -> ledger.Event:
    """Return a line of the ledger."""
    time = datetime(2026, 1, 1, tzinfo=UTC)
    return ledger.Event.model_validate(
        {"time": time, "rollout": rollout, "event": kind, "data": data}
    )


EVENTS = [
    event("r1", "begin", release="1111111111111111", previous="", who="ann"),
    event("r1", "end", outcome="promoted"),
    event("r2", "begin", release="2222222222222222", previous="1111111111111111", who="bob"),
    event("r2", "end", outcome="reverted", reason="cell one: gate x: FAIL. Next: git revert"),
    event("r3", "begin", release="2222222222222222", previous="1111111111111111", who="bob"),
]


def test_rollouts_shows_a_line_each_and_the_last_in_full() -> None:
    """One that never ended says so."""
    shown = "\n".join(fabfile._rollout_lines(EVENTS, "", 5)).splitlines()
    assert shown[0].split() == ["r1", "promoted", "nothing", "->", "1111111111111111", "ann"]
    assert shown[1].split()[:2] == ["r2", "reverted"]
    assert shown[2].split()[:2] == ["r3", "unfinished"]
    assert "rollout   r3: UNFINISHED in 0 s" in shown


def test_rollouts_tells_a_named_one_with_its_last_sentence() -> None:
    """What happened, and the next command."""
    shown = "\n".join(fabfile._rollout_lines(EVENTS, "r2", 0))
    assert shown.strip().startswith("rollout   r2: REVERTED")
    assert shown.endswith("Next: git revert")


@pytest.mark.parametrize(("events", "name"), [([], ""), (EVENTS, "r9")])
def test_rollouts_refuses_what_the_ledger_does_not_have(
    events: list[ledger.Event], name: str
) -> None:
    """In one sentence."""
    with pytest.raises(ledger.LedgerError):
        list(fabfile._rollout_lines(events, name, 5))


def test_logs_reads_the_units_journal() -> None:
    """The command is built, not run."""
    assert fabfile._logs_command("decode", 20, follow=True) == (
        "journalctl --no-pager -u sglang-decode.service -n 20 -f"
    )


def test_logs_refuses_a_role_that_is_none() -> None:
    """Nothing is sent to a host."""
    with pytest.raises(SystemExit, match="role: should be one of prefill, decode"):
        fabfile._logs_command("decode; reboot", 20, follow=False)


def test_a_host_that_is_not_named_is_one_sentence() -> None:
    """`fab status` without -H."""
    with pytest.raises(SystemExit, match=r"^-H: should name the host to ask"):
        fabfile._ask(Context(), "true")


def test_a_host_that_cannot_be_reached_is_one_sentence() -> None:
    """Nothing listens there; the sentence says where address and key come from."""
    with pytest.raises(SystemExit, match=r"^127\.0\.0\.1 cannot be reached by SSH: .* ssh_config"):
        fabfile._ask(Connection("127.0.0.1", port=1), "true")
