"""Memory under a ladder of long prefills at once, against the plan and against the device.

Every rung asks so many prefills at the same time, with prefixes of their own or with a shared one,
while free memory is sampled on every GPU (or of the engine's processes, on a CPU). What SGLang
reports of itself is its memory at the start; what kills a server is the peak of a long prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from seatrial import counters, host
from seatrial.cell import Cell, CellServer
from seatrial.counters import Counters
from seatrial.details import Point, Series
from seatrial.engine import Answer, Engine
from seatrial.haystack import START, Ruler, ask_at_length
from seatrial.host import Followed, Host
from seatrial.load import Load, at_once
from seatrial.memory import MIB, RolePlan
from seatrial.prometheus import Prometheus
from seatrial.thresholds import Memory, Rung
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.memory

ANSWER_TOKENS = 8
WATCH_SECONDS = 1800
WATCH_BEGINS_SECONDS = 15
GAP_SECONDS_MAX = 2.0
"""A spike of a long prefill lasts longer; a longer silence of the samples could hide one."""
DCGM_FREE = "DCGM_FI_DEV_FB_FREE"


@dataclass
class Device:
    """One GPU, or the memory that the plan gives to one CPU engine.

    Attributes:
        peaks: the highest use seen on each rung, in bytes.
        kept_peak: the highest use since the start that the kernel itself kept, where it does.
        hz: samples per second, the fewest of any rung.
    """

    where: str
    plan: RolePlan
    total: int
    peaks: list[int] = field(default_factory=list)
    kept_peak: int = 0
    hz: float = float("inf")
    longest_gap: float = 0.0
    samples: int = 0

    @property
    def headroom_mib(self) -> float:
        """What is left of the plan."""
        return (self.plan.peak_bytes - self.peak) / MIB

    @property
    def peak(self) -> int:
        """The highest use of all."""
        return max(*self.peaks, self.kept_peak)

    def margin_mib(self, rung: int) -> float:
        """What is left of the device on a rung."""
        return (self.total - self.peaks[rung]) / MIB

    @property
    def slope_mib(self) -> float:
        """How much margin a rung costs at most against the one before."""
        steps = [(later - earlier) / MIB for earlier, later in pairwise(self.peaks)]
        return max(steps, default=0.0)


@dataclass
class Ladder:
    """What the ladder found."""

    rungs: list[Rung]
    devices: list[Device] = field(default_factory=list)
    loads: list[Load[Answer]] = field(default_factory=list)
    mishaps: dict[str, float] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def ladder(
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    run: Any,
    connect: Callable[[str], Engine],
    host_of: Callable[[CellServer], Host],
) -> Ladder:
    """Climb the ladder once, and look at everything that it may have broken."""
    bounds: Memory = run.thresholds.section("memory")
    found = Ladder(bounds.ladder)
    before = {server.label: host_of(server).unit(server.unit) for server in cell.engines}
    clocks = {server.label: host_of(server).now() for server in cell.engines}
    counted = _mishaps(cell, connect)
    for number, rung in enumerate(bounds.ladder):
        requests = _prefills(router, ruler, run.seed + 1000 * number, rung)
        with _watched(cell, bounds, host_of, found):
            found.loads.append(at_once(requests, rung.requests))
            time.sleep(0.5)  # for the last samples of the rung
    for server in cell.engines:
        state, old = host_of(server).unit(server.unit), before[server.label]
        if (state.main_pid, state.restarts) != (old.main_pid, old.restarts):
            found.restarts.append(f"{server.label} restarted")
        since = clocks[server.label]
        lines = host_of(server).memory_problems(server.unit, since)
        kept = next((one for one in found.devices if one.where == server.label), None)
        if kept is not None and bounds.source == "host":
            kept.kept_peak = host_of(server).peak_memory_bytes(server.unit)
        found.lines += [f"{server.label}: {line}" for line in lines]
    if not found.restarts:
        for earlier, later in zip(counted, _mishaps(cell, connect), strict=True):
            for name, count in counters.growth(earlier, later).items():
                found.mishaps[name] = found.mishaps.get(name, 0.0) + count
    return found


def test_long_prefills_do_not_end_a_server(
    gate: Recorder, cell: Cell, ladder: Ladder, bounds: Memory
) -> None:
    """Under long prefills no server restarts, and no journal tells of memory that ran out."""
    bad = {line.partition(":")[0] for line in ladder.lines}
    bad |= {line.removesuffix(" restarted") for line in ladder.restarts}
    said = [*ladder.restarts, *ladder.lines[:3]]
    measured, bound = gate.record(
        (len(cell.engines) - len(bad)) / len(cell.engines),
        at_least=1.0,
        unit="of servers untouched",
        samples=len(cell.engines),
        message="; ".join(said) + "." if said else "",
        next_step=(
            "Memory ran out while serving: mem_fraction_static must go down, not up; or lower "
            "chunked_prefill_size, context_length or max-running-requests."
        ),
    )
    assert measured >= bound


def test_long_prefills_are_all_answered(gate: Recorder, ladder: Ladder, bounds: Memory) -> None:
    """Under the ladder no request fails, and no engine aborts or retracts one."""
    asked = sum(len(load.answers) for load in ladder.loads)
    whole = sum(len(load.whole) for load in ladder.loads)
    aborted = ladder.mishaps.get("num_aborted_requests_total", 0.0)
    retracted = ladder.mishaps.get("num_retracted_requests_total", 0.0)
    problems = [problem for load in ladder.loads for problem in load.problems]
    measured, bound = gate.record(
        max(0.0, min(whole, asked - max(aborted, retracted))) / asked,
        at_least=1.0,
        unit="of prefills answered",
        samples=asked,
        message=(
            f"{whole} of {asked} answered; aborted {aborted:.0f}, retracted {retracted:.0f}."
            + (f" First problem: {problems[0]}." if problems else "")
        ),
        next_step=(
            "Retracted requests mean that the KV cache is too small for what runs at once: "
            "mem_fraction_static up, or max-running-requests down."
        ),
    )
    assert measured >= bound


def test_peak_memory_stays_within_plan(gate: Recorder, ladder: Ladder, bounds: Memory) -> None:
    """Under long prefills no server's peak memory exceeds what was planned for it."""
    tightest = min(_sampled(ladder, bounds), key=lambda device: device.headroom_mib)
    measured, bound = gate.record(
        tightest.headroom_mib,
        at_least=bounds.headroom_mib_min,
        unit="MiB",
        samples=sum(device.samples for device in ladder.devices),
        message=" ".join(_prediction(device) for device in ladder.devices),
        next_step=_advice(tightest),
    )
    assert measured >= bound


