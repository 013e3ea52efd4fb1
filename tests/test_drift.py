"""Drift is named where it is, with what git says, what the host says and what to do about it."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from seatrial import drift

REPOSITORY = Path(__file__).resolve().parents[1]
LOOK = REPOSITORY / "roles/drift/files/look.py"
RELEASE, OTHER, BUILD = "1" * 16, "2" * 16, "b" * 16
UNIT, ROUTER = "sglang-combined.service", "sglang-router.service"
PYTHON = f"/opt/seatrial/builds/{BUILD}/bin/python"
ARGV = {
    "combined": [PYTHON, "-m", "sglang.launch_server", "--port", "30002"],
    "router": [PYTHON, "-m", "sglang_router.launch_router", "--port", "8000"],
}
CONFIG = "/etc/haproxy/haproxy.cfg"
LINKS = {
    f"{folder}/{unit}": f"/opt/seatrial/current/units/{unit}"
    for folder in drift.UNIT_FOLDERS
    for unit in (UNIT, ROUTER)
}


def sha256(text: str) -> str:
    """Return the checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def described(commit: str = "c" * 40) -> dict[str, Any]:
    """Return a release.json."""
    return {
        "digest": RELEASE,
        "commit": commit,
        "build": BUILD,
        "kernels_sha256": "k",
        "units": {UNIT: sha256("unit combined"), ROUTER: sha256("unit router")},
        "servers": {
            role: {"argv": argv, "env": {"OMP_NUM_THREADS": "1"}, "port": 1}
            for role, argv in ARGV.items()
        },
    }


def wanted(host: str = "gpu-c", **changes: Any) -> drift.Wanted:
    """Return what git says of a host with one whole cell, and the entry on it."""
    files = {
        **{f"units/sglang-{role}.service": f"unit {role}" for role in ARGV},
        **{f"env/{role}.env": "OMP_NUM_THREADS=1\n" for role in ARGV},
        "release.json": json.dumps(described()),
    }
    plain = {
        "cell": "two",
        "release": RELEASE,
        "build": BUILD,
        "files": files,
        "links": {"build": f"../../builds/{BUILD}"},
        "description": described(),
        "laid": {CONFIG: {"content": "frontend", "mode": "0644", "playbook": "deploy.yml"}},
        "services": {"haproxy.service": {"playbook": "deploy.yml"}},
        "entry": {"two": "10.77.0.13:8000"},
    }
    return drift.Wanted.model_validate({**plain, **changes})


def unit(name: str, **changes: Any) -> dict[str, Any]:
    """Return what systemd says of a healthy unit of the release."""
    role = name.removeprefix("sglang-").removesuffix(".service")
    plain = {
        "load": "loaded",
        "active": "active",
        "enabled": "enabled",
        "is_stale": False,
        "pid": 7,
        "file": f"/opt/seatrial/releases/{RELEASE}/units/{name}",
        "drop_ins": [],
        "command": " ".join(ARGV.get(role, [])),
    }
    return {**plain, **changes}


def laid(digest: str = RELEASE) -> dict[str, Any]:
    """Return the folder of a release, as the role lays it down."""
    description = described(commit="another commit of the same release")
    return {
        "files": {
            "release.json": "whatever",
            **{f"units/sglang-{role}.service": sha256(f"unit {role}") for role in ARGV},
            **{f"env/{role}.env": sha256("OMP_NUM_THREADS=1\n") for role in ARGV},
        },
        "links": {"build": f"../../builds/{BUILD}"},
        "build": BUILD,
        "description": {**description, "digest": digest},
        "environment": {role: {"OMP_NUM_THREADS": sha256("1")} for role in ARGV},
    }


