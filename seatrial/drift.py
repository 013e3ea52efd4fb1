"""Drift: what differs between the commit that git is at and what is really on the hosts.

Role ``drift`` looks at each host (:class:`Look`), the roles say what they would lay down
(:class:`Wanted`), and :func:`compare` names each difference with what to do about it. A value that
might be a secret is never shown: of environment variables only the names are.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial import release
from seatrial.errors import SeatrialError
from seatrial.release import UNITS

Kind = Literal[
    "unreachable",
    "release",
    "split",
    "decision",
    "lock",
    "build",
    "files",
    "units",
    "processes",
    "services",
    "entry",
]
ROLES = {unit: role for role, unit in UNITS.items()}
UNIT_FOLDERS = ("/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants")
PUT_AWAY = ("/etc/systemd/system/", "/run/systemd/system/")
SHOWN = 2  # names of touched files in one line of the table
# What release.json says of where it came from; the same release may come from several commits.
NAMED_ONLY = ("commit",)


class DriftError(SeatrialError):
    """What a host answered cannot be compared."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class File(_Strict):
    """A file as it lies on a host."""

    sha256: str
    mode: str
    owner: str


class Unit(_Strict):
    """What systemd has in memory of a unit; ``command`` is its words joined by blanks."""

    load: str
    active: str
    enabled: str
    is_stale: bool
    pid: int
    file: str
    drop_ins: list[str]
    command: str


class Process(_Strict):
    """A unit's main process: arguments, listed environment, digests of the builds it has loaded."""

    argv: list[str]
    environment: dict[str, str]
    builds: list[str]


class Stray(_Strict):
    """A server that no unit runs."""

    pid: int
    command: str


class LaidRelease(_Strict):
    """The folder of a release: checksums, targets of links, release.json, environment checksums."""

    files: dict[str, str]
    links: dict[str, str]
    build: str
    description: dict[str, Any] | None
    environment: dict[str, dict[str, str]]


class LaidBuild(_Strict):
    """The folder of a build, and how many of its entries changed after it was put there."""

    description: dict[str, Any] | None
    entries: int
    touched: int
    touched_first: list[str]
    has_python: bool


class GpuHost(_Strict):
    """What is on a GPU host.

    ``links`` are those of units, ``state`` its small JSON files, ``going_back`` the states of the
    units that bring it back by itself.
    """

    current: str
    last_good: str
    releases: dict[str, LaidRelease | None]
    builds: dict[str, LaidBuild | None]
    links: dict[str, str]
    units: dict[str, Unit]
    drop_ins: list[str]
    processes: dict[str, Process]
    strays: list[Stray]
    state: dict[str, dict[str, Any]]
    going_back: dict[str, str]

    @property
    def pending(self) -> dict[str, Any] | None:
        """The decision that nobody has taken yet."""
        return self.state.get("pending")


class EntryCell(_Strict):
    """A cell as HAProxy knows it: ``address:port`` of its router."""

    address: str
    is_open: bool


class Entry(_Strict):
    """HAProxy's words, and the cells that a restart would open."""

    problem: str
    cells: dict[str, EntryCell]
    remembered: list[str]


class Look(_Strict):
    """What role ``drift`` saw on a host."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    files: dict[str, File | None]
    services: dict[str, Unit]
    gpu_host: GpuHost | None
    entry: Entry | None


class WantedFile(_Strict):
    """A file that a role lays down: text (None: a secret), mode, owner, and the playbook for it."""

    content: str | None
    mode: str
    owner: str = "root:root"
    playbook: str


class WantedService(_Strict):
    """A service, whether it runs by itself after a reboot, and the playbook that sees to it."""

    active: Literal["active", "inactive"] = "active"
    enabled: bool = True
    playbook: str


class Wanted(_Strict):
    """What git says of one host.

    Attributes:
        release: the release's digest; empty for a host without engines.
        files: the release's files, ``release.json`` among them, by relative path.
        laid: files outside any release, by absolute path.
        entry: cell -> ``address:port`` of its router; None where the host has no HAProxy of ours.
    """

    cell: str = ""
    release: str = ""
    build: str = ""
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    description: dict[str, Any] = {}
    laid: dict[str, WantedFile] = {}
    services: dict[str, WantedService] = {}
    entry: dict[str, str] | None = None


class Difference(_Strict):
    """One line of the table; ``host`` is ``fleet`` for what concerns several."""

    kind: Kind
    host: str
    what: str
    git: str
    found: str
    todo: str


class Report(_Strict):
    """The content of ``drift.json``.

    Attributes:
        judged: the hosts that answered.
        unreachable: the hosts that did not; nothing is known of them.
        changes: for each host that runs another release than this commit's: what deploy.yml would
            change of it, a phrase each.
    """

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    time: datetime
    fleet: str
    commit: str
    release: str
    judged: list[str]
    unreachable: list[str]
    differences: list[Difference]
    changes: dict[str, list[str]]

    @property
    def is_clean(self) -> bool:
        """Whether every host answered and is what git says."""
        return not self.differences


class Commands:
    """What a person types, for one fleet."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet

    def play(self, playbook: str) -> str:
        """Return the line that runs a playbook."""
        return f"ansible-playbook -i inventory/{self._fleet} {playbook}"

    @property
    def deploy(self) -> str:
        """Return the line that brings the fleet to what git says."""
        return self.play("deploy.yml")

    @staticmethod
    def on(host: str, command: str) -> str:
        """Return words for a command that root types on a host."""
        return f"on {host}: {command}"


