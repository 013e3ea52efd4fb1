"""Running a real playbook, and what is kept of its failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seatrial.gitops import playbooks
from seatrial.gitops.playbooks import Reason, Run

HOSTS = """\
all:
  vars: {ansible_connection: local, ansible_python_interpreter: "{{ ansible_playbook_python }}"}
  hosts:
    one:
    two:
    away: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}
"""
PLAYBOOK = """\
- name: Fail in several ways
  hosts: all
  gather_facts: false
  ignore_unreachable: true
  tasks:
    - name: Ask who is there
      ansible.builtin.raw: "true"

    - name: Fail without a consequence
      ansible.builtin.command: "false"
      failed_when: false

    - name: Show what it may know
      ansible.builtin.shell: env; cat ${ANSIBLE_VAULT_PASSWORD_FILE}
      register: known
      when: inventory_hostname == 'one'

    - name: Say it
      ansible.builtin.debug: {var: known.stdout}

    - name: Fail with a secret
      ansible.builtin.assert: {that: false, fail_msg: hunter2}
      no_log: true
      ignore_errors: false
      when: inventory_hostname == 'two'

    - name: Fail for one thing and another
      ansible.builtin.assert: {that: false, fail_msg: "it lacks\\n  {{ item }}"}
      loop: [bread, wine]
      when: inventory_hostname == 'one'
"""


def test_a_failed_playbook_says_why_and_keeps_no_secret(
    tree: Callable[[dict[str, str]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not answer and what the last task said; what it may not know, it does not."""
    monkeypatch.setenv("PLANTED_TOKEN", "swordfish")
    root = tree({"inventory/toy/hosts.yml": HOSTS, "fail.yml": PLAYBOOK, "vault": "#vault"})
    with (tmp_path / "lock").open("w") as lock:
        run = playbooks.run(
            root,
            "toy",
            "fail.yml",
            record=tmp_path / "record",
            lock=lock.fileno(),
            seconds=120,
            vault_password_file=root / "vault",
        )
    assert run.status == 2
    assert run.sentence.startswith("no answer from away (")
    assert run.sentence.endswith("; it lacks bread; it lacks wine")
    kept = "".join(path.read_text() for path in (tmp_path / "record").iterdir())
    assert "#vault" in kept
    assert f"PATH={Path(sys.executable).parent}:" in kept
    assert "hunter2" not in kept
    assert "swordfish" not in kept


def test_a_playbook_that_cannot_be_read_says_its_last_words(
    tree: Callable[[dict[str, str]], Path], tmp_path: Path
) -> None:
    """No task ran, so none could say why."""
    root = tree({"inventory/toy/hosts.yml": HOSTS, "fail.yml": "- nonsense: true"})
    with (tmp_path / "lock").open("w") as lock:
        run = playbooks.run(
            root,
            "toy",
            "fail.yml",
            record=tmp_path / "record",
            lock=lock.fileno(),
            seconds=120,
            vault_password_file=None,
        )
    assert run.status > 0
    assert run.sentence.startswith(f"fail.yml ended with status {run.status}: ")


def test_hosts_that_say_the_same_are_said_once(tmp_path: Path) -> None:
    """A fleet may have many."""
    silent = [Reason(f"gpu-{name}", "Check", True, "no route") for name in "abc"]
    loud = [Reason(f"gpu-{name}", "Lock", False, "the disk is full.") for name in "de"]
    run = Run("deploy.yml", 2, False, [*silent, *loud], tmp_path / "log")
    assert run.sentence == "no answer from gpu-a, gpu-b, gpu-c (no route); the disk is full"
