"""Role `gpu_host` lets a fit host pass and tells an unfit one what to change."""

import json
import os
import re
import socket
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.playing import played

ROLE = Path(__file__).parents[1] / "roles" / "gpu_host"
PROBE = ROLE / "files" / "probe.py"

GPU = {
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "driver_version": "580.95.05",
    "compute_cap": "12.0",
    "persistence_mode": "Enabled",
}
FIT: dict[str, Any] = {
    "os": {"id": "debian", "version": "12"},
    "machine": "x86_64",
    "programs_absent": [],
    "interpreter": "3.11",
    "gpus": [{"index": str(index), **GPU} for index in range(2)],
    "has_build": False,
    "disk_free_bytes": 10 << 30,
    "memory_bytes": 16 << 30,
    "ports_taken": {"30000": "sglang-prefill.service"},
    "is_clock_synchronised": True,
    "has_model_config": True,
    "libraries": ["libcurl.so.4", "libz.so.1"],
}
BUILD = {
    "architectures": ["sm_120"],
    "shared_libraries": ["libcurl.so.4"],
    "needed_by": {"libcurl.so.4": ["lib/mooncake/engine.so"]},
    "size_bytes": 1 << 30,
}
# What is unfit about a host (path in FIT, value) -> what the operator reads.
UNFIT = {
    "distribution": (("os", "id", "fedora"), "runs fedora 12 on x86_64"),
    "interpreter": (("interpreter", None), "is not there: install package python3.11"),
    "programs": (("programs_absent", ["zstd"]), "apt-get install zstd"),
    "disk": (("disk_free_bytes", 3 << 30), "has 3.00 GB free and needs 4.00 GB"),
    "memory": (("memory_bytes", 4 << 30), "has 4.00 GB of memory and needs 8.00 GB"),
    "ports": (("ports_taken", "30000", "nginx.service"), "'30000': 'nginx.service'"),
    "clock": (("is_clock_synchronised", False), "clock of clock is not synchronised"),
    "driver": (("gpus", 0, "driver_version", "570.10"), "has driver 570.10; .* needs 580"),
    "no-driver": (("gpus", []), "has driver none; .* needs 580"),
    "too-few-gpus": (("gpus", [{"index": "0", **GPU}]), "has no GPU 1 (it has 1)"),
    "capability": (("gpus", 1, "compute_cap", "9.0"), "are sm_120, sm_90; the build is for sm_120"),
    "persistence": (("gpus", 1, "persistence_mode", "Disabled"), "Persistence mode is off"),
    "model": (("has_model_config", False), "/models/m on model has no config.json"),
    "library": (
        ("libraries", []),
        "library lacks libcurl.so.4, needed by lib/mooncake/engine.so",
    ),
}


def unfit(path: tuple[Any, ...]) -> dict[str, Any]:
    """What a probe says of a host with one thing wrong."""
    host = deepcopy(FIT)
    *steps, key, value = path
    place: Any = host
    for step in steps:
        place = place[step]
    place[key] = value
    return host


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What Ansible prints for a fleet with one fit host and one host for each way to be unfit."""
    folder = tmp_path_factory.mktemp("gpu_host")
    hosts = {name: unfit(path) for name, (path, _) in UNFIT.items()} | {"fit": FIT}
    inventory = {"all": {"hosts": {name: {"__gpu_host": host} for name, host in hosts.items()}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    given = {
        "gpu_host_platform": "cuda13",
        "gpu_host_gpus": [0, 1],
        "gpu_host_ports": [30000],
        "gpu_host_build": BUILD,
        "gpu_host_model_path": "/models/m",
    }
    rules = ("system", "gpus", "build")
    tasks = [{"include_role": {"name": str(ROLE), "tasks_from": name}} for name in rules]
    ran = played(folder, {"hosts": "all", "vars": given, "tasks": tasks}, "-i", "hosts.yml")
    return ran.stdout + ran.stderr


def test_a_fit_host_passes_every_rule(told: str) -> None:
    """Ports of our own unit do not count as taken."""
    assert re.search(r"^fit +: ok=\d+ +changed=0 +unreachable=0 +failed=0", told, re.MULTILINE), (
        told
    )


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_host_is_told_what_to_change(told: str, name: str) -> None:
    """The rule fails with a message that has the numbers or names in it."""
    assert re.search(rf"^{name} +: .* failed=1 ", told, re.MULTILINE), told
    failure = next(line for line in told.splitlines() if line.startswith(f"fatal: [{name}]"))
    wanted = UNFIT[name][1]
    expected = wanted if ".*" in wanted else re.escape(wanted)
    assert re.search(expected, failure), failure


def probed(*arguments: str, path: str = os.environ["PATH"]) -> dict[str, Any]:
    """What the probe says of this machine."""
    found = subprocess.run(
        [sys.executable, PROBE, *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments of the probe for an empty host."""
    return [
        f"--root={tmp_path / 'opt' / 'seatrial'}",
        f"--build={tmp_path / 'build'}",
        f"--model={tmp_path / 'model'}",
        f"--interpreter={sys.executable}",
    ]


def test_the_probe_tells_the_facts_that_the_rules_read(arguments: list[str]) -> None:
    """Rules and probe agree on the names, on a host where nothing is installed yet."""
    found = probed(*arguments, "--ports=")
    assert found.keys() == FIT.keys()
    assert found["interpreter"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found["disk_free_bytes"] > 0
    assert "libc.so.6" in found["libraries"]
    assert not found["has_build"]
    assert not found["has_model_config"]
    assert found["ports_taken"] == {}


def test_the_probe_sees_a_taken_port(arguments: list[str]) -> None:
    """A listening socket is found; a free port is not listed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert list(probed(*arguments, f"--ports={port}")["ports_taken"]) == [str(port)]
    assert probed(*arguments, f"--ports={port}")["ports_taken"] == {}


def test_the_probe_reads_what_the_driver_tells(tmp_path: Path, arguments: list[str]) -> None:
    """One GPU a line, as nvidia-smi's CSV has them."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, NVIDIA RTX PRO 6000, 580.95.05, 12.0, Enabled'\n")
    driver.chmod(0o755)
    found = probed(*arguments, "--ports=", path=f"{tmp_path}:{os.environ['PATH']}")
    assert found["gpus"] == [{"index": "0", **GPU, "name": "NVIDIA RTX PRO 6000"}]
