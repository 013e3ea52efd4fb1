"""A cell on one host: what its server says, and what its host answers to the gates.

The server is the stand-in; the door to the host is a dictionary from question to answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from seatrial import host
from seatrial.host import Followed, Host, HostError
from seatrial.report import GateResult
from tests.gate_runs import cell_file, run_gates, thresholds
from tests.standin import StandIn, serving

UNIT = "sglang-combined.service"
BUILD = "/opt/seatrial/builds/0123456789abcdef"
PYTHON = f"{BUILD}/bin/python"
LIMITS = "--context-length 32768 --chunked-prefill-size 32768 --mem-fraction-static 0.3"
ARGV = [PYTHON, "-m", "sglang.launch_server", *LIMITS.split(), "--port", "30002"]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "LISTED": "not to be printed"}
RELEASE = {
    "schema": 1,
    "digest": "fedcba9876543210",
    "commit": "c" * 40,
    "build": "0123456789abcdef",
    "sglang": "0.5.23",
    "platform": "cpu",
    "model": {"name": "stand-in", "path": "/models/m", "revision": "revision"},
    "spec_sha256": "s" * 64,
    "index_topk": 1024,
    "index_key_dtype": "fp8_e4m3",
    "patches": ["cpu_dsa"],
    "kernels_sha256": "k" * 64,
    "units": {UNIT: "u" * 64},
    "servers": {"combined": {"argv": ARGV, "env": ENVIRONMENT, "port": 30002}},
}
PLAN = {
    "schema": 1,
    "roles": {
        "combined": {
            "role": "combined",
            "rows": [{"name": "all", "bytes": 1000 * 1024**2, "is_static": True, "why": "test"}],
            "static_limit_bytes": 2000 * 1024**2,
            "device_bytes": 2000 * 1024**2,
            "process_bytes": 500 * 1024**2,
            "pool_tokens": 1,
            "bytes_per_token": 1.0,
        }
    },
}
INFO = {
    "version": "0.5.23",
    "model_path": "/models/m",
    "json_model_override_args": '{"index_key_dtype": "fp8_e4m3", "index_topk": 1024}',
    "disaggregation_mode": "null",
    "context_length": 32768,
    "chunked_prefill_size": 32768,
    "mem_fraction_static": 0.3,
    "internal_states": [
        {"chunked_prefill_size": 32768, "env_vars": {"SGLANG_USE_CPU_ENGINE": "1"}}
    ],
}
LABELS = {
    "patch": "cpu_dsa",
    "rank": "0",
    "digest": "0011223344556677",
    "index_topk": "1024",
    "index_key_dtype": "fp8_e4m3",
    "allocated_width": "1024",
}


@dataclass
class Situation:
    """What server and host say; a test changes one of them."""

    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    labels: dict[str, str] | None = field(default_factory=lambda: dict(LABELS))
    release: dict[str, Any] = field(default_factory=lambda: dict(RELEASE))
    unit_sha256: str = "u" * 64
    main_pid: int = 7
    command: str = " ".join(ARGV)
    is_stale: str = "no"
    mappings: int = 12
    argv: list[str] = field(default_factory=lambda: list(ARGV))
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    revision: str = "revision\n"
    peak_kib: str = "1048576\n262144\n"
    used_kib: int = 1048576
    rate_hz: float = 5.0
    restarts_after: int = 1000
    memory_lines: str = ""
    self_test: str = '{"op": "topk", "case": "64", "ok": true, "message": ""}\n'
    faults: dict[str, Any] = field(default_factory=dict)
    looks: int = 0
    server: StandIn | None = None

    def answers(self) -> dict[str, str]:
        """Return the host's answer to each question that the gates have."""
        lines = [f"{key}={value}\n" for key, value in sorted(self.environment.items())]
        return {
            host.read_question("/opt/seatrial/current/release.json"): json.dumps(self.release),
            host.unit_question(UNIT): (
                f"MainPID={self.main_pid}\nNRestarts=0\nFragmentPath=/units/u\n"
                f"ExecStart={{ path=p ; argv[]={self.command} ; ignore_errors=no ; pid=0 }}\n"
                f"NeedDaemonReload={self.is_stale}\n"
            ),
            host.mapped_question(7, BUILD): f"{self.mappings}\n",
            host.read_question("/models/m/revision"): self.revision,
            host.sha256_question("/units/u"): f"{self.unit_sha256}  /units/u\n",
            host.command_line_question(7): "".join(f"{word}\n" for word in self.argv),
            host.environment_question(7, sorted(ENVIRONMENT)): "".join(lines),
            host.kernels_digest_question(PYTHON): "0011223344556677\n",
            host.peak_memory_question(UNIT): self.peak_kib,
            host.memory_question(UNIT): f"{self.used()}\n",
            host.clock_question(): "1000\n",
            host.memory_problems_question(UNIT, 1000): self.memory_lines,
            host.self_test_question(PYTHON): self.self_test,
        }

    def unit_answer(self) -> str:
        """Return what systemd says; the process is another one after so many looks."""
        self.looks += 1
        pid = self.main_pid + (self.looks > self.restarts_after)
        return self.answers()[host.unit_question(UNIT)].replace(
            f"MainPID={self.main_pid}", f"MainPID={pid}"
        )

    @contextmanager
    def followed(self) -> Iterator[Followed]:
        """Give samples of memory, at the situation's rate, while the block runs."""
        followed, is_over = Followed(), threading.Event()

        def give() -> None:
            while not is_over.wait(1 / self.rate_hz):
                followed.write(f"{self.used()}\n")

        followed.write(f"{self.used()}\n")
        thread = threading.Thread(target=give)
        thread.start()
        try:
            yield followed
        finally:
            is_over.set()
            thread.join()

    def used(self) -> int:
        """Return the KiB in use now: what the situation says and what the server's faults add."""
        extra = self.server.extra_mib if self.server is not None else 0.0
        return self.used_kib + round(1024 * extra)

    def serve_as(self, server: StandIn) -> None:
        """Let the stand-in say what the situation's server says."""
        self.server = server
        server.info = self.info
        if self.labels is not None:
            inner = ",".join(f'{key}="{value}"' for key, value in self.labels.items())
            server.metrics = f"seatrial_plugin_info{{{inner}}} 1.0\n"


