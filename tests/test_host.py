"""The door to a host asks fixed questions, changes nothing, and lets no secret out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial import host
from seatrial.host import Host, HostError


def answered(question: str) -> str:
    """Ask this machine what a host would be asked."""
    done = subprocess.run(
        ["sh", "-c", question], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout


@pytest.fixture
def process() -> Iterator[int]:
    """Return a process with known arguments and environment."""
    environment = {**os.environ, "LISTED": "a b=c", "HIDDEN_TOKEN": "hush"}
    with subprocess.Popen(["sleep", "3"], env=environment) as child:
        yield child.pid
        child.kill()


def test_questions_are_these() -> None:
    """What is asked is short enough to be read before it is trusted."""
    assert host.read_question("/etc/a b") == "cat -- '/etc/a b'"
    assert host.sha256_question("/etc/x") == "sha256sum -- /etc/x"
    assert host.unit_question("sglang-router.service") == (
        "systemctl show --property=MainPID,NRestarts,FragmentPath,ExecStart,NeedDaemonReload "
        "sglang-router.service"
    )
    assert host.gpu_memory_question([0, 3]) == (
        "nvidia-smi --id=0,3 --query-gpu=index,memory.used --format=csv,noheader,nounits"
    )


def test_command_line_is_that_of_the_process(process: int) -> None:
    """Arguments come one per line."""
    assert answered(host.command_line_question(process)) == "sleep\n3\n"


def test_only_listed_environment_leaves_the_host(process: int) -> None:
    """A secret next to a listed key stays where it is."""
    assert answered(host.environment_question(process, ["LISTED", "ABSENT"])) == "LISTED=a b=c\n"


def test_loaded_files_are_counted(process: int) -> None:
    """A process maps its libraries, and nothing from a folder that is not there."""
    assert int(answered(host.mapped_question(process, "/usr/lib"))) > 0
    assert answered(host.mapped_question(process, "/nowhere")) == "0\n"


@pytest.mark.parametrize("key", ["A|.*", "A B", "", "1A"])
def test_environment_key_is_checked(key: str) -> None:
    """A key cannot widen the question."""
    with pytest.raises(HostError, match="is not the name of an environment variable"):
        host.environment_question(1, [key])


@pytest.mark.parametrize("unit", ["a.service; reboot", "a b.service", "a.timer", ""])
def test_unit_name_is_checked(unit: str) -> None:
    """A unit's name cannot become a command."""
    with pytest.raises(HostError, match="is not the name of a service"):
        host.unit_question(unit)


def test_peak_of_absent_unit_is_empty() -> None:
    """No process is an answer, which the caller refuses."""
    assert answered(host.peak_memory_question("seatrial-absent.service")) == ""


def test_missing_ssh_config_is_one_sentence(tmp_path: Path) -> None:
    """The file is named."""
    with pytest.raises(HostError, match="should be the ssh_config that names gpu-a; no such file"):
        Host("gpu-a", tmp_path / "ssh_config")


def test_unreachable_host_is_one_sentence(tmp_path: Path) -> None:
    """No traceback of a library reaches the reader."""
    config = tmp_path / "ssh_config"
    config.write_text("Host gpu-a\n  HostName 127.0.0.1\n  Port 9\n")
    with Host("gpu-a", config) as door, pytest.raises(HostError, match="cannot be reached by SSH"):
        door.read("/etc/hostname")


def test_lines_are_kept_as_they_come() -> None:
    """A line is whole when its end has come, wherever the pieces were cut."""
    followed = host.Followed()
    for piece in ("10\n2", "0\n", "", "3"):
        followed.write(piece)
    assert [line for _, line in followed.lines] == ["10", "20"]
    with pytest.raises(HostError, match=r"unit: the samples of its memory did not begin in 0.1 s"):
        host.Followed().wait_for_line(0.1, "unit")


def test_memory_of_absent_unit_is_not_watched() -> None:
    """There is nothing to sample, and the question ends at once."""
    question = host.process_watch_question("sglang-no-such-unit.service", 60)
    assert answered(question) == ""


def test_memory_problems_are_found_in_both_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the unit and of the kernel that tell of memory come back, others do not."""
    program = tmp_path / "journalctl"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--unit=u.service) echo 'INFO ready'; echo 'torch.OutOfMemoryError: CUDA out of memory';;\n"
        "--dmesg) echo 'Out of memory: Killed process 7 (python)';;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert answered(host.memory_problems_question("u.service", 5)).splitlines() == [
        "torch.OutOfMemoryError: CUDA out of memory",
        "Out of memory: Killed process 7 (python)",
    ]
