"""Plays a role on this machine, for the tests that ask what facts it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLUGINS = {
    f"ANSIBLE_{kind.upper()}_PLUGINS": str(Path(__file__).parents[1] / "plugins" / kind)
    for kind in ("action", "filter")
}


def played(folder: Path, play: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """Play it in the folder; ``words`` go to ansible-playbook."""
    (folder / "play.json").write_text(json.dumps([{"gather_facts": False, **play}]))
    return subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), *words, "play.json"],
        cwd=folder,
        env=os.environ | {"ANSIBLE_NOCOLOR": "1"} | PLUGINS,
        capture_output=True,
        text=True,
        check=False,
    )


def facts_after(
    folder: Path, tasks: Sequence[dict[str, Any]], names: Sequence[str], hosts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the named facts that the tasks leave on each host, all of which are this machine."""
    told = "{{ {" + ", ".join(f"'{name}': {name}" for name in names) + "} }}"
    keep = {"copy": {"content": told, "dest": f"{folder}/{{{{ inventory_hostname }}}}.json"}}
    words = ("-i", ",".join(hosts) + ",", "-e", f"ansible_python_interpreter={sys.executable}")
    ran = played(folder, {"hosts": "all", "connection": "local", "tasks": [*tasks, keep]}, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {host: json.loads((folder / f"{host}.json").read_text()) for host in hosts}
