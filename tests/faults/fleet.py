"""The fleet that the fault matrix strikes: rehearsal hosts with the light engine, and the strikes.

Everything but the engine is the real thing: `ansible-playbook deploy.yml` of a clone, its roles,
units and gates, systemd, sshd, HAProxy, Prometheus. A release is one commit that changes one value.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rehearsal import run as rehearsal
from rehearsal.light import build as light
from seatrial import ledger

WORK = rehearsal.CACHE / "faults"
REPOSITORY = WORK / "repository"
STATE = Path.home() / ".local/state/seatrial/faults"
LEDGER = STATE / "ledger.jsonl"
INVENTORY = Path("inventory/faults")
SPEC = INVENTORY / "group_vars/all/serving_spec.yml"
LOCK = Path("light.lock")
ARTIFACTS = rehearsal.CACHE / "artifacts"
ENTRY = "10.77.0.10:8080"
GPU_HOSTS = ("gpu-a", "gpu-b", "gpu-c")
CELLS = {"one": ("gpu-a", "gpu-b"), "two": ("gpu-c",)}
ROLES = ("prefill", "decode", "combined", "router")
PLACES = {"prefill": "gpu-a", "decode": "gpu-b", "combined": "gpu-c"}
SMALL_DISK = "gpu-b"
PROGRAM = "/opt/seatrial/bin/seatrial-host"
IN_NETWORK = ("nsenter", "--net=/run/netns/seatrial", "--")
HERE = Path(__file__).resolve().parent

# Seconds. Small, so that a case is short; generous, so that a busy machine does not fail one.
TIMEOUTS = {
    "drain_seconds": 15,
    "stop_seconds": 4,
    "ready_seconds": 20,
    "router_seconds": 12,
    "gate_seconds": 30,
}
DEAD_MAN_SECONDS = 165
DEPLOY_SECONDS = 420
"""Longer than any rollout of light cells that ends by itself."""


@dataclass(frozen=True)
class Host:
    """What one GPU host says of itself."""

    current: str
    last_good: str
    is_pending: bool
    is_active: bool
    units: Mapping[str, str]
    has_timer: bool
    booted: str


@dataclass
class Deploy:
    """A run of a playbook in the background."""

    process: subprocess.Popen[bytes]
    log: Path
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
        return ledger.read(LEDGER)[self.ledger_at :]

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

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        try:
            self.process.wait(DEPLOY_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end:\n{self.output[-4000:]}") from None
        self.seconds = time.time() - self.begin
        return self.process.returncode


# --- commands -------------------------------------------------------------------------------


def hosts(*words: str) -> None:
    """Run a verb of hosts.sh."""
    done = subprocess.run([rehearsal.HOSTS, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"hosts.sh {' '.join(words)}: {done.stdout}{done.stderr}"


def on(host: str, command: str, *, check: bool = True, seconds: float = 30) -> str:
    """Run a shell command on a host and return what it prints."""
    words = ("ssh", "-F", "/var/lib/seatrial-rehearsal/ssh_config", "-o", "ConnectTimeout=5")
    try:
        done = subprocess.run(
            [*IN_NETWORK, *words, host, command],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        if check:
            raise
        return ""
    if check and done.returncode:
        raise AssertionError(f"{host}: `{command}` failed: {done.stdout}{done.stderr}")
    return done.stdout


def each(command: str, names: Iterable[str] = GPU_HOSTS) -> dict[str, str]:
    """Run a shell command on several hosts at once."""
    names = list(names)
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(lambda name: on(name, command), names), strict=True))


def look() -> dict[str, Host]:
    """Ask every GPU host what it runs."""
    command = (
        f"{PROGRAM} status; systemctl is-active seatrial-deadman.timer; stat -c %Y /proc/1; true"
    )
    found = {}
    for name, text in each(command).items():
        said, timer, booted = text.strip().splitlines()[-3:]
        status = json.loads(said)
        found[name] = Host(
            current=status["current"],
            last_good=status["last_good"],
            is_pending=status["pending"] is not None,
            is_active=status["active"],
            units={unit: state["MainPID"] for unit, state in status["units"].items()},
            has_timer=timer == "active",
            booted=booted,
        )
    return found


def open_cells() -> set[str]:
    """Return the cells whose entry is open, as HAProxy says."""
    program = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/haproxy/admin.sock'); "
        "s.sendall(b'show servers state cells\\n'); print(s.makefile().read())"
    )
    lines = on("edge", f"python3 -c {shlex.quote(program)}").splitlines()
    rows = [line.split() for line in lines[2:] if line.strip()]
    return {row[3] for row in rows if not int(row[6]) & 1}


# --- the clone ------------------------------------------------------------------------------


def git(*words: str, repository: Path = REPOSITORY) -> str:
    """Run git in the clone."""
    return rehearsal.git("-C", repository, *words)


def commit(message: str, repository: Path = REPOSITORY) -> None:
    """Commit what lies in the clone."""
    git("add", "-A", repository=repository)
    git(*rehearsal.IDENTITY, "commit", "--quiet", "-m", message, repository=repository)


def make_clone() -> None:
    """Clone the work tree, with an inventory of its own beside the rehearsal's."""
    rehearsal.clone(rehearsal.SOURCE, REPOSITORY)
    shutil.copytree(REPOSITORY / "inventory/rehearsal", REPOSITORY / INVENTORY)
    variables = REPOSITORY / INVENTORY / "group_vars"
    (variables / "all/light.yml").write_text(
        'build_lock: "{{ inventory_dir | dirname | dirname }}/light.lock"\n'
        # Hosts of the matrix get small disks, to be filled.
        "gpu_host_disk_free_min_bytes: 8388608\n"
        "build_disk_reserve_bytes: 1048576\n"
    )
    spec = read_spec()
    spec["engine"]["patches"] = ["light"]
    spec["timeouts"] = dict(TIMEOUTS)
    spec["rollout"]["dead_man_seconds"] = DEAD_MAN_SECONDS
    spec["gates"]["select"] = ["identity", "readiness"]
    write_spec(spec)
    use_build("1")
    name_release("r0")
    commit("Rehearse with the light engine")


