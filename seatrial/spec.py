"""The serving spec: the desired state of a fleet, typed and checked before anything is touched.

A spec is the variable ``serving_spec`` in ``inventory/<fleet>/group_vars/all/serving_spec.yml``.
Every problem is reported at once, one line each, as ``path: should be ...``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from seatrial.errors import SeatrialError

ENGINE_ROLES = ("prefill", "decode", "combined")
ROLES = (*ENGINE_ROLES, "router")

# Flags that the spec says by its own keys. Saying them again under `args` would make two truths.
FLAGS_OF_THE_SPEC = {
    "model-path": "model.path",
    "served-model-name": "model.name",
    "revision": "model.revision",
    "json-model-override-args": "index_topk and index_key_dtype",
    "mem-fraction-static": "mem_fraction_static",
    "context-length": "context_length",
    "chunked-prefill-size": "chunked_prefill_size",
    "disaggregation-mode": "cells",
    "disaggregation-transfer-backend": "transfer_backend",
    "disaggregation-bootstrap-port": "roles.prefill.bootstrap_port",
    "host": "seatrial_address of the host",
    "port": "roles.<role>.port",
    "prometheus-port": "roles.router.metrics_port",
    "prefill": "cells",
    "decode": "cells",
    "pd-disaggregation": "cells",
    "worker-urls": "cells",
}
# Second spellings of SGLang's flags (server_args.py of 0.5.23: option strings of one argument, as
# its own parser lists them) and the one that the spec takes, so that roles can be compared and
# nothing is said twice. `config` names a file of more arguments, which no commit would show.
SPELLINGS = {
    "model": "model-path",
    "tp-size": "tensor-parallel-size",
    "tp": "tensor-parallel-size",
    "dp-size": "data-parallel-size",
    "pp-size": "pipeline-parallel-size",
    "ep-size": "expert-parallel-size",
    "ep": "expert-parallel-size",
    "dcp-size": "decode-context-parallel-size",
    "attn-dp-size": "attention-data-parallel-size",
    "attn-cp-size": "attention-context-parallel-size",
    "moe-dp-size": "moe-data-parallel-size",
    "nccl-init-addr": "dist-init-addr",
    "grpc-http-sidecar-port": "smg-http-sidecar-port",
    "context-bucket": "cuda-graph-prefill-max-context",
    "speculative-draft-model": "speculative-draft-model-path",
    "enable-hicache": "enable-hierarchical-cache",
    "hierarchical-sparse-attention-extra-config": "hisparse-config",
}
# Seconds that a cell's rollout may spend between its steps: Ansible's own, and the entry's.
BETWEEN_STEPS_SECONDS = 60
# A share of the cells: 1% to 100%.
SHARE = re.compile(r"([1-9]\d?|100)%")
SECRET_FLAGS = ("api-key", "admin-api-key", "hf-token", "ssl-keyfile-password")
SECRET_NAME = re.compile(r"(?i)(api_?key|token|secret|password)$")


class SpecError(SeatrialError):
    """The serving spec says something that cannot be served."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[int, Field(ge=1, le=86400)]
Scalar = str | int | float | bool
ArgumentValue = Scalar | list[str | int | float] | dict[str, Any]


