"""The gates that look at hosts: identity, memory and kernels, with the door's answers made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.verdict import Verdict
from tests.situations import (
    ARGV,
    BUILD,
    ENVIRONMENT,
    INFO,
    LABELS,
    RELEASE,
    Judge,
    Situation,
    judging,
)


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Return how to judge a situation by one group of gates."""
    return judging(tmp_path, monkeypatch)


def test_right_server_is_the_release(judge: Judge) -> None:
    """Every source agrees, and each gate says how many facts it compared."""
    status, gates, output = judge(Situation(), "identity")
    assert status == 0, output
    assert {gate.verdict for gate in gates.values()} == {Verdict.PASS}
    assert all(gate.samples > 0 for gate in gates.values())
    assert "not to be printed" not in output
    assert f"combined: {' '.join(ARGV)}" in output


def test_process_that_renames_itself_is_known_by_its_unit(judge: Judge) -> None:
    """SGLang's router hides its arguments; its unit, its build and its environment still tell."""
    status, _, output = judge(Situation(argv=["sglang::router", "", ""]), "identity")
    assert status == 0, output


@pytest.mark.parametrize(
    ("change", "gate", "message"),
    [
        (
            {"release": {**RELEASE, "digest": "0" * 16}},
            "test_unit_files_are_the_released_ones",
            "release on a is 0000000000000000, released is fedcba9876543210",
        ),
        (
            {"info": {**INFO, "context_length": 16384}},
            "test_servers_report_released_configuration",
            "context-length of combined on a is 16384, released is 32768",
        ),
        (
            {"unit_sha256": "0" * 64},
            "test_unit_files_are_the_released_ones",
            "sglang-combined.service on a is 0000",
        ),
        (
            {"is_stale": "yes"},
            "test_unit_files_are_the_released_ones",
            "has changed since systemd loaded it",
        ),
        (
            {"main_pid": 0},
            "test_processes_run_released_arguments",
            "does not run",
        ),
        (
            {"argv": [*ARGV[:-1], "30003"]},
            "test_processes_run_released_arguments",
            "argument 10 of combined on a is 30003, released is 30002",
        ),
        (
            {"command": "/bin/other"},
            "test_processes_run_released_arguments",
            "command of sglang-combined.service is /bin/other, released is /opt",
        ),
        (
            {"mappings": 0},
            "test_processes_run_released_arguments",
            f"has loaded nothing from {BUILD}",
        ),
        (
            {"argv": ["sglang::router"], "environment": {}},
            "test_processes_run_released_arguments",
            "set SPT_NOENV=1",
        ),
        (
            {"argv": [*ARGV, "--more"]},
            "test_processes_run_released_arguments",
            "number of arguments of combined on a is 12, released is 11",
        ),
        (
            {"environment": {**ENVIRONMENT, "LISTED": "another"}},
            "test_processes_run_released_arguments",
            "environment LISTED of combined on a differs",
        ),
        (
            {"revision": "0ther-one\n"},
            "test_model_on_every_host_is_the_released_revision",
            "revision of the model on a is 0ther-one, released is revision",
        ),
        (
            {"info": {**INFO, "version": "0.5.22"}},
            "test_servers_report_released_configuration",
            "SGLang of combined on a is 0.5.22, released is 0.5.23",
        ),
        (
            {"info": {**INFO, "model_path": "/models/other"}},
            "test_servers_report_released_configuration",
            "model of combined on a is /models/other",
        ),
        (
            {"info": {**INFO, "json_model_override_args": "{}"}},
            "test_servers_report_released_configuration",
            "index_topk of combined on a is None, released is 1024",
        ),
        (
            {"info": {**INFO, "chunked_prefill_size": 8192}},
            "test_servers_derive_what_the_release_means",
            "chunk of combined on a (32768 over 1 DP ranks) is 8192, released is 32768",
        ),
        (
            {"info": {**INFO, "internal_states": [{"chunked_prefill_size": 16384}]}},
            "test_servers_derive_what_the_release_means",
            "is 16384, released is 32768",
        ),
        (
            {
                "info": {
                    **INFO,
                    "attention_backend": "a",
                    "internal_states": [
                        {"chunked_prefill_size": 32768, "attention_backend": "b"},
                    ],
                }
            },
            "test_servers_derive_what_the_release_means",
            "attention_backend of combined on a is a, in one of its schedulers b",
        ),
        (
            {
                "info": {
                    **INFO,
                    "internal_states": [
                        {
                            "chunked_prefill_size": 32768,
                            "env_vars": {"SGLANG_USE_CPU_ENGINE": "0"},
                        }
                    ],
                }
            },
            "test_servers_derive_what_the_release_means",
            "SGLang changed SGLANG_USE_CPU_ENGINE of combined on a by itself",
        ),
        (
            {"info": {**INFO, "disaggregation_mode": "prefill"}},
            "test_servers_report_released_configuration",
            "mode of combined on a is prefill, released is null",
        ),
        (
            {"labels": {**LABELS, "allocated_width": "512"}},
            "test_plugin_reports_released_selection_on_every_rank",
            "rank 0 of combined on a allocated 512 entries, index_topk is 1024",
        ),
        (
            {"labels": {**LABELS, "index_key_dtype": "bf16"}},
            "test_plugin_reports_released_selection_on_every_rank",
            "is bf16, released is fp8_e4m3",
        ),
        (
            {"labels": {**LABELS, "digest": "ffffffffffffffff"}},
            "test_plugin_reports_released_selection_on_every_rank",
            "is ffffffffffffffff, released is 0011223344556677",
        ),
        (
            {"labels": None},
            "test_plugin_reports_released_selection_on_every_rank",
            "rank 0 of combined on a reports no selection",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_other_server_is_not_the_release(
    judge: Judge, change: dict[str, Any], gate: str, message: str
) -> None:
    """One fact that differs fails the gate that looks at it, and is named."""
    status, gates, output = judge(Situation(**change), "identity")
    assert status == 1, output
    assert gates[gate].verdict is Verdict.FAIL
    assert message in gates[gate].message
    assert "not to be printed" not in output
    assert "another" not in output


def test_memory_within_plan_and_device_passes(judge: Judge) -> None:
    """Peaks are compared with the plan, free memory with the device, on every rung."""
    status, gates, output = judge(Situation(), "memory")
    assert status == 0, output
    peak = gates["test_peak_memory_stays_within_plan"]
    assert (peak.measured, peak.unit) == (1500 - 1280, "MiB")
    assert "peak 1280 MiB of 1500 planned (-15 %)" in peak.message
    margin = gates["test_free_memory_keeps_its_margin_on_every_rung"]
    assert margin.measured == 2500 - 1024
    assert margin.samples >= 6
    assert [point.x for point in margin.details.series[0].points] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "gate", "verdict", "message"),
    [
        (
            {"peak_kib": f"{1600 * 1024}\n"},
            "test_peak_memory_stays_within_plan",
            Verdict.FAIL,
            "peak 1600 MiB of 1500 planned (+7 %)",
        ),
        (
            {"used_kib": 2480 * 1024},
            "test_free_memory_keeps_its_margin_on_every_rung",
            Verdict.FAIL,
            "1 x 500 tokens at once",
        ),
        (
            {"peak_kib": ""},
            "test_peak_memory_stays_within_plan",
            Verdict.INVALID,
            "has no running process",
        ),
        (
            {"rate_hz": 1.5},
            "test_free_memory_keeps_its_margin_on_every_rung",
            Verdict.INVALID,
            "sample",
        ),
        (
            {"restarts_after": 1},
            "test_long_prefills_do_not_end_a_server",
            Verdict.FAIL,
            "combined on a restarted",
        ),
        (
            {"memory_lines": "torch.OutOfMemoryError: CUDA out of memory\n"},
            "test_long_prefills_do_not_end_a_server",
            Verdict.FAIL,
            "OutOfMemoryError",
        ),
        (
            {"faults": {"retracts": True}},
            "test_long_prefills_are_all_answered",
            Verdict.FAIL,
            "retracted",
        ),
        (
            {"faults": {"hides_metrics": True}},
            "test_long_prefills_are_all_answered",
            Verdict.INVALID,
            "none of SGLang's metrics",
        ),
    ],
    ids=["plan", "device", "silent", "rare", "restart", "journal", "retracted", "unmetered"],
)
def test_memory_that_runs_short_is_found(
    judge: Judge, change: dict[str, Any], gate: str, verdict: Verdict, message: str
) -> None:
    """Each sign of memory that ran out, or could not be watched, has its own verdict."""
    _, gates, output = judge(Situation(**change), "memory")
    assert gates[gate].verdict is verdict, output
    assert message in gates[gate].message


def test_memory_that_ran_short_says_in_which_direction_to_go(judge: Judge) -> None:
    """By how much the fraction must go down follows from how far the plan was off."""
    _, gates, _ = judge(Situation(peak_kib=f"{1700 * 1024}\n"), "memory")
    told = gates["test_peak_memory_stays_within_plan"].next
    assert "mem_fraction_static must go down, not up: by at least 0.10" in told


@pytest.mark.parametrize(
    ("page", "verdict", "message"),
    [
        ('{"op": "topk", "case": "64", "ok": true, "message": ""}\n', Verdict.PASS, ""),
        (
            '{"op": "topk", "case": "64", "ok": false, "message": "3 of 64 values"}\n',
            Verdict.FAIL,
            "topk (64) on a: 3 of 64 values",
        ),
        ("Traceback: no module\n", Verdict.INVALID, "something else than its findings"),
        ("", Verdict.INVALID, "tested nothing"),
    ],
    ids=["right", "wrong", "broken", "empty"],
)
def test_kernels_are_judged_by_their_self_test(
    judge: Judge, page: str, verdict: Verdict, message: str
) -> None:
    """A self-test that fails or does not test is no pass."""
    _, gates, output = judge(Situation(self_test=page), "kernels")
    (gate,) = gates.values()
    assert gate.verdict is verdict, output
    assert message in gate.message
