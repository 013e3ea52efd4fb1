"""What the reconciler knows, on disk: attempts, troubles, and the orders that people gave.

``state.json`` is written by the reconciler alone, under its lock. Orders (pause, retry, approve,
override) are small files that people's commands write and the reconciler reads, so the two never
write the same file. Every write is atomic and synced.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
Kind = Literal[
    "refused",
    "waiting",
    "began",
    "resumed",
    "promoted",
    "unchanged",
    "reverted",
    "failed",
    "degraded",
    "drift",
    "healed",
    "trouble",
    "recovered",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Status(StrEnum):
    """Where an attempt to roll a commit out stands. The last five are final.

    ``refused``: verification or policy said no, nothing was touched. ``unchanged``: nothing in it
    concerns the hosts. ``reverted``: gates said no, and the old release serves. ``failed``: it did
    not come to an end that the fleet can be left at by itself, or nothing moved at all.
    """

    WAITING = "waiting"
    ROLLING = "rolling"
    REVERTING = "reverting"
    REFUSED = "refused"
    UNCHANGED = "unchanged"
    PROMOTED = "promoted"
    REVERTED = "reverted"
    FAILED = "failed"


FINAL = (Status.REFUSED, Status.UNCHANGED, Status.PROMOTED, Status.REVERTED, Status.FAILED)


class Announcement(_Strict):
    """Something happened that people, git or machines should hear of.

    Attributes:
        commit: what it is about; empty if it is about none (the repository cannot be reached).
        sentence: the one that matters, whole: what happened, why, and what to do now.
        gate: the gate that decided, with what it measured against which bound.
        report: the folder of the rollout's reports on the control host.
        rollout: its name in the ledger.
        signer: who signed the commit.
        serves: the commit that serves now; empty if that is not known.
        branch_at: the commit that the branch is at.
        began: when the rollout began, if it has.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    time: datetime
    fleet: str
    kind: Kind
    sentence: str
    commit: Commit | Literal[""] = ""
    gate: str = ""
    measured: float | None = None
    bound: float | None = None
    bound_is: Literal["min", "max"] = "min"
    unit: str = ""
    report: str = ""
    rollout: str = ""
    signer: str = ""
    serves: Commit | Literal[""] = ""
    branch_at: Commit | Literal[""] = ""
    began: datetime | None = None


class Attempt(_Strict):
    """The one attempt to roll a commit out.

    Attributes:
        since: when it came to this status.
        runs: how often deploy.yml was started for it; the second time is a resume.
        reverts: how often rollback.yml was.
        ledger_offset: bytes of the ledger that are older than this attempt.
        content: digest of everything in the commit that hosts or gates can see.
        inputs: digest of what was judged beside the commit (signers, approvals, settings): a
            refusal holds as long as it is the same.
        is_told: whether its last announcement was made.
        is_noted: whether its note is on the commit.
    """

    commit: Commit
    status: Status
    since: datetime
    signer: str = ""
    sentence: str = ""
    rollout: str = ""
    began: datetime | None = None
    runs: int = 0
    reverts: int = 0
    ledger_offset: int = 0
    previous: str = ""
    content: str = ""
    inputs: str = ""
    override: str = ""
    gate: str = ""
    measured: float | None = None
    bound: float | None = None
    bound_is: Literal["min", "max"] = "min"
    unit: str = ""
    report: str = ""
    is_told: bool = False
    is_noted: bool = False

    @property
    def is_final(self) -> bool:
        """Whether nothing more comes of it unless a person asks for a retry."""
        return self.status in FINAL


class Trouble(_Strict):
    """Something that keeps the reconciler from working; told once, and once more when it is over."""

    since: datetime
    sentence: str


class State(_Strict):
    """The content of ``state.json``.

    Attributes:
        serves: the last commit that came to its good end; empty before the first.
        head: the commit that the branch was last seen at.
        attempts: one for each commit, oldest first; the newest are kept.
        troubles: by topic (repository, branch, clock, disk).
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    fleet: str
    serves: Commit | Literal[""] = ""
    release: str = ""
    head: Commit | Literal[""] = ""
    attempts: list[Attempt] = []
    troubles: dict[str, Trouble] = {}


class Order(_Strict):
    """What a person ordered: ``orders/<kind>[-<commit>].json``.

    Attributes:
        kind: ``pause`` holds every rollout until the file is gone; ``retry`` forgets how the
            commit's attempt ended; ``approve`` is the approval that a fleet asks for; ``override``
            lets the commit begin in a freeze window and without approval.
        accept_history: with ``override``: also where the branch was rewritten.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    kind: Literal["pause", "retry", "approve", "override"]
    commit: Commit | Literal[""] = ""
    who: Annotated[str, Field(min_length=1)]
    reason: str = ""
    time: datetime
    accept_history: bool = False


def now() -> datetime:
    """Return the present moment in UTC."""
    return datetime.now(UTC)