Judge = Callable[..., tuple[int, dict[str, GateResult], str]]
LADDER = [{"requests": n, "prompt_tokens": 500, "is_shared": n > 2} for n in (1, 2, 3)]


def judging(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Return how to judge a situation by one group of gates; ``own`` changes its thresholds."""

    def judged(
        situation: Situation, group: str, **own: Any
    ) -> tuple[int, dict[str, GateResult], str]:
        def answer(door: Host, question: str, _seconds: float = 0) -> str:
            if question == host.unit_question(UNIT):
                return situation.unit_answer()
            answers = situation.answers()
            if question not in answers:
                raise HostError(f"{door.name}: a question that no gate should have: {question}")
            return answers[question]

        def follow(_door: Host, _question: str) -> Any:
            return situation.followed()

        monkeypatch.setattr(Host, "_ask", answer)
        monkeypatch.setattr(Host, "follow", follow)
        changed: dict[str, Any] = {
            "identity": {"probe_prompt_tokens": 100},
            "memory": {"ladder": LADDER},
            "not_applicable": {},
        }
        with serving(**situation.faults) as server:
            situation.serve_as(server)
            file = cell_file(folder, server, [group], release=RELEASE, plan=PLAN)
            limits = thresholds(folder, **changed | own)
            outcome = run_gates(folder, "--cell-file", file, "--thresholds", limits)
        assert outcome.report is not None
        return outcome.status, {gate.id: gate for gate in outcome.report.gates}, outcome.output

    return judged
