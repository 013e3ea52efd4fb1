"""The memory plan: what a server will need, predicted before anything is stopped.

Two limits are checked per server. *Static* memory (weights and caches, which SGLang allocates when
it starts) must fit into ``mem_fraction_static`` of the device; static and working memory together
must fit into the device. The second limit is the one that SGLang does not check: its scratch for
index scores lies outside of ``mem_fraction_static`` and kills a server in the middle of a long
prefill.

Every row says where its number comes from. A number that is an estimate says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from seatrial.errors import SeatrialError
from seatrial.spec import EngineServer, ServingSpec

GIB = 1024**3
MIB = 1024**2
INDEX_KEY_DTYPES = ("fp8_e4m3", "bf16", "fp32")

# DeepSeek-V4 in SGLang 0.5.23; srt/mem_cache/deepseek_v4_memory_pool.py and
# srt/model_executor/pool_configurator.py (DSV4PoolConfigurator) have each of them.
_PAGE_TOKENS = 256
_WINDOW_TOKENS = 128
_KV_ALIGN_BYTES = 576
_EVICTION_INTERVAL_TOKENS = 128
_DEFAULT_RUNNING_REQUESTS = 256
_PREFIX_TAILS_PER_REQUEST = 4
_C4_RING, _C128_RING = 8, 128
_INDEX_PAGE_ENTRIES = 64
_TABLE_ALIGN = 64
_STAGING_POOL_MIB = 4096

# Estimates, to be replaced by measurements of the fleet's own cards.
_CUDA_CONTEXT_BYTES = 1536 * MIB
_DECODE_GRAPHS_BYTES = 2048 * MIB

# Python, its libraries and the processes of one SGLang server on a CPU, without weights and caches:
# the sum of their peak resident memory once ready, shared pages counted once per process. 2170 MiB
# were measured with the rehearsal model; the rest is for the transfer engine of prefill and decode.
_CPU_PROCESSES_BYTES = 2304 * MIB
# Queries that the CPU backend scores at once (kernels, sparse_attention/backend.py, ROWS).
_CPU_BLOCK_ROWS = 256


class MemoryPlanError(SeatrialError):
    """A plan does not fit into the device, or cannot be made."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class Row(_Strict):
    """One line of a plan.

    Attributes:
        is_static: counts against ``mem_fraction_static``.
        why: formula or origin, for people.
    """

    name: str
    bytes: int
    is_static: bool
    why: str


