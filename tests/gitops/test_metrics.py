"""The reconciler's metrics are what node-exporter and Prometheus accept, and say what is so."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from seatrial.gitops import metrics
from seatrial.gitops.state import Attempt, State, Status, Trouble

OLD, NEW = "a" * 40, "b" * 40
WHEN = datetime(2026, 11, 29, 20, 0, tzinfo=UTC)


def state(status: Status, *, serves: str = OLD) -> State:
    """Return a state whose branch is at a commit that came to this."""
    attempt = Attempt(commit=NEW, status=status, since=WHEN)
    return State(fleet="rehearsal", serves=serves, head=NEW, attempts=[attempt])


def samples(path: Path) -> dict[str, float]:
    """Return each sample by its name."""
    families = text_string_to_metric_families(path.read_text())
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.parametrize(
    ("status", "degraded", "rolling"),
    [
        (Status.REFUSED, 1, 0),
        (Status.REVERTED, 1, 0),
        (Status.FAILED, 1, 0),
        (Status.ROLLING, 0, 1),
        (Status.PROMOTED, 0, 0),
        (Status.UNCHANGED, 0, 0),
    ],
)
def test_degraded_is_a_branch_that_was_tried_and_does_not_serve(
    tmp_path: Path, status: Status, degraded: int, rolling: int
) -> None:
    """What an alert asks for."""
    metrics.write(tmp_path / "x.prom", state(status), is_paused=False)
    found = samples(tmp_path / "x.prom")
    assert found["seatrial_gitops_degraded"] == degraded
    assert found["seatrial_gitops_rolling"] == rolling
    assert found["seatrial_gitops_attempt_timestamp_seconds"] == WHEN.timestamp()


def test_troubles_pause_and_drift_are_told(tmp_path: Path) -> None:
    """And gone when they are over."""
    path = tmp_path / "x.prom"
    now = state(Status.PROMOTED)
    now.troubles = {"repository": Trouble(since=WHEN, sentence='cannot "be" reached\n')}
    metrics.write(path, now, is_paused=True, drift=3)
    found = samples(path)
    assert found["seatrial_gitops_trouble_since_timestamp_seconds"] == WHEN.timestamp()
    assert found["seatrial_gitops_paused"] == 1
    assert found["seatrial_gitops_drift_differences"] == 3
    now.troubles = {}
    metrics.write(path, now, is_paused=False)
    assert "seatrial_gitops_trouble_since_timestamp_seconds" not in samples(path)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["x.prom"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_before_the_first_look_there_is_no_commit(tmp_path: Path) -> None:
    """An empty state is written without complaint."""
    metrics.write(tmp_path / "x.prom", State(fleet="rehearsal"), is_paused=False)
    assert samples(tmp_path / "x.prom")["seatrial_gitops_degraded"] == 0
