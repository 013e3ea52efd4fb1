"""How every operation is timed: the same way as its peers, beside its floor, and only when right.

An operation has a module ``benchmarks/<op>.py`` with ``cases() -> Iterable[Case]``.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

WALK_BYTES = 240 << 20
FLUSH_BYTES = 192 << 20
SETS = (3, 64)
CALLS = 64
REPLAYS = 21
REPEATS = 3
FLUSHED_CALLS = 20


@dataclass(frozen=True)
class Case:
    """One size of one operation.

    Attributes
    ----------
    op: the operation's folder name
    name: the size in words, such as ``fp8 N=128``
    bytes_moved: bytes that a call must read and write, each once; they make the floor
    make: ``make(seed)`` returns one set of inputs and outputs on the GPU, all of them its own
    ours: runs the operation on one set, on the current stream, and allocates nothing
    check: runs it on one set and returns None, or one sentence that says what is wrong
    peers: what else does the same work, by name, called like ``ours``; one that cannot be had here
        raises, and is reported as not run
    set_bytes: bytes of one set, where that is more than ``bytes_moved``
    target_us: what is to be reached, in rotation, microseconds
    """

    op: str
    name: str
    bytes_moved: int
    make: Callable[[int], Any]
    ours: Callable[[Any], None]
    check: Callable[[Any], str | None]
    peers: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    set_bytes: int = 0
    target_us: float | None = None


@dataclass(frozen=True)
class Time:
    """Microseconds of one call.

    Attributes
    ----------
    rotating_us: median over repeats of a graph that walks through the input sets
    rotating_spread_us: largest less smallest of the repeats
    flushed_us: likewise, with the L2 read full of something else before each call
    flushed_spread_us: likewise
    """

    rotating_us: float
    rotating_spread_us: float
    flushed_us: float
    flushed_spread_us: float


@dataclass(frozen=True)
class Result:
    """What one case came to. ``fault`` is why there is no time."""

    op: str
    name: str
    floor_us: float
    target_us: float | None
    fault: str | None
    times: dict[str, Time]
    not_run: dict[str, str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


def judge(case: Case, bytes_per_second: float) -> Result:
    """Check the case, and time it and its peers if it is right."""
    begun = time.monotonic()
    fault = case.check(case.make(0))
    times: dict[str, Time] = {}
    not_run: dict[str, str] = {}
    if fault is None:
        few, many = SETS
        fitting = WALK_BYTES // max(case.set_bytes, case.bytes_moved, 1)
        sets = [case.make(seed) for seed in range(1, 1 + min(max(fitting, few), many))]
        for name, call in {"ours": case.ours, **case.peers}.items():
            try:
                times[name] = measured(call, sets)
            except Exception as error:  # a peer that is not there is no failure
                if name == "ours":
                    raise
                not_run[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Result(
        case.op,
        case.name,
        case.bytes_moved / bytes_per_second * 1e6,
        case.target_us,
        fault,
        times,
        not_run,
        time.monotonic() - begun,
    )


def measured(call: Callable[[Any], None], sets: list[Any]) -> Time:
    """Time a call over the sets, rotating and with the L2 flushed."""
    import torch

    rounds = -(-CALLS // len(sets))
    rotating = captured(call, sets * rounds)
    medians = [replayed(rotating) / (rounds * len(sets)) for _ in range(REPEATS)]
    junk = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    sink = torch.empty((), dtype=torch.int64, device="cuda")
    some = [sets[i % len(sets)] for i in range(FLUSHED_CALLS)]

    def flush(_: Any) -> None:
        torch.sum(junk, dim=0, dtype=torch.int64, out=sink)

    def flush_and_call(one: Any) -> None:
        flush(one)
        call(one)

    only_flush, with_call = captured(flush, some), captured(flush_and_call, some)
    differences = [(replayed(with_call) - replayed(only_flush)) / len(some) for _ in range(REPEATS)]
    return Time(
        statistics.median(medians),
        max(medians) - min(medians),
        statistics.median(differences),
        max(differences) - min(differences),
    )


def captured(call: Callable[[Any], None], sets: list[Any]) -> Any:
    """Return the calls on the sets as one graph, after running them once outside of it."""
    import torch

    for one in sets:
        call(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in sets:
            call(one)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed(graph: Any) -> float:
    """Return the median microseconds of a replay."""
    import torch

    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(REPLAYS)
    ]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * float(statistics.median(begin.elapsed_time(end) for begin, end in events))


def copy_bytes_per_second() -> float:
    """Return the bandwidth of a copy of 4 GiB, bytes read plus bytes written."""
    import torch

    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    # Not Tensor.copy_: in a graph that is the copy engine's, which is slower than the cores.
    graph = captured(lambda one: torch.neg(one, out=target), [source])
    return float(2 * source.nbytes / (replayed(graph) * 1e-6))


def table(results: list[Result]) -> str:
    """Return the results for people: one line a case; a red one shows no time."""
    lines = []
    for result in results:
        head = f"{result.op:12} {result.name:28} floor {result.floor_us:8.2f} us"
        if result.fault:
            lines.append(f"{head}  RED: {result.fault}")
            continue
        ours = result.times["ours"]
        cells = [
            f"{name} {t.rotating_us:8.2f} ±{t.rotating_spread_us / 2:4.2f} "
            f"/ {t.flushed_us:8.2f} ±{t.flushed_spread_us / 2:4.2f}"
            for name, t in result.times.items()
        ]
        cells += [f"{name} not run: {why}" for name, why in result.not_run.items()]
        if result.target_us is not None:
            met = "met" if ours.rotating_us <= result.target_us else "MISSED"
            cells.append(f"target {result.target_us:.2f} {met}")
        cells.append(f"{result.floor_us / ours.rotating_us:4.0%} of floor")
        lines.append("  ".join([head, *cells]))
    return "\n".join(
        ["us, median ± half the spread of 3 repeats: rotating inputs / L2 flushed", *lines]
    )
