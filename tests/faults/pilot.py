"""The control host of a rehearsed fleet: a machine of its own, steered by git alone.

The pilot boots beside the fleet's hosts (``hosts.sh up pilot``), with its own systemd, boot id and
sshd. On it lie the bare repository, which is pushed to over SSH, and what ``playbooks/gitops.yml``
lays down: the reconciler with its own user, environment, units, hook and webhook. It reaches the
hosts as the production inventory does, by a key in the user's home. Nothing of this machine steers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from rehearsal import run as rehearsal
from seatrial import ledger
from tests.faults import hosts
from tests.faults.fleet import ARTIFACTS, CONNECTIONS, WORK

NAME = "pilot"
ADDRESS = "10.77.0.9"
USER = "seatrial-gitops"
HOME = Path("/var/lib/seatrial-gitops")
BARE = "/srv/git/fleet.git"
WEBHOOK = f"http://{ADDRESS}:9443/hooks"
WHEELS = rehearsal.CACHE / "control-wheels"
ROOT = rehearsal.STATE / "hosts" / NAME / "root"
SSH_CONFIG = rehearsal.STATE / "ssh_config"
ANN, BOB = "ann@example.org", "bob@example.org"
PEOPLE = (ANN, BOB)
TOLD = "10.77.0.1:8099"
"""Where those listen who are told."""

LISTENER = """
import http.server, json, sys
class Heard(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[1], "a") as out:
            out.write(json.dumps({"path": self.path, "body": body}) + "\\n")
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("10.77.0.1", 8099), Heard).serve_forever()
"""


class Steered(Protocol):
    """A fleet that was rolled out by hand, and that the pilot takes over."""

    @property
    def name(self) -> str:
        """Its inventory's name."""

    @property
    def repository(self) -> Path:
        """The clone from which it was rolled out."""

    @property
    def ledger(self) -> Path:
        """What was written down of that."""