class RolePlan(_Strict):
    """What one server will need on each device, in bytes.

    Attributes:
        process_bytes: memory of the processes beside the device: on a CPU engine the device is a
            share of the same memory, so a measurement of the processes holds it too; 0 on a GPU.
        pool_tokens: tokens that the KV cache must hold.
        bytes_per_token: what one more token in the KV cache costs.
    """

    role: str
    rows: list[Row]
    static_limit_bytes: int
    device_bytes: int
    process_bytes: int
    pool_tokens: int
    bytes_per_token: float

    @property
    def static_bytes(self) -> int:
        """Weights and caches."""
        return sum(row.bytes for row in self.rows if row.is_static)

    @property
    def total_bytes(self) -> int:
        """Everything on the device."""
        return sum(row.bytes for row in self.rows)

    @property
    def peak_bytes(self) -> int:
        """What a measurement of the running server may find: the device and the processes."""
        return self.total_bytes + self.process_bytes

    @property
    def static_excess_bytes(self) -> int:
        """By how much weights and caches miss their limit; negative when they fit."""
        return self.static_bytes - self.static_limit_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much the whole misses the device; negative when it fits."""
        return self.total_bytes - self.device_bytes

    @property
    def is_fitting(self) -> bool:
        """Whether both limits hold."""
        return self.static_excess_bytes <= 0 and self.excess_bytes <= 0

    def table(self) -> str:
        """Return the numbers for people, in MiB, under 100 columns."""
        lines = [f"{self.role}: {'MiB':>{31 - len(self.role)}}"]
        for is_static, total, limit in (
            (True, self.static_bytes, self.static_limit_bytes),
            (False, self.total_bytes, self.device_bytes),
        ):
            lines += [
                f"  {row.name:22} {_mib(row.bytes):>8}  {row.why}"
                for row in self.rows
                if row.is_static is is_static
            ]
            name = "weights and caches" if is_static else "all together"
            excess = total - limit
            verdict = f"{_mib(excess)} MiB too much" if excess > 0 else f"{_mib(-excess)} MiB free"
            lines.append(f"  {name:22} {_mib(total):>8}  of {_mib(limit)} allowed: {verdict}")
        return "\n".join(lines)


class MemoryPlan(_Strict):
    """The plans of all servers that a spec's cells use, by role."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    roles: dict[str, RolePlan]
    wider_bytes: dict[int, dict[str, int]] = {}
    """What each role would need in all with a wider index_topk that the build supports."""

    def cost_of(self, width: int) -> str:
        """Return what a wider index_topk would cost on each device, in words."""
        asked = self.wider_bytes.get(width)
        if asked is None:
            return f"The plan does not know what index_topk {width} would cost."
        said = []
        for role, total in asked.items():
            more = total - self.roles[role].total_bytes
            free = self.roles[role].device_bytes - self.roles[role].total_bytes
            said.append(f"{_mib(more)} MiB more for {role}, of {_mib(free)} MiB free")
        return f"index_topk {width} would cost {'; '.join(said)}."

    def table(self) -> str:
        """Return all tables."""
        return "\n".join(plan.table() for plan in self.roles.values())


