"""The rehearsal hosts' script agrees with the inventory and says in one sentence what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "rehearsal/hosts.sh"
INVENTORY = yaml.safe_load((REPOSITORY / "inventory/rehearsal/hosts.yml").read_text())
SENTENCE_FOR_OTHERS = "namespaces and mounts need root; run this with sudo."


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with these words."""
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)


def inventory_addresses() -> dict[str, str]:
    """Return ``{host: address}`` of the rehearsal inventory's hosts, the control host excepted."""
    groups = INVENTORY["all"]["children"]
    return {
        name: variables["ansible_host"]
        for group in ("gpu_hosts", "entry")
        for name, variables in groups[group]["hosts"].items()
    }


def test_hosts_have_the_addresses_of_the_inventory() -> None:
    """The script boots exactly the hosts that the inventory reaches, and on request the pilot."""
    table = re.search(r"ADDRESS=\((.*?)\)", SCRIPT.read_text(), re.DOTALL)
    assert table
    addresses = dict(re.findall(r"\[([\w-]+)\]=([\d.]+)", table[1]))
    assert addresses.pop("pilot") not in inventory_addresses().values()
    assert addresses == inventory_addresses()


def test_every_host_has_one_address_for_ansible_and_for_other_hosts() -> None:
    """A rehearsal host has one network only."""
    for group in INVENTORY["all"]["children"].values():
        for variables in group["hosts"].values():
            if variables and "ansible_host" in variables:
                assert variables["ansible_host"] == variables["seatrial_address"]


def test_ansible_enters_the_namespace_that_the_script_makes() -> None:
    """Both wrappers of the inventory name the script's network namespace."""
    namespace = re.search(r"^readonly NAMESPACE=(\w+)\$BERTH$", SCRIPT.read_text(), re.MULTILINE)
    assert namespace
    for wrapper in ("ssh", "sh"):
        text = (REPOSITORY / "rehearsal" / wrapper).read_text()
        assert f'--net="/run/netns/{namespace[1]}${{SEATRIAL_BERTH:-}}" ' in text


def test_ansible_uses_the_ssh_configuration_that_the_script_writes() -> None:
    """Key, host keys and time-outs come from one file."""
    state = re.search(r"^readonly STATE=(\S+)\$BERTH$", SCRIPT.read_text(), re.MULTILINE)
    connection = REPOSITORY / "inventory/rehearsal/group_vars/all/connection.yml"
    assert state
    assert f"-F {state[1]}/ssh_config" in connection.read_text()


def test_help_names_every_verb() -> None:
    """A verb that nobody is told about is no verb."""
    verbs = re.findall(r"^ {4}([a-z |]+)\) ", SCRIPT.read_text(), re.MULTILINE)
    words = {word for line in verbs for word in line.split(" | ")} - {"supervise"}
    said = run("help").stdout
    assert words >= {"up", "down", "in", "status", "freeze", "poweroff"}
    assert [word for word in sorted(words) if not re.search(rf"\b{word}\b", said)] == []


@pytest.mark.parametrize(
    "verb", ["freeze", "thaw", "cut", "mend", "part", "join", "poweroff", "poweron"]
)
def test_unknown_host_is_refused_in_one_sentence(verb: str) -> None:
    """A misspelt host is an error that lists the hosts, and nothing is touched."""
    done = run(verb, "gpu-z")
    expected = "no host 'gpu-z'; they are gpu-a gpu-b gpu-c edge pilot."
    if os.geteuid():
        expected = SENTENCE_FOR_OTHERS
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rehearsal hosts: {expected}\n"


def test_image_lists_each_package_once() -> None:
    """The package list is the image's recipe; a line is a package or a reason."""
    lines = (REPOSITORY / "rehearsal/image/packages.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) == len(set(packages))
    assert [line for line in packages if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", line)] == []
