"""Runs the gates on a stand-in, with the arguments that an operator or the role `gate` gives."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from seatrial import report
from seatrial.report import GateResult, Report
from tests.standin import StandIn

ROOT = Path(__file__).resolve().parents[1]
CASE_A = "test_case_a_needle_at_start_of_5200_tokens_is_recalled"
RATE = "test_load_generates_tokens_fast_enough"
BY_URL = "readiness,window"
"""The groups that a URL alone can answer."""
ROLES = {"combined": {"port": 30002, "gpus": [], "args": {}, "env": {}}}


@dataclass
class Outcome:
    """What a run of the gates left."""

    status: int
    output: str
    report: Report | None
    junit: Path

    def cases(self) -> list[ET.Element]:
        """Return the gates as the JUnit file has them."""
        return list(ET.parse(self.junit).iter("testcase"))  # noqa: S314 - pytest wrote it

    def gate(self, name: str) -> GateResult:
        """Return one gate's result."""
        assert self.report is not None
        return next(gate for gate in self.report.gates if gate.id == name)


def run_gates(folder: Path, *arguments: str, gates: str = "gates/") -> Outcome:
    """Run the gates in this process and read what they leave in ``folder``."""
    command = [gates, "-p", "no:cacheprovider", "-p", "no:xdist", "--report-dir", str(folder)]
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        status = pytest.main([*command, *arguments])
    written = folder / "report.json"
    found = report.read(written) if written.is_file() else None
    return Outcome(int(status), printed.getvalue(), found, folder / "junit.xml")


def own_gate(folder: Path, body: str, before: str = "") -> str:
    """Write a folder of gates with one gate of this body, under the project's own conftest.

    ``before`` stands above the gate in its file: more gates, in the order in which they run.
    """
    gates = folder / "gates"
    gates.mkdir()
    (gates / "conftest.py").write_text((ROOT / "gates/conftest.py").read_text())
    (gates / "thresholds").symlink_to(ROOT / "gates/thresholds")
    (gates / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    head = f"import pytest\n\n{before}\n\n@pytest.mark.window\ndef test_own(gate):\n"
    # A name of its own: importing caches by name, and these tests share a process.
    holds = "    'It holds.'\n"
    (gates / f"test_{folder.name}.py").write_text(f"{head}{holds}    {body}\n")
    return str(gates)


def thresholds(folder: Path, **sections: Any) -> str:
    """Write thresholds like the rehearsal's, but for the given keys, and return the file."""
    value = yaml.safe_load((ROOT / "gates/thresholds/rehearsal.yml").read_text())
    value["request_seconds"] = 5
    value["throughput"] |= {"scrape_seconds": 1, "requests": 4, "repeats": 2}
    value["liveness"] |= {"idle_seconds": 0.1, "burst_requests": 60, "burst_pause_seconds": 0.01}
    value["liveness"] |= {"probe_interval_seconds": 0.05, "settle_seconds": 1}
    value["kernels"] = {"seconds": 5, "passed_ratio_min": 1.0}
    for name, change in sections.items():
        value[name] = value[name] | change if change and isinstance(change, dict) else change
    path = folder / "own.yml"
    path.write_text(yaml.safe_dump(value))
    return str(path)


def cell_file(folder: Path, server: StandIn, select: list[str], **change: Any) -> str:
    """Write the cell file of a combined server that is its own router, and return its path."""
    spec = {
        "schema": 1,
        "model": {"name": "stand-in", "path": "/models/m", "revision": "revision"},
        "engine": {"sglang": "0.5.23", "platform": "cpu", "python": "3.11", "patches": []},
        "index_topk": 1024,
        "index_key_dtype": "fp8_e4m3",
        "mem_fraction_static": 0.3,
        "context_length": 32768,
        "chunked_prefill_size": 32768,
        "transfer_backend": "mooncake_tcp",
        "device_memory_gib": 1.0,
        "roles": {**ROLES, "router": {"port": 1, "metrics_port": 2, "args": {}, "env": {}}},
        "cells": {"one": {"combined": ["a"], "router": "a"}},
        "timeouts": {
            "drain_seconds": 1,
            "stop_seconds": 1,
            "ready_seconds": 1,
            "router_seconds": 1,
            "gate_seconds": 1,
        },
        "rollout": {
            "batches": [1],
            "dead_man_seconds": 200,
            "revert_scope": "cell",
            "keep_releases": 3,
        },
        "gates": {"thresholds": "rehearsal", "select": select, "cold_launches": 0},
    }
    value = {
        "schema": 1,
        "name": "one",
        "router_url": server.url,
        "servers": [
            {
                "role": "combined",
                "host": "a",
                "address": "127.0.0.1",
                "url": server.url,
                "unit": "sglang-combined.service",
            }
        ],
        "prometheus_url": server.url,
        "release": None,
        "spec": spec,
        "plan": None,
        "thresholds": "rehearsal",
        "ssh_config": None,
    }
    path = folder / "cell.json"
    path.write_text(json.dumps(value | change))
    return str(path)
