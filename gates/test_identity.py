"""The running servers are the release: git = unit = process = server's own words = behaviour.

Each gate compares facts from one source with the release and measures which share of them agrees.
A value that might be a secret is never printed: for environment variables only names are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from seatrial import release as releases
from seatrial.cell import Cell, CellServer
from seatrial.engine import Answer, Engine
from seatrial.facts import Facts
from seatrial.haystack import START, Layout, is_recalled
from seatrial.host import Host
from seatrial.release import Release, ReleasedServer
from seatrial.thresholds import Identity
from seatrial.verdict import InvalidMeasurementError, Recorder

pytestmark = [pytest.mark.identity, pytest.mark.each_launch]

BACKENDS = ("attention_backend", "moe_runner_backend", "sampling_backend", "kv_cache_dtype")
"""What SGLang resolves by hardware and model; another choice is another numeric result."""
CURRENT_RELEASE = "/opt/seatrial/current/release.json"


@pytest.fixture(scope="module")
def on_host(
    cell: Cell, release: Release, host_of: Callable[[CellServer], Host]
) -> dict[str, Release]:
    """Return the release.json that lies on each host; hosts differ in the roles they run."""
    return {
        server.host: releases.parse(host_of(server).read(CURRENT_RELEASE), server.host)
        for server in cell.servers
    }


def test_unit_files_are_the_released_ones(
    gate: Recorder,
    cell: Cell,
    release: Release,
    on_host: dict[str, Release],
    host_of: Callable[[CellServer], Host],
    bounds: Identity,
) -> None:
    """The release on every host is the asked one, and systemd has loaded its unit files."""
    facts = Facts()
    for name, lying in on_host.items():
        facts.agree(f"release on {name}", lying.digest, release.digest)
    for server in cell.servers:
        host, expected = host_of(server), on_host[server.host].units.get(server.unit)
        state = host.unit(server.unit)
        found = host.sha256(state.path) if state.path else "not there"
        facts.agree(f"{server.unit} on {server.host}", found, expected)
        facts.hold(
            not state.is_stale,
            f"{server.unit} on {server.host} has changed since systemd loaded it",
        )
    _assert_agreement(gate, facts, bounds)


def test_model_on_every_host_is_the_released_revision(
    gate: Recorder,
    cell: Cell,
    release: Release,
    host_of: Callable[[CellServer], Host],
    bounds: Identity,
) -> None:
    """The model's folder on every host holds the released revision, which no server tells."""
    facts = Facts()
    for server in {server.host: server for server in cell.engines}.values():
        found = host_of(server).read(f"{release.model.path}/revision").strip()
        facts.agree(f"revision of the model on {server.host}", found, release.model.revision)
    measured, bound = facts.judge(gate, bounds.agreement_ratio_min)
    assert measured >= bound


def test_processes_run_released_arguments(
    gate: Recorder,
    cell: Cell,
    on_host: dict[str, Release],
    host_of: Callable[[CellServer], Host],
    bounds: Identity,
) -> None:
    """Every main process was started with the released arguments and environment."""
    facts = Facts()
    for server in cell.servers:
        host, expected = host_of(server), _released(on_host[server.host], server)
        state = host.unit(server.unit)
        facts.agree(f"command of {server.unit}", state.command, " ".join(expected.argv))
        facts.hold(state.main_pid > 0, f"{server.unit} on {server.host} does not run")
        if state.main_pid > 0:
            _compare_process(facts, host, state.main_pid, server, expected)
    _assert_agreement(gate, facts, bounds)


def test_servers_report_released_configuration(
    gate: Recorder, cell: Cell, release: Release, connect: Callable[[str], Engine], bounds: Identity
) -> None:
    """Every server, asked over HTTP, reports the released version, model and settings."""
    facts = Facts()
    for server in cell.engines:
        info = connect(server.url).server_info()
        _compare_server_info(facts, cell, release, server, info)
    for server in cell.with_roles("router"):
        found = sorted(connect(server.url).workers())
        facts.agree(f"workers of {server.label}", found, sorted(s.url for s in cell.engines))
    _assert_agreement(gate, facts, bounds)


