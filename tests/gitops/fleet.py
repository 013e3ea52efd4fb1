"""A fleet in a folder: a bare repository that people push to, and its reconciler.

Real are git, keys, ansible-playbook and its processes; the playbooks move a toy (toy.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from seatrial import ledger
from seatrial.gitops import reconcile, state
from seatrial.gitops.settings import Settings
from seatrial.gitops.state import Announcement, Attempt, Order, State
from tests.gitops.people import Person, allow, run

REPOSITORY = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy.py")
PLAYBOOK = """\
- name: {name}
  hosts: all
  gather_facts: false
  tasks:
    - name: Ask the toy
      ansible.builtin.command:
        argv:
          - "{{{{ ansible_playbook_python }}}}"
          - {toy}
          - {verb}
          - "{{{{ inventory_dir | dirname | dirname }}}}"
          - "{more}"
      environment: {{PYTHONPATH: {root}}}
      register: toy
      failed_when: false
      changed_when: false

    - name: It went well
      ansible.builtin.assert:
        that: toy.rc == 0
        fail_msg: "{{{{ toy.stdout or toy.stderr }}}}"
"""
MORE = {
    "deploy": "",
    "rollback": "{{ rollback_release | default('') }}",
    "look": "{{ fleet_state_dir }}",
}
FILES = {"deploy.yml": "deploy", "rollback.yml": "rollback", "playbooks/drift.yml": "look"}
SPEC = "inventory/toy/group_vars/all/serving_spec.yml"
GATES = {"thresholds": "toy", "select": ["window"], "cold_launches": 0}


class Heard:
    """A teller that remembers, and does what is asked ``at`` a kind of announcement."""

    def __init__(self) -> None:
        self.told: list[Announcement] = []
        self.is_deaf = False
        self.at: dict[str, Callable[[], object]] = {}

    def announce(self, _: Settings, announcement: Announcement) -> None:
        """Remember it."""
        if self.is_deaf:
            raise OSError("the channel is broken")
        self.told.append(announcement)
        self.at.get(announcement.kind, lambda: None)()

    def note(self, announcement: Announcement) -> str:
        """Return a note."""
        return f"{announcement.kind}: {announcement.sentence}\n"


class Fleet:
    """The fleet ``toy``, with alice and bob as its signers."""

    def __init__(self, folder: Path, home: Path, alice: Person, bob: Person) -> None:
        self.folder, self.home, self.alice, self.bob = folder, home, alice, bob
        self.work, self.origin, self.state_dir = (
            folder / name for name in ("work", "origin.git", "state")
        )
        self.settings_file, self.signers = folder / "toy.yml", folder / "signers"
        self.log = folder / "said"
        self._started: list[subprocess.Popen[bytes]] = []
        self.heard = Heard()
        self.status = -1
        folder.mkdir()
        run("git", "init", "-q", "--bare", "-b", "main", self.origin)
        run("git", "init", "-q", "-b", "main", self.work)
        allow(self.signers, *(f"{one.address} {one.key}" for one in (alice, bob)))
        self.set()
        for name, verb in FILES.items():
            self.put(
                name,
                PLAYBOOK.format(name=name, toy=TOY, verb=verb, more=MORE[verb], root=REPOSITORY),
            )
        python = "{{ ansible_playbook_python }}"
        host = {"ansible_connection": "local", "ansible_python_interpreter": python}
        self.put("inventory/toy/hosts.yml", yaml.safe_dump({"all": {"hosts": {"toy": host}}}))
        self.put("gates/thresholds/toy.yml", yaml.safe_dump({"window": {"recall_ratio_min": 0.6}}))
        self.put("ansible.cfg", "[defaults]\ncallbacks_enabled =\n")

    def set(self, **changes: Any) -> None:
        """Write the settings."""
        plain = {
            "schema": 1,
            "fleet": "toy",
            "repository": {"url": str(self.origin), "branch": "main", "seconds": 20, "notes": True},
            "signers": {"ssh": str(self.signers), "gpg_home": None, "sign_for_others": []},
            "protected": {"paths": ["gates/", "ansible.cfg"], "approvers": []},
            "windows": [],
            "approval": None,
            "drift": {"heal": False},
            "tell": {
                "notify_urls_file": None,
                "report_url": None,
                "forge": None,
                "metrics_file": None,
                "grafana": None,
            },
            "state_dir": str(self.state_dir),
            "rollout_seconds": 60,
            "vault_password_file": None,
        }
        self.settings_file.write_text(yaml.safe_dump({**plain, **changes}))

    # --- what people do

    def put(self, name: str, text: str) -> None:
        """Write a file of the work tree."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, index_topk: int, *words: str, who: Person | None = None, **more: Any) -> str:
        """Commit a spec, and return the commit."""
        spec = {"index_topk": index_topk, "gates": GATES, **more}
        self.put(SPEC, yaml.safe_dump({"serving_spec": spec}))
        return (who or self.alice).commit(self.work, f"index_topk {index_topk}", *words)

    def push(self, *words: str) -> None:
        """Push the branch and the tags."""
        run("git", "push", "-q", "--tags", *words, self.origin, "HEAD:main", cwd=self.work)

    def merge(self, index_topk: int, **more: Any) -> str:
        """Commit a spec and push it."""
        commit = self.commit(index_topk, **more)
        self.push()
        return commit

    def order(self, kind: Any, commit: str = "", **more: Any) -> None:
        """Give an order."""
        self.state_dir.mkdir(exist_ok=True)
        made = Order(kind=kind, commit=commit, who="olga", reason="why", time=state.now(), **more)
        state.give(self.state_dir, made)

    # --- the reconciler

    def poll(self, *, is_drift: bool = False) -> list[Announcement]:
        """Let it do a whole pass, and return what it told."""
        self.heard.told = []
        self.status = reconcile.one_pass(
            self.settings_file, "toy", is_drift=is_drift, teller=self.heard
        )
        return self.heard.told

    def kinds(self) -> list[str]:
        """Let it do a whole pass, and return what kinds of things it told."""
        return [one.kind for one in self.poll()]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it as its unit does; what it says is in `said`."""
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "seatrial.gitops"),
                    *("--fleet", "toy", "--settings", self.settings_file),
                ],
                cwd=REPOSITORY,
                env={**os.environ, "HOME": str(self.home)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    @property
    def said(self) -> str:
        """What started reconcilers have said."""
        return self.log.read_text()

    def end(self) -> None:
        """End what was started, and whatever it waits for."""
        for held in self.home.glob("hold-*"):
            held.unlink()
        for process in self._started:
            if process.poll() is None:
                kill(process, playbook=True)
        self._started = []

    def hold(self, phase: str) -> Path:
        """Let rollouts wait in this phase."""
        path = self.home / f"hold-{phase}"
        path.touch()
        return path

    # --- what can be seen

    @property
    def state(self) -> State:
        """What the reconciler knows."""
        return state.load(self.state_dir, "toy")

    def attempt(self, commit: str) -> Attempt:
        """Return how a commit's attempt stands."""
        found = self.state.attempt(commit)
        assert found is not None
        return found

    @property
    def events(self) -> list[ledger.Event]:
        """What the ledger holds; each of its lines must be whole."""
        path = self.home / ".local/state/seatrial/toy/ledger.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [ledger.Event.model_validate_json(line) for line in lines]

    @property
    def rollouts(self) -> list[str]:
        """The commits that rollouts began for."""
        return [event.data["commit"] for event in self.events if event.event == "begin"]

    @property
    def host(self) -> dict[str, Any]:
        """What the host runs."""
        path = self.home / "host.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"moves": 0}
        return found

    def note(self, commit: str) -> str:
        """Return the note on a commit, as the repository has it."""
        return run("git", "notes", "--ref=rollouts", "show", commit, cwd=self.origin)


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def kill(process: subprocess.Popen[bytes], *, playbook: bool) -> None:
    """Kill the reconciler with nobody to clean up; with ``playbook`` what it started, too."""
    children = children_of(process.pid) if playbook else []
    process.kill()
    process.wait()
    for child in children:
        os.kill(child, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(child) for child in children))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still wait to be counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Return a process's children, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found
