"""A release is laid down whole or not at all, and put back where somebody edited it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

MODULE = Path(__file__).resolve().parents[1] / "plugins/modules/release_tree.py"
FILES = {
    "units/sglang-router.service": "[Unit]\n",
    "release.json": json.dumps({"digest": "1", "commit": "a"}),
}


def lay(path: Path, *, check: bool = False, **changes: Any) -> dict[str, Any]:
    """Run the module and return what it says."""
    given = {
        "path": str(path),
        "files": FILES,
        "links": {"build": "../../builds/b"},
        "named_only": {"release.json": ["commit"]},
        "_ansible_check_mode": check,
        **changes,
    }
    done = subprocess.run(
        [sys.executable, MODULE],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": given}),
        capture_output=True,
        text=True,
        check=False,
    )
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return a release that the module laid down."""
    path = tmp_path / "releases/1"
    assert lay(path)["changed"]
    return path


def test_a_second_run_changes_nothing(release: Path) -> None:
    """Nor does the same release from another commit."""
    assert not lay(release)["changed"]
    again = {**FILES, "release.json": json.dumps({"digest": "1", "commit": "b"})}
    assert not lay(release, files=again)["changed"]
    assert json.loads((release / "release.json").read_text())["commit"] == "a"


@pytest.mark.parametrize("deed", ["edit", "remove", "relink", "unlink", "release.json"])
def test_what_was_changed_by_hand_is_put_back(release: Path, deed: str) -> None:
    """Files and links; a check run names it and leaves it as it is."""
    unit, link = release / "units/sglang-router.service", release / "build"
    name = "build" if "link" in deed else "units/sglang-router.service"
    if deed == "edit":
        unit.chmod(0o644)
        unit.write_text("x")
    elif deed == "remove":
        unit.unlink()
    elif deed == "release.json":
        name = deed
        (release / deed).unlink()
        (release / deed).write_text('{"digest": "2"}')
    else:
        link.unlink()
        if deed == "relink":
            link.symlink_to("/elsewhere")
    checked = lay(release, check=True)
    assert (checked["changed"], checked["edited"]) == (True, [name])
    assert lay(release, check=True)["changed"]
    done = lay(release)
    assert (done["changed"], done["edited"], done["diff"]) == (True, [name], checked["diff"])
    assert unit.read_text() == "[Unit]\n"
    assert str(link.readlink()) == "../../builds/b"
    assert json.loads((release / "release.json").read_text())["digest"] == "1"
    assert not lay(release)["changed"]


def test_a_check_run_lays_nothing_down(tmp_path: Path) -> None:
    """Not even the folder of the releases; the diff shows every file and link."""
    said = lay(tmp_path / "releases/1", check=True)
    assert said["changed"]
    assert {one["after_header"] for one in said["diff"]} == {*FILES, "build"}
    assert list(tmp_path.iterdir()) == []


def test_a_release_that_a_check_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """The checker's own words are the message."""
    refused = lay(
        tmp_path / "releases/1", checks=[{"argv": ["sh", "-c", "echo no such flag; exit 1"]}]
    )
    assert "is refused, nothing was changed: no such flag" in refused["msg"]
    assert list((tmp_path / "releases").iterdir()) == []


def test_a_check_is_given_the_folder_before_it_is_in_place(tmp_path: Path) -> None:
    """As `{}` at the start of a word; elsewhere it is part of a program's text."""
    path = tmp_path / "releases/1"
    program = "import sys; x = {}; sys.exit(x != {} or not open(sys.argv[1]).read())"
    argv = [sys.executable, "-c", program, "{}/release.json"]
    assert lay(path, checks=[{"argv": argv}])["changed"]
    assert path.is_dir()


def test_two_runs_at_once_lay_a_release_down_once(tmp_path: Path) -> None:
    """Neither fails for the other; two people may deploy one commit at the same moment."""
    slow = [{"argv": ["sleep", "0.5"]}]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda _: lay(tmp_path / "releases/1", checks=slow), range(2)))
    assert sorted(one["changed"] for one in said) == [False, True], said
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["1"]