def look(value: Mapping[str, Any], host: str) -> Look:
    """Read what role ``drift`` saw.

    Raises:
        DriftError: it is not of schema 1.
    """
    try:
        return Look.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise DriftError(
            f"{host}: {where}: {first['msg']}; roles/drift has another schema"
        ) from None


def report(
    fleet: str,
    commit: str,
    wanted: Mapping[str, Wanted],
    found: Mapping[str, Look | str],
    time: datetime,
) -> Report:
    """Compare a fleet with a commit; see :func:`compare`."""
    return Report(
        time=time,
        fleet=fleet,
        commit=commit,
        release=next((one.release for one in wanted.values() if one.release), ""),
        judged=[host for host, one in found.items() if isinstance(one, Look)],
        unreachable=[host for host, one in found.items() if isinstance(one, str)],
        differences=compare(fleet, wanted, found),
        changes={
            host: said
            for host, one in found.items()
            if isinstance(one, Look) and (said := _changes(wanted[host], one))
        },
    )


def _changes(wanted: Wanted, seen: Look) -> list[str]:
    """Return what a rollout would change of the release that a host runs."""
    if seen.gpu_host is None or seen.gpu_host.current == wanted.release:
        return []
    running = seen.gpu_host.releases.get(seen.gpu_host.current)
    old, new = (running.description if running else None) or {}, wanted.description
    units, others = old.get("units", {}), new.get("units", {})
    edited = (name for name in {*units, *others} if units.get(name) != others.get(name))
    return [
        *release.changes(old, new, names_only=True),
        *(f"unit {name}" for name in sorted(edited)),
    ]


def compare(
    fleet: str, wanted: Mapping[str, Wanted], found: Mapping[str, Look | str]
) -> list[Difference]:
    """Name everything that differs, host by host, then what concerns the fleet.

    Parameters
    ----------
    found
        What was seen on each host, or in one sentence why it did not answer.
    """
    commands = Commands(fleet)
    seen = {host: one for host, one in found.items() if isinstance(one, Look)}
    differences = [
        Difference(
            kind="unreachable",
            host=host,
            what="the host",
            git="answers",
            found=one,
            todo=f"ssh {host}; what is on it is not known",
        )
        for host, one in found.items()
        if isinstance(one, str)
    ]
    for host, one in seen.items():
        differences += _Judge(commands, host, wanted[host], one).differences()
    return differences + list(_fleet(commands, wanted, seen))


def text(report: Report) -> str:
    """Return the table for people; the commands stand below it, numbered, to be copied."""
    hosts = f"{len(report.judged)} of {len(report.judged) + len(report.unreachable)} hosts judged"
    heading = [
        f"fleet {report.fleet}, commit {report.commit[:12]}, release {report.release}; {hosts}"
    ]
    if report.is_clean:
        return "\n".join([*heading, "No drift: every host is what git says."])
    todos = list(dict.fromkeys(one.todo for one in report.differences))
    rows = [
        (one.host, one.what, one.git, one.found, f"({todos.index(one.todo) + 1})")
        for one in report.differences
    ]
    legend = [f"({number}) {todo}" for number, todo in enumerate(todos, 1)]
    return "\n".join([*heading, "", *_table(rows), "", "what to do", *legend])


