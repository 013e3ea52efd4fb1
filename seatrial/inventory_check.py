"""Refuses what Ansible accepts in silence: inventory variables and groups that nobody reads.

Ansible rejects a misspelt role parameter but takes a misspelt inventory variable as one more
variable, and the role goes on with its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# What the project reads besides the inputs of its roles.
PROJECT_VARIABLES: Mapping[str, str] = {
    "serving_spec": "the desired state of the fleet; its own keys are checked by seatrial.spec",
    "seatrial_address": "the address at which other hosts of the fleet reach this host",
}

# What Ansible reads to reach a host (its manual, "Connecting to hosts: behavioral parameters").
CONNECTION_VARIABLES = frozenset(
    {
        "ansible_become",
        "ansible_become_method",
        "ansible_become_password",
        "ansible_become_user",
        "ansible_connection",
        "ansible_host",
        "ansible_port",
        "ansible_python_interpreter",
        "ansible_scp_extra_args",
        "ansible_sftp_extra_args",
        "ansible_shell_executable",
        "ansible_ssh_args",
        "ansible_ssh_common_args",
        "ansible_ssh_executable",
        "ansible_ssh_extra_args",
        "ansible_ssh_private_key_file",
        "ansible_ssh_timeout",
        "ansible_user",
    }
)

# Ansible's own groups; they need no mention in an inventory.
IMPLICIT_GROUPS = frozenset({"all", "ungrouped"})
GROUP_KEYS = frozenset({"hosts", "vars", "children"})
# What Ansible loads from group_vars and host_vars, as YAML.
VARIABLE_FILES = frozenset({".yml", ".yaml", ".json", ""})
ENCRYPTED = "$ANSIBLE_VAULT"


class _Loader(yaml.SafeLoader):
    """Reads Ansible's YAML: a value tagged ``!vault`` or ``!unsafe`` is some text."""


_Loader.add_multi_constructor("!", lambda _loader, _tag, node: str(node.value))


class _Names(NamedTuple):
    """What an inventory's host files define."""

    groups: set[str]
    hosts: set[str]


def unknown_variables(inventory: Path, roles: Path) -> list[str]:
    """Return one line for each name in ``inventory`` that nobody reads; empty means all is known.

    Known are the options in ``roles/*/meta/argument_specs.yml``, `PROJECT_VARIABLES` and
    `CONNECTION_VARIABLES`. Checked are the variables in host files, ``group_vars`` and
    ``host_vars``, the keys of groups, and that each group or host with variables exists. A file
    that is encrypted whole is left to Ansible, which fails on a name that it then lacks.

    Parameters
    ----------
    inventory
        The folder of one fleet, such as ``inventory/production``.
    roles
        The folder of the roles.
    """
    inventory = inventory.resolve()
    known = sorted({*PROJECT_VARIABLES, *CONNECTION_VARIABLES, *_role_options(roles)})
    problems: list[str] = []
    names = _Names(set(IMPLICIT_GROUPS), set())
    for file in _files(inventory):
        where = file.relative_to(inventory.parents[1])
        try:
            content = _read(file)
        except yaml.YAMLError as error:
            problems.append(f"{where}: should be YAML: {' '.join(str(error).split())}")
            continue
        owner = file.relative_to(inventory).parts[0]
        if owner in ("group_vars", "host_vars"):
            found = _unknown(content, known)
        else:
            found = _walk(content, known, names)
        problems += [f"{where}: {problem}" for problem in found]
    return problems + list(_strays(inventory, names))


def _files(inventory: Path) -> Iterator[Path]:
    """Yield the files that Ansible would read, host files before variables."""
    yield from sorted(
        path for path in inventory.iterdir() if path.suffix in (".yml", ".yaml") and path.is_file()
    )
    for folder in ("group_vars", "host_vars"):
        yield from sorted(
            path
            for path in (inventory / folder).rglob("*")
            if path.is_file() and path.suffix in VARIABLE_FILES and not path.name.startswith(".")
        )


def _read(file: Path) -> Mapping[str, Any]:
    """Return the mapping in ``file``, empty when it is encrypted or holds none."""
    text = file.read_text()
    if text.startswith(ENCRYPTED):
        return {}
    # A subclass of the safe loader, so this is safe_load with two more tags.
    content = yaml.load(text, Loader=_Loader)  # noqa: S506
    return content if isinstance(content, dict) else {}


def _role_options(roles: Path) -> Iterator[str]:
    """Yield the name of each input that a role declares, over all its entry points."""
    for file in sorted(roles.glob("*/meta/argument_specs.yml")):
        for entry_point in _read(file).get("argument_specs", {}).values():
            yield from entry_point.get("options", {})


def _walk(groups: Mapping[str, Any], known: list[str], names: _Names) -> Iterator[str]:
    """Yield the problems of a host file's groups and collect the names that it defines."""
    for group, content in groups.items():
        names.groups.add(group)
        parts: Mapping[str, Any] = content or {}
        for key in parts:
            if key not in GROUP_KEYS:
                yield f"group '{group}': unknown key '{key}'{_hint(key, sorted(GROUP_KEYS))}"
        for host, variables in (parts.get("hosts") or {}).items():
            names.hosts.add(host)
            yield from _unknown(variables or {}, known)
        yield from _unknown(parts.get("vars") or {}, known)
        yield from _walk(parts.get("children") or {}, known, names)


def _unknown(variables: Mapping[str, Any], known: list[str]) -> Iterator[str]:
    for name in variables:
        if name not in known:
            yield f"unknown variable '{name}'{_hint(name, known)}"


def _strays(inventory: Path, names: _Names) -> Iterator[str]:
    """Yield variables that belong to a group or host that the inventory does not have."""
    for folder, kind, known in (
        ("group_vars", "group", names.groups),
        ("host_vars", "host", names.hosts),
    ):
        if any("[" in name for name in known):
            continue  # a range such as gpu-[01:16]; Ansible's own to expand
        for path in sorted((inventory / folder).glob("[!.]*")):
            name = path.name if path.is_dir() else path.name.removesuffix(path.suffix)
            if name not in known and (path.is_dir() or path.suffix in VARIABLE_FILES):
                where = path.relative_to(inventory.parents[1])
                yield f"{where}: unknown {kind} '{name}'{_hint(name, sorted(known))}"


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