def seen() -> dict[str, Any]:
    """Return a host that is what git says."""
    processes = {
        f"sglang-{role}.service": {
            "argv": argv if role != "router" else ["sglang::router", ""],
            "environment": {"OMP_NUM_THREADS": "1"},
            "builds": [BUILD],
        }
        for role, argv in ARGV.items()
    }
    return {
        "schema": 1,
        "files": {CONFIG: {"sha256": sha256("frontend"), "mode": "0644", "owner": "root:root"}},
        "services": {"haproxy.service": unit("haproxy.service", file="/lib/haproxy.service")},
        "gpu_host": {
            "current": RELEASE,
            "last_good": RELEASE,
            "releases": {RELEASE: laid()},
            "builds": {
                BUILD: {
                    "description": {"digest": BUILD},
                    "entries": 9,
                    "touched": 0,
                    "touched_first": [],
                    "has_python": True,
                }
            },
            "links": dict(LINKS),
            "units": {name: unit(name) for name in (UNIT, ROUTER)},
            "drop_ins": [],
            "processes": processes,
            "strays": [],
            "state": {},
            "going_back": {"seatrial-deadman.timer": "inactive", "seatrial-revert.service": ""},
        },
        "entry": {
            "problem": "",
            "cells": {"two": {"address": "10.77.0.13:8000", "is_open": True}},
            "remembered": ["two"],
        },
    }


def compare(*looks: dict[str, Any] | str, **changes: Any) -> list[drift.Difference]:
    """Compare hosts called gpu-c, gpu-d ... with git."""
    names = [f"gpu-{letter}" for letter in "cdef"[: len(looks)]]
    return drift.compare(
        "rehearsal",
        {name: wanted(name, **changes) for name in names},
        {
            name: one if isinstance(one, str) else drift.look(one, name)
            for name, one in zip(names, looks, strict=True)
        },
    )


def only(*looks: dict[str, Any] | str, **changes: Any) -> drift.Difference:
    """Return the one difference that there must be."""
    found = compare(*looks, **changes)
    assert len(found) == 1, found
    return found[0]


def test_a_host_that_is_what_git_says_has_no_drift() -> None:
    """The same release from another commit is no drift, nor is a router's own process title."""
    assert compare(seen()) == []


def test_a_build_that_only_the_host_has_is_no_drift() -> None:
    """Another control machine keeps no build; it cannot know the checksum of the kernels."""
    assert compare(seen(), description={**described(), "kernels_sha256": ""}) == []


Spoil = Callable[[dict[str, Any]], object]


def put(path: str, value: object) -> Spoil:
    """Return a function that changes one value, its place written with ``|`` between the keys."""

    def spoil(look: dict[str, Any]) -> None:
        *parents, last = path.split("|")
        for key in parents:
            look = look[key]
        look[last] = value

    return spoil


FILES = f"gpu_host|releases|{RELEASE}|files|"
SYSTEM = "/etc/systemd/system"
CONTROL = f"/etc/systemd/system.control/{UNIT}.d/50-CPUQuota.conf"
DROP_IN = f"{SYSTEM}/{UNIT}.d/x.conf"