def test_free_memory_keeps_its_margin_on_every_rung(
    gate: Recorder, ladder: Ladder, bounds: Memory
) -> None:
    """On every rung of the ladder, every device keeps the demanded margin free."""
    devices = _sampled(ladder, bounds)
    gate.details.series += [
        Series(
            title="Free memory on each rung",
            name=device.where,
            x_label="rung",
            y_label="MiB",
            points=[
                Point(x=number + 1, y=device.margin_mib(number))
                for number in range(len(device.peaks))
            ],
            bound=bounds.margin_mib_min,
        )
        for device in devices
    ]
    margins = [
        (device.margin_mib(number), device, rung)
        for device in devices
        for number, rung in enumerate(ladder.rungs)
    ]
    margin, device, rung = min(margins, key=lambda found: found[0])
    measured, bound = gate.record(
        margin,
        at_least=bounds.margin_mib_min,
        unit="MiB",
        samples=sum(one.samples for one in devices),
        message=(
            f"Tightest: {device.where} with {_words(rung)}; a rung costs up to "
            f"{max(one.slope_mib for one in devices):.0f} MiB more than the one before; "
            f"{min(one.hz for one in devices):.1f} samples a second at least."
        ),
        next_step=_advice(device),
    )
    assert measured >= bound


def _prefills(router: Engine, ruler: Ruler, seed: int, rung: Rung) -> list[Callable[[], Answer]]:
    """Return the requests of a rung; those that share a prefix differ in their last words only."""

    def ask(number: int) -> Answer:
        return ask_at_length(
            lambda text: router.chat(_with_tail(text, number), ANSWER_TOKENS),
            ruler,
            seed if rung.is_shared else seed + number,
            rung.prompt_tokens,
            START,
        )

    return [partial(ask, number) for number in range(rung.requests)]


