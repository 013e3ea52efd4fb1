"""What playbooks ask the library decides which cells move, and by what a cell is judged."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError

REPOSITORY = Path(__file__).resolve().parents[1]
SPEC_FILE = REPOSITORY / "inventory/rehearsal/group_vars/all/serving_spec.yml"
HOSTS = ["gpu-a", "gpu-b", "gpu-c"]
CELLS = ["one", "two"]
OLD, NEW = "0" * 16, "1" * 16
SAME = f"split: cell one runs {NEW}, cell two runs {NEW}, "


@pytest.fixture(scope="module")
def filters() -> ModuleType:
    """Return the filter plugin as Ansible loads it."""
    path = REPOSITORY / "plugins/filter/seatrial.py"
    loader = importlib.util.spec_from_file_location("filters", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.fixture
def plain() -> dict[str, Any]:
    """Return the rehearsal's spec, every key in place."""
    value: dict[str, Any] = yaml.safe_load(SPEC_FILE.read_text())["serving_spec"]
    return value


def status(**changed: Any) -> dict[str, Any]:
    """Return what a settled host says, but for what is changed."""
    settled = {"current": NEW, "last_good": NEW, "active": True, "pending": None, "drift": {}}
    return {**settled, **changed}


def test_a_settled_fleet_does_not_move(filters: ModuleType, plain: dict[str, Any]) -> None:
    """Nothing to do is nothing done."""
    found = filters.moves(plain, NEW, {host: status() for host in HOSTS}, CELLS)
    assert found == {"cells": [], "hosts": [], "sizes": []}


@pytest.mark.parametrize(
    "changed",
    [
        {"current": OLD},
        {"last_good": OLD},
        {"active": False},
        {"pending": {"release": NEW}},
        {"drift": {"sglang-decode.service": "runs with other arguments"}},
    ],
)
def test_a_cell_moves_whole_when_one_of_its_hosts_is_not_settled(
    filters: ModuleType, plain: dict[str, Any], changed: dict[str, Any]
) -> None:
    """A rollout that died in between is finished by the next."""
    found = filters.moves(
        plain, NEW, {**{host: status() for host in HOSTS}, "gpu-b": status(**changed)}, CELLS
    )
    assert found == {"cells": ["one"], "hosts": ["gpu-a", "gpu-b"], "sizes": [2]}


def test_batches_keep_whole_cells_together(filters: ModuleType, plain: dict[str, Any]) -> None:
    """The sizes that Ansible's `serial` takes are hosts; cells are never cut."""
    plain["rollout"]["batches"] = [2]
    found = filters.moves(plain, NEW, {host: status(current=OLD) for host in HOSTS}, CELLS)
    assert found["sizes"] == [3]


@pytest.mark.parametrize(
    ("serving", "cells", "sizes"),
    [(CELLS, ["one", "two"], [2, 1]), (["one"], ["two", "one"], [1, 2]), ([], CELLS, [2, 1])],
)
def test_a_cell_that_does_not_serve_moves_first(
    filters: ModuleType,
    plain: dict[str, Any],
    serving: list[str],
    cells: list[str],
    sizes: list[int],
) -> None:
    """Else a cell that is down could not be mended: the canary beside it may not be drained."""
    found = filters.moves(plain, NEW, {host: status(current=OLD) for host in HOSTS}, serving)
    assert (found["cells"], found["sizes"]) == (cells, sizes)


def test_a_revert_is_judged_by_what_ran_before(filters: ModuleType, plain: dict[str, Any]) -> None:
    """Ports and index settings come from the running release, not from the merge that failed."""
    running = {
        "index_topk": 1024,
        "index_key_dtype": "fp8_e4m3",
        "servers": {"router": {"port": 8000}, "combined": {"port": 30002}},
    }
    plain["index_topk"] = 512
    plain["roles"]["router"]["port"] = 9999
    found = filters.as_released(plain, {"gpu-c": running})
    assert found["index_topk"] == 1024
    assert found["roles"]["router"]["port"] == 8000
    assert plain["roles"]["router"]["port"] == 9999


def test_spec_values_from_elsewhere_than_the_file_are_refused(
    filters: ModuleType, plain: dict[str, Any]
) -> None:
    """`-e serving_spec=...` would serve what no commit says."""
    check = filters.FilterModule().filters()["seatrial_check"]
    assert check(plain, str(SPEC_FILE), HOSTS)["index_topk"] == 1024
    plain["index_topk"] = 512
    with pytest.raises(AnsibleFilterError, match="should come from"):
        check(plain, str(SPEC_FILE), HOSTS)


