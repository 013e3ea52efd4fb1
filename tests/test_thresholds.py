"""Thresholds files are complete, and say what is wrong when they are not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from seatrial import thresholds
from seatrial.thresholds import ThresholdsError

MEMORY = "memory_growth_mib_per_1000_requests_max"
FOLDER = Path(__file__).resolve().parents[1] / "gates/thresholds"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yml"))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_is_valid(name: str) -> None:
    """Each file that ships is named after what it says, and tells where its numbers come from."""
    found = thresholds.load(FOLDER, name)
    assert found.model == name
    assert found.origin.run


@pytest.mark.parametrize("name", ["rehearsal", "deepseek-v4-flash-nvfp4"])
def test_rollout_file_is_complete(name: str) -> None:
    """What a rollout uses has a section for each group."""
    found = thresholds.load(FOLDER, name)
    for section in ("identity", "readiness", "window", "throughput", "memory"):
        assert found.section(section) is not None


def test_file_may_be_named_by_its_path(tmp_path: Path) -> None:
    """By hand, a file of one's own serves."""
    path = tmp_path / "mine.yml"
    path.write_text((FOLDER / "any-server.yml").read_text())
    assert thresholds.load(FOLDER, str(path)).model == "any-server"


def test_unknown_name_lists_the_known() -> None:
    """A misspelt name is answered with the right ones."""
    with pytest.raises(ThresholdsError, match=r"no thresholds reharsal; by name there are: any-"):
        thresholds.load(FOLDER, "reharsal")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windw": {}}, "windw: is not a key"),
        ({"readiness": {"answer_tokens": 4}}, "readiness.ready_servers_ratio_min: is missing"),
        ({"request_seconds": -1}, "request_seconds: Input should be greater than 0"),
        ({"schema": 2}, "schema: Input should be 1"),
        ({"request_seconds": True}, "request_seconds: Input should be a valid number"),
        ({"request_seconds": "3"}, "request_seconds: Input should be a valid number"),
        ({"request_seconds": math.inf}, "request_seconds: Input should be a finite number"),
        ({"request_seconds": 1e12}, "request_seconds: Input should be less than"),
        ({"concurrency": True}, "concurrency: Input should be a valid integer"),
        ({"soak": {MEMORY: math.nan}}, f"soak.{MEMORY}: Input should be a finite number"),
        ({"recall": {"depths": []}}, "recall.depths: List should have at least 1 item"),
    ],
)
def test_wrong_key_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """One line per wrong key, with its path."""
    value = yaml.safe_load((FOLDER / "any-server.yml").read_text()) | change
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(value))
    with pytest.raises(ThresholdsError) as caught:
        thresholds.load(FOLDER, str(path))
    assert message in str(caught.value)


def test_missing_section_is_named() -> None:
    """A gate without thresholds says which section to add."""
    with pytest.raises(ThresholdsError, match="have no section memory"):
        thresholds.load(FOLDER, "any-server").section("memory")


@pytest.mark.parametrize(("fleet", "seconds"), [("rehearsal", 90), ("production", 600)])
def test_selected_groups_fit_their_time(repository: Path, fleet: str, seconds: float) -> None:
    """What a rollout runs by default has a budget for each group, and together they fit."""
    spec = yaml.safe_load(
        (repository / f"inventory/{fleet}/group_vars/all/serving_spec.yml").read_text()
    )["serving_spec"]
    budget = thresholds.load(FOLDER, spec["gates"]["thresholds"]).budget_seconds
    assert sum(budget[group] for group in spec["gates"]["select"]) <= seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window:", "the key window stands twice"),
        ("critical: {readiness: ''}", "the key critical stands twice"),
        ("answers: [", "should be YAML"),
        ("? [a]\n: b", "a key should be a word"),
    ],
)
def test_key_that_stands_twice_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """YAML would take the last one in silence."""
    path = tmp_path / "mine.yml"
    path.write_text((FOLDER / "rehearsal.yml").read_text() + f"\n{text}\n")
    with pytest.raises(ThresholdsError, match=message):
        thresholds.load(FOLDER, str(path))


@pytest.mark.parametrize("day", ["soon", "2026-13-01", ""])
def test_origin_has_a_day(tmp_path: Path, day: str) -> None:
    """When the numbers were set is a day, not a word."""
    value = yaml.safe_load((FOLDER / "any-server.yml").read_text())
    value["origin"]["when"] = day
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(value))
    with pytest.raises(ThresholdsError, match=r"origin\.when: should be a day like 2026-11-29"):
        thresholds.load(FOLDER, str(path))