def _with_tail(text: str, number: int) -> str:
    """Put a sentence of its own between a prompt's prose and its question."""
    prose, _, question = text.rpartition("\n\n")
    return f"{prose} Page {number}.\n\n{question}"


@contextmanager
def _watched(
    cell: Cell, bounds: Memory, host_of: Callable[[CellServer], Host], found: Ladder
) -> Iterator[None]:
    """Sample the memory of every device while the block runs, and keep each one's peak."""
    if bounds.source == "dcgm":
        with _scraped(cell, bounds, found):
            yield
        return
    with ExitStack() as stack:
        followed = [
            (server, stack.enter_context(host_of(server).follow(_watch_question(cell, server))))
            for server in cell.engines
        ]
        for server, lines in followed:
            lines.wait_for_line(WATCH_BEGINS_SECONDS, server.label)
        start = time.monotonic()
        yield
    for server, lines in followed:
        for where, total, samples in _read(cell, server, lines):
            own = [sample for sample in samples if sample[0] >= start]
            _keep(found, where, _plan(cell, server), total, start, own)


def _gpus(cell: Cell, server: CellServer) -> list[int]:
    spec_server = cell.spec.server(server.role) if cell.spec is not None else None
    return list(getattr(spec_server, "gpus", []))


def _watch_question(cell: Cell, server: CellServer) -> str:
    gpus = _gpus(cell, server)
    if gpus:
        return host.gpu_watch_question(gpus, WATCH_SECONDS)
    return host.process_watch_question(server.unit, WATCH_SECONDS)


def _read(
    cell: Cell, server: CellServer, followed: Followed
) -> Iterator[tuple[str, int, list[tuple[float, int]]]]:
    """Yield each device's name, its bytes in all, and the samples of its use in bytes."""
    gpus = _gpus(cell, server)
    if not gpus:
        plan = _plan(cell, server)
        total = plan.device_bytes + plan.process_bytes
        samples = [(at, 1024 * int(line)) for at, line in followed.lines if line.isdigit()]
        yield server.label, total, samples
        return
    for gpu in gpus:
        total, samples = 0, []
        for at, line in followed.lines:
            words = [word.strip() for word in line.split(",")]
            if len(words) == 3 and words[0] == str(gpu) and words[1].isdigit():
                samples.append((at, int(words[1]) * MIB))
                total = int(words[2]) * MIB
        yield f"{server.label} GPU {gpu}", total, samples


def _keep(
    found: Ladder,
    where: str,
    plan: RolePlan,
    total: int,
    start: float,
    samples: Sequence[tuple[float, int]],
) -> None:
    """Add one rung's samples to their device.

    Raises:
        InvalidMeasurementError: there was no sample.
    """
    if not samples:
        raise InvalidMeasurementError(f"{where}: no sample of its memory came while a rung ran.")
    device = next((one for one in found.devices if one.where == where), None)
    if device is None:
        device = Device(where, plan, total)
        found.devices.append(device)
    times = [start, *(at for at, _ in samples)]
    device.peaks.append(max(used for _, used in samples))
    device.hz = min(device.hz, len(samples) / max(times[-1] - start, 1e-9))
    device.longest_gap = max(
        device.longest_gap, *(later - earlier for earlier, later in pairwise(times))
    )
    device.samples += len(samples)


