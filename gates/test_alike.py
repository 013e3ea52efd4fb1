"""A combined cell and one with prefill and decode answer alike: the field's way to rule P/D out.

Both must run the same release, so this is asked after a rollout, by playbooks/gate.yml.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seatrial import canary
from seatrial.cell import Cell, Peer
from seatrial.engine import Engine
from seatrial.haystack import Ruler
from seatrial.thresholds import Alike
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = pytest.mark.alike


def test_cell_of_the_other_kind_answers_alike(
    gate: Recorder,
    cell: Cell,
    router: Engine,
    ruler: Ruler,
    connect: Callable[[str], Engine],
    bounds: Alike,
) -> None:
    """A combined cell and one with prefill and decode answer the same greedy prompts alike."""
    peer = _peer(cell, connect)
    seeds = gate.seeds()
    alike, differing = 0, []
    for number in range(bounds.prompts):
        tokens = bounds.lengths[number % len(bounds.lengths)]
        seed = next(seeds)
        reply = canary.send(router.chat, ruler, seed, tokens)
        other = canary.send(connect(peer.router_url).chat, ruler, seed, tokens)
        alike += reply.answer.text == other.answer.text
        if reply.answer.text != other.answer.text:
            differing.append((reply.answer.text.strip()[:40], other.answer.text.strip()[:40]))
    measured, bound = gate.record(
        alike / bounds.prompts,
        at_least=bounds.alike_ratio_min,
        unit="of answers alike",
        samples=bounds.prompts,
        message=(
            f"{alike} of {bounds.prompts} alike with {peer.name}."
            + (f" Here {differing[0][0]!r}, there {differing[0][1]!r}." if differing else "")
        ),
        next_step="If only the cell with prefill and decode is wrong, it is the transfer.",
    )
    assert measured >= bound


def _peer(cell: Cell, connect: Callable[[str], Engine]) -> Peer:
    """Return a cell of the other kind that runs the same release as this one.

    Raises:
        InvalidMeasurementError: there is none.
    """
    is_combined = bool(cell.with_roles("combined"))
    others = [peer for peer in cell.peers if peer.is_combined is not is_combined]
    if not others:
        raise InvalidMeasurementError("The fleet has no cell of the other kind to compare with.")
    ours = _release_of(connect(cell.engines[0].url))
    for peer in others:
        if all(_release_of(connect(url)) == ours for url in peer.engine_urls):
            return peer
    raise InvalidMeasurementError(
        f"{others[0].name} does not run what this cell runs (yet), so their answers need not be "
        "alike: judge the fleet again when the rollout is over, with playbooks/gate.yml."
    )


def _release_of(engine: Engine) -> tuple[object, ...]:
    """Return what decides a server's answers, as far as it says itself."""
    info = engine.server_info()
    keys = ("version", "model_path", "revision", "json_model_override_args", "kv_cache_dtype")
    return tuple(info.get(key) for key in keys)
