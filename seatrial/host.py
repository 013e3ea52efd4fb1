"""The one read-only door to a host: SSH by fabric, and a fixed set of questions.

A question is built by a pure function and answered by :class:`Host`; none of them changes anything.
Values of environment variables leave the host only for the keys that were asked for.
"""

from __future__ import annotations

import io
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fabric
import paramiko
from invoke.exceptions import CommandTimedOut, UnexpectedExit

from seatrial.errors import SeatrialError

CONNECT_SECONDS = 10
COMMAND_SECONDS = 30

_PROPERTIES = "MainPID,NRestarts,FragmentPath,ExecStart,NeedDaemonReload"
_ARGV = re.compile(r"argv\[\]=(.*?) ; ignore_errors=")
_ENVIRONMENT_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_MEMORY_PROBLEMS = (
    "out of memory|outofmemoryerror|oom-kill|oom_reaper|cannot allocate memory|bad_alloc"
    "|scheduler hit an exception"
)
"""What torch, CUDA, the kernel and SGLang write (in lower case) when memory runs out."""
_UNIT = re.compile(r"^[A-Za-z0-9:_.@-]+\.service$")


class HostError(SeatrialError):
    """A host cannot be reached or cannot answer a question."""


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit.

    Attributes:
        main_pid: process id of the unit's main process; 0 when it does not run.
        restarts: how often systemd has restarted it by itself since it was started.
        path: the unit file that systemd has loaded.
        command: the command line that systemd starts, drop-ins included, words joined by blanks.
        is_stale: the file has changed since systemd loaded it.
    """

    main_pid: int
    restarts: int
    path: str
    command: str
    is_stale: bool


class Followed(io.TextIOBase):
    """Lines as they come, each with the time at which it came, on a clock that nobody sets.

    Attributes:
        is_over: the program ended before it was told to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []
        self.is_over = False
        self._rest = ""

    def wait_for_line(self, seconds: float, where: str) -> None:
        """Wait until the first line has come.

        Raises:
            HostError: none came in time.
        """
        deadline = time.monotonic() + seconds
        while not self.lines:
            if time.monotonic() > deadline:
                raise HostError(
                    f"{where}: the samples of its memory did not begin in {seconds:g} s"
                )
            time.sleep(0.05)

    def writable(self) -> bool:
        """Say that it takes text."""
        return True

    def write(self, text: str) -> int:
        """Take a piece of output."""
        *whole, self._rest = (self._rest + text).split("\n")
        now = time.monotonic()
        self.lines += [(now, line) for line in whole if line.strip()]
        return len(text)


