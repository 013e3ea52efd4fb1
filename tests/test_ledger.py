"""The ledger loses nothing that was written, and tells a rollout in words."""

from __future__ import annotations

import resource
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from seatrial import ledger
from seatrial.ledger import Event, LedgerError

START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def event(
    second: float, kind: Literal["begin", "phase", "gates", "host", "end"], **fields: Any
) -> Event:
    """Return an event ``second`` seconds after the start."""
    return Event(time=START + timedelta(seconds=second), rollout="r1", event=kind, **fields)


STORY = [
    event(0, "begin", data={"commit": "c" * 40, "release": "new", "previous": "old"}),
    event(1, "phase", cell="one", phase="drain"),
    event(3, "phase", cell="one", phase="activate"),
    event(40, "phase", cell="one", phase="gate"),
    event(70, "gates", cell="one", data={"lines": ["window_a FAIL 0 of 3"]}),
    event(71, "phase", cell="one", phase="revert"),
    event(101, "phase", cell="one", phase="open"),
    event(102, "end", data={"outcome": "reverted", "reason": "gate window_a is FAIL"}),
]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Line by line, in order."""
    path = tmp_path / "state" / "ledger.jsonl"
    for one in STORY:
        ledger.append(path, one)
    assert ledger.read(path) == STORY
    assert ledger.read(path, "other") == []


def test_a_torn_line_spoils_neither_what_is_before_nor_what_comes_after(tmp_path: Path) -> None:
    """Power can go in the middle of a line."""
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, STORY[0])
    with path.open("a") as file:
        file.write('{"schema": 1, "time": "2026')
    ledger.append(path, STORY[1])
    assert ledger.read(path) == STORY[:2]


def test_a_line_that_a_full_disk_cuts_off_is_taken_back(tmp_path: Path) -> None:
    """The kernel writes what has room and then refuses, as at the limit that is set here."""
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, STORY[0])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            ledger.append(path, STORY[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    ledger.append(path, STORY[1])
    assert ledger.read(path) == STORY[:2]


def test_the_outage_is_the_time_from_drain_to_open() -> None:
    """Whatever happened in between."""
    assert ledger.outages(STORY) == {"one": 100.0}


def test_a_cell_that_never_opened_is_out_until_the_end() -> None:
    """A closed entry counts, also when nobody opened it."""
    assert ledger.outages([*STORY[:6], STORY[7]]) == {"one": 101.0}


def test_each_phase_lasts_until_the_next() -> None:
    """The last one until the rollout ends."""
    seconds = {phase.name: phase.seconds for phase in ledger.phases(STORY)}
    assert seconds == {"drain": 2, "activate": 37, "gate": 31, "revert": 30, "open": 1}


def test_the_summary_says_outcome_phases_gates_and_reason() -> None:
    """In words that fit a terminal."""
    text = ledger.summary(STORY)
    for words in ("REVERTED in 102 s", "one: activate", "window_a FAIL 0 of 3", "gate window_a is"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_an_unknown_rollout_is_an_error() -> None:
    """Not an empty summary."""
    with pytest.raises(LedgerError):
        ledger.summary([])


def test_a_rollout_without_an_end_is_unfinished() -> None:
    """Its controller died."""
    other = Event(time=START, rollout="r2", event="begin")
    assert ledger.unfinished([*STORY, other]) == ["r2"]
    assert ledger.unfinished(STORY) == []


def test_what_hosts_did_by_themselves_is_told() -> None:
    """Their journals are collected; the last count says where to go on."""
    lines = [
        {"time": START.timestamp() + 5, "event": "armed", "release": "new"},
        {
            "time": START.timestamp() + 9,
            "event": "reverting",
            "release": "new",
            "reason": "nobody confirmed in time",
        },
    ]
    noted = event(80, "host", data={"host": "gpu-a", "lines": lines, "count": 7})
    told = ledger.summary([*STORY[:-1], noted, STORY[-1]])
    assert "12:00:09 gpu-a reverting: nobody confirmed in time" in told
    assert "armed" not in told
    assert ledger.lines_of([noted], "gpu-a") == 7
    assert ledger.lines_of([noted], "gpu-b") == 0


def test_a_split_that_was_found_is_told() -> None:
    """The summary says how the fleet was found."""
    begin = event(0, "begin", data={"found": "split: cell one runs new, cell two runs old"})
    assert "found     split: cell one runs new" in ledger.summary([begin, *STORY[1:]])