class _Inputs(BaseModel):
    """What one role's formulas read."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    spec: ServingSpec
    role: str
    server: EngineServer
    config: dict[str, Any]
    build: dict[str, Any]
    weights_bytes: int | None

    def number(self, key: str) -> int:
        """Return a number of the model's config.json."""
        value = self.config.get(key)
        if not isinstance(value, int):
            raise MemoryPlanError(
                f"config.json of {self.spec.model.name}: {key} should be a number for the plan"
            )
        return value

    def argument(self, default: int, flag: str) -> int:
        """Return the number given for ``flag`` in the role's arguments; each has one spelling."""
        value = self.server.args.get(flag)
        return value if isinstance(value, int) else default

    @property
    def ranks(self) -> int:
        """GPUs over which one copy of the model is spread (tensor parallel)."""
        return self.argument(1, "tensor-parallel-size")

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV cache must hold: what the role asks for, else one full context."""
        return self.argument(self.spec.context_length, "max-total-tokens")

    @property
    def chunk(self) -> int:
        """Tokens of one prefill step; no step is longer than the context."""
        return min(self.spec.chunked_prefill_size, self.spec.context_length)


def plan(
    spec: ServingSpec,
    model_config: Mapping[str, Any],
    build: Mapping[str, Any],
    weights_bytes: int | None = None,
) -> MemoryPlan:
    """Predict every server's memory and refuse what does not fit.

    Args:
        spec: the serving spec.
        model_config: content of the model's config.json.
        build: content of build.json.
        weights_bytes: size of the model's weight files, if known; else it is computed.

    Raises:
        MemoryPlanError: a server does not fit; the message has the numbers, by how much, and what
            would fit.
    """
    predicted = predict(spec, model_config, build, weights_bytes)
    problems = [
        _refusal(one, spec, model_config, build, weights_bytes)
        for one in predicted.roles.values()
        if not one.is_fitting
    ]
    if problems:
        raise MemoryPlanError("\n\n".join(problems))
    wider = {
        width: {
            role: one.total_bytes
            for role, one in predict(
                spec.model_copy(update={"index_topk": width}), model_config, build, weights_bytes
            ).roles.items()
        }
        for width in build.get("supported_index_topk", [])
        if width > spec.index_topk
    }
    return predicted.model_copy(update={"wider_bytes": wider})


def predict(
    spec: ServingSpec,
    model_config: Mapping[str, Any],
    build: Mapping[str, Any],
    weights_bytes: int | None = None,
) -> MemoryPlan:
    """Predict every server's memory, whether it fits or not.

    Raises:
        MemoryPlanError: the model's architecture is not known, or its config lacks a number.
    """
    architecture = (model_config.get("architectures") or ["none"])[0]
    formulas = _FORMULAS.get(architecture)
    if formulas is None:
        raise MemoryPlanError(
            f"config.json of {spec.model.name}: no memory formulas for the architecture "
            f"{architecture}; there are some for {', '.join(sorted(_FORMULAS))}"
        )
    plans = {}
    for role in ("prefill", "decode", "combined"):
        server = getattr(spec.roles, role)
        if server is None or not any(getattr(cell, role) for cell in spec.cells.values()):
            continue
        inputs = _Inputs(
            spec=spec,
            role=role,
            server=server,
            config=dict(model_config),
            build=dict(build),
            weights_bytes=weights_bytes,
        )
        plans[role] = _role_plan(inputs, formulas)
    return MemoryPlan(roles=plans)


_Formulas = Callable[[_Inputs], tuple[list[Row], float]]


def _role_plan(inputs: _Inputs, formulas: _Formulas) -> RolePlan:
    rows, bytes_per_token = formulas(inputs)
    device = int(inputs.spec.device_memory_gib * GIB)
    static_limit = int(device * inputs.spec.mem_fraction_static)
    rest = static_limit - sum(row.bytes for row in rows if row.is_static)
    if "max-total-tokens" not in inputs.server.args and rest > 0:
        why = "SGLang fills mem_fraction_static unless max-total-tokens is given"
        rows = [*rows, Row(name="more KV cache", bytes=rest, is_static=True, why=why)]
    is_cpu = inputs.spec.engine.platform == "cpu"
    return RolePlan(
        role=inputs.role,
        rows=rows,
        static_limit_bytes=static_limit,
        device_bytes=device,
        process_bytes=_CPU_PROCESSES_BYTES if is_cpu else 0,
        pool_tokens=inputs.pool_tokens,
        bytes_per_token=bytes_per_token,
    )


def _llama(inputs: _Inputs) -> tuple[list[Row], float]:
    """Llama with the project's sparse attention (kernels, ``cpu_dsa``) on a CPU, all in fp32.

    KV: tokens x layers x (K and V) x key-value heads x head size x 4 B. Index keys: what the build
    says one token costs; their layers come after ``index_sparse_layer`` and are not counted twice.
    A chunk is scored in blocks of rows, each against every compressed entry of 4 tokens.
    """
    number = inputs.number
    hidden, heads, kv_heads = (
        number("hidden_size"),
        number("num_attention_heads"),
        number("num_key_value_heads"),
    )
    width = inputs.config.get("head_dim") or hidden // heads
    layers = number("num_hidden_layers")
    attending = inputs.config.get("index_sparse_layer", layers - 1) + 1
    row = 2 * kv_heads * width * 4
    kv_token, index_token = attending * row, _built_index_bytes(inputs)
    pool, chunk, context = inputs.pool_tokens, inputs.chunk, inputs.spec.context_length
    entries, block = ceil(context / 4), min(_CPU_BLOCK_ROWS, chunk)
    index_width = inputs.config.get("index_head_dim", 0)
    rows = [
        Row(
            name="weights",
            bytes=inputs.weights_bytes or 4 * _llama_parameters(inputs, width),
            is_static=True,
            why="fp32",
        ),
        Row(
            name="KV cache",
            bytes=pool * kv_token,
            is_static=True,
            why=f"{pool} tokens x {kv_token} B",
        ),
        Row(
            name="index keys",
            bytes=round(pool * index_token),
            is_static=True,
            why=f"{pool} tokens x {index_token:g} B ({inputs.spec.index_key_dtype})",
        ),
        Row(
            name="index scores",
            bytes=2 * block * entries * 4,
            is_static=False,
            why=f"2 x block {block} x {entries} entries x 4 B",
        ),
        Row(
            name="index keys in fp32",
            bytes=entries * index_width * 4,
            is_static=False,
            why=f"{entries} entries x {index_width} x 4 B, one request at a time",
        ),
        Row(
            name="attention of a block",
            bytes=2 * heads * block * context * 4 + 2 * context * row,
            is_static=False,
            why=f"2 x {heads} heads x block {block} x {context} x 4 B, and its gathered rows",
        ),
        Row(
            name="activations",
            bytes=8 * chunk * hidden * 4,
            is_static=False,
            why=f"8 x chunk {chunk} x {hidden} x 4 B (estimate)",
        ),
    ]
    return rows, kv_token + index_token


def _llama_parameters(inputs: _Inputs, width: int) -> int:
    """Count the parameters of a Llama model with heads of ``width`` channels."""
    number = inputs.number
    hidden, heads, kv_heads = (
        number("hidden_size"),
        number("num_attention_heads"),
        number("num_key_value_heads"),
    )
    per_layer = (
        2 * hidden * heads * width
        + 2 * hidden * kv_heads * width
        + 3 * hidden * number("intermediate_size")
        + 2 * hidden
    )
    embeddings = 1 if inputs.config.get("tie_word_embeddings") else 2
    vocabulary = embeddings * number("vocab_size") * hidden
    return vocabulary + number("num_hidden_layers") * per_layer + hidden


def _built_index_bytes(inputs: _Inputs) -> float:
    table = inputs.build.get("index_key_bytes_per_token") or {}
    value = table.get(inputs.spec.index_key_dtype)
    if not isinstance(value, int | float):
        raise MemoryPlanError(
            f"build.json: index_key_bytes_per_token should name {inputs.spec.index_key_dtype}; "
            "the plan needs it"
        )
    return float(value)


def _deepseek_v4(inputs: _Inputs) -> tuple[list[Row], float]:
    """DeepSeek-V4 on sm_120 (SGLang 0.5.23), per GPU.

    Caches are not split by tensor parallelism: there is one KV head, so each GPU holds it all.
    """
    caches, bytes_per_token = _deepseek_v4_caches(inputs)
    return [_deepseek_v4_weights(inputs), *caches, *_deepseek_v4_working(inputs)], bytes_per_token


def _deepseek_v4_weights(inputs: _Inputs) -> Row:
    """Weights on one GPU.

    Routed experts are split over the ranks, at 4 bit and one fp8 scale per 16 values (NVFP4), or
    one per 32 (MXFP4); dense matrices are fp8; embedding and head bf16. Projections that lead into
    the one KV head or the indexer are on every rank.
    """
    number, ranks = inputs.number, inputs.ranks
    hidden, layers, heads = (
        number("hidden_size"),
        number("num_hidden_layers"),
        number("num_attention_heads"),
    )
    q_rank, o_rank, width = number("q_lora_rank"), number("o_lora_rank"), number("head_dim")
    expert_width = number("moe_intermediate_size")
    c4 = _compressed_layers(inputs, 4)
    routed = layers * number("n_routed_experts") * 3 * hidden * expert_width
    routed_bytes = routed * _bytes_per_expert_weight(inputs)
    split = layers * (
        q_rank * heads * width
        + heads * width * o_rank
        + number("o_groups") * o_rank * hidden
        + 3 * hidden * expert_width * number("n_shared_experts")
    )
    everywhere = layers * (hidden * q_rank + hidden * width) + c4 * (
        q_rank * number("index_n_heads") * number("index_head_dim")
        + 4 * hidden * (width + number("index_head_dim"))
    )
    vocabulary = 2 * 2 * number("vocab_size") * hidden
    computed = routed_bytes + split + vocabulary
    if inputs.weights_bytes is not None:
        computed = inputs.weights_bytes - everywhere
    why = f"{(computed + everywhere) / 1e9:.0f} GB over {ranks} GPUs"
    return Row(name="weights", bytes=round(computed / ranks) + everywhere, is_static=True, why=why)


def _bytes_per_expert_weight(inputs: _Inputs) -> float:
    said = str(inputs.config.get("quantization_config", "")).upper()
    if "NVFP4" in said:
        return 0.5 + 1 / 16
    if "MXFP4" in said or "FP4" in str(inputs.config.get("expert_dtype", "")).upper():
        return 0.5 + 1 / 32
    return 1.0 if "FP8" in said else 2.0


def _deepseek_v4_caches(inputs: _Inputs) -> tuple[list[Row], float]:
    """KV cache, index keys, sliding windows and compression states, as SGLang sizes its pools.

    A latent of KV is 448 B fp8 + 64 x 2 B rope + 8 B scales = 584 B, pages padded to 576 B; an
    index key is ``index_head_dim`` values, in fp8 with a 4 B scale per 128.
    """
    width, index_width = inputs.number("head_dim"), inputs.number("index_head_dim")
    latent = width - 64 + 2 * 64 + 8
    layers = inputs.number("num_hidden_layers")
    c4, c128 = _compressed_layers(inputs, 4), _compressed_layers(inputs, 128)
    entry = {
        "fp8_e4m3": index_width + 4 * ceil(index_width / 128),
        "bf16": 2 * index_width,
        "fp32": 4 * index_width,
    }[inputs.spec.index_key_dtype]
    pool = ceil(inputs.pool_tokens / _PAGE_TOKENS) * _PAGE_TOKENS
    kv_token = (
        c4 * _padded(latent, _PAGE_TOKENS // 4) / 4
        + c128 * _padded(latent, _PAGE_TOKENS // 128) / 128
    )
    index_token = c4 * entry / 4
    window = _window_tokens(inputs)
    state = 4 * width * 4 + 4 * index_width * 4
    window_token = layers * _padded(latent, _PAGE_TOKENS) + c4 * state * _C4_RING / _PAGE_TOKENS
    running = _running(inputs)
    slots = (running + 1) * _C128_RING + _C128_RING + 1
    c128_state = ceil(slots / 128) * 128 * 2 * width * 4 * c128
    rows = [
        Row(
            name="KV cache",
            bytes=round(pool * kv_token),
            is_static=True,
            why=f"{pool} tokens x {kv_token:.0f} B ({c4} C4 and {c128} C128 layers)",
        ),
        Row(
            name="index keys",
            bytes=round(pool * index_token),
            is_static=True,
            why=f"{pool} tokens x {index_token:.0f} B ({inputs.spec.index_key_dtype})",
        ),
        Row(
            name="sliding windows",
            bytes=round(window * window_token),
            is_static=True,
            why=f"{window} tokens x {window_token:.0f} B, for {running} requests",
        ),
        Row(
            name="compression states",
            bytes=c128_state,
            is_static=True,
            why=f"{running} requests x {_C128_RING} rows x {c128} layers",
        ),
    ]
    return rows, kv_token + index_token


def _deepseek_v4_working(inputs: _Inputs) -> list[Row]:
    """Working memory outside of ``mem_fraction_static``.

    Index scores on sm_120 are not cut into row blocks (srt/layers/attention/dsv4/metadata.py,
    rows_per_chunk=None under the TileLang indexer): a chunk's rows x the context's entries x 4 B.
    Selected entries are kept twice for each row of a chunk, as places in pages and in the request
    (DSV4AttnMetadata.init_flashmla_related), and the tables of all 128-token entries and of all
    pages are as wide as the context, not as the request (_init_compression_metadata_triton). A
    transfer reads the KV pool itself, and its few metadata lie in host memory (MetadataBuffers in
    srt/disaggregation/utils.py); only where prefill and decode differ in TP is there a staging pool
    (SGLANG_DISAGG_STAGING_BUFFER, SGLANG_DISAGG_STAGING_POOL_SIZE_MB).
    """
    chunk, context = inputs.chunk, inputs.spec.context_length
    pages = ceil(context / _PAGE_TOKENS)
    entries = pages * _INDEX_PAGE_ENTRIES
    tables = ceil(ceil(context / 128) / _TABLE_ALIGN) * _TABLE_ALIGN
    hidden, topk = inputs.number("hidden_size"), inputs.spec.index_topk
    streams = inputs.number("hc_mult")
    rows = [
        Row(
            name="index scores",
            bytes=chunk * entries * 4,
            is_static=False,
            why=f"chunk {chunk} x {entries} entries x 4 B, in one piece",
        ),
        Row(
            name="selected entries",
            bytes=2 * chunk * topk * 4,
            is_static=False,
            why=f"2 x chunk {chunk} x index_topk {topk} x 4 B",
        ),
        Row(
            name="index tables",
            bytes=chunk * (tables + pages) * 4,
            is_static=False,
            why=f"chunk {chunk} x ({tables} 128-token entries + {pages} pages) x 4 B",
        ),
        Row(
            name="activations",
            bytes=4 * chunk * hidden * streams * 2,
            is_static=False,
            why=f"4 x chunk {chunk} x {hidden} x {streams} streams x 2 B (estimate)",
        ),
        Row(
            name="CUDA and NCCL",
            bytes=_CUDA_CONTEXT_BYTES,
            is_static=False,
            why="context, libraries, communicators (estimate)",
        ),
    ]
    if str(inputs.server.env.get("SGLANG_OPT_SM120_DIRECT_SWA_KV", "0")) != "1":
        latent = inputs.number("head_dim") + 64 + 8
        rows.append(
            Row(
                name="window copy",
                bytes=round(_window_tokens(inputs) * _padded(latent, _PAGE_TOKENS)),
                is_static=False,
                why="one layer's windows; SGLANG_OPT_SM120_DIRECT_SWA_KV=1 saves it",
            )
        )
    if inputs.role != "combined":
        rows.append(_transfer_buffers(inputs))
    if inputs.role != "prefill":
        rows.append(
            Row(
                name="decode graphs",
                bytes=_DECODE_GRAPHS_BYTES,
                is_static=False,
                why="CUDA graphs of all batch sizes (estimate)",
            )
        )
    return rows


def _transfer_buffers(inputs: _Inputs) -> Row:
    """Return what the transfer needs beside the KV pool, on decode and prefill."""
    env = inputs.server.env
    is_staged = str(env.get("SGLANG_DISAGG_STAGING_BUFFER", "0")).lower() in {"1", "true"}
    pool = int(env.get("SGLANG_DISAGG_STAGING_POOL_SIZE_MB", _STAGING_POOL_MIB))
    return Row(
        name="transfer buffers",
        bytes=pool * MIB if is_staged else 0,
        is_static=False,
        why="staging pool" if is_staged else "none: sent from the KV cache itself",
    )


def _compressed_layers(inputs: _Inputs, ratio: int) -> int:
    """Count the layers that compress ``ratio`` tokens into one entry."""
    ratios = inputs.config.get("compress_ratios")
    if not isinstance(ratios, list):
        raise MemoryPlanError(
            f"config.json of {inputs.spec.model.name}: compress_ratios should be a list; "
            "the plan needs it"
        )
    return ratios[: inputs.number("num_hidden_layers")].count(ratio)


def _running(inputs: _Inputs) -> int:
    return inputs.argument(_DEFAULT_RUNNING_REQUESTS, "max-running-requests")


def _window_tokens(inputs: _Inputs) -> int:
    """Tokens of the sliding-window pool: the worst case of all running requests, page by page.

    compute_swa_request_cap() and DSV4PoolConfigurator._resolve_swa_cap_tokens() of SGLang 0.5.23.
    """
    running, page = _running(inputs), _PAGE_TOKENS
    per_request = _WINDOW_TOKENS + _EVICTION_INTERVAL_TOKENS + page + page
    tokens = per_request * running
    if inputs.role != "decode":
        tokens += 2 * inputs.spec.chunked_prefill_size + page
        if not inputs.server.args.get("disable-radix-cache"):
            tails = inputs.argument(_PREFIX_TAILS_PER_REQUEST * running, "swa-prefix-tails")
            tokens += tails * (_WINDOW_TOKENS + page)
    return ceil(tokens / page) * page


def _padded(bytes_per_slot: int, slots: int) -> float:
    """Return bytes per slot of a page that is padded to the alignment of the KV layout."""
    return ceil(bytes_per_slot * slots / _KV_ALIGN_BYTES) * _KV_ALIGN_BYTES / slots


_FORMULAS: dict[str, _Formulas] = {
    "LlamaForCausalLM": _llama,
    "DeepseekV4ForCausalLM": _deepseek_v4,
}


def _refusal(
    one: RolePlan,
    spec: ServingSpec,
    model_config: Mapping[str, Any],
    build: Mapping[str, Any],
    weights_bytes: int | None,
) -> str:
    """Return the message for a server that does not fit: numbers, by how much, what would fit."""
    if one.static_excess_bytes > 0:
        head = (
            f"The memory plan of {one.role} does not fit: weights and caches need "
            f"{_mib(one.static_bytes)} MiB, mem_fraction_static {spec.mem_fraction_static:g} of "
            f"{spec.device_memory_gib:g} GiB allows {_mib(one.static_limit_bytes)} MiB, "
            f"{_mib(one.static_excess_bytes)} MiB too much."
        )
    else:
        head = (
            f"The memory plan of {one.role} does not fit: a long prefill would need "
            f"{_mib(one.total_bytes)} MiB, the device has {_mib(one.device_bytes)} MiB, "
            f"{_mib(one.excess_bytes)} MiB too much."
        )
    remedies = _remedies(one, spec, model_config, build, weights_bytes)
    return f"{head}\n{one.table()}\nWhat would fit: {'; or '.join(remedies)}."


def _remedies(
    one: RolePlan,
    spec: ServingSpec,
    model_config: Mapping[str, Any],
    build: Mapping[str, Any],
    weights_bytes: int | None,
) -> list[str]:
    """Return the single changes of the spec that would make the server fit."""

    def is_fitting(**change: Any) -> bool:
        changed = predict(spec.model_copy(update=change), model_config, build, weights_bytes)
        return changed.roles[one.role].is_fitting

    remedies = []
    smaller = INDEX_KEY_DTYPES[: INDEX_KEY_DTYPES.index(spec.index_key_dtype)]
    supported = build.get("supported_index_key_dtypes") or smaller
    remedies += [
        f"index_key_dtype {dtype}"
        for dtype in reversed(smaller)
        if dtype in supported and is_fitting(index_key_dtype=dtype)
    ]
    tokens = one.pool_tokens - ceil(
        max(one.static_excess_bytes, one.excess_bytes) / one.bytes_per_token
    )
    tokens = tokens // _PAGE_TOKENS * _PAGE_TOKENS
    if tokens >= spec.context_length:
        remedies.append(f"roles.{one.role}.args.max-total-tokens at most {tokens}")
    if one.excess_bytes <= 0:
        fraction = ceil(1000 * one.static_bytes / one.device_bytes) / 1000
        remedies.append(f"mem_fraction_static at least {fraction:g}")
    chunk = spec.chunked_prefill_size
    while chunk > 1 and not is_fitting(chunked_prefill_size=chunk):
        chunk //= 2
    if 1 < chunk < spec.chunked_prefill_size:
        remedies.append(f"chunked_prefill_size at most {chunk}")
    context = spec.context_length // 1024
    while context > 1 and not is_fitting(context_length=context * 1024):
        context //= 2
    if context > 1 and context * 1024 < spec.context_length:
        remedies.append(f"context_length at most {context * 1024}")
    return remedies or ["more memory per device, or more devices"]


def _mib(count: int) -> str:
    return f"{count / MIB:.0f}"