@contextmanager
def _scraped(cell: Cell, bounds: Memory, found: Ladder) -> Iterator[None]:
    """Do the same from DCGM's metric of free memory, as far apart as Prometheus scrapes it."""
    if cell.prometheus_url is None:
        raise InvalidMeasurementError(
            "The cell file names no Prometheus to ask for DCGM's metrics."
        )
    prometheus = Prometheus(cell.prometheus_url)
    wanted = {
        f"{server.label} GPU {gpu}": (
            server,
            f'{DCGM_FREE}{{Hostname="{server.host}", gpu="{gpu}"}}',
        )
        for server in cell.engines
        for gpu in _gpus(cell, server)
    }
    begin = prometheus.now()
    yield
    end = prometheus.now()
    for where, (server, selector) in wanted.items():
        closes = prometheus.wait_for_scrape(selector, end, bounds.scrape_seconds)
        free_mib, samples = prometheus.lowest(selector, begin, closes)
        plan = _plan(cell, server)
        used = plan.device_bytes - int(free_mib * MIB)
        step = (closes - begin) / samples
        _keep(
            found,
            where,
            plan,
            plan.device_bytes,
            0.0,
            [(step * (number + 1), used) for number in range(samples)],
        )


def _sampled(ladder: Ladder, bounds: Memory) -> list[Device]:
    """Return the devices, all of whose samples were frequent enough to see a peak.

    Raises:
        InvalidMeasurementError: there is no device, or its samples leave room for a missed peak.
    """
    if not ladder.devices:
        raise InvalidMeasurementError("The cell file names no engine, so no memory was measured.")
    for device in ladder.devices:
        if not device.hz >= bounds.samples_hz_min:
            raise InvalidMeasurementError(
                f"{device.where} was sampled {device.hz:.1f} times a second, "
                f"{bounds.samples_hz_min:g} are needed to see a peak."
            )
        if (
            bounds.source == "host"
            and not device.kept_peak
            and device.longest_gap > GAP_SECONDS_MAX
        ):
            raise InvalidMeasurementError(
                f"{device.where} was not sampled for {device.longest_gap:.1f} s, which is long "
                "enough to miss a peak."
            )
    if ladder.restarts:
        raise InvalidMeasurementError(f"{'; '.join(ladder.restarts)}: its peak died with it.")
    return ladder.devices


def _prediction(device: Device) -> str:
    """Say by how much the plan was off."""
    peak, planned = device.peak / MIB, device.plan.peak_bytes / MIB
    return (
        f"{device.where}: peak {peak:.0f} MiB of {planned:.0f} planned "
        f"({100 * (peak - planned) / planned:+.0f} %)."
    )


def _advice(device: Device) -> str:
    """Say whether the memory fraction must go up or down, and to where."""
    over = max(-device.headroom_mib, 0.0)
    by = over * MIB / device.plan.device_bytes
    return (
        f"Memory ran short while serving, so mem_fraction_static must go down, not up: by at least "
        f"{max(by, 0.01):.2f} for {device.where}; or lower chunked_prefill_size or context_length. "
        "(Up is for an engine that does not start because its KV cache does not fit.)"
    )


def _mishaps(cell: Cell, connect: Callable[[str], Engine]) -> list[Counters]:
    return [
        counters.read(connect(server.url), server.label, counters.PRESSURE)
        for server in cell.engines
    ]


def _plan(cell: Cell, server: CellServer) -> RolePlan:
    plan = cell.plan.roles.get(server.role) if cell.plan is not None else None
    if plan is None:
        raise InvalidMeasurementError(f"The cell file has no memory plan for {server.role}.")
    return plan


def _words(rung: Rung) -> str:
    shared = " with one shared prefix" if rung.is_shared else ""
    return f"{rung.requests} x {rung.prompt_tokens} tokens at once{shared}"
