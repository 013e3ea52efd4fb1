"""The files that role `gitops` lays down, rendered by Ansible with the role's own expressions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
ROLE = REPOSITORY / "roles/gitops"
COMMIT = "c" * 40
FLEET = "rehearsal"
UNITS = (
    "seatrial-gitops@.service",
    "seatrial-gitops@.timer",
    "seatrial-gitops@.path",
    "seatrial-gitops-drift@.service",
    "seatrial-gitops-drift@.timer",
    "seatrial-gitops-webhook@.service",
    "seatrial-gitops-door@.service",
)
TEMPLATES = (
    *UNITS,
    "seatrial-gitops-door.cfg",
    "seatrial-gitops-hooks.json",
    "seatrial-gitops-post-receive",
)


def render(target: Path, **inputs: Any) -> dict[str, Any]:
    """Render every template into ``target``; return the settings that the role would write."""
    content = "{{ __gitops_settings | seatrial_gitops_settings | to_json }}"
    tasks: list[dict[str, Any]] = [
        {
            "ansible.builtin.template": {
                "src": f"{REPOSITORY}/templates/{name}.j2",
                "dest": f"{target}/{name}",
                "mode": "0755",
            }
        }
        for name in TEMPLATES
    ]
    tasks.append({"ansible.builtin.copy": {"content": content, "dest": f"{target}/settings.json"}})
    play = {
        "hosts": "control",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [f"{ROLE}/vars/main.yml"],
        "vars": {
            **yaml.safe_load((ROLE / "defaults/main.yml").read_text()),
            "role_path": str(ROLE),
            "gitops_commit": COMMIT,
            "gitops_url": "/srv/git/fleet.git",
            "gitops_signers": ["ann@example.org ssh-ed25519 AAAA"],
            **inputs,
        },
        "tasks": [
            {
                **task,
                "vars": {
                    "ansible_python_interpreter": "{{ ansible_playbook_python }}",
                    "ansible_shell_executable": "/bin/sh",
                    # The knock, where a test can hear it.
                    "__gitops_knock": str(target / "knock"),
                },
            }
            for task in tasks
        ],
    }
    (target / "knock").mkdir(exist_ok=True)
    (target / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            *("-i", REPOSITORY / "inventory" / FLEET, target / "play.yml"),
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    found: dict[str, Any] = yaml.safe_load((target / "settings.json").read_text())
    return found