def read_spec(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Return the clone's serving spec."""
    content: dict[str, Any] = yaml.safe_load((repository / SPEC).read_text())["serving_spec"]
    return content


def write_spec(spec: Mapping[str, Any], repository: Path = REPOSITORY) -> None:
    """Replace the clone's serving spec."""
    text = yaml.safe_dump({"serving_spec": dict(spec)}, sort_keys=False)
    (repository / SPEC).write_text(text)


def name_release(name: str, repository: Path = REPOSITORY) -> None:
    """Let the spec say another name of the release to every server: the smallest change."""
    spec = read_spec(repository)
    for role in ROLES:
        spec["roles"][role]["env"] = {**spec["roles"][role]["env"], "LIGHT_RELEASE": name}
    write_spec(spec, repository)


def release_name() -> str:
    """Return that name."""
    return str(read_spec()["roles"]["router"]["env"]["LIGHT_RELEASE"])


def use_build(version: str) -> str:
    """Let the inventory name the light build of this version, and see that it is kept."""
    (REPOSITORY / LOCK).write_text(light.lock(version))
    return light.make(REPOSITORY / LOCK, REPOSITORY / "kernels", ARTIFACTS)


# --- runs -----------------------------------------------------------------------------------


def play(*words: str, log: Path, repository: Path = REPOSITORY) -> Deploy:
    """Start a playbook of the clone in the background, as people type it."""
    program = Path(sys.executable).with_name("ansible-playbook")
    at = len(ledger.read(LEDGER))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, "-i", INVENTORY, *words],
            cwd=repository,
            env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Deploy(process, log, time.time(), at)


def up(log: Path) -> None:
    """Boot fresh hosts and promote the base release, with the playbook that any rehearsal uses."""
    hosts("down")
    shutil.rmtree(STATE, ignore_errors=True)
    rehearsal.make_api_key()
    make_clone()
    hosts("up")
    give_small_disk()
    deploy = play(
        "playbooks/rehearse.yml",
        "-e",
        f"rehearse_api_key_file={rehearsal.API_KEY_FILE}",
        log=log,
    )
    assert deploy.wait() == 0, deploy.output[-6000:]


def give_small_disk() -> None:
    """Give one host a small disk of its own at /opt/seatrial, which outlives its reboots."""
    hosts("poweroff", SMALL_DISK)
    place = rehearsal.STATE / "hosts" / SMALL_DISK / "root/opt/seatrial"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=755", "small", place], check=True)
    hosts("poweron", SMALL_DISK)
    hosts("up")  # waits until it answers