def _table(rows: list[tuple[str, str, str, str, str]]) -> Iterator[str]:
    titles = ("host", "what", "git says", "host says", "do")
    limits = (12, 36, 26, 32, 4)
    widths = [
        min(limit, max(len(row[column]) for row in [titles, *rows]))
        for column, limit in enumerate(limits)
    ]
    for row in [titles, *rows]:
        cells = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)
        ]
        for line in range(max(len(cell) for cell in cells)):
            parts = [
                (cell[line] if line < len(cell) else "").ljust(width)
                for cell, width in zip(cells, widths, strict=True)
            ]
            yield "  ".join(parts).rstrip()


class _Judge:
    """Compares one host."""

    def __init__(self, commands: Commands, host: str, wanted: Wanted, seen: Look) -> None:
        self._commands, self._host = commands, host
        self._wanted, self._seen = wanted, seen
        self._restart = f"{commands.deploy} (it drains the cell and starts the release again)"

    def differences(self) -> Iterator[Difference]:
        """Yield what differs on this host, what matters most first."""
        if self._seen.gpu_host is not None:
            gpu_host = self._seen.gpu_host
            yield from self._releases(gpu_host)
            yield from self._decision(gpu_host)
            yield from self._builds(gpu_host)
            yield from self._wanted_files(gpu_host)
            yield from self._running_files(gpu_host)
            yield from self._units(gpu_host)
            yield from self._processes(gpu_host)
        yield from self._laid()
        yield from self._services()
        if self._seen.entry is not None:
            yield from self._entry(self._seen.entry)

    def _say(self, kind: Kind, what: str, git: object, found: object, todo: str) -> Difference:
        return Difference(
            kind=kind, host=self._host, what=what, git=str(git), found=str(found), todo=todo
        )

    def _releases(self, seen: GpuHost) -> Iterator[Difference]:
        deploy = (
            f"{self._commands.deploy}; where it was rolled back on purpose: git revert the merge"
        )
        links = {"current": seen.current, "last_good": seen.last_good}
        for digest in dict.fromkeys(links.values()):
            names = " and ".join(name for name, found in links.items() if found == digest)
            if digest != self._wanted.release:
                found = digest or "nothing"
                yield self._say("release", names, self._wanted.release, found, deploy)
            if digest and seen.releases.get(digest) is None:
                yield self._say("release", f"{names}: the folder", "there", "gone", deploy)

    def _decision(self, seen: GpuHost) -> Iterator[Difference]:
        timer = seen.going_back.get("seatrial-deadman.timer") == "active"
        if seen.pending is not None:
            found = str(seen.pending.get("release") or "unknown")
            yield self._say(
                "decision",
                "undecided release",
                "none",
                found if timer else f"{found}, and no timer that takes it back",
                f"wait for the rollout that runs; if none does: {self._commands.deploy}",
            )
        for unit, state in seen.going_back.items():
            if state == "failed":
                log = self._commands.on(self._host, f"journalctl -u {unit}")
                yield self._say("services", unit, "not failed", "failed", log)

    def _builds(self, seen: GpuHost) -> Iterator[Difference]:
        used = {one.build for one in seen.releases.values() if one} - {""}
        for digest in sorted(used):
            what, build = f"build {digest}", seen.builds.get(digest)
            folder = f"/opt/seatrial/builds/{digest}"
            # What serves goes on from the files it has open; it is not the release, so it restarts.
            again = (
                f"on {self._host}: mv {folder} {folder}.touched; then {self._commands.deploy}; "
                f"then on {self._host}: systemctl restart 'sglang-*' (its cell answers nothing "
                "meanwhile)"
            )
            if build is None:
                yield self._say("build", what, "there", "gone", self._commands.deploy)
            elif build.description is None or build.description.get("digest") != digest:
                yield self._say("build", f"{what}: build.json", digest, "not that", again)
            elif not build.has_python:
                yield self._say("build", f"{what}: bin/python", "runs", "does not", again)
            elif build.touched:
                names = ", ".join(build.touched_first[:SHOWN])
                more = build.touched - SHOWN
                yield self._say(
                    "build",
                    f"{what}: {build.entries} files and folders",
                    "untouched since it was put there",
                    f"{build.touched} touched: {names}" + (f" and {more} more" if more > 0 else ""),
                    again,
                )

    def _wanted_files(self, seen: GpuHost) -> Iterator[Difference]:
        """Compare the folder of the release that git wants with what would be rendered."""
        digest = self._wanted.release
        laid = seen.releases.get(digest)
        if laid is None:
            if digest not in (seen.current, seen.last_good):
                yield self._say(
                    "files", f"release {digest}", "staged", "not staged", self._commands.deploy
                )
            return
        for name, content in self._wanted.files.items():
            if name == "release.json":
                if not _is_described(laid.description, self._wanted.description):
                    yield self._file(digest, name, "differs" if name in laid.files else "missing")
            elif name not in laid.files:
                yield self._file(digest, name, "missing")
            elif laid.files[name] != _sha256(content):
                yield self._file(digest, name, "edited")
        for name, target in self._wanted.links.items():
            if laid.links.get(name) != target:
                yield self._say(
                    "files",
                    f"{digest}/{name}",
                    f"-> {target}",
                    f"-> {laid.links[name]}" if name in laid.links else "missing",
                    self._commands.deploy,
                )
        yield from self._added(digest, laid, {*self._wanted.files, *self._wanted.links})

    def _running_files(self, seen: GpuHost) -> Iterator[Difference]:
        """Compare other releases that matter with their own release.json."""
        for digest in dict.fromkeys((seen.current, seen.last_good)):
            laid = seen.releases.get(digest)
            if laid is None or digest == self._wanted.release:
                continue
            if laid.description is None:
                yield self._file(digest, "release.json", "missing or no JSON")
                continue
            units, servers = laid.description.get("units", {}), laid.description.get("servers", {})
            for name, checksum in units.items():
                found = laid.files.get(f"units/{name}")
                if found != checksum:
                    yield self._file(digest, f"units/{name}", "edited" if found else "missing")
            for role, server in servers.items():
                listed = {name: _sha256(value) for name, value in server.get("env", {}).items()}
                names = _unlike(listed, laid.environment.get(role, {}))
                if names:
                    yield self._file(digest, f"env/{role}.env", f"differs in {', '.join(names)}")
            known = {f"units/{name}" for name in units} | {f"env/{role}.env" for role in servers}
            yield from self._added(digest, laid, {*known, "release.json", "build"})

    def _file(self, digest: str, name: str, found: str) -> Difference:
        return self._say("files", f"{digest}/{name}", "as released", found, self._commands.deploy)

    def _added(self, digest: str, laid: LaidRelease, known: set[str]) -> Iterator[Difference]:
        for name in sorted({*laid.files, *laid.links} - known):
            path = f"/opt/seatrial/releases/{digest}/{name}"
            yield self._say(
                "files",
                f"{digest}/{name}",
                "not there",
                "added by hand",
                self._commands.on(self._host, f"rm {path}"),
            )

    def _units(self, seen: GpuHost) -> Iterator[Difference]:
        """Compare what systemd knows with the release that the host runs."""
        running = seen.releases.get(seen.current)
        described = (running.description if running else None) or {}
        if seen.current and not described:
            return  # that is said already, and nobody knows which units there should be
        units = set(described.get("units", {}))
        for path, target in seen.links.items():
            name = path.rpartition("/")[2]
            wanted = f"/opt/seatrial/current/units/{name}" if name in units else ""
            if target != wanted:
                yield self._say(
                    "units",
                    path,
                    f"-> {wanted}" if wanted else "not there",
                    target if target in ("", "a file") else f"-> {target}",
                    self._commands.on(
                        self._host,
                        f"ln -sfn {wanted} {path} && systemctl daemon-reload"
                        if wanted
                        else f"rm {path} && systemctl daemon-reload",
                    ),
                )
        for path in sorted({*seen.drop_ins, *self._loaded_drop_ins(seen)}):
            unit = path.split("/")[-2].removesuffix(".d")
            # What seatrial-host puts away, before it starts the release again.
            is_known = unit in units and path.startswith(PUT_AWAY)
            by_hand = f"rm {path} && systemctl daemon-reload && systemctl restart {unit}"
            yield self._say(
                "units",
                f"drop-in {path}",
                "not there",
                "changes the unit",
                self._restart if is_known else self._commands.on(self._host, by_hand),
            )
        for name in sorted(units):
            yield from self._unit(seen, name, described)

    @staticmethod
    def _loaded_drop_ins(seen: GpuHost) -> Iterator[str]:
        """Yield drop-ins that systemd applies to our units from a folder for people's changes."""
        for unit in seen.units.values():
            yield from (path for path in unit.drop_ins if path.startswith(("/etc/", "/run/")))

    def _unit(self, seen: GpuHost, name: str, described: Mapping[str, Any]) -> Iterator[Difference]:
        unit = seen.units.get(name)
        if unit is None:
            return
        reload = self._commands.on(self._host, "systemctl daemon-reload")
        if unit.load == "masked":
            yield self._say(
                "units",
                name,
                "loaded",
                "masked",
                self._commands.on(self._host, f"systemctl unmask {name}"),
            )
            return
        released = described["servers"].get(ROLES.get(name, ""), {})
        path = f"/opt/seatrial/releases/{seen.current}/units/{name}"
        if unit.file != path:
            yield self._say("units", f"{name}: file in systemd's memory", path, unit.file, reload)
        elif unit.is_stale:
            yield self._say(
                "units", f"{name}: in systemd's memory", "as on disk", "an older content", reload
            )
        elif released and unit.command != " ".join(released["argv"]):
            yield self._say(
                "units", f"{name}: command in systemd's memory", "as released", "another", reload
            )
        if unit.active != "active":
            yield self._say("services", name, "active", unit.active, self._commands.deploy)

    def _processes(self, seen: GpuHost) -> Iterator[Difference]:
        """Compare what runs with the release that the host is said to run."""
        running = seen.releases.get(seen.current)
        if running is None or running.description is None:
            return
        for name, process in seen.processes.items():
            released = running.description.get("servers", {}).get(ROLES.get(name, ""))
            if released is None:
                yield self._say(
                    "processes",
                    name,
                    "not in the release",
                    "runs",
                    self._commands.on(self._host, f"systemctl stop {name}"),
                )
                continue
            yield from (
                self._say("processes", f"{name}: {what}", git, found, self._restart)
                for what, git, found in _process(process, released, running.build)
            )
        for stray in seen.strays:
            yield self._say(
                "processes",
                f"process {stray.pid}",
                "not there",
                stray.command,
                self._commands.on(self._host, f"kill {stray.pid}"),
            )

    def _laid(self) -> Iterator[Difference]:
        """Compare files outside any release."""
        for path, wanted in self._wanted.laid.items():
            found, todo = self._seen.files.get(path), self._commands.play(wanted.playbook)
            if found is None:
                yield self._say("files", path, "there", "missing", todo)
            elif wanted.content is not None and found.sha256 != _sha256(wanted.content):
                yield self._say("files", path, "as rendered", "edited, or of another commit", todo)
            elif (found.mode, found.owner) != (wanted.mode, wanted.owner):
                yield self._say(
                    "files",
                    f"{path}: mode and owner",
                    f"{wanted.mode} {wanted.owner}",
                    f"{found.mode} {found.owner}",
                    todo,
                )

    def _services(self) -> Iterator[Difference]:
        for name, wanted in self._wanted.services.items():
            found = self._seen.services[name]
            todo = self._commands.play(wanted.playbook)
            if found.load != "loaded":
                yield self._say("services", name, "loaded", found.load, todo)
                continue
            if found.active != wanted.active:
                yield self._say("services", name, wanted.active, found.active, todo)
            if wanted.enabled and found.enabled != "enabled":
                yield self._say("services", f"{name} at boot", "enabled", found.enabled, todo)
            if found.is_stale:
                yield self._say(
                    "services",
                    f"{name}: in systemd's memory",
                    "as on disk",
                    "an older content",
                    self._commands.on(self._host, "systemctl daemon-reload"),
                )
            for path in found.drop_ins:
                if path.startswith(("/etc/", "/run/")):
                    yield self._say(
                        "services",
                        f"drop-in {path}",
                        "not there",
                        "changes the unit",
                        self._commands.on(self._host, f"rm {path} && systemctl daemon-reload"),
                    )

    def _entry(self, seen: Entry) -> Iterator[Difference]:
        """Compare the cells that the running HAProxy knows; open or closed concerns the fleet."""
        deploy = self._commands.deploy
        if seen.problem:
            yield self._say("entry", "HAProxy's admin socket", "answers", seen.problem, deploy)
            return
        for cell, address in (self._wanted.entry or {}).items():
            found = seen.cells.get(cell)
            if found is None:
                yield self._say("entry", f"cell {cell}", address, "unknown to HAProxy", deploy)
            elif found.address != address:
                yield self._say("entry", f"cell {cell}", address, found.address, deploy)
            elif found.is_open != (cell in seen.remembered):
                yield self._say(
                    "entry",
                    f"cell {cell} after a restart of HAProxy",
                    "as it is now",
                    "closed" if found.is_open else "open",
                    deploy,
                )
        for cell in sorted(set(seen.cells) - set(self._wanted.entry or {})):
            yield self._say("entry", f"cell {cell}", "not there", "known to HAProxy", deploy)


