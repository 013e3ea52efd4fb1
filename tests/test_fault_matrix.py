"""The fault matrix finds what it is there to find: each wrong end, planted, is a problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import hosts
from tests.faults.cases import CASES
from tests.faults.fleet import Fleet
from tests.faults.stage import LAST_GOOD, NEW, Stage

BASE = "a" * 16


def asked(number: int, **more: Any) -> dict[str, Any]:
    """Return what the probe writes of a good answer, with other values for some of it."""
    servers = "router=r1@10.77.0.11 prefill=r1@10.77.0.11 decode=r1@10.77.0.12"
    at = 100.0 + number
    good = {"begin": at, "end": at + 0.1, "status": 200, "error": "", "servers": servers}
    return {"number": number, "cell": ("one", "two")[number % 2], **good, **more}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    """Return how to make a stage whose probe has seen these requests, and HAProxy's log these."""

    def make(requests: list[dict[str, Any]], log: str = "") -> Stage:
        lines = "".join(f"{json.dumps(one)}\n" for one in requests)
        (tmp_path / "probe.jsonl").write_text(lines)
        monkeypatch.setattr(hosts, "on", lambda *_, **__: log)
        return Stage(Fleet("light"), "a_case", tmp_path, BASE, "r0", "r1", {NEW}, began=100.0)

    return make


def test_good_answers_are_no_problem(stage: Callable[..., Stage]) -> None:
    """Both cells answer until the end."""
    assert stage([asked(number) for number in range(20)])._wrong_answers() == []


def test_an_answer_of_two_releases_is_found(stage: Callable[..., Stage]) -> None:
    """A prefill of the old release with a decode of the new one."""
    mixed = "router=r1@10.77.0.11 prefill=r1@10.77.0.11 decode=r0@10.77.0.12"
    found = stage([asked(0, servers=mixed), *map(asked, range(1, 20))])._wrong_answers()
    assert found == [f"an answer of two releases: {mixed}"]


@pytest.mark.parametrize(
    ("hurt", "problems"), [({}, 1), ({"two": 0.0}, 1), ({"one": 150.0}, 1), ({"one": 0.0}, 0)]
)
def test_a_failed_request_needs_a_reason(
    stage: Callable[..., Stage], hurt: dict[str, float], problems: int
) -> None:
    """Only the cell that the fault struck may fail, and only afterwards."""
    log = 'x entry cells/one 0/0/0 502 "POST /v1/chat/completions?probe=2 HTTP/1.1"'
    seen = stage([*map(asked, range(2)), asked(2, status=502), *map(asked, range(3, 20))], log)
    seen.hurt = hurt
    assert len(seen._wrong_answers()) == problems


def test_no_open_cell_is_no_reason(stage: Callable[..., Stage]) -> None:
    """Closing the last open cell is the rollout's fault."""
    log = 'x entry entry/<NOSRV> 0/0/0 503 "POST /v1/chat/completions?probe=2 HTTP/1.1"'
    seen = stage([*map(asked, range(2)), asked(2, status=503), *map(asked, range(3, 20))], log)
    seen.hurt = {"one": 0.0}
    assert len(seen._wrong_answers()) == 1


def test_a_silent_cell_at_the_end_is_found(stage: Callable[..., Stage]) -> None:
    """A cell whose entry stays closed answers nothing."""
    seen = stage([asked(number, cell="one") for number in range(20)])
    assert seen._wrong_answers() == ["at the end cell two does not answer"]


def test_a_split_fleet_is_found(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases, pending decisions and units that are down."""
    good = hosts.Host(
        current="b" * 16,
        last_good="b" * 16,
        is_pending=False,
        is_active=True,
        units={},
        has_timer=False,
        booted="1",
    )
    seen = stage([])
    monkeypatch.setattr(hosts, "open_cells", lambda: {"one", "two"})
    monkeypatch.setattr(hosts, "look", lambda: dict.fromkeys(hosts.GPU_HOSTS, good))
    assert seen._wrong_hosts() == []
    monkeypatch.setattr(
        hosts, "look", lambda: {"gpu-a": good, "gpu-b": good._replace(current=BASE)}
    )
    assert "does not run one release" in seen._wrong_hosts()[0]
    monkeypatch.setattr(hosts, "look", lambda: {"gpu-a": good._replace(is_pending=True)})
    assert "decision pending" in seen._wrong_hosts()[0]
    monkeypatch.setattr(hosts, "open_cells", lambda: {"two"})
    monkeypatch.setattr(hosts, "look", lambda: {"gpu-a": good})
    assert seen._wrong_hosts() == ["the entry of cell one is closed"]
    seen.may_end = {LAST_GOOD}
    assert f"the fleet ended with {NEW}" in seen._wrong_hosts()


def test_what_make_test_runs_is_telling_and_has_been_seen_to_pass() -> None:
    """Controller, host, engine, files and people; what docs/faults.md shows as not run waits."""
    page = (Path(__file__).resolve().parents[1] / "docs/faults.md").read_text()
    telling = {name: case for name, case in CASES.items() if case.is_telling}
    for word in ("controller", "host_", "engine", "gates", "small"):
        assert any(word in name for name in telling), word
    for case in telling.values():
        assert f"| {case.fault} | {case.phase} | no run passed yet | | | | light |" not in page


def test_the_page_has_every_case() -> None:
    """docs/faults.md says of each whether it was run."""
    page = (Path(__file__).resolve().parents[1] / "docs/faults.md").read_text()
    missing = [
        case.name for case in CASES.values() if f"| {case.fault} | {case.phase} |" not in page
    ]
    assert missing == []
