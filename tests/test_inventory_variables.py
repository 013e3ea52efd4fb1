"""An inventory may hold only variables, groups and hosts that somebody reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from seatrial.inventory_check import unknown_variables

Tree = Callable[[dict[str, str]], Path]

SPECS = """
argument_specs:
  main:
    options:
      cell_ready_timeout_seconds: {type: int}
  revert:
    options:
      cell_revert_scope: {type: str}
"""
HOSTS = """
all:
  vars:
    ansible_user: operator
  children:
    gpu_hosts:
      hosts:
        gpu1:
          ansible_host: 192.0.2.11
          seatrial_address: 192.0.2.11
    monitoring:
      hosts:
        gpu1:
"""


def check(tree: Tree, files: dict[str, str]) -> list[str]:
    """Return the problems of a small inventory with ``files`` added or put in place of its own."""
    root = tree(
        {
            "roles/cell/meta/argument_specs.yml": SPECS,
            "inventory/lab/hosts.yml": HOSTS,
            **{f"inventory/lab/{name}": content for name, content in files.items()},
        }
    )
    return unknown_variables(root / "inventory/lab", root / "roles")


@pytest.mark.parametrize("fleet", ["production", "rehearsal"])
def test_the_project_reads_every_variable_of_its_inventories(repository: Path, fleet: str) -> None:
    """Both inventories hold known names only."""
    inventory = repository / "inventory" / fleet
    assert inventory.is_dir()
    assert unknown_variables(inventory, repository / "roles") == []


def test_the_vault_example_holds_known_names(repository: Path, tree: Tree) -> None:
    """What a person copies to vault.yml is read by somebody."""
    example = repository / "inventory/production/group_vars/all/vault.yml.example"
    root = tree({"lab/hosts.yml": HOSTS, "lab/group_vars/all/vault.yml": example.read_text()})
    assert yaml.safe_load(example.read_text())
    assert unknown_variables(root / "lab", repository / "roles") == []


def test_options_of_every_entry_point_and_connection_variables_are_known(tree: Tree) -> None:
    """Nothing is reported for names that a role, the project or Ansible reads."""
    known = "cell_ready_timeout_seconds: 300\ncell_revert_scope: fleet\nserving_spec: {}\n"
    assert check(tree, {"group_vars/all/x.yml": known}) == []


def test_a_misspelt_variable_is_refused_with_the_near_name(tree: Tree) -> None:
    """The message names the file, the variable and what was probably meant."""
    assert check(tree, {"group_vars/all/x.yml": "cell_redy_timeout_seconds: 300\n"}) == [
        (
            "inventory/lab/group_vars/all/x.yml: unknown variable 'cell_redy_timeout_seconds'; "
            "did you mean 'cell_ready_timeout_seconds'?"
        )
    ]


def test_a_variable_like_no_other_is_refused_without_a_guess(tree: Tree) -> None:
    """No near name, no question."""
    assert check(tree, {"host_vars/gpu1.yml": "zzz: 1\n"}) == [
        "inventory/lab/host_vars/gpu1.yml: unknown variable 'zzz'"
    ]


def test_variables_of_hosts_and_groups_in_the_host_file_are_checked(tree: Tree) -> None:
    """A name is found at any depth of the host file."""
    hosts = HOSTS.replace("seatrial_address", "seatrail_address").replace("ansible_user", "user")
    assert check(tree, {"hosts.yml": hosts}) == [
        "inventory/lab/hosts.yml: unknown variable 'user'",
        (
            "inventory/lab/hosts.yml: unknown variable 'seatrail_address'; "
            "did you mean 'seatrial_address'?"
        ),
    ]


def test_a_misspelt_key_of_a_group_is_refused(tree: Tree) -> None:
    """Ansible would skip the whole block with a warning."""
    assert check(tree, {"hosts.yml": "all: {children: {gpu_hosts: {host: {gpu1: }}}}"}) == [
        "inventory/lab/hosts.yml: group 'gpu_hosts': unknown key 'host'; did you mean 'hosts'?"
    ]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("group_vars/gpu_host.yml", "unknown group 'gpu_host'; did you mean 'gpu_hosts'?"),
        ("group_vars/gpu_host/x.yml", "unknown group 'gpu_host'; did you mean 'gpu_hosts'?"),
        ("host_vars/gpu2.yml", "unknown host 'gpu2'; did you mean 'gpu1'?"),
    ],
)
def test_variables_of_a_group_or_host_that_is_not_there_are_refused(
    tree: Tree, file: str, problem: str
) -> None:
    """Ansible reads such a file for nobody and says nothing."""
    found = check(tree, {file: "serving_spec: {}\n"})
    assert [line.partition(": ")[2] for line in found] == [problem]


def test_encrypted_values_are_names_too_and_encrypted_files_are_left_alone(tree: Tree) -> None:
    """A `!vault` value hides no misspelt name; a file encrypted whole has no readable names."""
    assert check(
        tree,
        {
            "group_vars/all/x.yml": "serving_spce: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  6162\n",
            "group_vars/all/vault.yml": "$ANSIBLE_VAULT;1.1;AES256\n6162\n",
        },
    ) == [
        (
            "inventory/lab/group_vars/all/x.yml: unknown variable 'serving_spce'; "
            "did you mean 'serving_spec'?"
        )
    ]


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tree: Tree) -> None:
    """The position is in the message; the rest of the inventory is still checked."""
    (found,) = check(tree, {"group_vars/all/x.yml": "a: [1\n"})
    assert found.startswith("inventory/lab/group_vars/all/x.yml: should be YAML: ")
    assert "line 2" in found