def _fleet(
    commands: Commands, wanted: Mapping[str, Wanted], seen: Mapping[str, Look]
) -> Iterator[Difference]:
    """Yield what only shows when hosts are seen together."""
    gpu_hosts = {host: one.gpu_host for host, one in seen.items() if one.gpu_host is not None}
    running: dict[str, set[str]] = {}
    for host, one in gpu_hosts.items():
        running.setdefault(wanted[host].cell, set()).add(one.current or "nothing")
    if len({*(name for names in running.values() for name in names)}) > 1:
        said = "; ".join(f"{cell}: {', '.join(sorted(names))}" for cell, names in running.items())
        yield Difference(
            kind="split",
            host="fleet",
            what="one release on every cell",
            git=next(one.release for one in wanted.values() if one.release),
            found=said,
            todo=commands.deploy,
        )
    yield from _lock(commands, gpu_hosts)
    for host, entry in ((host, one.entry) for host, one in seen.items() if one.entry):
        for cell, known in entry.cells.items():
            members = [name for name, each in wanted.items() if each.cell == cell]
            if not members or any(name not in gpu_hosts for name in members):
                continue  # a host that did not answer: nobody knows whether its cell should serve
            serves = all(_serves(gpu_hosts[name]) for name in members)
            if known.is_open != serves:
                yield Difference(
                    kind="entry",
                    host=host,
                    what=f"entry of cell {cell}",
                    git="open" if serves else "closed: its hosts serve no promoted release",
                    found="open" if known.is_open else "closed",
                    todo=commands.deploy,
                )