@pytest.mark.parametrize(
    ("spoil", "kind", "what", "found", "todo"),
    [
        (
            put(f"{FILES}units/{UNIT}", "edited"),
            "files",
            f"{RELEASE}/units/{UNIT}",
            "edited",
            "deploy.yml",
        ),
        (
            put(f"{FILES}env/router.env", "edited"),
            "files",
            f"{RELEASE}/env/router.env",
            "edited",
            "deploy.yml",
        ),
        (
            put(f"{FILES}units/notes", "x"),
            "files",
            f"{RELEASE}/units/notes",
            "added by hand",
            f"rm /opt/seatrial/releases/{RELEASE}/units/notes",
        ),
        (
            lambda look: look["gpu_host"]["releases"][RELEASE]["files"].pop("env/router.env"),
            "files",
            f"{RELEASE}/env/router.env",
            "missing",
            "deploy.yml",
        ),
        (
            put(f"gpu_host|releases|{RELEASE}|links|build", "../../builds/x"),
            "files",
            f"{RELEASE}/build",
            "-> ../../builds/x",
            "deploy.yml",
        ),
        (
            put(f"gpu_host|releases|{RELEASE}|description|build", "x"),
            "files",
            f"{RELEASE}/release.json",
            "differs",
            "deploy.yml",
        ),
        (
            put(f"gpu_host|links|{SYSTEM}/{UNIT}", "a file"),
            "units",
            f"{SYSTEM}/{UNIT}",
            "a file",
            f"ln -sfn /opt/seatrial/current/units/{UNIT} {SYSTEM}/{UNIT}",
        ),
        (
            put(f"gpu_host|links|{SYSTEM}/sglang-decode.service", "/opt/x"),
            "units",
            f"{SYSTEM}/sglang-decode.service",
            "-> /opt/x",
            f"rm {SYSTEM}/sglang-decode.service",
        ),
        (
            put("gpu_host|drop_ins", [DROP_IN]),
            "units",
            f"drop-in {DROP_IN}",
            "changes the unit",
            "deploy.yml",
        ),
        (
            put(f"gpu_host|units|{UNIT}|drop_ins", [DROP_IN, "/usr/lib/systemd/system/x.conf"]),
            "units",
            DROP_IN,
            "changes the unit",
            "deploy.yml",
        ),
        (
            put("gpu_host|drop_ins", [CONTROL]),
            "units",
            CONTROL,
            "changes the unit",
            f"rm {CONTROL} && systemctl daemon-reload && systemctl restart {UNIT}",
        ),
        (
            put(f"gpu_host|units|{UNIT}|is_stale", True),
            "units",
            UNIT,
            "an older content",
            "systemctl daemon-reload",
        ),
        (
            put(f"gpu_host|units|{UNIT}|command", "python"),
            "units",
            UNIT,
            "another",
            "systemctl daemon-reload",
        ),
        (
            put(f"gpu_host|units|{UNIT}|load", "masked"),
            "units",
            UNIT,
            "masked",
            f"systemctl unmask {UNIT}",
        ),
        (
            put(f"gpu_host|processes|{UNIT}|argv", [*ARGV["combined"][:-1], "30003"]),
            "processes",
            "argument 4 (--port)",
            "30003",
            "starts the release again",
        ),
        (
            put(f"gpu_host|processes|{UNIT}|argv", [*ARGV["combined"], "--x"]),
            "processes",
            "argument 5",
            "--x",
            "starts the release again",
        ),
        (
            put(f"gpu_host|processes|{UNIT}|environment", {"OMP_NUM_THREADS": "8"}),
            "processes",
            "environment OMP_NUM_THREADS",
            "another value",
            "starts the release again",
        ),
        (
            put(f"gpu_host|processes|{ROUTER}|builds", ["a" * 16]),
            "processes",
            "loaded files",
            "a" * 16,
            "starts the release again",
        ),
        (
            put("gpu_host|strays", [{"pid": 99, "command": "python -m sglang"}]),
            "processes",
            "process 99",
            "python -m sglang",
            "kill 99",
        ),
        (put(f"gpu_host|builds|{BUILD}", None), "build", BUILD, "gone", "deploy.yml"),
        (
            put(f"gpu_host|builds|{BUILD}|description", None),
            "build",
            "build.json",
            "not that",
            f"mv /opt/seatrial/builds/{BUILD}",
        ),
        (
            put(f"gpu_host|builds|{BUILD}|has_python", False),
            "build",
            "bin/python",
            "does not",
            "deploy.yml",
        ),
        (put(f"files|{CONFIG}", None), "files", CONFIG, "missing", "deploy.yml"),
        (put(f"files|{CONFIG}|sha256", "x"), "files", CONFIG, "edited", "deploy.yml"),
        (put(f"files|{CONFIG}|mode", "0666"), "files", CONFIG, "0666 root:root", "deploy.yml"),
        (
            put("services|haproxy.service|enabled", "disabled"),
            "services",
            "haproxy.service at boot",
            "disabled",
            "deploy.yml",
        ),
        (
            put("services|haproxy.service|active", "failed"),
            "services",
            "haproxy.service",
            "failed",
            "deploy.yml",
        ),
        (
            put("entry|problem", "no such file"),
            "entry",
            "admin socket",
            "no such file",
            "deploy.yml",
        ),
        (
            put("entry|cells|two|address", "10.77.0.13:1"),
            "entry",
            "cell two",
            "10.77.0.13:1",
            "deploy.yml",
        ),
        (
            put("gpu_host|going_back|seatrial-revert.service", "failed"),
            "services",
            "seatrial-revert.service",
            "failed",
            "journalctl -u seatrial-revert.service",
        ),
        (put("entry|remembered", []), "entry", "after a restart", "closed", "deploy.yml"),
    ],
)
def test_each_difference_is_named_with_what_to_do(
    spoil: Spoil, kind: str, what: str, found: str, todo: str
) -> None:
    """One fault on a host is one line, and the line says all of it."""
    look = seen()
    spoil(look)
    difference = only(look)
    assert difference.kind == kind
    assert difference.host == "gpu-c"
    assert what in difference.what
    assert found in difference.found
    assert todo in difference.todo


