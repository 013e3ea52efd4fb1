"""Bad merges and the most telling faults with SGLang itself, all on one kept fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rehearsal import run as rehearsal
from tests.faults import hosts
from tests.faults.cases import CASES, Case
from tests.faults.fleet import WORK, Fleet
from tests.faults.night import Night
from tests.faults.stage import LAST_GOOD, NEW, Stage

FAULTS = [name for name, case in CASES.items() if case.is_for_real]
BAD_MERGES = rehearsal.scenarios()
THOROUGH = [
    *("identity", "readiness", "kernels", "window", "recall", "transfer", "throughput", "memory"),
    *("liveness", "answers"),
]
# Past the entry, as gates go.
ROUTER_OF_CELL_TWO = "http://10.77.0.13:8000"


@pytest.fixture(scope="module")
def night(alone: None) -> Iterator[Night]:
    """Boot one fleet for all cases; take it down whatever happens."""
    try:
        yield Night(Fleet("real"), WORK / "real")
    finally:
        hosts.verb("down")


def merge_badly(name: str, stage: Stage) -> None:
    """Merge what rehearsal/scenarios.yml says, judged by the window gates, and see it refused."""
    spec = stage.fleet.read_spec()
    spec.update(BAD_MERGES[name]["edit"])
    spec["gates"]["select"] = ["readiness", "window"]
    stage.fleet.write_spec(spec)
    stage.fleet.commit(BAD_MERGES[name]["merge"])
    stage.struck()
    refused = stage.fails(stage.deploy())
    assert refused.outcome in {"", "reverted"}, refused.reason
    stage.take_back()


@pytest.mark.parametrize("name", BAD_MERGES)
def test_a_bad_merge_ends_with_the_old_release(night: Night, name: str) -> None:
    """It is refused before anything moves, or its gates fail and the old release is back."""
    said = BAD_MERGES[name]
    words = f"merge: {said['merge']} ({rehearsal.edit_of(said)})"
    night.perform(Case(name, words, "check, or gate", LAST_GOOD, lambda s: merge_badly(name, s)))


def judge_thoroughly(stage: Stage) -> None:
    """Promote a release that was asked for recall, then one that has to recall no less."""
    spec = stage.fleet.read_spec()
    spec["gates"].update(select=THOROUGH, cold_launches=1)
    spec["timeouts"]["gate_seconds"] = 900
    spec["rollout"]["dead_man_seconds"] = 3600
    stage.fleet.write_spec(spec)
    stage.fleet.commit("Judge by the whole suite")
    stage.struck()
    stage.succeeds(stage.deploy())
    spec["gates"]["select"] = [*THOROUGH, "comparison"]
    stage.fleet.write_spec(spec)
    stage.merge()
    judged = stage.succeeds(stage.deploy())
    for report in (event.data["report"] for event in judged.events if event.event == "gates"):
        print(json.dumps({g["id"]: (g["verdict"], g["message"]) for g in report["gates"]}))
    assert judged.outcome == "promoted"


def test_gates_find_the_faults_that_a_proxy_plants_before_the_real_engine(night: Night) -> None:
    """The same pack as on the stand-in, with SGLang's answers and its own counts of tokens."""
    if not night.is_whole:
        night.make_whole()
    pack = ["-m", "pytest", "tests/test_mutations.py", "-k", "fault_of_answers", "-q"]
    done = subprocess.run(
        [*hosts.IN_NETWORK, sys.executable, *pack],
        cwd=rehearsal.SOURCE,
        env={**os.environ, "SEATRIAL_ENGINE": ROUTER_OF_CELL_TWO},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", FAULTS)
def test_the_fleet_comes_back(night: Night, name: str) -> None:
    """Whatever strikes, the fleet ends whole, on one release."""
    night.perform(CASES[name])


def test_the_whole_suite_promotes_a_good_release_that_is_compared_with_last_good(
    night: Night,
) -> None:
    """Every group that a rollout can ask, a second cold launch, and last_good's own questions.

    The last of all: the fleet's spec stays so.
    """
    night.perform(
        Case("whole_suite", "no fault: the whole suite, twice", "gate", NEW, judge_thoroughly)
    )
