"""What the reconciler knows, on disk: attempts, troubles, and the orders that people gave.

``state.json`` is written by the reconciler alone, under its lock. Orders (pause, retry, approve,
override) are small files that people's commands write and the reconciler reads, so the two never
write the same file. Every write is atomic and synced.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.errors import SeatrialError
from seatrial.gitops import disk
from seatrial.gitops.clock import Clock

FILE = "state.json"
ORDERS = "orders"
AGAIN_SECONDS = 60
KEPT = 200
"""Attempts that are remembered; older ones are of commits that the branch has long left behind."""

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


class StateError(SeatrialError):
    """What the reconciler knows cannot be read, or an order cannot be given."""


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
        signer: who signed the commit.
        approver: who approved it, where somebody had to.
        sentence: what was said of it last.
        rollout: its name in the ledger, the last one's if it was resumed.
        began: when deploy.yml was first started for it.
        asked: since when a person's approval is awaited.
        again: not to be tried before; for what ends by itself, such as another's fleet lock.
        runs: how often deploy.yml was started for it; the second time is a resume.
        reverts: how often rollback.yml was.
        ledger_before: how many events of the ledger are older than its last run.
        release: what it makes of the hosts.
        previous: the release that served before it.
        record: the folder of its plan and of what the playbooks said.
        content: digest of everything in the commit that hosts or gates can see.
        inputs: digest of what was judged beside the commit (signers, approvals, settings): a
            refusal holds as long as it is the same.
        override: who let it pass windows and approval, and why.
        report: the folder of its reports on the control host.
        is_told: whether its last announcement was made.
        is_noted: whether its note is on the commit.
    """

    commit: Commit
    status: Status
    since: datetime
    signer: str = ""
    approver: str = ""
    sentence: str = ""
    rollout: str = ""
    began: datetime | None = None
    asked: datetime | None = None
    again: datetime | None = None
    runs: int = 0
    reverts: int = 0
    ledger_before: int = 0
    release: str = ""
    previous: str = ""
    record: str = ""
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
    """Something that keeps the reconciler from working; told once, and again when it is over."""

    since: datetime
    sentence: str


class DriftSeen(_Strict):
    """How many differences a look for drift found, and a digest that tells whether they are new."""

    digest: str
    count: int


class State(_Strict):
    """The content of ``state.json``.

    Attributes:
        serves: the last commit that came to its good end; empty before the first.
        head: the commit that the branch was last seen at.
        attempts: one for each commit, oldest first; the newest are kept.
        release: the release that it made.
        troubles: by topic (repository, branch, clock, disk).
        clock: how this machine's clock went when this was written.
        drift: what the last look for drift found; None if nobody has looked.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    fleet: str
    serves: Commit | Literal[""] = ""
    release: str = ""
    head: Commit | Literal[""] = ""
    attempts: list[Attempt] = []
    troubles: dict[str, Trouble] = {}
    clock: Clock | None = None
    drift: DriftSeen | None = None

    def attempt(self, commit: str) -> Attempt | None:
        """Return the attempt to roll ``commit`` out, if there is one."""
        return next((one for one in self.attempts if one.commit == commit), None)

    @property
    def running(self) -> Attempt | None:
        """The attempt that has begun and has not ended."""
        begun = (Status.ROLLING, Status.REVERTING)
        return next((one for one in self.attempts if one.status in begun), None)


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


def soon() -> datetime:
    """Return when to try again what should end by itself."""
    return now() + timedelta(seconds=AGAIN_SECONDS)


def load(folder: Path, fleet: str) -> State:
    """Read the state in ``folder``; a new one if there is none.

    Raises:
        StateError: it is there and cannot be read, or is another fleet's.
    """
    path = folder / FILE
    try:
        state = State.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return State(fleet=fleet)
    except (OSError, ValidationError) as error:
        raise StateError(
            f"{path}: cannot be read as state ({_first(error)}): it says which commits may follow "
            "what serves; bring it back from a backup, or move it away and look at the branch "
            "before the next poll takes whatever it is at"
        ) from None
    if state.fleet != fleet:
        raise StateError(f"{path}: is the state of fleet {state.fleet}, not of {fleet}")
    return state


def save(folder: Path, state: State) -> None:
    """Write the state, atomically and synced. Keeps the newest attempts.

    Raises:
        OSError: it could not be written; the old state is still there.
    """
    state.attempts = state.attempts[-KEPT:]
    disk.write(folder / FILE, state.model_dump_json(by_alias=True, indent=2) + "\n")


def orders(folder: Path) -> list[Order]:
    """Return the orders that stand, oldest first.

    Raises:
        StateError: a file that is no order.
    """
    found = []
    for path in sorted((folder / ORDERS).glob("[!.]*.json")):
        try:
            found.append(Order.model_validate_json(path.read_bytes()))
        except FileNotFoundError:
            continue  # withdrawn since
        except (OSError, ValidationError) as error:
            raise StateError(f"{path}: is no order ({_first(error)}); remove it") from None
    return sorted(found, key=lambda order: order.time)


def give(folder: Path, order: Order) -> None:
    """Let an order stand; the next poll reads it."""
    (folder / ORDERS).mkdir(exist_ok=True)
    disk.write(
        folder / ORDERS / _name(order.kind, order.commit),
        order.model_dump_json(by_alias=True) + "\n",
    )


def withdraw(folder: Path, kind: str, commit: str = "") -> bool:
    """Take an order back, and return whether there was one."""
    path = folder / ORDERS / _name(kind, commit)
    if not path.exists():
        return False
    path.unlink()
    return True


def _name(kind: str, commit: str) -> str:
    return f"{kind}-{commit}.json" if commit else f"{kind}.json"


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return f"{where}: {problem['msg']}" if where else str(problem["msg"])
    return str(error)
