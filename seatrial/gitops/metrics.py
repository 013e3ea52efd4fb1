"""The reconciler's own metrics, for node-exporter's textfile collector.

Written when something changed. A poll that finds nothing only touches the file:
``node_textfile_mtime_seconds`` is the heartbeat.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from seatrial.gitops.state import State, Status


def write(path: Path, state: State, *, is_paused: bool, drift: int | None = None) -> None:
    """Replace the file at once with what is so now.

    Parameters
    ----------
    drift
        How many differences the last look for drift found; none if nobody has looked.

    Raises:
        OSError: the file cannot be written.
    """
    registry = CollectorRegistry()

    def gauge(name: str, says: str, value: float, **labels: str) -> None:
        labels = {"fleet": state.fleet, **labels}
        made = Gauge(f"seatrial_gitops_{name}", says, [*labels], registry=registry)
        made.labels(**labels).set(value)

    gauge(
        "info",
        "The commit that serves, and the one that the branch is at.",
        1,
        serves=state.serves,
        branch_at=state.head,
    )
    head = next((one for one in reversed(state.attempts) if one.commit == state.head), None)
    status = head.status if head else None
    gauge(
        "degraded",
        "1 if the branch is at a commit that was tried and does not serve.",
        status in (Status.REFUSED, Status.REVERTED, Status.FAILED),
    )
    gauge("paused", "1 while a person has paused the fleet.", is_paused)
    gauge("waiting", "1 while a commit waits for its time or its approval.", status == "waiting")
    is_moving = status in (Status.ROLLING, Status.REVERTING)
    gauge("rolling", "1 while a rollout or its way back is at work.", is_moving)
    if head:
        gauge(
            "attempt_timestamp_seconds",
            "When the attempt at the branch's commit came to its status.",
            head.since.timestamp(),
            status=head.status,
            commit=head.commit,
        )
    troubles = Gauge(
        "seatrial_gitops_trouble_since_timestamp_seconds",
        "Since when something keeps the reconciler from working.",
        ["fleet", "topic"],
        registry=registry,
    )
    for topic, trouble in state.troubles.items():
        troubles.labels(state.fleet, topic).set(trouble.since.timestamp())
    if drift is not None:
        gauge("drift_differences", "Differences that the last look for drift found.", drift)
    write_to_textfile(str(path), registry)
    path.chmod(0o644)