def test_servers_derive_what_the_release_means(
    gate: Recorder, cell: Cell, release: Release, connect: Callable[[str], Engine], bounds: Identity
) -> None:
    """What SGLang derives itself is what the release means: chunk, backends, environment."""
    facts = Facts()
    for server in cell.engines:
        info = connect(server.url).server_info()
        ranks = [dict(info), *(dict(state) for state in info.get("internal_states") or [])]
        facts.hold(len(ranks) > 1, f"{server.label} tells nothing of its schedulers")
        for state in ranks:
            _compare_derived(facts, release, server, info, state)
    _assert_agreement(gate, facts, bounds)


def test_plugin_reports_released_selection_on_every_rank(
    gate: Recorder,
    cell: Cell,
    release: Release,
    on_host: dict[str, Release],
    host_of: Callable[[CellServer], Host],
    connect: Callable[[str], Engine],
    bounds: Identity,
) -> None:
    """On every rank the plugin runs the installed kernels and allocated index_topk entries."""
    if not release.patches:
        raise InvalidMeasurementError(
            "The release enables no patch, so no plugin reports; list this gate under "
            "not_applicable in the thresholds file."
        )
    facts = Facts()
    for server in cell.engines:
        released = _released(on_host[server.host], server)
        digest = host_of(server).kernels_digest(released.argv[0])
        _compare_plugin(facts, release, server, connect(server.url), _ranks(released), digest)
    _assert_agreement(gate, facts, bounds)


def test_cell_recalls_short_needle(
    gate: Recorder, ask: Callable[[int, Layout, int], Answer], bounds: Identity
) -> None:
    """The cell behaves like the model: it recalls a needle from a short prompt."""
    answer = ask(bounds.probe_prompt_tokens, START, 32)
    facts = Facts()
    facts.hold(is_recalled(answer.text), f"the answer was {answer.text.strip()[:60]!r}")
    _assert_agreement(gate, facts, bounds)


def _compare_process(
    facts: Facts, host: Host, pid: int, server: CellServer, expected: ReleasedServer
) -> None:
    """Compare a main process' own arguments, build and environment.

    SGLang's router writes its title over its arguments. Then they cannot be read, and what systemd
    starts, together with the build whose files the process has loaded, stands for them.
    """
    found = host.command_line(pid)
    is_renamed = found[0].startswith("sglang::")
    if not is_renamed:
        for index, word in enumerate(expected.argv):
            there = found[index] if index < len(found) else "missing"
            facts.agree(f"argument {index} of {server.label}", there, word)
        facts.agree(f"number of arguments of {server.label}", len(found), len(expected.argv))
    build = expected.argv[0].removesuffix("/bin/python")
    facts.hold(host.has_mapped(pid, build), f"{server.label} has loaded nothing from {build}")
    environment = host.environment(pid, expected.env)
    if is_renamed and expected.env and not environment:
        facts.hold(
            False,
            f"{server.label} has written its title over its environment; "
            "set SPT_NOENV=1 in its environment",
        )
        return
    for key, value in expected.env.items():
        facts.hold(environment.get(key) == value, f"environment {key} of {server.label} differs")


def _compare_server_info(
    facts: Facts, cell: Cell, release: Release, server: CellServer, info: dict[str, Any]
) -> None:
    """Compare what an engine says of itself over HTTP."""
    facts.agree(f"SGLang of {server.label}", info.get("version"), release.sglang)
    facts.agree(f"model of {server.label}", info.get("model_path"), release.model.path)
    override = _json(info.get("json_model_override_args"))
    for key in ("index_topk", "index_key_dtype"):
        facts.agree(f"{key} of {server.label}", override.get(key), getattr(release, key))
    mode = info.get("disaggregation_mode") or "null"
    facts.agree(
        f"mode of {server.label}", mode, "null" if server.role == "combined" else server.role
    )
    flags = releases.flags_of(release.servers[server.role].argv)
    for flag in ("context-length", "mem-fraction-static"):
        found = info.get(flag.replace("-", "_"))
        facts.agree(f"{flag} of {server.label}", str(found), flags.get(flag))


