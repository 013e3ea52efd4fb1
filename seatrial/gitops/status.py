"""What a person reads who asks how the fleet stands to its branch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from seatrial.gitops.settings import Settings
from seatrial.gitops.state import Attempt, Order, State, Status

SHOWN = 5


def headline(state: State) -> str:
    """Return the one line that says what serves, what the branch is at, and why they differ."""
    serves = f"serving {short(state.serves)}" if state.serves else "serving nothing of this branch"
    if not state.head:
        return f"{serves}, the branch was not seen yet"
    if state.head == state.serves:
        return f"{serves}, and that is what the branch is at"
    head = next((one for one in reversed(state.attempts) if one.commit == state.head), None)
    both = f"{serves}, branch at {short(state.head)}"
    if head is None:
        return f"{both}, not looked at yet"
    return {
        Status.REFUSED: f"degraded: {both}, {_because('refused', head)}",
        Status.REVERTED: f"degraded: {both}, {_because('refused', head)}",
        Status.FAILED: f"degraded: {both}, {_because('failed', head)}",
        Status.WAITING: f"{both}, waits: {_reason(head)}",
        Status.ROLLING: f"{both}, which is being rolled out since {moment(head.since)}",
        Status.REVERTING: f"{both}, which is being taken back since {moment(head.since)}",
        Status.UNCHANGED: f"{both}, which changes nothing on the hosts",
        Status.PROMOTED: f"{both}, which is promoted",
    }[head.status]


def lines(settings: Settings, state: State, orders: Iterable[Order]) -> Iterator[str]:
    """Yield the headline, what stands in the way, what people ordered, and the last attempts."""
    yield f"{settings.fleet}: {headline(state)}"
    for topic, trouble in state.troubles.items():
        yield f"  trouble   {topic} since {moment(trouble.since)}: {trouble.sentence}"
    for order in orders:
        yield f"  {order.kind:<9} {_order(order)}"
    for attempt in state.attempts[-SHOWN:]:
        yield f"  {attempt.status:<9} {_attempt(attempt)}"


def short(commit: str) -> str:
    """Return a commit as people read it."""
    return commit[:12]


def moment(time: datetime) -> str:
    """Return a time as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ")


def _order(order: Order) -> str:
    commit = f"{short(order.commit)} " if order.commit else ""
    reason = f": {order.reason}" if order.reason else ""
    return f"{commit}by {order.who} at {moment(order.time)}{reason}"


def _attempt(attempt: Attempt) -> str:
    facts = [short(attempt.commit), moment(attempt.since), attempt.rollout, attempt.signer]
    return "  ".join(fact for fact in facts if fact)


def _because(word: str, attempt: Attempt) -> str:
    """Return the word and the reason; a reason that begins with the word has it already."""
    reason = _reason(attempt)
    return reason if reason.startswith(word) else f"{word} because {reason}"


def _reason(attempt: Attempt) -> str:
    return attempt.sentence.rstrip().rstrip(".") or "no reason was written down"