def _lock(commands: Commands, gpu_hosts: Mapping[str, GpuHost]) -> Iterator[Difference]:
    """Yield one line for each rollout that holds the fleet lock, whatever number of hosts."""
    held: dict[str, list[str]] = {}
    for host, one in gpu_hosts.items():
        if "fleet_lock" in one.state:
            lock = one.state["fleet_lock"]
            who, commit = lock.get("who", "unknown"), str(lock.get("commit", "unknown"))[:12]
            held.setdefault(f"{lock.get('what', 'rollout')} {commit} of {who}", []).append(host)
    for holder, hosts in held.items():
        yield Difference(
            kind="lock",
            host="fleet",
            what=f"fleet lock on {', '.join(hosts)}",
            git="free",
            found=holder,
            todo=f"wait for its end; who holds it says: {commands.play('playbooks/unlock.yml')}",
        )


def _serves(host: GpuHost) -> bool:
    """Whether a host runs a promoted release with nothing undecided."""
    return (
        bool(host.current)
        and host.current == host.last_good
        and host.pending is None
        and bool(host.units)
        and all(unit.active == "active" for unit in host.units.values())
    )


def _process(
    process: Process, released: Mapping[str, Any], build: str
) -> Iterator[tuple[str, str, str]]:
    """Yield ``what, git says, host says`` for a main process."""
    # SGLang's router writes its title over its arguments; the build that it loaded stands for them.
    is_renamed = process.argv[0].startswith("sglang::")
    if not is_renamed:
        argv = released["argv"]
        for index in range(max(len(argv), len(process.argv))):
            ours = argv[index] if index < len(argv) else "nothing"
            theirs = process.argv[index] if index < len(process.argv) else "nothing"
            if ours != theirs:
                flag = argv[index - 1] if 0 < index <= len(argv) else ""
                where = f"argument {index}" + (f" ({flag})" if flag.startswith("--") else "")
                yield where, ours, theirs
                break  # one too many or too few would make all that follow differ
    if build and build not in process.builds:
        yield "loaded files", f"build {build}", ", ".join(process.builds) or "of no build"
    names = [
        name for name, value in released["env"].items() if process.environment.get(name) != value
    ]
    if names and not (is_renamed and not process.environment):
        yield f"environment {', '.join(names)}", "as released", "another value, or none"


def _is_described(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether a release.json says what git says.

    Not compared is where it came from, and what the control machine cannot know without the build.
    """
    if found is None:
        return False
    unknown = {*NAMED_ONLY, *(key for key, value in wanted.items() if value == "")}
    return all(found.get(key) == wanted.get(key) for key in {*found, *wanted} - unknown)


def _unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names whose values differ, or that only one side has."""
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
