"""The KV cache crosses from prefill to decode intact, and both sides are what must be equal.

In a cell with prefill and decode the first token of an answer is made by prefill, and every later
one by decode from the KV cache that was sent. A canary's secret has several tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from seatrial import canary, counters
from seatrial.canary import Reply
from seatrial.cell import BY_HAND, Cell, CellServer
from seatrial.counters import Counters
from seatrial.details import Heatmap, Item, Square
from seatrial.engine import Engine
from seatrial.facts import Facts
from seatrial.haystack import Ruler
from seatrial.load import at_once
from seatrial.statistics import wilson_interval
from seatrial.thresholds import Transfer
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.transfer

EQUAL_KEYS = (
    "version",
    "model_path",
    "revision",
    "json_model_override_args",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "page_size",
    "tp_size",
    "attention_backend",
    "context_length",
    "disaggregation_transfer_backend",
)
"""What prefill and decode must say alike: else pages or their contents do not fit together."""
EQUAL_LABELS = ("digest", "index_topk", "index_key_dtype", "index_key_bytes", "version")


@pytest.fixture(scope="module")
def sides(cell: Cell) -> tuple[list[CellServer], list[CellServer]]:
    """Return the prefill and the decode servers.

    Raises:
        InvalidMeasurementError: the cell has none, or only a URL is known.
    """
    prefill, decode = cell.with_roles("prefill"), cell.with_roles("decode")
    if not prefill or not decode:
        why = f" {BY_HAND}" if not cell.servers else ""
        raise InvalidMeasurementError(
            f"The cell has no prefill and decode servers of its own.{why}"
        )
    return prefill, decode


@pytest.fixture(scope="module")
def crossed(
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    run: Any,
    connect: Callable[[str], Engine],
    sides: tuple[list[CellServer], list[CellServer]],
) -> tuple[list[tuple[int, Reply | None]], dict[str, float]]:
    """Send canaries of several lengths, alone and together; return replies and counters."""
    bounds: Transfer = run.thresholds.section("transfer")
    before = _counted(cell, connect)
    found: list[tuple[int, Reply | None]] = []
    for tokens in bounds.lengths:
        seeds = [run.seed + tokens * 1000 + number for number in range(bounds.samples)]
        requests = [partial(canary.send, router.chat, ruler, seed, tokens) for seed in seeds]
        alone = at_once(requests[:1], 1)  # which teaches the ruler this length, too
        together = at_once(requests[1:], bounds.concurrency)
        found += [(tokens, reply) for reply in [*alone.answers, *together.answers]]
    grown: dict[str, float] = {}
    for earlier, later in zip(before, _counted(cell, connect), strict=True):
        for name, count in counters.growth(earlier, later).items():
            grown[name] = grown.get(name, 0.0) + count
    return found, grown


@pytest.mark.each_launch
def test_canaries_cross_intact(
    gate: Recorder,
    crossed: tuple[list[tuple[int, Reply | None]], dict[str, float]],
    bounds: Transfer,
) -> None:
    """Decode names secrets that only an intact KV cache holds, at every length, alone or not."""
    replies, _ = crossed
    right = [(tokens, reply is not None and reply.is_right) for tokens, reply in replies]
    squares = []
    for tokens in bounds.lengths:
        hits = [is_right for length, is_right in right if length == tokens]
        low, high = wilson_interval(sum(hits), len(hits))
        squares.append(
            Square(x=tokens, y=0, successes=sum(hits), samples=len(hits), low=low, high=high)
        )
    gate.details.heatmaps.append(
        Heatmap(
            title="Canaries across the transfer",
            x_label="prompt tokens",
            y_label="depth, percent",
            squares=squares,
            bound=bounds.canary_ratio_min,
        )
    )
    gate.details.items += [
        Item(
            key=reply.key if reply is not None else f"lost/{tokens}/{order}",
            order=order,
            is_right=reply is not None and reply.is_right,
        )
        for order, (tokens, reply) in enumerate(replies)
    ]
    by_length = ", ".join(f"{cell.successes}/{cell.samples} at {cell.x:.0f}" for cell in squares)
    wrong = [one.answer.text for _, one in replies if one is not None and not one.is_right]
    measured, bound = gate.record(
        sum(hit for _, hit in right) / len(right),
        at_least=bounds.canary_ratio_min,
        unit="of canaries right",
        samples=len(right),
        message=f"{by_length} tokens." + (f" One said {wrong[0].strip()[:60]!r}." if wrong else ""),
        next_step=(
            "Ask the same of a combined cell: if it is right there, the transfer spoils the KV "
            "cache; compare page size, dtypes and layouts of both sides."
        ),
    )
    assert measured >= bound


def test_transfers_do_not_fail(
    gate: Recorder,
    crossed: tuple[list[tuple[int, Reply | None]], dict[str, float]],
    bounds: Transfer,
) -> None:
    """Each canary's KV cache is sent once, and no transfer or handshake fails or is repeated."""
    replies, grown = crossed
    sent = grown[counters.TRANSFERS]
    answered = sum(reply is not None for _, reply in replies)
    if sent < answered:
        raise InvalidMeasurementError(
            f"{answered} canaries were answered, and prefill counted {sent:.0f} transfers: the "
            "counters of transfers do not count, so their failures cannot be believed either."
        )
    failed = sum(grown[name] for name in counters.TRANSFER)
    told = ", ".join(f"{name} {grown[name]:.0f}" for name in counters.TRANSFER)
    measured, bound = gate.record(
        max(0.0, sent - failed) / sent if sent else float("nan"),
        at_least=1.0,
        unit="of transfers without a failure",
        samples=round(sent),
        message=f"{sent:.0f} transfers; {told}.",
        next_step="Read both engines' journals for the transfer engine's own words.",
    )
    assert measured >= bound


def test_both_sides_agree_where_they_must(
    gate: Recorder,
    sides: tuple[list[CellServer], list[CellServer]],
    connect: Callable[[str], Engine],
    bounds: Transfer,
) -> None:
    """Prefill and decode say alike what the KV cache's layout and meaning depend on."""
    servers = [*sides[0], *sides[1]]
    infos = {server.label: connect(server.url).server_info() for server in servers}
    facts = Facts()
    first = servers[0].label
    for key in EQUAL_KEYS:
        for label, info in infos.items():
            if label != first and (key in info or key in infos[first]):
                mine, theirs = info.get(key), infos[first].get(key)
                facts.hold(mine == theirs, f"{key} of {label} is {mine}, of {first} {theirs}")
    reports = {
        server.label: {
            tuple(labels.labels.get(key) for key in EQUAL_LABELS)
            for labels in connect(server.url).metrics("seatrial_plugin_info")
            if "allocated_width" in labels.labels
        }
        for server in servers
    }
    for label, report in reports.items():
        if label != first and (report or reports[first]):
            facts.hold(
                report == reports[first],
                f"the plugin of {label} reports {sorted(map(str, report))}, of {first} "
                f"{sorted(map(str, reports[first]))}",
            )
    measured, bound = facts.judge(gate, bounds.agreement_ratio_min)
    assert measured >= bound


def _counted(cell: Cell, connect: Callable[[str], Engine]) -> list[Counters]:
    names = (*counters.TRANSFER, counters.TRANSFERS)
    return [
        counters.read(connect(server.url), server.label, names)
        for server in cell.with_roles("prefill", "decode")
    ]
