"""A fleet on the rehearsal hosts: its clone, its inventory, and the runs of its playbooks.

Everything but the light engine is the real thing: `ansible-playbook deploy.yml` of a clone, its
roles, units and gates, systemd, sshd, HAProxy, Prometheus. A release is a commit that changes one
value. With `engine="real"` SGLang serves too, and a rollout takes minutes instead of one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rehearsal import run as rehearsal
from rehearsal.light import build as light
from seatrial import ledger
from seatrial.spec import BETWEEN_STEPS_SECONDS
from tests.faults import hosts

WORK = rehearsal.CACHE / f"faults{rehearsal.BERTH}"
ARTIFACTS = rehearsal.CACHE / "artifacts"
ROLES = ("prefill", "decode", "combined", "router")
CONNECTIONS = Path.home() / f".ansible/cp{rehearsal.BERTH}"
DEPLOY_SECONDS = 900
"""Longer than any rollout of these fleets that ends by itself."""

# Seconds. Small, so that a case is short; generous, so that a busy machine does not fail one.
TIMEOUTS = {
    "light": {
        "drain_seconds": 15,
        "stop_seconds": 3,
        "ready_seconds": 15,
        "router_seconds": 9,
        "gate_seconds": 30,
    },
    "real": {
        "drain_seconds": 30,
        "stop_seconds": 20,
        "ready_seconds": 150,
        "router_seconds": 30,
        "gate_seconds": 300,
    },
}


@dataclass
class Deploy:
    """A run of a playbook in the background."""

    process: subprocess.Popen[bytes]
    log: Path
    ledger_file: Path
    begin: float
    ledger_at: int
    seconds: float = 0.0
    was_killed: bool = False

    @property
    def output(self) -> str:
        """Return what it has printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def events(self) -> list[ledger.Event]:
        """Return the ledger's events since it began."""
        return ledger.read(self.ledger_file)[self.ledger_at :]

    @property
    def outcome(self) -> str:
        """Return how the ledger says that its rollout ended; empty while it has not."""
        ends = [event for event in self.events if event.event == "end"]
        return str(ends[-1].data["outcome"]) if ends else ""

    @property
    def reason(self) -> str:
        """Return the last sentence of its rollout."""
        ends = [event for event in self.events if event.event == "end"]
        return str(ends[-1].data["reason"]) if ends else ""

    def await_phase(self, phase: str, cell: str = "one") -> None:
        """Wait until the ledger says that the cell entered the phase."""
        self._await(
            lambda: any(
                event.event == "phase" and (event.cell, event.phase) == (cell, phase)
                for event in self.events
            ),
            f"phase {phase} of cell {cell}",
        )

    def await_output(self, words: str) -> None:
        """Wait until it prints the words."""
        self._await(lambda: words in self.output, repr(words))

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEPLOY_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} in time:\n{self.output[-4000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the controller's processes at once, as the kernel does for want of memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.was_killed = True
        self.seconds = time.time() - self.begin

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the controller's processes."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        try:
            self.process.wait(DEPLOY_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end:\n{self.output[-4000:]}") from None
        self.seconds = time.time() - self.begin
        return self.process.returncode


@dataclass(frozen=True)
class Fleet:
    """The hosts of inventory/rehearsal under another name, with quick time-outs and few gates."""

    engine: Literal["light", "real"]

    @property
    def name(self) -> str:
        """Return the name of its inventory, and of all that is kept of it."""
        return f"faults-{self.engine}{rehearsal.BERTH}"

    @property
    def repository(self) -> Path:
        """Return its clone of the work tree."""
        return WORK / self.name

    @property
    def state(self) -> Path:
        """Return where the control machine keeps its ledger and reports."""
        return Path.home() / ".local/state/seatrial" / self.name

    @property
    def ledger(self) -> Path:
        """Return its ledger."""
        return self.state / "ledger.jsonl"

    @property
    def timeouts(self) -> dict[str, int]:
        """Return the spec's time-outs, in seconds."""
        return TIMEOUTS[self.engine]

    @property
    def dead_man_seconds(self) -> int:
        """Return after how many seconds a host reverts that is told nothing: the least allowed."""
        times = self.timeouts
        waits = 3 * times["stop_seconds"] + times["ready_seconds"] + times["router_seconds"]
        return waits + times["gate_seconds"] + BETWEEN_STEPS_SECONDS

    # --- its clone ---

    def make_clone(self) -> None:
        """Clone the work tree, with an inventory of its own beside the rehearsal's."""
        rehearsal.clone(rehearsal.SOURCE, self.repository)
        inventory = self.repository / "inventory" / self.name
        shutil.copytree(self.repository / "inventory/rehearsal", inventory)
        connection = inventory / "group_vars/all/connection.yml"
        connection.write_text(
            connection.read_text().replace("/var/lib/seatrial-rehearsal/", f"{rehearsal.STATE}/")
        )
        spec = self.read_spec()
        spec["timeouts"] = self.timeouts
        spec["rollout"]["dead_man_seconds"] = self.dead_man_seconds
        spec["gates"]["select"] = ["identity", "readiness"]
        if self.engine == "light":
            # No case is judged by what Prometheus gathers, and being scraped costs a host much.
            monitoring = inventory / "group_vars/monitoring.yml"
            monitoring.write_text("monitoring_scrape_interval_seconds: 10\n")
            spec["engine"]["patches"] = ["light"]
            (inventory / "group_vars/all/light.yml").write_text(
                'build_lock: "{{ inventory_dir | dirname | dirname }}/light.lock"\n'
                # One host of the light fleet has a small disk, to be filled.
                "gpu_host_disk_free_min_bytes: 8388608\n"
                "build_disk_reserve_bytes: 1048576\n"
            )
            self.use_build("1")
        self.write_spec(spec)
        self.name_release("r0")
        self.commit("Rehearse faults")

    def git(self, *words: str) -> str:
        """Run git in the clone."""
        return rehearsal.git("-C", self.repository, *words)

    def commit(self, message: str) -> None:
        """Commit what lies in the clone."""
        self.git("add", "-A")
        self.git(*rehearsal.IDENTITY, "commit", "--quiet", "-m", message)

    def read_spec(self) -> dict[str, Any]:
        """Return the clone's serving spec."""
        content: dict[str, Any] = yaml.safe_load(self._spec.read_text())["serving_spec"]
        return content

    def write_spec(self, spec: dict[str, Any]) -> None:
        """Replace the clone's serving spec."""
        self._spec.write_text(yaml.safe_dump({"serving_spec": spec}, sort_keys=False))

    def name_release(self, name: str) -> None:
        """Say another name of the release to every server: the smallest change of all."""
        spec = self.read_spec()
        for role in ROLES:
            spec["roles"][role]["env"] = {**spec["roles"][role]["env"], "REHEARSED_RELEASE": name}
        self.write_spec(spec)

    def release_name(self) -> str:
        """Return that name."""
        return str(self.read_spec()["roles"]["router"]["env"]["REHEARSED_RELEASE"])

    def use_build(self, version: str) -> str:
        """Name the light build of this version, and see that it is kept; return its digest."""
        lock = self.repository / "light.lock"
        lock.write_text(light.lock(version))
        return light.make(lock, self.repository / "kernels", ARTIFACTS)

    @property
    def _spec(self) -> Path:
        folder = self.repository / "inventory" / self.name / "group_vars/all"
        return folder / "serving_spec.yml"

    # --- its runs ---

    def play(self, *words: str, log: Path, repository: Path | None = None) -> Deploy:
        """Start a playbook of the clone, or of another one, as people type it."""
        program = Path(sys.executable).with_name("ansible-playbook")
        at = len(ledger.read(self.ledger))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [program, "-i", f"inventory/{self.name}", *words],
                cwd=repository or self.repository,
                env={
                    **os.environ,
                    "PATH": f"{program.parent}:{os.environ['PATH']}",
                    # Hosts of two berths have one address.
                    "ANSIBLE_SSH_CONTROL_PATH_DIR": str(CONNECTIONS),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Deploy(process, log, self.ledger, time.time(), at)

    def up(self, log: Path) -> None:
        """Boot fresh hosts and promote the base release, with the playbook of any rehearsal."""
        hosts.verb("down")
        shutil.rmtree(self.state, ignore_errors=True)
        rehearsal.make_api_key()
        self.make_clone()
        hosts.verb("up")
        if self.engine == "light":
            _give_small_disk()
        key = f"rehearse_api_key_file={rehearsal.API_KEY_FILE}"
        deploy = self.play("playbooks/rehearse.yml", "-e", key, log=log)
        assert deploy.wait() == 0, deploy.output[-6000:]


def _give_small_disk() -> None:
    """Give one host a small disk of its own at /opt/seatrial, which outlives its reboots."""
    hosts.verb("poweroff", hosts.SMALL_DISK)
    place = rehearsal.STATE / "hosts" / hosts.SMALL_DISK / "root/opt/seatrial"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=755", "small", place], check=True)
    hosts.verb("poweron", hosts.SMALL_DISK)
    hosts.verb("up")  # waits until it answers
