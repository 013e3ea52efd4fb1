"""One case of the fault matrix: what happens around a strike, and what must be true at its end."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rehearsal import run as rehearsal
from seatrial import ledger
from tests.faults import hosts
from tests.faults.fleet import WORK, Deploy, Fleet

HERE = Path(__file__).resolve().parent
LAST_GOOD, NEW = "last_good", "the new release"
SETTLE_SECONDS = 60
# How often the probe asks: SGLang on a CPU has to work for an answer.
PROBE_SECONDS = {"light": 0.2, "real": 1.0}
MARGIN_SECONDS = 60
TAIL_SECONDS = 4.0
HELD = "/run/fault-port.held"
"""There once a stranger has the port that it was after."""


class Row(NamedTuple):
    """One line of the matrix."""

    name: str
    fault: str
    phase: str
    end: str
    seconds: float
    requests: int
    failed: int
    engine: str


class Request(NamedTuple):
    """One question of the probe."""

    number: int
    begin: float
    end: float
    status: int
    cell: str
    servers: str
    error: str

    @property
    def releases(self) -> set[str]:
        """Return the names of the releases that stood behind this answer."""
        return set(re.findall(r"=(\w+)@", self.servers))


@dataclass
class Stage:
    """A case while it runs: its probe, its strikes, and what it allows."""

    fleet: Fleet
    name: str
    folder: Path
    base: str
    base_name: str
    release: str
    may_end: set[str]
    began: float = field(default_factory=time.time)
    struck_at: float = 0.0
    recovered_at: float = 0.0
    end: str = ""
    hurt: dict[str, float] = field(default_factory=dict)
    closed_since: float = 0.0
    torn: int = 0
    late_ends: int = 0
    reported: str = ""
    deploys: list[Deploy] = field(default_factory=list)
    undo: list[Callable[[], object]] = field(default_factory=list)
    _probe: subprocess.Popen[bytes] | None = None

    @property
    def back_seconds(self) -> float:
        """Return in how many seconds a host that is told nothing is back, and serves."""
        return self.fleet.dead_man_seconds + MARGIN_SECONDS

    def __post_init__(self) -> None:
        """Leave to earlier cases what they did to the ledger."""
        self.torn, self.late_ends = self._unreadable(), self._ends_too_many()

    # --- what a case does ---

    def merge(self) -> None:
        """Commit a change that makes the next release."""
        self.fleet.name_release(self.release)
        self.fleet.commit(f"Change for {self.name}")

    def take_back(self) -> None:
        """Revert that commit, as the last sentence of a failed rollout says."""
        self.fleet.git(*rehearsal.IDENTITY, "revert", "--no-edit", "HEAD")

    def deploy(self, repository: Path | None = None) -> Deploy:
        """Start `ansible-playbook deploy.yml`."""
        return self.run("deploy.yml", repository=repository)

    def run(self, *words: str, repository: Path | None = None) -> Deploy:
        """Start a playbook."""
        log = self.folder / f"run-{len(self.deploys) + 1}.log"
        started = self.fleet.play(*words, log=log, repository=repository)
        self.deploys.append(started)
        return started

    def fails(self, deploy: Deploy) -> Deploy:
        """Wait until a run has ended, and not well; what it says is for people."""
        assert deploy.wait() != 0, f"should have failed:\n{deploy.output[-3000:]}"
        assert "Traceback" not in deploy.output, deploy.output[-6000:]
        return deploy

    def succeeds(self, deploy: Deploy) -> Deploy:
        """Wait until a run has ended well."""
        assert deploy.wait() == 0, f"should have succeeded:\n{deploy.output[-5000:]}"
        return deploy

    def struck(self, *cells: str) -> None:
        """Note that the fault strikes now, and which open cells it takes down by itself."""
        self.struck_at = self.struck_at or time.time()
        for cell in cells:
            self.hurt.setdefault(cell, time.time())

    def all_cells_are_down(self) -> None:
        """Note that from now on the fault leaves no cell that could answer."""
        self.closed_since = self.closed_since or time.time()

    def afterwards(self, action: Callable[[], object]) -> None:
        """Do this at the end, whatever happens: what mends the fault."""
        self.undo.append(action)

    def mend(self) -> None:
        """Take the strikes back, the last one first."""
        while self.undo:
            self.undo.pop()()

    def repair(self) -> Deploy:
        """Run the next deploy, and wait until it has ended promoted or with nothing to do."""
        # What they had written when they died, which may be nothing.
        unfinished = [one.events for one in self.deploys if one.was_killed]
        again = self.succeeds(self.deploy())
        begin = next((event for event in again.events if event.event == "begin"), None)
        found = str(begin.data.get("found", "")) if begin else ""
        if found:
            assert found in again.output
            self.reported = "split, reported, repaired: "
        if unfinished and unfinished[-1]:
            died = [
                one for one in ledger.read(self.fleet.ledger) if one.data.get("outcome") == "died"
            ]
            assert unfinished[-1][0].rollout in {one.rollout for one in died}
        return again

    def come_back(self) -> None:
        """Revert the commit; where the fleet is not whole yet, let the next run make it so."""
        self.take_back()
        if not self.is_back(hosts.look()) or hosts.open_cells() != set(hosts.CELLS):
            self.repair()

    def colleague(self) -> Path:
        """Return another clone, with another change of the same base."""
        other = WORK / "colleague"
        shutil.rmtree(other, ignore_errors=True)
        self.fleet.name_release(f"{self.release}x")
        self.fleet.commit("A colleague's change")
        rehearsal.git("clone", "--quiet", self.fleet.repository, other)
        self.fleet.git("reset", "-q", "--hard", "HEAD^")
        self.afterwards(lambda: shutil.rmtree(other))
        return other

    def switch(self, role: str, fault: str, release: str = "") -> None:
        """Let a release, the new one if none is named, show a fault in this role."""
        host = hosts.PLACES[role]
        text = json.dumps({"release": release or self.release, "fault": fault})
        hosts.on(
            host,
            "install -d -m 755 /run/seatrial-fault && "
            f"echo '{text}' >/run/seatrial-fault/{role}.json",
        )
        self.afterwards(lambda: hosts.on(host, "rm -rf /run/seatrial-fault"))

    def await_state(
        self, condition: Callable[[dict[str, hosts.Host]], bool], what: str, seconds: float
    ) -> None:
        """Look at the hosts until the condition holds."""
        deadline = time.monotonic() + seconds
        while True:
            found = hosts.look()
            if condition(found):
                return
            assert time.monotonic() < deadline, f"{what}: not after {seconds:.0f} s: {found}"
            # A look costs the machine half a second's work, which the rollout needs too.
            time.sleep(2)

    def is_back(self, found: dict[str, hosts.Host]) -> bool:
        """Say whether every host runs last_good, with nothing left to decide."""
        return all(
            host.current == host.last_good == self.base and host.is_active and not host.is_pending
            for host in found.values()
        )

    def await_open(self, seconds: float) -> None:
        """Wait until the entry has opened every cell."""
        deadline = time.monotonic() + seconds
        while hosts.open_cells() != set(hosts.CELLS):
            assert time.monotonic() < deadline, f"open after {seconds:.0f} s: {hosts.open_cells()}"
            time.sleep(1)

    def await_closed(self, cell: str) -> None:
        """Wait until the entry has closed a cell."""
        deadline = time.monotonic() + 300
        while cell in hosts.open_cells():
            assert time.monotonic() < deadline, f"cell {cell} was not closed"
            time.sleep(0.2)

    def await_note(self, host: str, event: str) -> None:
        """Wait until the host has noted an event of this case in its own journal."""
        read = "tail -n 5 /opt/seatrial/state/journal.jsonl"
        deadline = time.monotonic() + 60
        while not any(
            line["event"] == event and line["time"] > self.began - 1
            for line in map(json.loads, hosts.on(host, read).splitlines())
        ):
            assert time.monotonic() < deadline, f"{host} noted no {event}"
            time.sleep(0.2)

    def await_own_way_back(self, host: str) -> None:
        """Wait until a host that nobody can reach has gone back, as its disk shows."""
        link = rehearsal.STATE / "hosts" / host / "root/opt/seatrial/current"
        deadline = time.monotonic() + self.back_seconds
        while link.readlink().name != self.base:
            assert time.monotonic() < deadline, f"{host} did not go back by itself"
            time.sleep(0.5)

    def await_unit(self, host: str, unit: str, state: str, seconds: float) -> None:
        """Wait until a unit is in the state."""
        deadline = time.monotonic() + seconds
        while (now := hosts.on(host, f"systemctl is-active {unit}; true").strip()) != state:
            assert time.monotonic() < deadline, f"{unit} is {now}, not {state}"
            time.sleep(0.5)

    def await_gates(self) -> list[int]:
        """Wait until the gates run; return their processes."""
        deadline = time.monotonic() + 60
        while True:
            pids = [pid for pid, words in own_processes().items() if "-m pytest gates/" in words]
            if pids:
                return pids
            assert time.monotonic() < deadline, "the gates did not start"
            time.sleep(0.02)

    # --- strikes that need taking back ---

    def cut(self, host: str) -> None:
        """Pull a host's cable."""
        hosts.verb("cut", host)
        self.afterwards(lambda: hosts.verb("mend", host))

    def fill_disk(self) -> None:
        """Leave no byte on the disk of gpu-b's /opt/seatrial."""
        fill = "/opt/seatrial/models/fill"
        hosts.on(hosts.SMALL_DISK, f"dd if=/dev/zero of={fill} bs=4k status=none; test -s {fill}")
        self.afterwards(lambda: hosts.on(hosts.SMALL_DISK, f"rm -f {fill}"))

    def fill_state(self) -> None:
        """Leave no byte on the disk where the control machine keeps ledger and reports."""
        state, aside = self.fleet.state, WORK / "state"
        shutil.copytree(state, aside)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "faults", state], check=True)
        shutil.copytree(aside, state, dirs_exist_ok=True)
        with contextlib.suppress(OSError), (state / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

        def empty() -> None:
            (state / "fill").unlink()
            shutil.rmtree(aside)
            shutil.copytree(state, aside)
            subprocess.run(["umount", "--lazy", state], check=True)
            shutil.rmtree(state)
            shutil.move(aside, state)

        self.afterwards(empty)

    def freeze_state(self) -> None:
        """Let nothing be written where the control machine keeps ledger and reports."""
        state = self.fleet.state
        subprocess.run(["mount", "--bind", state, state], check=True)
        self.afterwards(lambda: subprocess.run(["umount", "--lazy", state], check=True))
        subprocess.run(["mount", "-o", "remount,bind,ro", state], check=True)

    def tear_ledger(self) -> None:
        """Leave half a line at the ledger's end, as a power loss does."""
        with self.fleet.ledger.open("a") as file:
            file.write('{"schema": 1, "time": "2026-11-2')
        self.torn += 1

    def delete_current(self, host: str) -> None:
        """Delete the release that runs on a host."""
        hosts.on(host, "rm -rf $(readlink -f /opt/seatrial/current)")

    def jump_clock(self, host: str, seconds: int) -> None:
        """Let the host's own programs see another time of day: all hosts share one kernel."""
        file = "/etc/python3.11/sitecustomize.py"
        shift = f"import time as t; n = t.time; t.time = lambda: n() + ({seconds})"
        hosts.on(host, f"cp {file} /root/sitecustomize.py && echo '{shift}' >>{file}")
        self.afterwards(lambda: hosts.on(host, f"mv /root/sitecustomize.py {file}"))

    def hold_port(self, host: str, port: int, seconds: int) -> None:
        """Let a stranger take a port as soon as it is free, and keep it for so long."""
        program = (
            "import socket, time\n"
            "while True:\n"
            "    s = socket.socket()\n"
            # As a server does: connections that the old one has closed linger on its port.
            "    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
            "    try:\n"
            f"        s.bind(('', {port}))\n"
            "    except OSError:\n"
            "        time.sleep(0.001)\n"
            "    else:\n"
            "        s.listen()\n"
            f"        open({HELD!r}, 'w').close()\n"
            f"        time.sleep({seconds}); break\n"
        )
        hosts.on(
            host,
            "systemd-run --quiet --collect --unit=fault-port "
            f"/usr/bin/python3 -c {shlex.quote(program)}",
        )
        self.afterwards(lambda: hosts.on(host, f"systemctl stop fault-port; rm -f {HELD}"))

    def break_daemon_reload(self, host: str) -> None:
        """Let `systemctl daemon-reload` fail on the host, and all else work."""
        wrapper = (
            "#!/bin/bash\n"
            "if [[ $* == *daemon-reload* ]]; then echo 'told to fail' >&2; exit 1; fi\n"
            'exec -a systemctl /usr/bin/systemctl.real "$@"\n'
        )
        hosts.on(
            host,
            "cd /usr/bin && mv systemctl systemctl.real && "
            f"printf %s {shlex.quote(wrapper)} >systemctl && chmod 755 systemctl",
        )
        self.afterwards(lambda: hosts.on(host, "cd /usr/bin && mv systemctl.real systemctl"))

    # --- before and after ---

    def start_probe(self) -> None:
        """Start asking the entry."""
        self._probe = subprocess.Popen(
            [
                # Beside HAProxy: what cuts the controller off does not cut off the users.
                *("nsenter", f"--net=/run/netns/{hosts.NAMESPACE}-edge", "--"),
                *(sys.executable, HERE / "probe.py", hosts.ENTRY),
                *(rehearsal.API_KEY_FILE, self.folder / "probe.jsonl"),
                str(PROBE_SECONDS[self.fleet.engine]),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop_probe(self) -> None:
        """Stop asking."""
        if self._probe is not None:
            self._probe.send_signal(signal.SIGKILL)
            self._probe.wait()

    def requests(self) -> list[Request]:
        """Return what the probe has seen."""
        lines = (self.folder / "probe.jsonl").read_text().splitlines()
        return sorted(Request(**json.loads(line)) for line in lines if line.endswith("}"))

    def settle(self) -> None:
        """Wait until every server is up and both cells answer, and note when that was."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and not self._is_settled():
            time.sleep(0.5)
        self.recovered_at = self.recovered_at or time.time()

    def _is_settled(self) -> bool:
        last = [one for one in self.requests() if one.end > time.time() - TAIL_SECONDS]
        if {one.cell for one in last if one.status == 200} < set(hosts.CELLS):
            return False
        try:
            return all(host.is_active for host in hosts.look().values())
        except (AssertionError, ValueError, subprocess.TimeoutExpired):
            return False

    def judge(self) -> list[str]:
        """Return a sentence for each thing that is not as it must be at the end of a case."""
        self.settle()
        time.sleep(TAIL_SECONDS)
        return [
            *self._wrong_answers(),
            *self._wrong_hosts(),
            *self._wrong_ledger(),
            *self._left_over(),
        ]

    def row(self, fault: str, phase: str) -> Row:
        """Return the line of the matrix."""
        asked = self.requests()
        return Row(
            self.name,
            fault,
            phase,
            self.end,
            max(0.0, self.recovered_at - (self.struck_at or self.recovered_at)),
            len(asked),
            sum(one.status != 200 for one in asked),
            self.fleet.engine,
        )

    # --- what must be true ---

    def _wrong_answers(self) -> list[str]:
        asked = self.requests()
        mixed = [one for one in asked if len(one.releases) > 1]
        problems = [f"an answer of two releases: {one.servers}" for one in mixed[:3]]
        cell_of = self._logged()
        unexplained = [
            one for one in asked if one.status != 200 and not self._is_explained(one, cell_of)
        ]
        problems += [
            f"{len(unexplained)} requests failed without a reason, such as number {one.number} "
            f"on {cell_of.get(one.number, 'no cell')}, {one.begin - self.began:.1f} s after the "
            f"case began: {one.status} {one.error}"
            for one in unexplained[:1]
        ]
        late = [one for one in asked if one.end > asked[-1].end - TAIL_SECONDS]
        problems += [
            f"at the end a plain request is not answered: {one.status} {one.error}"
            for one in late
            if one.status != 200
        ][:1]
        answering = {one.cell for one in late if one.status == 200}
        problems += [
            f"at the end cell {cell} does not answer" for cell in set(hosts.CELLS) - answering
        ]
        return problems

    def _is_explained(self, request: Request, cell_of: dict[int, str]) -> bool:
        """Say whether the fault itself took down what the request was sent to."""
        cell = cell_of.get(request.number, "")
        if cell in hosts.CELLS:
            return cell in self.hurt and request.end >= self.hurt[cell]
        if "edge" in self.hurt and request.end >= self.hurt["edge"]:
            return True
        return bool(self.closed_since) and request.end >= self.closed_since

    def _logged(self) -> dict[int, str]:
        """Return the cell that HAProxy sent each request to, by the request's number."""
        lines = hosts.on(
            "edge", f"journalctl -t haproxy -o cat --no-pager --since=@{int(self.began)}"
        ).splitlines()
        pattern = re.compile(r" \w+ (?:\w+)/(\S+) .*probe=(\d+) ")
        return {int(found[2]): found[1] for line in lines if (found := pattern.search(line))}

    def _wrong_hosts(self) -> list[str]:
        try:
            found = hosts.look()
        except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
            return [f"the hosts do not say what they run: {error}"]
        problems = []
        running = {name for host in found.values() for name in (host.current, host.last_good)}
        end = LAST_GOOD if running == {self.base} else NEW
        self.end = self.reported + end
        if len(running) == 1 and end not in self.may_end:
            problems.append(f"the fleet ended with {end}")
        if len(running) != 1:
            said = {name: (host.current, host.last_good) for name, host in found.items()}
            problems.append(f"the fleet does not run one release (current, last_good): {said}")
        for name, host in found.items():
            if host.is_pending or host.has_timer:
                problems.append(f"{name} still has a decision pending or its timer")
            if not host.is_active:
                problems.append(f"{name}: not every unit is active")
        closed = set(hosts.CELLS) - hosts.open_cells()
        problems += [f"the entry of cell {cell} is closed" for cell in closed]
        return problems

    def _wrong_ledger(self) -> list[str]:
        events = ledger.read(self.fleet.ledger)
        problems = []
        if self._unreadable() != self.torn:
            problems.append(f"{self._unreadable()} lines of the ledger cannot be read")
        if self._ends_too_many() > self.late_ends:
            problems.append(f"{self._ends_too_many()} ends are of rollouts that had ended")
        begun = [event.rollout for event in events if event.event == "begin"]
        ended = {event.rollout for event in events if event.event == "end"}
        return problems + [
            f"rollout {rollout} has no end in the ledger"
            for rollout in dict.fromkeys(begun)
            if rollout not in ended
        ]

    def _unreadable(self) -> int:
        path = self.fleet.ledger
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return len(lines) - len(ledger.read(path))

    def _ends_too_many(self) -> int:
        events = ledger.read(self.fleet.ledger)
        ended = [event.rollout for event in events if event.event == "end"]
        return len(ended) - len(set(ended))

    def _left_over(self) -> list[str]:
        deadline = time.monotonic() + self.fleet.timeouts["gate_seconds"] + MARGIN_SECONDS
        while (running := own_processes().values()) and time.monotonic() < deadline:
            time.sleep(1)
        problems = [f"still running on the control machine: {line}" for line in running]
        command = (
            "ls -Ad /opt/seatrial/*/.[!.]* /opt/seatrial/.[!.]* /opt/seatrial/state/*lock*.json "
            "/run/seatrial-fault 2>/dev/null; "
            "awk '$2 ~ /seatrial./ {print \"mount\", $2}' /proc/mounts; "
            "systemctl list-units --plain --no-legend 'run-*.service' 'run-*.timer' 'fault-*'; true"
        )
        for name, said in hosts.each(command).items():
            problems += [f"left over on {name}: {line}" for line in said.splitlines()]
        command = "systemctl list-units --all --plain --no-legend 'seatrial-reopen-*'"
        problems += [
            f"left over on edge: {line}" for line in hosts.on("edge", command).splitlines()
        ]
        return problems


def own_processes() -> dict[int, str]:
    """Return the command lines of what runs of the clone's playbooks have left running here."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").replace("\0", " ")
            folder = (path.parent / "cwd").readlink()
        except OSError:
            continue
        # What keeps a connection for the next run ends by itself, and holds nothing.
        if folder.is_relative_to(WORK) and "[mux]" not in words:
            found[int(path.parent.name)] = words[:200]
    return found
