"""Who may know whom (see docs and `CONTRIBUTING.md`): a short list of rules, each shown to bite."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

FOLDERS = (
    "gates",
    "inventory",
    "kernels",
    "playbooks",
    "plugins",
    "rehearsal",
    "roles",
    "seatrial",
    "templates",
    "tests",
)
# The package inside kernels/ has a name of its own, because PyPI has a `kernels` too.
PACKAGES = {name: name for name in FOLDERS} | {"seatrial_kernels": "kernels"}

# A folder's Python may import its own folder and these.
MAY_IMPORT: dict[str, set[str]] = {
    "seatrial": set(),
    "kernels": set(),
    "gates": {"seatrial"},
    "plugins": {"seatrial"},
    "rehearsal": {"seatrial"},
    # A program that a role runs inside a build may use what the build holds.
    "roles": {"kernels"},
}
# A folder's other files may name paths below these.
MAY_NAME: dict[str, set[str]] = {
    "playbooks": {"playbooks", "inventory"},
    "roles": {"templates", "kernels"},
    "templates": set(),
    "inventory": set(),
}
# One role runs the gates: one command, one exit status, one report.
GATE_ROLE = "gate"
# Two places make the rehearsal what it is: the inventory that reaches its hosts through the
# rehearsal's own door, and the playbook that boots them and then does what every fleet does.
OF_THE_REHEARSAL = (("inventory", "rehearsal"), ("playbooks", "rehearse.yml"))

ROLE_CALL = re.compile(r"^\s*-?\s*(?:ansible\.builtin\.)?(?:include|import)_role:", re.MULTILINE)
# At the start of a path, after `../` or after `}}/`: /opt/seatrial/ is a place on a host.
A_PATH = re.compile(rf"(?:(?<![\w./-])|\.\./|\}}\}}/)({'|'.join(FOLDERS)})/[\w{{]")
TEXT_FILES = frozenset({".yml", ".yaml", ".j2", ".cfg", ".sh", ""})
# Types and descriptions of inputs: words for people, like a comment.
DESCRIPTIONS = "argument_specs.yml"


def violations(root: Path) -> list[str]:
    """Return a line for each rule that a file under ``root`` breaks."""
    return [
        *(line for folder in MAY_IMPORT for line in _imports(root, folder)),
        *(line for folder in MAY_NAME for line in _paths(root, folder)),
        *_roles_that_call_roles(root),
        *_kernels_as_a_package(root),
    ]


def _imports(root: Path, folder: str) -> Iterator[str]:
    for file in sorted((root / folder).rglob("*.py")):
        for name in _imported(ast.parse(file.read_text(), str(file))):
            target = PACKAGES.get(name.partition(".")[0], folder)
            if target not in {folder, *MAY_IMPORT[folder]}:
                yield f"{file.relative_to(root)}: {folder} must not import {target}"


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and node.args:
            function, name = node.func, node.args[0]
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield str(name.value)


def _paths(root: Path, folder: str) -> Iterator[str]:
    for file in _texts(root / folder):
        parts = file.relative_to(root).parts
        allowed = set(MAY_NAME[folder])
        if parts[:2] == ("roles", GATE_ROLE):
            allowed.add("gates")
        if parts[:2] in OF_THE_REHEARSAL:
            allowed.add("rehearsal")
        if file.name == DESCRIPTIONS:
            continue
        for found in A_PATH.finditer(_without_comments(file.read_text())):
            if found[1] not in allowed:
                yield f"{file.relative_to(root)}: {folder} must not name {found[1]}/"


def _roles_that_call_roles(root: Path) -> Iterator[str]:
    for file in _texts(root / "roles"):
        if ROLE_CALL.search(_without_comments(file.read_text())):
            yield f"{file.relative_to(root)}: roles must not include one another"
    for file in sorted((root / "roles").glob("*/meta/main.yml")):
        if (yaml.safe_load(file.read_text()) or {}).get("dependencies"):
            yield f"{file.relative_to(root)}: roles must not depend on one another"


def _kernels_as_a_package(root: Path) -> Iterator[str]:
    if (root / "kernels/__init__.py").exists():
        yield "kernels/__init__.py: would hide PyPI's kernels, which transformers imports"


def _texts(folder: Path) -> Iterator[Path]:
    yield from sorted(
        file for file in folder.rglob("*") if file.is_file() and file.suffix in TEXT_FILES
    )


def _without_comments(text: str) -> str:
    """Drop comments and what a person is told to type: an explanation is no dependency."""
    text = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    text = re.sub(r"(?m)(?:^|\s)#.*$", "", text)
    return re.sub(r"ansible-playbook \S+", "", text)


def test_no_folder_knows_more_than_it_may(repository: Path) -> None:
    """The checkout follows the rules."""
    assert violations(repository) == []


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("seatrial/a.py", "import gates.window", "seatrial must not import gates"),
        (
            "seatrial/a.py",
            "def f():\n    from kernels import x",
            "seatrial must not import kernels",
        ),
        (
            "seatrial/a.py",
            "import importlib\nimportlib.import_module('seatrial_kernels.describe')",
            "seatrial must not import kernels",
        ),
        (
            "kernels/seatrial_kernels/a.py",
            "from seatrial import spec",
            "kernels must not import seatrial",
        ),
        ("gates/test_a.py", "import rehearsal.model", "gates must not import rehearsal"),
        ("roles/cell/files/a.py", "import seatrial.spec", "roles must not import seatrial"),
        (
            "roles/cell/tasks/main.yml",
            "- name: Reuse\n  ansible.builtin.include_role:\n    name: router\n",
            "roles must not include one another",
        ),
        (
            "roles/cell/meta/main.yml",
            "dependencies: [router]",
            "roles must not depend on one another",
        ),
        ("roles/build/tasks/main.yml", "src: ../../gates/x.py", "roles must not name gates/"),
        (
            "roles/cell/tasks/main.yml",
            "src: '{{ role_path }}/../../inventory/production/hosts.yml'",
            "roles must not name inventory/",
        ),
        (
            "roles/cell/tasks/main.yml",
            "src: '{{ role_path | dirname | dirname }}/rehearsal/x'",
            "roles must not name rehearsal/",
        ),
        ("templates/a.j2", "{% include 'roles/cell/b' %}", "templates must not name roles/"),
        ("playbooks/deploy.yml", "cmd: ../rehearsal/x", "playbooks must not name rehearsal/"),
        ("playbooks/a.yml", "src: ../templates/a.j2", "playbooks must not name templates/"),
        ("inventory/production/hosts.yml", "x: roles/y", "inventory must not name roles/"),
        (
            "inventory/production/hosts.yml",
            "x: rehearsal/ssh",
            "inventory must not name rehearsal/",
        ),
        ("kernels/__init__.py", "", "would hide PyPI's kernels"),
    ],
)
def test_a_planted_violation_is_found(
    tree: Callable[[dict[str, str]], Path], file: str, content: str, problem: str
) -> None:
    """Each rule fails on a file that breaks it, and names the file."""
    found = violations(tree({file: content}))
    assert len(found) == 1
    assert found[0].startswith(f"{file}: ")
    assert problem in found[0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("gates/test_a.py", "from seatrial.spec import ServingSpec\nimport requests"),
        ("kernels/tests/test_a.py", "import seatrial_kernels.describe"),
        ("seatrial/a.py", "from . import errors\nfrom seatrial.errors import SeatrialError"),
        ("roles/gate/tasks/main.yml", "cmd: pytest {{ role_path }}/../../gates/"),
        ("roles/release/tasks/main.yml", "src: ../../templates/sglang-prefill.service.j2"),
        ("roles/cell/tasks/main.yml", "# never include_role: see roles/router\n"),
        ("roles/cell/tasks/main.yml", "fail_msg: ansible-playbook playbooks/deploy.yml"),
        ("templates/a.j2", "{# see roles/release #}\nExecStart=/opt/seatrial/current"),
        ("playbooks/rehearse.yml", "cmd: ../rehearsal/hosts.sh up"),
        ("inventory/rehearsal/hosts.yml", "x: '{{ inventory_dir }}/../../rehearsal/ssh'"),
    ],
)
def test_what_is_allowed_stays_allowed(
    tree: Callable[[dict[str, str]], Path], file: str, content: str
) -> None:
    """The rules do not cry wolf: own names, the allowed neighbours, and comments pass."""
    assert violations(tree({file: content})) == []
