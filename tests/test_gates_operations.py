"""The gates of load, liveness and transfer judge a stand-in with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.baseline import Baseline
from seatrial.report import GateResult
from seatrial.verdict import Verdict
from tests.gate_runs import cell_file, run_gates, thresholds
from tests.standin import StandIn, serving

Judge = Callable[..., dict[str, GateResult]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Return how to judge a stand-in with faults by one group of gates."""

    def judged(
        group: str,
        faults: dict[str, Any] | None = None,
        bounds: dict[str, Any] | None = None,
        **change: Any,
    ) -> dict[str, GateResult]:
        with serving(**(faults or {})) as server:
            if group in {"transfer", "alike"}:
                change.setdefault(
                    "servers", [_server(server, "prefill"), _server(server, "decode")]
                )
            own = thresholds(tmp_path, **(bounds or {}))
            file = cell_file(tmp_path, server, [group], **change)
            outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", own)
        assert outcome.report is not None
        return {gate.id: gate for gate in outcome.report.gates}

    return judged


def _server(server: StandIn, role: str) -> dict[str, str]:
    return {
        "role": role,
        "host": "a",
        "address": "127.0.0.1",
        "url": server.url,
        "unit": f"sglang-{role}.service",
    }


@pytest.mark.parametrize(
    ("faults", "gate", "verdict", "message"),
    [
        (
            {"forgets_after": 50},
            "test_answers_do_not_get_worse_with_time",
            Verdict.FAIL,
            "by order 0 / 0 / ",
        ),
        (
            {"loses_beside": 3},
            "test_bursts_are_answered_rightly",
            Verdict.FAIL,
            "one said",
        ),
        (
            {"is_busy_unhealthy": True, "prefill_seconds": 0.1},
            "test_one_token_comes_in_time_beside_a_long_prefill",
            Verdict.PASS,
            "which is not judged",
        ),
        (
            {"first_seconds": 0.05, "bounds": {"probe_seconds_max": 0.02}},
            "test_one_token_comes_in_time_beside_a_long_prefill",
            Verdict.FAIL,
            "The slowest took",
        ),
        (
            {"keeps_cancelled": True, "token_seconds": 0.01},
            "test_cancelled_requests_leave_nothing_behind",
            Verdict.FAIL,
            "still running after 1 s: combined on a: 4",
        ),
        (
            {"refuses_streams": True},
            "test_cancelled_requests_leave_nothing_behind",
            Verdict.INVALID,
            "0 of 4 clients could hang up in the middle of an answer",
        ),
        (
            {"hides_metrics": True},
            "test_cancelled_requests_leave_nothing_behind",
            Verdict.INVALID,
            "none of SGLang's metrics",
        ),
        (
            {"hangs_after_idle": 0.3, "bounds": {"idle_seconds": 0.6}, "request_seconds": 1},
            "test_cell_answers_after_an_idle_time",
            Verdict.FAIL,
            "no answer",
        ),
    ],
    ids=["decay", "bursts", "health", "slow", "cancelled", "nobody-left", "unmetered", "idle"],
)
def test_fault_of_liveness_is_found(
    judge: Judge, faults: dict[str, Any], gate: str, verdict: Verdict, message: str
) -> None:
    """Each fault gives the right verdict by the gate that is there for it."""
    faults = dict(faults)
    own: dict[str, Any] = {"request_seconds": faults.pop("request_seconds", 5)}
    if "bounds" in faults:
        own["liveness"] = faults.pop("bounds")
    gates = judge("liveness", faults, own)
    assert gates[gate].verdict is verdict, gates[gate]
    assert message in gates[gate].message


def test_dead_scheduler_behind_a_healthy_server_is_found(judge: Judge) -> None:
    """`/health` says 200, and no token comes: the own probe fails."""
    gates = judge("readiness", {"is_hung": True}, {"request_seconds": 0.5})
    assert gates["test_every_server_is_ready"].verdict is Verdict.PASS
    assert gates["test_own_request_is_answered"].verdict is Verdict.FAIL


def test_loops_in_any_answer_are_found(judge: Judge, tmp_path: Path) -> None:
    """A loop in an answer to another gate fails the gate that looks at all answers."""
    with serving(loops_after=40) as server:
        file = cell_file(tmp_path, server, ["liveness", "answers"])
        outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", thresholds(tmp_path))
    gate = outcome.gate("test_answers_of_all_gates_are_sound")
    assert gate.verdict is Verdict.FAIL
    assert "x repetition loop" in gate.message
    assert "bursts are answered rightly" in gate.message