def _compare_derived(
    facts: Facts,
    release: Release,
    server: CellServer,
    info: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Compare what a server, or one of its schedulers, made of its arguments and environment.

    With DP attention each rank gets its share of the chunk (srt/arg_groups/parallel_hook.py divides
    `chunked_prefill_size` by `attn_dp_size`). A backend that was asked for must be the one that
    runs; what SGLang chose itself must be one choice. `env_vars` is SGLang's own environment after
    it has changed it, and is there with SGLANG_EXPOSE_OWN_ENV_VARS=1.
    """
    released = release.servers[server.role]
    flags = releases.flags_of(released.argv)
    shares = int(flags.get("attn-dp-size") or 1)
    if "enable-dp-attention" in flags:
        shares = int(flags.get("dp-size") or flags.get("dp") or 1)
    asked = int(flags.get("chunked-prefill-size", 0))
    facts.agree(
        f"chunk of {server.label} ({asked} over {shares} DP ranks)",
        state.get("chunked_prefill_size"),
        asked // shares,
    )
    for key in BACKENDS:
        if key not in state:
            continue
        resolved, wanted = state[key], flags.get(key.replace("_", "-"), "auto")
        if wanted != "auto":
            facts.agree(f"{key} of {server.label}", resolved, wanted)
        elif key in info:
            facts.hold(
                resolved == info[key],
                f"{key} of {server.label} is {info[key]}, in one of its schedulers {resolved}",
            )
    own = state.get("env_vars")
    if released.env.get("SGLANG_EXPOSE_OWN_ENV_VARS") == "1" and "launch_command" not in state:
        facts.hold(isinstance(own, dict), f"{server.label} does not tell its own environment")
    for name, value in released.env.items():
        if isinstance(own, dict) and name in own:
            facts.hold(
                str(own[name]) == value, f"SGLang changed {name} of {server.label} by itself"
            )


def _compare_plugin(
    facts: Facts, release: Release, server: CellServer, engine: Engine, ranks: int, digest: str
) -> None:
    """Compare what the plugin says of itself in the engine's metrics, rank by rank."""
    reports = [sample.labels for sample in engine.metrics("seatrial_plugin_info")]
    for labels in reports:
        patch = labels.get("patch", "")
        where = f"patch {patch} on rank {labels.get('rank')} of {server.label}"
        facts.hold(patch in release.patches, f"{where} is not in the release")
        facts.agree(f"kernels of {where}", labels.get("digest"), digest)
    for rank in range(ranks):
        where = f"rank {rank} of {server.label}"
        selecting = [
            labels
            for labels in reports
            if labels.get("rank") == str(rank) and "allocated_width" in labels
        ]
        facts.hold(bool(selecting), f"{where} reports no selection")
        for labels in selecting:
            for key in ("index_topk", "index_key_dtype"):
                facts.agree(f"{key} on {where}", labels.get(key), str(getattr(release, key)))
            width = labels["allocated_width"]
            facts.hold(
                width.isdigit() and int(width) >= release.index_topk,
                f"{where} allocated {width} entries, index_topk is {release.index_topk}",
            )


def _released(release: Release, server: CellServer) -> ReleasedServer:
    """Return what the release says of a server's process."""
    released = release.servers.get(server.role)
    if released is None:
        raise InvalidMeasurementError(f"release.json on {server.host} has no {server.role}.")
    return released


def _ranks(server: ReleasedServer) -> int:
    """Return the number of tensor-parallel ranks that the arguments ask for."""
    for flag in ("--tensor-parallel-size", "--tp-size", "--tp"):
        if flag in server.argv:
            return int(server.argv[server.argv.index(flag) + 1])
    return 1


def _json(text: object) -> dict[str, Any]:
    """Return the JSON object in ``text``, or nothing."""
    if isinstance(text, dict):
        return text
    try:
        value = json.loads(str(text))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _assert_agreement(gate: Recorder, facts: Facts, bounds: Identity) -> None:
    """Record which share of the facts agrees, and assert it."""
    measured, bound = facts.judge(gate, bounds.agreement_ratio_min)
    assert measured >= bound