@pytest.mark.parametrize(
    ("gates", "said"),
    [
        ({"select": ["windo"]}, "gates.select: should be among .*window.*, has windo"),
        ({"thresholds": "rehearsl"}, "no thresholds rehearsl; by name there are: .*rehearsal"),
        ({"thresholds": "any-server", "select": ["memory"]}, "have no section memory"),
    ],
)
def test_gates_that_cannot_judge_are_refused_before_anything_stops(
    filters: ModuleType, plain: dict[str, Any], gates: dict[str, Any], said: str
) -> None:
    """A typing error would move a cell, find it INVALID, and bring it back."""
    check = filters.FilterModule().filters()["seatrial_check_gates"]
    assert check(plain, str(REPOSITORY / "gates"))
    plain["gates"].update(gates)
    with pytest.raises(AnsibleFilterError, match=said):
        check(plain, str(REPOSITORY / "gates"))


def test_a_host_without_facts_is_named_all_the_same(filters: ModuleType) -> None:
    """An unreachable host knows no reason."""
    hosts = [
        {"inventory_hostname": "a", "cell_is_switched": True},
        {"inventory_hostname": "b", "cell_problem": "no disk"},
        {"inventory_hostname": "c"},
    ]
    assert filters.problems(hosts, "cell_is_switched") == "b: no disk; c: no answer"


def test_a_fleet_that_agrees_is_not_split(filters: ModuleType, plain: dict[str, Any]) -> None:
    """Also before the first release."""
    assert filters.split(plain, {host: status() for host in HOSTS}) == ""
    nothing = status(current="", last_good="", active=False)
    assert filters.split(plain, dict.fromkeys(HOSTS, nothing)) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"gpu-a": {"current": OLD}, "gpu-b": {"current": OLD}},
            f"split: cell one runs {OLD}, cell two runs {NEW}",
        ),
        (
            {"gpu-b": {"current": OLD}},
            (
                f"split: gpu-a of cell one runs {NEW}, gpu-b of cell one runs {OLD}, "
                f"cell two runs {NEW}"
            ),
        ),
        (
            {"gpu-c": {"pending": {"release": NEW}}},
            SAME + "undecided on gpu-c",
        ),
        (
            {"gpu-c": {"last_good": OLD}},
            SAME
            + ", ".join(f"last_good is {NEW} on {host}" for host in HOSTS[:2])
            + f", last_good is {OLD} on gpu-c",
        ),
    ],
)
def test_a_split_fleet_is_told_cell_by_cell(
    filters: ModuleType, plain: dict[str, Any], changed: dict[str, dict[str, Any]], said: str
) -> None:
    """What a rollout leaves that died in between."""
    found = {host: status(**changed.get(host, {})) for host in HOSTS}
    assert filters.split(plain, found) == said


def test_the_lock_is_asked_for_as_long_as_a_rollout_can_take(
    filters: ModuleType, plain: dict[str, Any]
) -> None:
    """Two batches and the way back: requests end twice, then the dead man's time runs."""
    batch = plain["rollout"]["dead_man_seconds"] + 2 * plain["timeouts"]["drain_seconds"]
    assert filters.lock_request(plain, "c")["seconds"] == 3 * batch


def test_a_cell_is_asked_where_its_release_serves(
    filters: ModuleType, plain: dict[str, Any]
) -> None:
    """Not where git's next release would: a revert brings other ports and roles back."""
    ports = {"gpu-a": {"prefill": 30100, "router": 8100}, "gpu-b": {"decode": 30101}}
    releases = {
        host: {
            "index_topk": 1024,
            "index_key_dtype": "bf16",
            "units": {},
            "servers": {role: {"port": port} for role, port in roles.items()},
        }
        for host, roles in ports.items()
    }
    found = filters.cell_file(
        plain,
        "gpu-a",
        releases=releases,
        addresses={host: host for host in HOSTS},
        select=["readiness"],
        plan=None,
        prometheus_url="",
        ssh_config="",
    )
    assert found["router_url"] == "http://gpu-a:8100"
    assert {server["role"]: server["url"] for server in found["servers"]} == {
        "prefill": "http://gpu-a:30100",
        "decode": "http://gpu-b:30101",
        "router": "http://gpu-a:8100",
    }