def test_intact_transfer_passes(judge: Judge) -> None:
    """Canaries come back right, each transfer is counted, both sides agree."""
    gates = judge("transfer", {"transfers": True, "info": {"version": "0.5.23"}})
    assert {gate.verdict for gate in gates.values()} == {Verdict.PASS}, gates
    assert gates["test_canaries_cross_intact"].samples == 12


@pytest.mark.parametrize(
    ("faults", "gate", "verdict", "message"),
    [
        ({"spoils_tail": True}, "test_canaries_cross_intact", Verdict.FAIL, "-0000-NOTHING"),
        ({"spoils_transfers": True}, "test_canaries_cross_intact", Verdict.FAIL, "I do not know"),
        ({"fails_transfers": True}, "test_transfers_do_not_fail", Verdict.FAIL, "failed_reqs"),
        ({"transfers": False}, "test_transfers_do_not_fail", Verdict.INVALID, "do not count"),
    ],
    ids=["tail", "together", "failures", "uncounted"],
)
def test_fault_of_the_transfer_is_found(
    judge: Judge, faults: dict[str, Any], gate: str, verdict: Verdict, message: str
) -> None:
    """What spoils or loses the KV cache on its way is told apart."""
    slow = {"token_seconds": 0.01} if "spoils_transfers" in faults else {}
    gates = judge("transfer", {"transfers": True, **slow, **faults})
    assert gates[gate].verdict is verdict, gates[gate]
    assert message in gates[gate].message


def test_sides_that_differ_are_named(tmp_path: Path) -> None:
    """A page size that differs fails, with both values."""
    with serving(info={"page_size": 64}) as one, serving(info={"page_size": 1}) as other:
        servers = [_server(one, "prefill"), {**_server(other, "decode"), "url": other.url}]
        file = cell_file(tmp_path, one, ["transfer"], servers=servers)
        outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", thresholds(tmp_path))
    gate = outcome.gate("test_both_sides_agree_where_they_must")
    assert gate.verdict is Verdict.FAIL
    assert "page_size of decode on a is 1, of prefill on a 64" in gate.message


def test_combined_cell_needs_no_transfer(tmp_path: Path) -> None:
    """For a combined cell the gates of the transfer are not applicable, with the reason."""
    with serving() as server:
        file = cell_file(tmp_path, server, ["readiness", "transfer"])
        outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", thresholds(tmp_path))
    assert outcome.status == 0, outcome.output
    gate = outcome.gate("test_canaries_cross_intact")
    assert gate.verdict is Verdict.NOT_APPLICABLE
    assert gate.message == "A combined server transfers no KV cache."


@pytest.mark.parametrize(
    ("faults", "info", "verdict", "message"),
    [
        ({}, {"version": "0.5.23"}, Verdict.PASS, "4 of 4 alike with two"),
        ({"spoils_tail": True}, {"version": "0.5.23"}, Verdict.FAIL, "-0000-NOTHING"),
        ({}, {"version": "0.5.22"}, Verdict.INVALID, "does not run what this cell runs"),
    ],
    ids=["alike", "spoilt", "other-release"],
)
def test_cells_of_both_kinds_are_compared(
    judge: Judge, faults: dict[str, Any], info: dict[str, str], verdict: Verdict, message: str
) -> None:
    """A combined cell of the same release answers alike, or the difference is shown."""
    with serving(info=info) as other:
        peer = {
            "name": "two",
            "router_url": other.url,
            "engine_urls": [other.url],
            "is_combined": True,
        }
        gates = judge("alike", {"info": {"version": "0.5.23"}, **faults}, peers=[peer])
    (gate,) = gates.values()
    assert gate.verdict is verdict, gate
    assert message in gate.message


