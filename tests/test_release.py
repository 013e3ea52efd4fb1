"""A release is named by what it is rendered from, and release.json says what systemd starts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial import release, spec
from seatrial.release import ReleaseError

REPOSITORY = Path(__file__).resolve().parents[1]
SPEC_FILE = REPOSITORY / "inventory/rehearsal/group_vars/all/serving_spec.yml"
UNIT = """\
[Service]
EnvironmentFile=/r/env/prefill.env
ExecStart=/b/bin/python -m sglang.launch_server \\
  --json-model-override-args '{"index_topk": 1024}' \\
  --name 50%% --cost $$5

[Install]
"""


def a_release(**changes: Any) -> dict[str, Any]:
    """Return a release.json in plain types."""
    plain = {
        "index_topk": 1024,
        "index_key_dtype": "fp8_e4m3",
        "sglang": "0.5.23",
        "build": "b" * 16,
        "patches": [],
        "model": {"name": "m"},
        "servers": {"prefill": {"argv": ["python", "--page-size", "1"], "env": {"A": "1"}}},
    }
    return {**plain, **changes}


def test_the_command_line_is_read_as_systemd_reads_it() -> None:
    """Joined lines, quotes, doubled percent and dollar signs."""
    command = release.command_of(UNIT)
    assert command.argv[3:] == [
        "--json-model-override-args",
        '{"index_topk": 1024}',
        "--name",
        "50%",
        "--cost",
        "$5",
    ]
    assert command.environment_files == ["/r/env/prefill.env"]


@pytest.mark.parametrize("value", ["a b", '{"x": 1}', "50%", "$HOME", "it's", "plain", 3, 0.5])
def test_a_quoted_word_comes_back_as_it_was(value: str | float) -> None:
    """Quoting and reading are each other's inverse."""
    unit = f"ExecStart=/bin/x {release.systemd_quote(value)}\n"
    assert release.command_of(unit).argv == ["/bin/x", str(value)]


def test_flags_follow_one_rule() -> None:
    """True is bare, false is left out, lists repeat values, dictionaries are JSON."""
    words = release.flag_words({"a": True, "b": False, "c": [1, 2], "d": {"k": 1}, "e": "x y"})
    assert words == ["--a", "--c 1 2", "--d '{\"k\": 1}'", "--e 'x y'"]


def test_a_unit_without_a_command_is_refused() -> None:
    """Nothing to compare a process with."""
    with pytest.raises(ReleaseError, match="one ExecStart"):
        release.command_of("[Service]\n")


def test_the_name_depends_on_spec_templates_and_build_alone(tmp_path: Path) -> None:
    """And not on the commit."""
    found = spec.load(SPEC_FILE)
    template = tmp_path / "sglang-prefill.service.j2"
    template.write_text("x")
    addresses = {"gpu-a": "10.77.0.11"}
    before = release.release_digest(found, "b" * 16, addresses, [template])
    assert release.release_digest(found, "b" * 16, addresses, [template]) == before
    assert release.release_digest(found, "c" * 16, addresses, [template]) != before
    assert release.release_digest(found, "b" * 16, {"gpu-a": "10.77.0.9"}, [template]) != before
    template.write_text("y")
    assert release.release_digest(found, "b" * 16, addresses, [template]) != before


def test_a_change_is_named_as_people_name_it() -> None:
    """Values of the spec first, then flags and environment of each role."""
    new = a_release(
        index_topk=512,
        servers={"prefill": {"argv": ["python", "--page-size", "64"], "env": {"A": "2"}}},
    )
    assert release.changes(a_release(), new) == [
        "index_topk 1024 -> 512",
        "prefill --page-size 1 -> 64",
        "prefill A 1 -> 2",
    ]
    assert release.changes(a_release(), a_release()) == ["the templates alone"]
    assert release.changes({}, a_release()) == ["everything: there was no release before"]


def test_a_file_that_is_no_release_is_named() -> None:
    """With the place and what to do."""
    with pytest.raises(ReleaseError, match=r"gpu-a: .*deploy\.yml"):
        release.parse(json.dumps({"schema": 1}), "gpu-a")


def test_only_a_commit_without_changes_names_a_release(tmp_path: Path) -> None:
    """A dirty tree is refused, with the names of what is dirty."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    with pytest.raises(ReleaseError, match="should be a git work tree"):
        release.commit_of(tmp_path)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-m", "a")
    assert len(release.commit_of(tmp_path)) == 40
    (tmp_path / "a").write_text("2")
    with pytest.raises(ReleaseError, match=r"no uncommitted change, has 1 \(a\)"):
        release.commit_of(tmp_path)


def test_every_environment_line_comes_back() -> None:
    """As the template writes them."""
    assert release.environment_of('# why\nA="1"\nB="x y"\n') == {"A": "1", "B": "x y"}


def test_the_rehearsals_spec_is_plain_yaml() -> None:
    """So that it can be read without Ansible."""
    assert yaml.safe_load(SPEC_FILE.read_text())["serving_spec"]["schema"] == 1