class Model(_Strict):
    """Which weights: a folder that is already on every GPU host."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    path: Annotated[str, Field(pattern=r"^/[^\s%$'\"\\]+$")]
    revision: Annotated[str, Field(min_length=7, pattern=r"^[A-Za-z0-9._:-]+$")]


class Engine(_Strict):
    """Which SGLang, for which platform, with which named patches of ``kernels/``."""

    sglang: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+(\.post\d+)?$")]
    platform: Literal["cpu", "cuda13"]
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    patches: list[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]]


class Server(_Strict):
    """How one role runs: its port, and SGLang's own arguments and environment."""

    port: Port
    args: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], ArgumentValue]
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], Scalar]

    @field_validator("args")
    @classmethod
    def _one_truth_and_no_secret(cls, args: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
        for flag in args:
            if flag in SECRET_FLAGS:
                raise ValueError(
                    f"without '{flag}' (arguments are readable by every user of the host; "
                    "the API key is checked at the entry, see roles/entry)"
                )
            if flag in SPELLINGS:
                raise ValueError(
                    f"without '{flag}' (SGLang reads it as '{SPELLINGS[flag]}': use that name)"
                )
            if flag == "config":
                raise ValueError(
                    "without 'config' (a file of arguments on the host is in no commit)"
                )
            if flag in FLAGS_OF_THE_SPEC:
                raise ValueError(
                    f"without '{flag}' (the spec says it in {FLAGS_OF_THE_SPEC[flag]})"
                )
        return args

    @field_validator("env")
    @classmethod
    def _no_secret_in_environment(cls, env: dict[str, Scalar]) -> dict[str, Scalar]:
        for name in env:
            if SECRET_NAME.search(name):
                raise ValueError(f"without '{name}' (put secrets in a file on the host)")
        return env


class EngineServer(Server):
    """A prefill, decode or combined server, and the GPUs that are its own on its host."""

    gpus: list[Annotated[int, Field(ge=0, le=63)]]


class PrefillServer(EngineServer):
    """A prefill server also serves the handshake of the KV transfer."""

    bootstrap_port: Port


class RouterServer(Server):
    """SGLang's router, which has a port of its own for its metrics."""

    metrics_port: Port


class Roles(_Strict):
    """The servers that a cell may hold."""

    prefill: PrefillServer | None = None
    decode: EngineServer | None = None
    combined: EngineServer | None = None
    router: RouterServer


class Cell(_Strict):
    """Which hosts serve together: a prefill and a decode list, or a combined list; one router."""

    prefill: list[str] = []
    decode: list[str] = []
    combined: list[str] = []
    router: str

    def roles_of(self, host: str) -> list[str]:
        """Return the roles that ``host`` has in this cell, engines before the router."""
        engines = [role for role in ENGINE_ROLES if host in getattr(self, role)]
        return [*engines, *(["router"] if host == self.router else [])]

    def hosts(self) -> list[str]:
        """Return the cell's hosts, each once; the first one leads the cell."""
        return list(dict.fromkeys([*self.prefill, *self.combined, *self.decode, self.router]))


class Timeouts(_Strict):
    """How long each step of a rollout may take, in seconds."""

    drain_seconds: Seconds
    stop_seconds: Seconds
    ready_seconds: Seconds
    router_seconds: Seconds
    gate_seconds: Seconds


class Rollout(_Strict):
    """Cells per batch, canary first; when an untold host reverts; what a failure undoes.

    A batch is a number of cells, or a share of all of them such as ``25%``, rounded down and at
    least one. ``keep_releases`` is how many earlier releases a host keeps beside what runs and
    last_good.
    """

    batches: Annotated[list[int | str], Field(min_length=1)]
    dead_man_seconds: Seconds
    revert_scope: Literal["fleet", "cell"]
    keep_releases: Annotated[int, Field(ge=0, le=1000)]

    @field_validator("batches", mode="before")
    @classmethod
    def _are_cells_or_shares(cls, batches: Any) -> Any:
        for size in batches if isinstance(batches, list) else []:
            is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            if not is_number and not re.fullmatch(SHARE, str(size)):
                raise ValueError(f"numbers from 1 and shares such as 25%, is {size!r}")
        return batches


class Gates(_Strict):
    """Which thresholds file judges, which groups of gates run, and over how many launches.

    ``cold_launches`` is how often the cell is stopped and started again after its gates passed, and
    asked what is marked ``each_launch``: some faults are there on one launch, not on the next.
    """

    thresholds: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    select: Annotated[list[str], Field(min_length=1)]
    cold_launches: Annotated[int, Field(ge=0, le=20)]


class ServingSpec(_Strict):
    """The desired state of a fleet. Lengths are tokens, times seconds, memory GiB."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    model: Model
    engine: Engine
    index_topk: Annotated[int, Field(ge=64, le=65536, multiple_of=64)]
    index_key_dtype: Literal["fp8_e4m3", "bf16", "fp32"]
    mem_fraction_static: Annotated[float, Field(gt=0.0, lt=1.0)]
    context_length: Annotated[int, Field(ge=128)]
    chunked_prefill_size: Annotated[int, Field(ge=1)]
    transfer_backend: Literal["mooncake", "mooncake_tcp", "nixl"]
    device_memory_gib: Annotated[float, Field(gt=0.0)]
    roles: Roles
    cells: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Cell], Field(min_length=1)
    ]
    timeouts: Timeouts
    rollout: Rollout
    gates: Gates

    def cell_of(self, host: str) -> str:
        """Return the name of the cell that ``host`` belongs to.

        Raises
        ------
        SpecError
            If no cell names the host.
        """
        for name, cell in self.cells.items():
            if host in cell.hosts():
                return name
        raise SpecError(f"cells: should name the host {host}, which is in the group gpu_hosts")

    def server(self, role: str) -> Server:
        """Return the server settings of ``role``, which the checks have shown to be there."""
        server = getattr(self.roles, role)
        if not isinstance(server, Server):
            raise SpecError(f"roles.{role}: should be set, because a cell uses it")
        return server

    def override(self) -> str:
        """Return the JSON for ``--json-model-override-args``: what changes the model's config."""
        return json.dumps(
            {"index_key_dtype": self.index_key_dtype, "index_topk": self.index_topk},
            sort_keys=True,
        )

    def rendered(self) -> dict[str, Any]:
        """Return the part of the spec that lands on hosts, in plain types.

        What only steers a rollout (batches, gates, its time-outs) is left out, so a change there
        makes no new release.
        """
        plain = self.model_dump(by_alias=True, mode="json", exclude={"rollout", "gates"})
        plain["timeouts"] = {
            key: plain["timeouts"][key] for key in ("ready_seconds", "stop_seconds")
        }
        return plain

    def sha256(self) -> str:
        """Return the digest (64 hex digits) of the part of the spec that lands on hosts."""
        canonical = json.dumps(self.rendered(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


class Batch(NamedTuple):
    """One step of a rollout: whole cells, and the hosts in them."""

    cells: list[str]
    hosts: list[str]


def load(path: Path) -> ServingSpec:
    """Read and check the spec in the inventory file ``path``.

    Raises
    ------
    SpecError
        If the file is missing, is not YAML, has no ``serving_spec``, or the spec is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"{path}: should exist and hold the variable serving_spec") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: should be YAML: {error}") from None
    if not isinstance(content, dict) or "serving_spec" not in content:
        raise SpecError(f"{path}: should hold the variable serving_spec")
    return check(content["serving_spec"])


def check(value: Mapping[str, Any]) -> ServingSpec:
    """Check a spec given in plain types and return it typed.

    Raises
    ------
    SpecError
        With one line per problem, each ``path: should be ..., is ...``.
    """
    try:
        spec = ServingSpec.model_validate(value)
    except ValidationError as error:
        lines = [_sentence(problem) for problem in error.errors()]
        raise SpecError("\n".join(dict.fromkeys(lines))) from None
    problems = list(_contradictions(spec))
    if problems:
        raise SpecError("\n".join(problems))
    return spec


def batches(spec: ServingSpec) -> list[Batch]:
    """Cut the cells into the batches of a rollout; the last size repeats until none is left."""
    names = list(spec.cells)
    sizes = list(spec.rollout.batches)
    result = []
    while names:
        asked = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        size = asked if isinstance(asked, int) else _share(asked, len(spec.cells))
        now, names = names[:size], names[size:]
        result.append(Batch(now, [host for name in now for host in spec.cells[name].hosts()]))
    return result


def _share(share: str, cells: int) -> int:
    return max(1, cells * int(share.removesuffix("%")) // 100)


def lease_seconds(spec: ServingSpec) -> int:
    """Return the seconds after which a rollout that holds the fleet lock is over for sure.

    Each launch of a batch is judged, or its hosts go back by themselves, within the dead man's
    time after its requests have ended; reverting the fleet takes no longer than one more.
    """
    # Before the dead man's timer starts, requests end at the entry and then on the hosts.
    launch = spec.rollout.dead_man_seconds + 2 * spec.timeouts.drain_seconds
    return (len(batches(spec)) * (1 + spec.gates.cold_launches) + 1) * launch


def check_hosts(spec: ServingSpec, gpu_hosts: list[str]) -> None:
    """Check that the cells and the inventory group ``gpu_hosts`` name the same hosts.

    Raises
    ------
    SpecError
        Naming each host that is missing on one side.
    """
    in_cells = [host for cell in spec.cells.values() for host in cell.hosts()]
    problems = [
        f"cells: should name only hosts of the group gpu_hosts, which lacks {host}"
        for host in in_cells
        if host not in gpu_hosts
    ]
    problems += [
        f"cells: should name the host {host}, which is in the group gpu_hosts"
        for host in gpu_hosts
        if host not in in_cells
    ]
    if problems:
        raise SpecError("\n".join(problems))


def check_against_build(spec: ServingSpec, build: Mapping[str, Any]) -> None:
    """Check that the build supports what the spec asks (``build`` is the content of build.json).

    Raises
    ------
    SpecError
        With one line per unsupported value.
    """
    problems = []
    for key, supported_key in (
        ("index_topk", "supported_index_topk"),
        ("index_key_dtype", "supported_index_key_dtypes"),
    ):
        value, supported = getattr(spec, key), build[supported_key]
        if value not in supported:
            names = ", ".join(str(item) for item in supported)
            problems.append(
                f"{key}: should be one of {names} (build {build['digest']} supports these), "
                f"is {value}"
            )
    problems += [
        f"engine.patches: should be among {', '.join(build['patches'])} "
        f"(what build {build['digest']} has), is {patch}"
        for patch in spec.engine.patches
        if patch not in build["patches"]
    ]
    problems += [
        f"engine.patches: should have {patch}, without which build {build['digest']} does not "
        f"support {key} {getattr(spec, key)}"
        for key, needed in build.get("patches_needed", {}).items()
        for patch, values in needed.items()
        if getattr(spec, key) in values and patch not in spec.engine.patches
    ]
    if problems:
        raise SpecError("\n".join(problems))


def check_against_model(spec: ServingSpec, config: Mapping[str, Any]) -> None:
    """Check the spec against the model's own config.json.

    Raises
    ------
    SpecError
        If the context is longer than the model was made for.
    """
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise SpecError(
            f"model.path: should hold a config.json with max_position_embeddings; "
            f"{spec.model.path}/config.json has none"
        )
    if spec.context_length > limit:
        raise SpecError(
            f"context_length: should be at most {limit} (max_position_embeddings of "
            f"{spec.model.name}), is {spec.context_length}"
        )


def _contradictions(spec: ServingSpec) -> Iterator[str]:
    """Yield what is wrong between keys that are each right alone."""
    if len(set(spec.gates.select)) != len(spec.gates.select):
        yield "gates.select: should name each group of gates once"
    yield from _cell_contradictions(spec)
    if spec.index_topk * 4 > spec.context_length:
        yield (
            f"index_topk: should be at most context_length / 4 = {spec.context_length // 4} "
            f"(one index entry stands for 4 tokens), is {spec.index_topk}"
        )
    # The router stops before the engines, and a start waits for what they held: three times `stop`.
    times = spec.timeouts
    needed = 3 * times.stop_seconds + times.ready_seconds + times.router_seconds
    needed += times.gate_seconds + BETWEEN_STEPS_SECONDS
    if spec.rollout.dead_man_seconds < needed:
        yield (
            f"rollout.dead_man_seconds: should be at least {needed} (3 x stop + ready + router + "
            f"gate seconds, and {BETWEEN_STEPS_SECONDS} between the steps), "
            f"is {spec.rollout.dead_man_seconds}"
        )
    yield from _disagreements(spec)


def _cell_contradictions(spec: ServingSpec) -> Iterator[str]:
    """Yield cells that cannot serve, and hosts in more than one cell."""
    seen: Counter[str] = Counter()
    for name, cell in spec.cells.items():
        seen.update(cell.hosts())
        if cell.combined and (cell.prefill or cell.decode):
            yield f"cells.{name}: should have prefill and decode, or combined, not both"
        elif not cell.combined and not (cell.prefill and cell.decode):
            yield f"cells.{name}: should have prefill and decode, or combined"
        for role in ENGINE_ROLES:
            if getattr(cell, role) and getattr(spec.roles, role) is None:
                yield f"roles.{role}: should be set, because cells.{name} uses it"
        for host in cell.hosts():
            yield from _clashes(spec, name, host)
    for host, count in seen.items():
        if count > 1:
            yield f"cells: should name the host {host} in one cell, name it in {count}"


def _disagreements(spec: ServingSpec) -> Iterator[str]:
    """Yield arguments and environment in which prefill and decode differ but must not."""
    prefill, decode = spec.roles.prefill, spec.roles.decode
    if prefill is None or decode is None:
        return
    for flag in (
        "kv-cache-dtype",
        "page-size",
        "dtype",
        "attention-backend",
        "tensor-parallel-size",
    ):
        ours, theirs = prefill.args.get(flag), decode.args.get(flag)
        if ours != theirs:
            yield (
                f"roles.decode.args.{flag}: should be {_said(ours)} as in roles.prefill.args "
                f"(both ends of the KV transfer must agree), is {_said(theirs)}"
            )
    for name in sorted(set(prefill.env) | set(decode.env)):
        ours, theirs = prefill.env.get(name), decode.env.get(name)
        if name.startswith("SGLANG_DSV4_") and ours != theirs:
            yield (
                f"roles.decode.env.{name}: should be {_said(ours)} as in roles.prefill.env "
                f"(it changes the layout of the KV), is {_said(theirs)}"
            )


def _clashes(spec: ServingSpec, cell_name: str, host: str) -> Iterator[str]:
    """Yield ports and GPUs that two servers of one host would both want."""
    ports: dict[int, str] = {}
    gpus: dict[int, str] = {}
    for role in spec.cells[cell_name].roles_of(host):
        server = getattr(spec.roles, role)
        for key in ("port", "bootstrap_port", "metrics_port"):
            port = getattr(server, key, None)
            if port is None:
                continue
            if port in ports:
                yield (
                    f"roles.{role}.{key}: should differ from {ports[port]} on the host {host}, "
                    f"both are {port}"
                )
            ports.setdefault(port, f"roles.{role}.{key}")
        for gpu in getattr(server, "gpus", []):
            if gpu in gpus:
                yield f"roles.{role}.gpus: should leave GPU {gpu} of {host} to {gpus[gpu]}"
            gpus.setdefault(gpu, f"roles.{role}")


def _said(value: object) -> str:
    return "absent" if value is None else repr(value)


def _sentence(problem: Any) -> str:
    """Turn one of pydantic's problems into ``path: should be ..., is ...``."""
    parts = [str(part) for part in problem["loc"]]
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    if parts[:1] == ["roles"] and len(parts) > 4:
        said = "text, a number, true or false, a list or a dictionary"
        return f"{'.'.join(parts[:4])}: should be {said}, is {value!r}"
    path = ".".join(parts) or "serving_spec"
    if kind == "extra_forbidden":
        return f"{path}: should be absent: the serving spec has no such key"
    if kind == "missing":
        return f"{path}: should be set"
    if kind == "value_error":
        return f"{path}: should be {context['error']}"
    wordings: dict[str, Callable[[], str]] = {
        "literal_error": lambda: f"one of {context['expected']}",
        "string_pattern_mismatch": lambda: f"text matching {context['pattern']}",
        "greater_than": lambda: f"greater than {context['gt']}",
        "greater_than_equal": lambda: f"at least {context['ge']}",
        "less_than": lambda: f"less than {context['lt']}",
        "less_than_equal": lambda: f"at most {context['le']}",
        "multiple_of": lambda: f"a multiple of {context['multiple_of']}",
    }
    if kind in wordings:
        wanted = wordings[kind]()
    else:
        wanted = problem["msg"].removeprefix("Input should be ").lower()
    return f"{path}: should be {wanted}, is {value!r}"
