"""What holds for every fleet's inventory, besides the names of its variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial import spec

FLEETS = ("production", "rehearsal")
# The groups that playbooks name.
GROUPS = {"control", "gpu_hosts", "build_hosts", "entry", "monitoring"}


def groups_of(repository: Path, fleet: str) -> dict[str, dict[str, Any]]:
    """Return the hosts of each group of a fleet."""
    content = yaml.safe_load((repository / "inventory" / fleet / "hosts.yml").read_text())
    children = content["all"]["children"]
    return {name: group["hosts"] for name, group in children.items()}


def spec_of(repository: Path, fleet: str) -> spec.ServingSpec:
    """Return the checked serving spec of a fleet."""
    return spec.load(repository / "inventory" / fleet / "group_vars/all/serving_spec.yml")


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_fleet_has_the_groups_that_playbooks_name(repository: Path, fleet: str) -> None:
    """A missing group would be a play without hosts, which passes."""
    groups = groups_of(repository, fleet)
    assert set(groups) == GROUPS
    assert all(groups.values())


@pytest.mark.parametrize("fleet", FLEETS)
def test_every_host_has_an_address_for_the_others(repository: Path, fleet: str) -> None:
    """Said once for a host, in the first group that names it."""
    groups = groups_of(repository, fleet)
    facts: dict[str, dict[str, Any]] = {}
    for hosts in groups.values():
        for name, variables in hosts.items():
            facts.setdefault(name, {}).update(variables or {})
    assert all("seatrial_address" in variables for variables in facts.values())


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_spec_is_valid_and_its_cells_are_the_gpu_hosts(repository: Path, fleet: str) -> None:
    """The worked examples pass the check that refuses a wrong one."""
    spec.check_hosts(spec_of(repository, fleet), list(groups_of(repository, fleet)["gpu_hosts"]))


def test_the_second_cell_of_the_readme_is_one_that_a_deploy_accepts(repository: Path) -> None:
    """What it shows is put into the spec as it stands there."""
    page = (repository / "inventory/production/README.md").read_text()
    shown = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    plain = spec_of(repository, "production").model_dump(by_alias=True, mode="json")
    grown = spec.check(plain | {key: shown[key] for key in ("cells", "rollout")})
    spec.check_hosts(grown, list(shown["gpu_hosts"]["hosts"]))
    assert [batch.cells for batch in spec.batches(grown)] == [["one"], ["two"]]


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_thresholds_that_a_spec_names_are_there(repository: Path, fleet: str) -> None:
    """A rollout would otherwise end at its gates, with the old release stopped."""
    name = spec_of(repository, fleet).gates.thresholds
    assert (repository / f"gates/thresholds/{name}.yml").is_file()


def test_the_production_host_gives_each_gpu_to_one_engine(repository: Path) -> None:
    """Prefill TP4 on GPUs 0-3, decode TP4 on 4-7, with ports of their own."""
    roles = spec_of(repository, "production").roles
    assert roles.prefill is not None
    assert roles.decode is not None
    assert (roles.prefill.gpus, roles.decode.gpus) == ([0, 1, 2, 3], [4, 5, 6, 7])
    for engine in (roles.prefill, roles.decode):
        assert engine.args["tensor-parallel-size"] == len(engine.gpus)
    assert roles.prefill.args["nccl-port"] != roles.decode.args["nccl-port"]