@dataclass
class Pilot:
    """The control host of one fleet, and the clone in which people work.

    Attributes:
        inputs: of role `gitops`, besides those that the rehearsal needs.
        secrets: planted texts that must be found nowhere but in the files made for them.
    """

    fleet: Steered
    inputs: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, Any] = field(default_factory=dict)
    _listener: subprocess.Popen[bytes] | None = None

    @property
    def work(self) -> Path:
        """Return the folder of keys and clone."""
        return WORK / f"{self.fleet.name}-pilot"

    @property
    def clone(self) -> Path:
        """Return the clone in which people commit."""
        return self.work / "clone"

    # --- making it ---

    def make(self, log: Path) -> None:
        """Boot the pilot beside a fleet that serves, and install the reconciler on it."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for person in PEOPLE:
            self.make_key(person)
        self._mount()
        hosts.verb("up", NAME)
        self._furnish()
        self._make_clone()
        self.push()
        self.install(log)

    def install(self, log: Path, *words: str) -> str:
        """Run ``playbooks/gitops.yml`` from this machine, as an operator would from a laptop."""
        laptop = self.work / "laptop.yml"
        laptop.write_text(yaml.safe_dump({"all": {"hosts": {"controller": _from_here()}}}))
        vault = self.work / "vault.json"
        vault.touch(mode=0o600)
        vault.write_text(json.dumps(self.secrets))
        program = Path(sys.executable).with_name("ansible-playbook")
        done = subprocess.run(
            [
                *(program, "-i", f"inventory/{self.fleet.name}", "-i", laptop),
                *("playbooks/gitops.yml", "-e", f"@{vault}", *words),
            ],
            cwd=self.clone,
            env={
                **os.environ,
                "PATH": f"{program.parent}:{os.environ['PATH']}",
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(CONNECTIONS),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        with log.open("a") as out:
            out.write(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    # --- who is told ---

    def listen(self) -> None:
        """Let a forge, a chat and Grafana listen on this machine; they keep what they hear."""
        self.heard_file.touch()
        self._listener = subprocess.Popen(
            [*hosts.IN_NETWORK, sys.executable, "-c", LISTENER, str(self.heard_file)],
            stdin=subprocess.DEVNULL,
        )

    def stop_listening(self) -> None:
        """End them."""
        if self._listener:
            self._listener.kill()
            self._listener.wait()

    @property
    def heard_file(self) -> Path:
        """Return where they keep it."""
        return self.work / "heard.jsonl"

    def heard(self, path: str) -> list[dict[str, Any]]:
        """Return what was posted to paths that begin so."""
        lines = [json.loads(line) for line in self.heard_file.read_text().splitlines()]
        return [line["body"] for line in lines if line["path"].startswith(path)]

    def make_key(self, person: str) -> None:
        """Make the key with which the person signs."""
        path = self.key(person)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)

    def key(self, person: str) -> Path:
        """Return the key with which the person signs."""
        return self.work / person.partition("@")[0]

    def _mount(self) -> None:
        """Let the pilot read what this machine keeps: finished builds, and wheels for pip."""
        _download_wheels()
        for source, place in (
            (ARTIFACTS, HOME / ".cache/seatrial/artifacts"),
            (_wheels(), Path("/opt/wheels")),
        ):
            target = ROOT / place.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            if not target.is_mount():
                subprocess.run(["mount", "--bind", source, target], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)

    def _furnish(self) -> None:
        """Put on the pilot what a control host has before Seatrial comes to it."""
        key = (rehearsal.STATE / "key").read_text()
        config = SSH_CONFIG.read_text().replace(f"{rehearsal.STATE}/key", "~/.ssh/seatrial")
        config = re.sub(r".*KnownHostsFile.*\n", "", config)
        files = {
            "/etc/pip.conf": "[global]\nno-index = true\nfind-links = /opt/wheels\n",
            f"{HOME}/.ssh/seatrial": key,
            f"{HOME}/.ssh/config": config,
            f"{HOME}/.ssh/known_hosts": (rehearsal.STATE / "known_hosts").read_text(),
            # What was rolled out by hand before there was a reconciler.
            f"{HOME}/.local/state/seatrial/{self.fleet.name}/ledger.jsonl": (
                self.fleet.ledger.read_text()
            ),
            "/home/git/.ssh/authorized_keys": (rehearsal.STATE / "key.pub").read_text(),
        }
        for path, text in files.items():
            target = ROOT / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        self.ssh(
            "useradd --create-home --shell /bin/bash git && "
            f"useradd --system --home-dir {HOME} --shell /bin/bash {USER} && "
            "chown -R git: /home/git && "
            f"chown -R {USER}: {HOME}/.ssh {HOME}/.local && chown {USER}: {HOME} {HOME}/.cache "
            f"{HOME}/.cache/seatrial && "
            f"chmod 700 {HOME}/.ssh /home/git/.ssh && chmod 600 {HOME}/.ssh/seatrial && "
            "mkdir -p /srv/git && chown git: /srv/git && "
            f"runuser -u git -- git init -q --bare --shared=group -b main {BARE} && "
            # Whoever may push may rewrite: what comes of it is the reconciler's to say.
            f"runuser -u git -- git -C {BARE} config receive.denyNonFastForwards false"
        )

    def _make_clone(self) -> None:
        """Clone the repository as people have it, with an inventory for this control host."""
        rehearsal.git("clone", "--quiet", self.fleet.repository, self.clone)
        self.git("remote", "set-url", "origin", f"ssh://git@{NAME}{BARE}")
        self.git("config", "core.sshCommand", f"{rehearsal.SOURCE}/rehearsal/ssh -F {SSH_CONFIG}")
        self.git("config", "gpg.format", "ssh")
        self.git("checkout", "--quiet", "-B", "main")
        inventory = self.clone / "inventory" / self.fleet.name
        found = yaml.safe_load((inventory / "hosts.yml").read_text())
        found["all"]["children"]["control"]["hosts"]["controller"] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": "{{ ansible_playbook_python }}",
            "seatrial_address": ADDRESS,
        }
        (inventory / "hosts.yml").write_text(yaml.safe_dump(found))
        connection = {"ansible_user": "root", "ansible_ssh_private_key_file": "~/.ssh/seatrial"}
        text = yaml.safe_dump({"ansible_python_interpreter": "/usr/bin/python3", **connection})
        (inventory / "group_vars/all/connection.yml").write_text(text)
        (inventory / "group_vars/control.yml").write_text(yaml.safe_dump(self._role_inputs()))
        with (inventory / "group_vars/monitoring.yml").open("a") as monitoring:
            monitoring.write("monitoring_control_hosts: [controller]\n")
        self.commit("Steer the fleet from the pilot")

    def _role_inputs(self) -> dict[str, Any]:
        return {
            "gitops_url": BARE,
            "gitops_bare_repository": BARE,
            "gitops_groups": ["git"],
            "gitops_signers": [
                f"{person} {self.key(person).with_suffix('.pub').read_text().strip()}"
                for person in PEOPLE
            ],
            **self.inputs,
        }

    # --- people ---

    def git(self, *words: str) -> str:
        """Run git in the clone."""
        return rehearsal.git("-C", self.clone, *words)

    def commit(self, message: str, *, by: str = ANN, options: tuple[str, ...] = ()) -> str:
        """Commit what lies in the clone, signed by the person; return the commit."""
        self.git("add", "-A")
        person = (
            *("-c", f"user.name={by}", "-c", f"user.email={by}"),
            *("-c", f"user.signingkey={self.key(by)}"),
        )
        self.git(*person, "commit", "--quiet", "-S", "-m", message, *options)
        return self.git("rev-parse", "HEAD").strip()

    def edit_spec(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the serving spec in the clone."""
        path = self.clone / "inventory" / self.fleet.name / "group_vars/all/serving_spec.yml"
        content = yaml.safe_load(path.read_text())
        change(content["serving_spec"])
        path.write_text(yaml.safe_dump(content, sort_keys=False))

    def push(self, *words: str) -> None:
        """Push the branch."""
        self.git("push", "--quiet", *(words or ("origin", "main")))

    def note(self, commit: str) -> str:
        """Return the note on the commit, as whoever fetches it reads it; empty if there is none."""
        self.git("fetch", "--quiet", "origin", "+refs/notes/*:refs/notes/*")
        done = subprocess.run(
            ["git", "-C", self.clone, "notes", "--ref=rollouts", "show", commit],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    # --- the machine ---

    def ssh(self, command: str, *, check: bool = True, seconds: float = 120) -> str:
        """Run a shell command on the pilot as root, and return what it prints."""
        return hosts.on(NAME, command, check=check, seconds=seconds)

    def fab(self, *words: str) -> str:
        """Run a task of the console as the reconciler's user."""
        root = "/opt/seatrial-gitops"
        asked = shlex.join([f"gitops.{words[0]}", *words[1:], "--fleet", self.fleet.name])
        return self.ssh(f"runuser -u {USER} -- {root}/venv/bin/fab -r {root}/source {asked} 2>&1")

    @property
    def unit(self) -> str:
        """Return the reconciler's service."""
        return f"seatrial-gitops@{self.fleet.name}.service"

    @property
    def state(self) -> dict[str, Any]:
        """Return what the reconciler knows."""
        found: dict[str, Any] = json.loads(self.ssh(f"cat {HOME}/{self.fleet.name}/state.json"))
        return found

    @property
    def events(self) -> list[ledger.Event]:
        """Return the events of the ledger on the pilot."""
        path = f"{HOME}/.local/state/seatrial/{self.fleet.name}/ledger.jsonl"
        return ledger.read(ROOT / path.lstrip("/"))

    def journal(self, unit: str = "", since: float = 0) -> str:
        """Return what the reconciler, or another unit, has said."""
        words = f"--since=@{since:.0f}" if since else ""
        return self.ssh(f"journalctl --no-pager -o short-iso -u {unit or self.unit} {words}")

    def await_status(self, commit: str, *wanted: str, seconds: float = 300) -> dict[str, Any]:
        """Wait until the attempt at the commit has come to one of these, and return it."""
        deadline = time.monotonic() + seconds
        seen: dict[str, Any] = {}
        while time.monotonic() < deadline:
            text = self.ssh(f"cat {HOME}/{self.fleet.name}/state.json 2>/dev/null", check=False)
            attempts = json.loads(text)["attempts"] if text else []
            seen = next((one for one in attempts if one["commit"] == commit), {})
            if seen.get("status") in wanted:
                return seen
            time.sleep(0.25)
        raise AssertionError(
            f"{commit[:12]} is {seen.get('status', 'unknown')}, not {' or '.join(wanted)}: "
            f"{seen.get('sentence')}\n{self.journal()[-4000:]}"
        )

    def await_idle(self, seconds: float = 60) -> None:
        """Wait until no look is at work."""
        deadline = time.monotonic() + seconds
        while self.ssh(f"systemctl is-active {self.unit}", check=False).strip() == "activating":
            assert time.monotonic() < deadline, self.journal()[-4000:]
            time.sleep(0.2)

    def await_phase(self, phase: str, cell: str = "one", seconds: float = 300) -> None:
        """Wait until a rollout that is under way enters the phase in the cell."""
        deadline = time.monotonic() + seconds
        before = len(self.events)
        while not any((e.cell, e.phase) == (cell, phase) for e in self.events[before:]):
            assert time.monotonic() < deadline, f"no {phase}: {self.journal()[-3000:]}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the reconciler and the playbook that it runs, as the kernel does."""
        self.ssh(f"systemctl kill --signal=KILL --kill-whom=all {self.unit}", check=False)

    def power_cycle(self) -> None:
        """Take the current away from the control host, and give it back."""
        hosts.verb("poweroff", NAME)
        hosts.verb("poweron", NAME)
        hosts.verb("up", NAME)

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        """Deliver something to the webhook, and return status and answer."""
        words = [w for name, value in headers.items() for w in ("--header", f"{name}: {value}")]
        done = subprocess.run(
            [
                *(*hosts.IN_NETWORK, "curl", "--silent", "--max-time", "20", "--data-binary", "@-"),
                *("--write-out", "\n%{http_code}", *words, f"{WEBHOOK}/{path}"),
            ],
            input=body,
            capture_output=True,
            check=False,
        )
        text, _, status = done.stdout.decode().rpartition("\n")
        return int(status), text

    def places_of(self, secret: str) -> list[str]:
        """Return where on the pilot the text is found: files, journal, arguments, environments."""
        wanted = ROOT / "srv/wanted"
        wanted.touch(mode=0o600)
        wanted.write_text(secret + "\n")
        found = self.ssh(
            "cd / && grep -rlaFs --exclude-dir=artifacts --exclude=wanted -f /srv/wanted "
            "/etc /home /opt/seatrial-gitops/sources /root /srv /tmp /var/lib /var/log /var/tmp "
            "/run/seatrial-gitops; "
            "journalctl --no-pager -o json -a | grep -qaF -f /srv/wanted && echo journal; "
            "grep -laFs -f /srv/wanted /proc/[0-9]*/cmdline /proc/[0-9]*/environ; true"
        )
        wanted.unlink()
        return found.splitlines()


def _from_here() -> dict[str, str]:
    """Return how this machine reaches the pilot."""
    return {
        "ansible_connection": "ssh",
        "ansible_host": ADDRESS,
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_executable": str(rehearsal.SOURCE / "rehearsal/ssh"),
        "ansible_sftp_extra_args": f"-S {rehearsal.SOURCE}/rehearsal/ssh",
        "ansible_ssh_common_args": f"-F {SSH_CONFIG}",
        "ansible_ssh_private_key_file": str(rehearsal.STATE / "key"),
    }


def _wheels() -> Path:
    lock = (rehearsal.SOURCE / "requirements/control.lock").read_bytes()
    return WHEELS / hashlib.sha256(lock).hexdigest()[:16]


def _download_wheels() -> None:
    """Have what pip installs on a machine without a package index, once for each lock."""
    target = _wheels()
    if (target / "complete").exists():
        return
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"),
            *("--only-binary=:all:", "--python-version", "3.11", "--dest", target),
            *("-r", rehearsal.SOURCE / "requirements/control.lock"),
        ],
        check=True,
    )
    (target / "complete").touch()