def test_touched_files_of_a_build_are_counted_and_the_first_are_named() -> None:
    """A build has tens of thousands of files; the line stays readable."""
    look = seen()
    look["gpu_host"]["builds"][BUILD] |= {"touched": 40, "touched_first": ["a", "b", "c"]}
    assert only(look).found == "40 touched: a, b and 38 more"


def test_a_running_release_that_is_gone_is_one_line() -> None:
    """Without its release.json nobody knows what its units should be."""
    look = seen()
    look["gpu_host"]["releases"][RELEASE] = None
    difference = only(look)
    assert (difference.kind, difference.found) == ("release", "gone")
    assert difference.what == "current and last_good: the folder"


def test_an_unpromoted_release_is_one_line() -> None:
    """The host runs the wanted release, but would come back to another."""
    look = seen()
    look["gpu_host"] |= {"last_good": OTHER}
    look["gpu_host"]["releases"][OTHER] = laid(OTHER)
    look["entry"]["cells"]["two"]["is_open"] = False
    look["entry"]["remembered"] = []
    difference = only(look)
    assert (difference.what, difference.git, difference.found) == ("last_good", RELEASE, OTHER)


def older() -> dict[str, Any]:
    """Return a host that runs, promoted and whole, the release of an older commit."""
    look = seen()
    host = look["gpu_host"]
    host |= {"current": OTHER, "last_good": OTHER}
    host["releases"] = {OTHER: laid(OTHER), RELEASE: None}
    for name, found in host["units"].items():
        found["file"] = f"/opt/seatrial/releases/{OTHER}/units/{name}"
    return look


def test_a_host_with_an_older_release_is_told_that_and_no_more() -> None:
    """Its files are judged by its own release.json, not by what git renders now."""
    found = compare(older())
    assert [(one.kind, one.what) for one in found] == [
        ("release", "current and last_good"),
        ("files", f"release {RELEASE}"),
    ]
    assert found[0].found == OTHER


@pytest.mark.parametrize(
    ("spoil", "what", "found"),
    [
        (put(f"gpu_host|releases|{OTHER}|files|units/{UNIT}", "x"), f"units/{UNIT}", "edited"),
        (
            put(
                f"gpu_host|releases|{OTHER}|environment|router",
                {"OMP_NUM_THREADS": sha256("9"), "HF_TOKEN": "x"},
            ),
            "env/router.env",
            "differs in HF_TOKEN, OMP_NUM_THREADS",
        ),
        (put(f"gpu_host|releases|{OTHER}|files|x", "x"), f"{OTHER}/x", "added by hand"),
        (put(f"gpu_host|releases|{OTHER}|description", None), "release.json", "missing or no JSON"),
    ],
)
def test_an_edited_older_release_is_seen_too(spoil: Spoil, what: str, found: str) -> None:
    """It is what serves, and what a revert would start."""
    look = older()
    spoil(look)
    lines = [one for one in compare(look) if what in one.what]
    assert [one.found for one in lines] == [found]


def test_a_pending_decision_is_drift() -> None:
    """A rollout runs, or died."""
    look = seen()
    look["gpu_host"]["state"]["pending"] = {"release": RELEASE, "since": 0, "seconds": 1}
    look["entry"]["cells"]["two"]["is_open"] = False
    look["entry"]["remembered"] = []
    difference = only(look)
    assert difference.kind == "decision"
    assert difference.found == f"{RELEASE}, and no timer that takes it back"
    look["gpu_host"]["going_back"]["seatrial-deadman.timer"] = "active"
    assert only(look).found == RELEASE


def test_a_held_fleet_lock_is_drift_once_for_all_its_hosts() -> None:
    """A rollout runs, or its controller died."""
    look = seen()
    look["gpu_host"]["state"]["fleet_lock"] = {"token": "t", "who": "ann", "commit": "c" * 40}
    look["entry"] = None
    (difference,) = compare(look, look)
    assert (difference.kind, difference.host) == ("lock", "fleet")
    assert difference.what == "fleet lock on gpu-c, gpu-d"
    assert difference.found == f"rollout {'c' * 12} of ann"
    assert "playbooks/unlock.yml" in difference.todo


