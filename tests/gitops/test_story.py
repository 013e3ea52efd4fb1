"""What a reconciler reads out of the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial import ledger
from seatrial.gitops import story
from tests.gitops.toy import report


def event(kind: Any, rollout: str = "r1", **more: Any) -> ledger.Event:
    """Return an event of the ledger; what is no field of it is its data."""
    fields = {key: more.pop(key) for key in ("cell", "phase") if key in more}
    return ledger.Event(time=ledger.now(), rollout=rollout, event=kind, data=more, **fields)


def begin(**more: Any) -> ledger.Event:
    """Return the opening of a rollout."""
    return event(
        "begin", **{"commit": "c" * 40, "release": "2", "previous": "1", "found": "", **more}
    )


def test_a_rollout_that_was_cut_off_has_no_outcome_and_says_where_it_had_come_to() -> None:
    """Its last phase, or none."""
    (told,) = story.stories([begin()])
    assert (told.outcome, told.where) == ("", "before the first phase")
    (told,) = story.stories([begin(), event("phase", cell="two", phase="gate")])
    assert (told.outcome, told.where) == ("", "phase gate of cell two")


def test_each_rollout_is_told_by_its_own_events() -> None:
    """A second one that closed the first."""
    second = event("begin", "r2", commit="rollback", release="1", previous="1", found="split: x")
    ends = [event("end", outcome="died"), event("end", "r2", outcome="promoted", reason="")]
    told = story.stories([begin(), ends[0], second, ends[1]])
    assert [(one.rollout, one.outcome) for one in told] == [("r1", "died"), ("r2", "promoted")]


def test_the_gate_that_said_no_is_named() -> None:
    """With what it measured; a report of another version names none, and spoils nothing."""
    plain = report(512).model_dump(by_alias=True, mode="json")
    (told,) = story.stories([begin(), event("gates", report=plain)])
    assert told.gate
    assert (told.gate.id, told.gate.measured) == ("test_needle_is_recalled", 0.05)
    (told,) = story.stories([begin(), event("gates", report={**plain, "schema": 99})])
    assert told.gate is None


def test_a_cell_that_does_not_serve_is_told_of_a_promoted_rollout_too() -> None:
    """The ledger of an older playbook says nothing of it."""
    ends = [event("end", outcome="promoted", closed="cell two does not serve: no answer")]
    ends += [event("end", outcome="promoted")]
    told = [story.stories([begin(), end])[0].closed for end in ends]
    assert told == ["cell two does not serve: no answer", ""]


@pytest.mark.parametrize(
    ("opened", "closed", "is_left"),
    [
        ({}, {"moved": True, "superseded": False}, True),
        ({}, {}, True),
        ({}, {"moved": False, "superseded": False}, False),
        ({"found": "split: cell one runs 2"}, {"moved": False, "superseded": False}, True),
        ({}, {"moved": True, "superseded": True}, False),
        ({"previous": ""}, {"moved": True, "superseded": False}, False),
    ],
    ids=["moved", "by an older playbook", "nothing moved", "was split", "taken over", "the first"],
)
def test_a_failed_rollout_is_ours_to_take_back_only_if_it_left_the_fleet_apart(
    opened: dict[str, Any], closed: dict[str, Any], is_left: bool
) -> None:
    """Not where nothing moved, where another rollout decides, or where there is no way back."""
    (told,) = story.stories([begin(**opened), event("end", outcome="failed", reason="", **closed)])
    assert told.is_left is is_left