@pytest.mark.parametrize(
    ("faults", "gate", "verdict"),
    [
        ({"aborts_every": 3}, "test_load_is_answered_whole", Verdict.FAIL),
        ({"tears_streams": True}, "test_load_is_answered_whole", Verdict.INVALID),
        ({"first_seconds": 0.2}, "test_first_token_comes_in_time_at_the_median", Verdict.FAIL),
        (
            {"slow_every": 6, "slow_seconds": 0.5},
            "test_first_token_comes_in_time_at_the_99th_percentile",
            Verdict.FAIL,
        ),
        ({"token_seconds": 0.05}, "test_tokens_follow_in_time_at_the_median", Verdict.FAIL),
    ],
    ids=["aborts", "torn", "first", "p99", "tokens"],
)
def test_fault_of_a_load_is_found(
    judge: Judge, faults: dict[str, Any], gate: str, verdict: Verdict
) -> None:
    """What users would see is found by the gate that measures it."""
    bounds = {
        "answer_tokens": 8,
        "first_token_p50_ms_max": 150,
        "first_token_p99_ms_max": 400,
        "inter_token_p50_ms_max": 30,
    }
    gates = judge("throughput", faults, {"throughput": bounds})
    assert gates[gate].verdict is verdict, gates[gate]


def test_slow_first_tokens_of_a_few_leave_the_median(judge: Judge) -> None:
    """Twice the time at p99 alone fails p99 alone."""
    gates = judge(
        "throughput",
        {"first_seconds": 0.05, "slow_every": 8, "slow_seconds": 0.4},
        {"throughput": {"answer_tokens": 4, "first_token_p99_ms_max": 300}},
    )
    failed = [name for name, gate in gates.items() if gate.verdict is Verdict.FAIL]
    assert failed == ["test_first_token_comes_in_time_at_the_99th_percentile"]


@pytest.mark.parametrize(
    ("before", "verdict"),
    [(0.01, Verdict.PASS), (1e6, Verdict.FAIL)],
    ids=["faster", "slower"],
)
def test_rate_is_compared_with_last_good(judge: Judge, before: float, verdict: Verdict) -> None:
    """A release that keeps up with last good passes, one below fails; a busy machine adds little.

    How well small differences are told from noise is shown in `tests/test_ratio.py`.
    """
    samples = {"load": {f"tokens_per_second/4/{repeat}": [before] * 8 for repeat in range(2)}}
    baseline = Baseline(release="f" * 16, where="the rollout before", items={}, samples=samples)
    gates = judge("throughput", baseline=baseline.model_dump(mode="json"))
    gate = gates["test_requests_are_served_as_fast_as_by_last_good"]
    assert gate.verdict is verdict, gate
    assert gate.details.comparisons[0].last_good_release == "f" * 16
    kept = gates["test_load_generates_tokens_fast_enough"].details.samples
    assert {name.rpartition("/")[0] for name in kept} == {
        "tokens_per_second/4",
        "first_token_seconds/4",
    }


def test_baseline_without_observations_is_invalid(judge: Judge) -> None:
    """Nothing to compare with never passes."""
    baseline = Baseline(release="f" * 16, where="the rollout before", items={}, samples={})
    gates = judge("throughput", baseline=baseline.model_dump(mode="json"))
    gate = gates["test_requests_are_served_as_fast_as_by_last_good"]
    assert gate.verdict is Verdict.INVALID
    assert "has no observations of a load with 4 requests at once" in gate.message


def test_cold_launch_asks_what_is_marked(tmp_path: Path) -> None:
    """After each of several launches only the marked gates run, and the others are named."""
    with serving() as server:
        file = cell_file(tmp_path, server, ["readiness", "window", "liveness", "answers"])
        own = thresholds(tmp_path)
        outcome = run_gates(tmp_path, "--cell-file", file, "--thresholds", own, "--each-launch")
    assert outcome.status == 0, outcome.output
    assert outcome.report is not None
    assert {gate.id for gate in outcome.report.gates} == {
        "test_every_server_is_ready",
        "test_own_request_is_answered",
        "test_bursts_are_answered_rightly",
        "test_cell_answers_after_an_idle_time",
        "test_answers_of_all_gates_are_sound",
    }
    assert "not asked after each cold launch" in {one.reason for one in outcome.report.not_selected}


def test_short_soak_sees_a_leak(tmp_path: Path) -> None:
    """By hand there is no host to look at; answers are judged all the same."""
    with serving() as server:
        own = thresholds(tmp_path, soak={"seconds": 0.5, "burst_pause_seconds": 0.01})
        outcome = run_gates(tmp_path, "--url", server.url, "--thresholds", own, "--select", "soak")
    assert outcome.gate("test_long_bursts_are_answered_rightly").verdict is Verdict.PASS
    memory = outcome.gate("test_memory_does_not_grow_with_requests")
    assert memory.verdict is Verdict.INVALID
    assert "no host to look at" in memory.message