def test_an_open_entry_of_a_cell_that_must_not_serve_is_drift() -> None:
    """Undecided, down or unpromoted: its entry is closed."""
    look = seen()
    look["gpu_host"]["units"][UNIT]["active"] = "failed"
    assert [(one.kind, one.what, one.found) for one in compare(look)] == [
        ("services", UNIT, "failed"),
        ("entry", "entry of cell two", "open"),
    ]


def test_a_closed_entry_of_a_cell_that_could_serve_is_drift() -> None:
    """A rollout that died between confirm and open leaves this."""
    look = seen()
    look["entry"]["cells"]["two"]["is_open"] = False
    look["entry"]["remembered"] = []
    difference = only(look)
    assert (difference.git, difference.found) == ("open", "closed")


def test_a_split_fleet_is_said_once() -> None:
    """The line names what each cell runs."""
    split = [one for one in compare(older(), seen(), entry=None) if one.kind == "split"]
    assert len(split) == 1
    assert split[0].host == "fleet"
    assert OTHER in split[0].found
    assert RELEASE in split[0].found


def test_a_host_that_does_not_answer_is_said_and_the_others_are_judged() -> None:
    """What is not known is not called right; whether its cell should serve is left open."""
    look = seen()
    put(f"files|{CONFIG}|sha256", "x")(look)
    look["entry"]["cells"]["two"]["is_open"] = False
    look["entry"]["remembered"] = []
    found = compare(look, "ssh: connect to host gpu-d port 22: No route to host")
    assert [(one.host, one.kind) for one in found] == [("gpu-d", "unreachable"), ("gpu-c", "files")]
    assert "No route" in found[0].found


def test_what_a_rollout_would_change_of_a_host_is_said_without_values_of_its_environment() -> None:
    """Arguments with both values, units and variables by name; a host that runs it: nothing."""
    look = older()
    running = look["gpu_host"]["releases"][OTHER]["description"]
    running["servers"] = copy.deepcopy(running["servers"])
    running["servers"]["combined"]["argv"][-1] = "31000"
    running["servers"]["combined"]["env"] = {"OMP_NUM_THREADS": "secret"}
    running["units"] = {UNIT: "another"}
    report = drift.report(
        "rehearsal",
        "c" * 40,
        {"gpu-c": wanted(), "gpu-d": wanted()},
        {"gpu-c": drift.look(look, "gpu-c"), "gpu-d": drift.look(seen(), "gpu-d")},
        now(),
    )
    assert report.changes == {
        "gpu-c": [
            "combined --port 31000 -> 30002",
            "combined environment OMP_NUM_THREADS",
            f"unit {UNIT}",
            f"unit {ROUTER}",
        ]
    }


def test_a_secret_value_is_never_shown() -> None:
    """Of environment variables only the names are."""
    look = seen()
    look["gpu_host"]["processes"][UNIT]["environment"] = {"OMP_NUM_THREADS": "hunter2"}
    report = drift.report("f", "c" * 40, {"a": wanted()}, {"a": drift.look(look, "a")}, now())
    assert "hunter2" not in report.model_dump_json()
    assert "hunter2" not in drift.text(report)


def now() -> datetime:
    """Return the moment of a report."""
    return datetime(2026, 1, 1, tzinfo=UTC)


def test_the_table_fits_and_its_commands_can_be_copied() -> None:
    """Columns wrap; a command stands whole on a line of its own, once."""
    look = seen()
    put(f"{FILES}units/{UNIT}", "edited")(look)
    put(f"files|{CONFIG}", None)(look)
    report = drift.report("lab", "c" * 40, {"a": wanted()}, {"a": drift.look(look, "a")}, now())
    lines = drift.text(report).splitlines()
    assert lines[0] == f"fleet lab, commit {'c' * 12}, release {RELEASE}; 1 of 1 hosts judged"
    assert lines[2].split() == ["host", "what", "git", "says", "host", "says", "do"]
    table, legend = lines[2 : lines.index("what to do")], lines[lines.index("what to do") + 1 :]
    assert max(len(line) for line in table) <= 118
    assert legend == ["(1) ansible-playbook -i inventory/lab deploy.yml"]