class Host:
    """One host, asked through SSH.

    Args:
        name: the host as the ssh_config names it.
        ssh_config: the configuration to read, or None for the operator's own.
    """

    def __init__(self, name: str, ssh_config: Path | None = None) -> None:
        self.name = name
        if ssh_config is not None and not ssh_config.is_file():
            raise HostError(
                f"{ssh_config}: should be the ssh_config that names {name}; no such file"
            )
        config = fabric.Config(
            runtime_ssh_path=None if ssh_config is None else str(ssh_config),
        )
        self._connection = fabric.Connection(name, config=config, connect_timeout=CONNECT_SECONDS)
        _trust_only_known_keys(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self._ask(read_question(path))

    def sha256(self, path: str) -> str:
        """Return the SHA-256 of a file as hex digits, links followed."""
        return self._ask(sha256_question(path)).split()[0]

    def unit(self, unit: str) -> UnitState:
        """Return what systemd says of ``unit``."""
        answers = dict(
            line.split("=", 1)
            for line in self._ask(unit_question(unit)).splitlines()
            if "=" in line
        )
        return UnitState(
            main_pid=int(answers.get("MainPID", "0")),
            restarts=int(answers.get("NRestarts", "0")),
            path=answers.get("FragmentPath", ""),
            command=found[1] if (found := _ARGV.search(answers.get("ExecStart", ""))) else "",
            is_stale=answers.get("NeedDaemonReload") == "yes",
        )

    def command_line(self, pid: int) -> list[str]:
        """Return the arguments that a process was started with."""
        return self._ask(command_line_question(pid)).removesuffix("\n").split("\n")

    def environment(self, pid: int, keys: Iterable[str]) -> dict[str, str]:
        """Return those of ``keys`` that the process was started with, with their values."""
        wanted = sorted(set(keys))
        if not wanted:
            return {}
        lines = self._ask(environment_question(pid, wanted)).splitlines()
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        return {key: found[key] for key in wanted if key in found}

    def has_mapped(self, pid: int, folder: str) -> bool:
        """Say whether a process has loaded files that lie below ``folder``."""
        return int(self._ask(mapped_question(pid, folder))) > 0

    def peak_memory_bytes(self, unit: str) -> int:
        """Return the peak resident memory of the unit's processes, each since its start, in bytes.

        The kernel keeps the peak (VmHWM), so nothing is missed between two looks. Pages that
        processes share are counted once per process, so the sum errs upwards.

        Raises:
            HostError: the unit has no process.
        """
        kib = [int(word) for word in self._ask(peak_memory_question(unit)).split()]
        if not kib:
            raise HostError(f"{self.name}: {unit} has no running process")
        return 1024 * sum(kib)

    def memory_bytes(self, unit: str) -> int:
        """Return the resident memory of the unit's processes now, in bytes; shared pages as above.

        Raises:
            HostError: the unit has no process.
        """
        kib = [int(word) for word in self._ask(memory_question(unit)).split()]
        if not kib:
            raise HostError(f"{self.name}: {unit} has no running process")
        return 1024 * sum(kib)

    def gpu_memory_bytes(self, gpus: Sequence[int]) -> dict[int, int]:
        """Return the memory in use per GPU, in bytes. torch keeps what it once reserved."""
        lines = self._ask(gpu_memory_question(gpus)).splitlines()
        pairs = [line.split(",") for line in lines if line.strip()]
        return {int(index): int(float(mib) * 1024**2) for index, mib in pairs}

    def kernels_digest(self, python: str) -> str:
        """Return the digest of the kernels that are installed for the interpreter ``python``."""
        return self._ask(kernels_digest_question(python)).strip()

    def now(self) -> int:
        """Return the host's own clock, in whole seconds."""
        return int(self._ask(clock_question()))

    def memory_problems(self, unit: str, since: int) -> list[str]:
        """Return the lines since ``since`` that tell of memory that ran out or of an engine's end.

        The unit's own journal and the kernel's; ``since`` is on the host's own clock.
        """
        return self._ask(memory_problems_question(unit, since)).splitlines()

    def self_test(self, python: str, seconds: float) -> str:
        """Return what the kernels' self-test printed, run by the interpreter ``python``.

        Raises:
            HostError: it could not be run or did not end in time.
        """
        return self._ask(self_test_question(python), seconds)

    @contextmanager
    def follow(self, question: str) -> Iterator[Followed]:
        """Read the lines of a question that goes on until the block ends.

        The lines carry the time at which they came here. Closing the channel ends the program on
        the host, which gets SIGPIPE at its next line; the questions for this end by themselves too.

        Raises:
            HostError: it did not start, or ended with an error status while it was read.
        """
        followed = Followed()
        try:
            promise = self._connection.run(
                question, hide=True, in_stream=False, asynchronous=True, out_stream=followed
            )
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise HostError(
                f"{self.name} cannot be reached by SSH: {error or type(error).__name__}"
            ) from None
        try:
            yield followed
        finally:
            followed.is_over = promise.runner.process_is_finished
            promise.runner.kill()
            with suppress(Exception):  # that it was ended is no news
                promise.join()

    def _ask(self, question: str, seconds: float = COMMAND_SECONDS) -> str:
        try:
            result = self._connection.run(question, hide=True, in_stream=False, timeout=seconds)
        except UnexpectedExit as error:
            said = " ".join(error.result.stderr.split())[:200]
            raise HostError(f"{self.name}: `{question}` failed: {said or 'no message'}") from None
        except CommandTimedOut:
            raise HostError(f"{self.name}: `{question}` took longer than {seconds:g} s") from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise HostError(
                f"{self.name} cannot be reached by SSH: {error or type(error).__name__}"
            ) from None
        return str(result.stdout)


def read_question(path: str) -> str:
    """Return the command that prints a file."""
    return f"cat -- {shlex.quote(path)}"


def sha256_question(path: str) -> str:
    """Return the command that prints a file's SHA-256."""
    return f"sha256sum -- {shlex.quote(path)}"


def unit_question(unit: str) -> str:
    """Return the command that prints a unit's state, a property per line."""
    return f"systemctl show --property={_PROPERTIES} {_unit(unit)}"


def command_line_question(pid: int) -> str:
    """Return the command that prints a process' arguments, one per line."""
    return f"tr '\\0' '\\n' < /proc/{int(pid)}/cmdline"


def environment_question(pid: int, keys: Sequence[str]) -> str:
    """Return the command that prints ``KEY=value`` for the asked keys and for no other.

    Raises:
        HostError: a key is not the name of an environment variable.
    """
    wrong = [key for key in keys if not _ENVIRONMENT_KEY.match(key)]
    if wrong:
        raise HostError(f"{wrong[0]!r} is not the name of an environment variable")
    pattern = f"^({'|'.join(keys)})="
    # awk, not grep: grep's "nothing found" is an error status, and here it is an answer.
    return f"tr '\\0' '\\n' < /proc/{int(pid)}/environ | awk '/{pattern}/'"


def mapped_question(pid: int, folder: str) -> str:
    """Return the command that counts a process' mappings of files below ``folder``."""
    path = shlex.quote(f" {folder.rstrip('/')}/")
    return f"awk -v path={path} 'index($0, path) {{n++}} END {{print n + 0}}' /proc/{int(pid)}/maps"


def peak_memory_question(unit: str) -> str:
    """Return the command that prints VmHWM, in KiB, of each process in the unit's control group."""
    return _status_question(unit, "VmHWM")


def memory_question(unit: str) -> str:
    """Return the command that prints VmRSS, in KiB, of each process in the unit's control group."""
    return _status_question(unit, "VmRSS")


def _status_question(unit: str, key: str) -> str:
    name = _unit(unit).replace(".", "\\.")
    return (
        f"for group in $(grep -lsE '/{name}(/|$)' /proc/[0-9]*/cgroup); do "
        f"awk '/^{key}:/ {{print $2}}' \"${{group%/cgroup}}/status\"; done"
    )


def gpu_memory_question(gpus: Sequence[int]) -> str:
    """Return the command that prints ``index, MiB in use`` of each GPU."""
    indices = ",".join(str(int(gpu)) for gpu in gpus)
    return f"nvidia-smi --id={indices} --query-gpu=index,memory.used --format=csv,noheader,nounits"


def gpu_watch_question(gpus: Sequence[int], seconds: int) -> str:
    """Return the command that prints ``index, MiB used, MiB in all`` of each GPU, 6 times a second.

    It ends by itself after ``seconds``.
    """
    indices = ",".join(str(int(gpu)) for gpu in gpus)
    return (
        f"timeout {int(seconds)} stdbuf -oL nvidia-smi --id={indices} "
        "--query-gpu=index,memory.used,memory.total --format=csv,noheader,nounits -lms 150"
    )


def process_watch_question(unit: str, seconds: int) -> str:
    """Return the command that prints the resident KiB of a unit's processes 5 times a second.

    Shared pages count once per process, as in :func:`peak_memory_question`. It ends by itself.
    """
    name = _unit(unit).replace(".", "\\.")
    return (
        f"files=$(for group in $(grep -lsE '/{name}(/|$)' /proc/[0-9]*/cgroup); do "
        'echo "${group%/cgroup}/status"; done); '
        f"end=$(($(date +%s) + {int(seconds)})); "
        'while [ -n "$files" ] && [ "$(date +%s)" -lt "$end" ]; do '
        "awk '/^VmRSS:/ {kib += $2} END {print kib + 0}' $files || exit 0; sleep 0.1; done"
    )


def clock_question() -> str:
    """Return the command that prints the host's clock in seconds since 1970."""
    return "date +%s"


def memory_problems_question(unit: str, since: int) -> str:
    """Return the command that prints the lines of the journal that tell of memory running out."""
    told = f"--since=@{int(since)} --no-pager --quiet --output=cat"
    return (
        f"{{ journalctl --unit={_unit(unit)} {told}; journalctl --dmesg {told}; }} "
        f"| awk 'tolower($0) ~ /{_MEMORY_PROBLEMS}/' | cut -c 1-300 | tail -n 50"
    )


def self_test_question(python: str) -> str:
    """Return the command that runs the kernels' self-test in a build and prints its findings."""
    return f"{shlex.quote(python)} -I -B -m seatrial_kernels.selftest"


def kernels_digest_question(python: str) -> str:
    """Return the command that prints the digest of the kernels installed for ``python``.

    Isolated and without writing byte-code: asking leaves nothing behind.
    """
    program = "from seatrial_kernels.report import digest; print(digest())"
    return f"{shlex.quote(python)} -I -B -c {shlex.quote(program)}"


def _unit(unit: str) -> str:
    if not _UNIT.match(unit):
        raise HostError(f"{unit!r} is not the name of a service")
    return unit


def _trust_only_known_keys(connection: Any) -> None:
    """Make a connection refuse hosts whose key is not known; fabric would accept any.

    ``StrictHostKeyChecking no`` or ``accept-new`` in the ssh_config is an operator's decision and
    is obeyed, as ssh does.
    """
    options = connection.ssh_config
    connection.client.load_system_host_keys()
    for name in str(options.get("userknownhostsfile", "")).split():
        file = Path(name).expanduser()
        if file.is_file():
            connection.client.load_host_keys(str(file))
    if str(options.get("stricthostkeychecking", "")).lower() not in {"no", "off", "accept-new"}:
        connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
