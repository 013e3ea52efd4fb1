"""Thresholds files are complete, and say what is wrong when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from seatrial import thresholds
from seatrial.thresholds import ThresholdsError

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