def test_the_report_comes_back_from_its_file() -> None:
    """A reconciler reads what the playbook wrote."""
    report = drift.report("lab", "c" * 40, {"a": wanted()}, {"a": "no answer"}, now())
    assert not report.is_clean
    assert report.unreachable == ["a"]
    assert drift.Report.model_validate_json(report.model_dump_json(by_alias=True)) == report
    clean = drift.report("lab", "c" * 40, {"a": wanted()}, {"a": drift.look(seen(), "a")}, now())
    assert clean.is_clean
    assert "No drift" in drift.text(clean)


def test_an_answer_of_another_schema_is_refused() -> None:
    """In one sentence that names the host."""
    with pytest.raises(drift.DriftError, match=r"^gpu-c: schema: .*roles/drift"):
        drift.look({**seen(), "schema": 2}, "gpu-c")


def looked_at(root: Path | str, **asked: Any) -> dict[str, Any]:
    """Run the program that looks, on this machine."""
    plain = {
        "root": str(root),
        "release": RELEASE,
        "build": BUILD,
        "units": [],
        "environment": {},
        "files": [],
        "services": [],
        "entry_socket": "",
        "entry_state_file": "",
    }
    done = subprocess.run(
        [sys.executable, LOOK, json.dumps({**plain, **asked})],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def host(tree: Callable[[dict[str, str]], Path]) -> Path:
    """Return a root with one release and its build."""
    root = tree(
        {
            f"releases/{RELEASE}/release.json": json.dumps(described()),
            f"releases/{RELEASE}/units/{UNIT}": "unit combined",
            f"releases/{RELEASE}/env/combined.env": '# why\nA="x y"\nTOKEN="secret"\n',
            f"builds/{BUILD}/lib/module.py": "",
            f"builds/{BUILD}/build.json": json.dumps({"digest": BUILD}),
            "state/pending.json": json.dumps({"release": RELEASE}),
        }
    )
    (root / f"releases/{RELEASE}/build").symlink_to(f"../../builds/{BUILD}")
    (root / "current").symlink_to(f"releases/{RELEASE}")
    return root


def test_the_look_is_what_the_schema_asks_for(host: Path) -> None:
    """And finds links, files, the build, and a pending decision."""
    found = drift.look(looked_at(host, files=["/etc/hostname", "/nowhere"]), "here").gpu_host
    assert found is not None
    assert (found.current, found.last_good) == (RELEASE, "")
    assert found.pending == {"release": RELEASE}
    release = found.releases[RELEASE]
    assert release is not None
    assert release.files[f"units/{UNIT}"] == sha256("unit combined")
    assert release.links == {"build": f"../../builds/{BUILD}"}
    assert release.environment["combined"]["A"] == sha256("x y")


def test_a_value_of_an_environment_file_stays_on_the_host(host: Path) -> None:
    """Its checksum is enough to compare."""
    assert "secret" not in json.dumps(looked_at(host))


def test_a_look_at_a_bare_machine_is_no_error(tmp_path: Path) -> None:
    """Nothing is there, and the schema can say so."""
    bare = drift.look(looked_at(tmp_path / "none"), "here").gpu_host
    assert bare is not None
    assert bare.current == ""
    assert bare.releases == {RELEASE: None}
    assert drift.look(looked_at(""), "here").gpu_host is None


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program that looks, as a module, one that forgives no difference of times."""
    loader = importlib.util.spec_from_file_location("look", LOOK)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    monkeypatch.setattr(module, "CLOCK_SECONDS", 0.0)
    return module


@pytest.mark.parametrize("deed", ["edit", "add", "delete", "chmod"])
def test_a_build_that_is_touched_after_it_came_is_seen(
    host: Path, deed: str, program: ModuleType
) -> None:
    """Whatever is done to it leaves a later time on a file or on its folder."""
    folder = host / "builds" / BUILD
    folder.chmod(0o755)  # the last thing that happens to a build is its own folder's
    assert program.build(folder)["touched"] == 0
    path = folder / "lib/module.py"
    deeds: dict[str, Callable[[], object]] = {
        "edit": lambda: path.write_text("x"),
        "add": (folder / "lib/more.py").touch,
        "delete": path.unlink,
        "chmod": lambda: path.chmod(0o600),
    }
    time.sleep(0.05)  # a file's time moves on with the kernel's tick
    deeds[deed]()
    assert program.build(folder)["touched"] >= 1
