"""Scores of index keys: decode and prefill, fp8 and bf16, beside SGLang's kernels and DeepGEMM's.

Every row has all of its keys, in pages at random places of a cache that is a set's own. A decode
step reads each key once and writes a score for it. On sm_90, fp8 keys are multiplied as f16 (ours)
or by an emulated instruction ("TileLang mma", what sm_120 runs by default); "TileLang" and DeepGEMM
use wgmma there, which sm_120 does not have. A name of a case says what ours ran.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from benchmarks import peers
from benchmarks import topk as topk_bench
from benchmarks.harness import Case
from seatrial_kernels.index_logits import check, decode_logits, prefill_logits, prefill_topk
from seatrial_kernels.index_store.reference import DIM, PAGE, PAGE_BYTES
from seatrial_kernels.testing import poisoned
from seatrial_kernels.topk import WORKSPACE_BYTES, topk_transform
from seatrial_kernels.topk import check as topk_check

HEADS = 64
K = 512
BATCHES, LENGTHS = (1, 8, 32, 128), (2048, 8192, 32768)
# Microseconds in rotation on an H200 with a copy of 4.26 TB/s. fp8: SGLang's TileLang kernel in
# mma.sync, as measured before this existed, over 1.7; bf16: 60 % of the copy's bandwidth from 64K
# keys on, 80 % from 256K. Short calls: 3.5.
TILELANG_MMA = {
    (32, 2048): 9.85,
    (128, 2048): 31.18,
    (8, 8192): 9.84,
    (32, 8192): 30.79,
    (128, 8192): 114.8,
    (8, 32768): 30.89,
    (32, 32768): 114.7,
    (128, 32768): 449.3,
}
SHORT_US, PREFILL_US = 3.5, 2900.0
# As in a model, where lengths and page tables are a step's and the kernel before makes queries.
IS_SETTLED = True


@dataclass
class Inputs:
    """One call's arguments."""

    queries: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    out: torch.Tensor
    next_n: int = 1
    schedule: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    workspace: torch.Tensor | None = None

    def given(self) -> check.Given:
        """Return what is read."""
        return self.queries, self.cache, self.weights, self.lengths, self.table


def cases() -> Iterator[Case]:
    """Yield the sizes."""
    for layout, batch, length in product(PAGE_BYTES, BATCHES, LENGTHS):
        yield decode_case(layout, batch, length, target=target_us(layout, batch, length))
    for layout, next_n, (batch, length) in product(PAGE_BYTES, (2, 4), ((8, 8192), (32, 32768))):
        yield decode_case(layout, batch, length, next_n=next_n)
    for layout, batch, limit in product(PAGE_BYTES, (8, 128), (2048, 262144)):
        yield decode_case(layout, batch, 1024, limit=limit)
    for layout in PAGE_BYTES:
        yield prefill_case(layout, 2048, 32768)
    for batch, length in ((1, 8192), (8, 8192), (8, 32768), (32, 32768), (128, 8192)):
        yield both_case("fp8_e4m3", batch, length)
        yield both_case("bf16", batch, length)


def target_us(layout: str, batch: int, length: int) -> float | None:
    """Return what is to be reached."""
    if batch == 1 and length <= 8192:
        return SHORT_US
    if layout == "fp8_e4m3":
        found = TILELANG_MMA.get((batch, length))
        return found / 1.7 if found else None
    keys = batch * length
    if keys < 1 << 16:
        return None
    share = 0.8 if keys >= 1 << 18 else 0.6
    return decode_bytes(layout, batch, length) / 4.26e12 / share * 1e6


def decode_bytes(layout: str, batch: int, length: int, next_n: int = 1) -> int:
    """Return what a decode step must read and write."""
    rows = batch * next_n
    keys = batch * length * (PAGE_BYTES[layout] // PAGE)
    return keys + rows * (length * 4 + HEADS * (DIM + 4) + 4) + batch * length // PAGE * 4


def words(layout: str) -> str:
    """Return the key type and what is multiplied on this machine."""
    if layout == "bf16":
        return "bf16"
    native = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return "fp8" if native else "fp8 as f16"


def decode_case(
    layout: str,
    batch: int,
    length: int,
    *,
    next_n: int = 1,
    limit: int = 0,
    target: float | None = None,
) -> Case:
    """Return one decode step; ``limit`` is the width of scores and table, if not the length."""
    beside: dict[str, Callable[[Inputs], None]] = {}
    if layout == "fp8_e4m3" and next_n == 1:
        beside["TileLang mma"] = partial(tilelang, False)
        beside["TileLang"] = partial(tilelang, True)
        if not limit:
            beside["DeepGEMM"] = deepgemm
    said = [f"next_n={next_n}"] if next_n > 1 else []
    said += [f"limit={limit}"] if limit else []
    moved = decode_bytes(layout, batch, length, next_n)
    return Case(
        op="index_logits",
        name=" ".join([words(layout), f"B={batch} L={length}", *said]),
        bytes_moved=moved,
        make=partial(inputs, layout, batch, length, next_n, limit),
        ours=ours,
        check=partial(fault, ours),
        peers=beside,
        set_bytes=moved,
        target_us=target,
    )


def prefill_case(layout: str, rows: int, length: int) -> Case:
    """Return the last rows of a request's prefill, each of which sees one key more."""
    beside: dict[str, Callable[[Inputs], None]] = {}
    if layout == "fp8_e4m3":
        beside["TileLang mma"] = partial(tilelang, False)
        beside["TileLang"] = partial(tilelang, True)
        beside["DeepGEMM"] = deepgemm_gathered
    pairs = sum(causal(rows, length))
    return Case(
        op="index_logits",
        name=f"{words(layout)} prefill {rows} x {length}",
        bytes_moved=pairs * 4 + length * (PAGE_BYTES[layout] // PAGE) + rows * HEADS * (DIM + 4),
        make=partial(prefill_inputs, layout, rows, length),
        ours=prefill,
        check=partial(fault, prefill),
        peers=beside,
        target_us=PREFILL_US,
    )


def both_case(layout: str, batch: int, length: int) -> Case:
    """Return a decode step's scores and its selection, back to back."""
    beside: dict[str, Callable[[Inputs], None]] = {}
    if layout == "fp8_e4m3":
        beside["TileLang mma + v2"] = partial(both, partial(tilelang, False), "peer_topk_v2")
        beside["TileLang mma + v1"] = partial(both, partial(tilelang, False), "peer_topk_v1")
        beside["DeepGEMM + v2"] = partial(both, deepgemm, "peer_topk_v2")
    return Case(
        op="index_logits",
        name=f"{words(layout)} + topk k={K} B={batch} L={length}",
        bytes_moved=decode_bytes(layout, batch, length) + batch * K * 4,
        make=partial(inputs, layout, batch, length, 1, 0),
        ours=ours_and_topk,
        check=partial(fault, ours_and_topk),
        peers=beside,
        set_bytes=decode_bytes(layout, batch, length),
    )


def causal(rows: int, length: int) -> list[int]:
    """Return the rows' lengths: one more entry for each row, the last one all."""
    return [max(length - rows + 1 + row, 0) for row in range(rows)]


def cache_of(layout: str, pages: int, draw: torch.Generator) -> torch.Tensor:
    """Return pages of normal keys, each with a scale of its own."""
    made = torch.empty(pages, PAGE_BYTES[layout], dtype=torch.uint8, device="cuda")
    step = 1 << 14
    for first in range(0, pages, step):
        part = made[first : first + step]
        keys = torch.randn(len(part), PAGE * DIM, generator=draw, device="cuda")
        if layout == "bf16":
            part.copy_(keys.bfloat16().view(torch.uint8))
            continue
        part[:, : PAGE * DIM] = (
            (keys * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        )
        scales = torch.rand(len(part), PAGE, generator=draw, device="cuda") * 0.01 + 0.005
        part[:, PAGE * DIM :] = scales.view(torch.uint8)
    return made


def inputs(layout: str, batch: int, length: int, next_n: int, limit: int, seed: int) -> Inputs:
    """Return random queries, keys and pages, and poisoned scores."""
    draw = torch.Generator("cuda").manual_seed(seed)
    rows, pages = batch * next_n, batch * length // PAGE
    width = limit or length
    table = torch.full((batch, width // PAGE), 2**31 - 1, dtype=torch.int32, device="cuda")
    order = torch.randperm(pages, generator=draw, device="cuda")
    table[:, : length // PAGE] = order.view(batch, -1).int()
    return Inputs(
        *asked(rows, draw, layout, pages),
        lengths=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        table=table.repeat_interleave(next_n, 0),
        out=poisoned(rows, width, dtype=torch.float32, device="cuda"),
        next_n=next_n,
        selected=torch.empty(rows, K, dtype=torch.int32, device="cuda"),
        workspace=torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
    )


def prefill_inputs(layout: str, rows: int, length: int, seed: int) -> Inputs:
    """Return the rows of one request, which all have the same pages."""
    draw = torch.Generator("cuda").manual_seed(seed)
    pages = length // PAGE
    order = torch.randperm(pages, generator=draw, device="cuda").int()
    return Inputs(
        *asked(rows, draw, layout, pages),
        lengths=torch.tensor(causal(rows, length), dtype=torch.int32, device="cuda"),
        table=order.repeat(rows, 1),
        out=poisoned(rows, length, dtype=torch.float32, device="cuda"),
    )


def asked(
    rows: int, draw: torch.Generator, layout: str, pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, cache and weights."""
    queries = torch.randn(rows, HEADS, DIM, generator=draw, device="cuda")
    weights = torch.randn(rows, HEADS, generator=draw, device="cuda")
    return queries.to(torch.float8_e4m3fn), cache_of(layout, pages, draw), weights


def ours(one: Inputs) -> None:
    """Run this package's kernel."""
    decode_logits(*one.given(), one.out, next_n=one.next_n, is_settled=IS_SETTLED)


def prefill(one: Inputs) -> None:
    """Run this package's kernel for many rows of a request."""
    prefill_logits(*one.given(), one.out, is_settled=IS_SETTLED)


def ours_and_topk(one: Inputs) -> None:
    """Run this package's two kernels."""
    decode_logits(*one.given(), one.out, skip=K, is_settled=IS_SETTLED)
    topk_transform(
        one.out, one.lengths, one.table, selection_of(one), PAGE, workspace=one.workspace
    )


def selection_of(one: Inputs) -> torch.Tensor:
    """Return where the selected entries go."""
    if one.selected is None:
        raise ValueError("these inputs have no place for a selection")
    return one.selected


def fault(run: Callable[[Inputs], None], one: Inputs) -> str | None:
    """Return what is wrong with the scores, seen in a few rows, and stray writes in all."""
    run(one)
    last = len(one.out) - 1
    rows = sorted({0, last // 3, last // 2, last})
    if run is ours_and_topk:
        return check.fault(one.given(), one.out, skip=K, rows=rows) or selection_fault(one)
    return check.fault(one.given(), one.out, rows=rows)


def selection_fault(one: Inputs) -> str | None:
    """Return what is wrong with the selection, by the scores that it was made from."""
    return topk_check.fault(one.out, one.lengths, one.table, PAGE, selection_of(one))


def both(logits: Callable[[Inputs], Any], name: str, one: Inputs) -> None:
    """Run a public kernel and one of SGLang's selections on what it wrote."""
    scores = logits(one)
    rows, width = scores.shape
    code = getattr(peers.library("topk"), name)(
        *map(peers.address, (scores, one.lengths, one.table, selection_of(one))),
        *(rows, width, K, one.table.shape[1], topk_bench.PAGE_BITS),
        peers.stream(),
    )
    if code:
        raise RuntimeError(f"CUDA error {code}")


@cache
def tilelang_module(uses_wgmma: bool) -> Any:
    """Return SGLang's module of TileLang kernels, once with and once without Hopper's wgmma."""
    name = "sglang.kernels.ops.attention.dsa.tilelang_kernel"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{name} is not there")
    spec.name = f"{name}_{'wgmma' if uses_wgmma else 'mma'}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The loader checks the name that it was made for.
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]
    exec(code, vars(module))  # noqa: S102 - a module under a second name
    tilelang = importlib.import_module("tilelang")
    module.pass_configs[tilelang.PassConfigKey.TL_DISABLE_WGMMA] = not uses_wgmma
    return module


def tilelang(uses_wgmma: bool, one: Inputs) -> Any:
    """Run SGLang's default on sm_120, as its wrapper calls it."""
    return tilelang_module(uses_wgmma).tilelang_fp8_paged_mqa_logits(
        one.queries.unsqueeze(1),
        one.cache.view(-1, PAGE, 1, DIM + 4),
        one.weights,
        one.lengths,
        one.table,
        None,
        one.out.shape[1],
        False,
    )


def deepgemm(one: Inputs) -> Any:
    """Run DeepGEMM's kernel for Hopper; its schedule, once a step, is made beforehand."""
    deep_gemm = importlib.import_module("deep_gemm")
    lengths = one.lengths.unsqueeze(1)
    if one.schedule is None:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        one.schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, count)
    return deep_gemm.fp8_paged_mqa_logits(
        one.queries.unsqueeze(1),
        one.cache.view(-1, PAGE, 1, DIM + 4),
        one.weights,
        lengths,
        one.table,
        one.schedule,
        one.out.shape[1],
        clean_logits=False,
    )


def deepgemm_gathered(one: Inputs) -> Any:
    """Run DeepGEMM's kernel for keys that lie in a row, which are gathered beforehand."""
    deep_gemm = importlib.import_module("deep_gemm")
    if one.schedule is None:
        pages = one.cache[one.table[0].long()]
        values = pages[:, : PAGE * DIM].reshape(-1, DIM).contiguous()
        one.schedule = values
        one.workspace = pages[:, PAGE * DIM :].contiguous().view(torch.float32).reshape(-1)
        one.selected = torch.zeros_like(one.lengths)
    keys = (one.schedule.view(torch.float8_e4m3fn), one.workspace)
    return deep_gemm.fp8_mqa_logits(
        one.queries, keys, one.weights, one.selected, one.lengths, clean_logits=False
    )


def prefill_memory(rows: int, length: int, budget_bytes: int) -> tuple[int, float]:
    """Return the bytes that a prefill's scores and selection allocate, and its milliseconds."""
    one = prefill_inputs("fp8_e4m3", 8, length, 1)
    queries = torch.randn(rows, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(rows, HEADS, device="cuda")
    lengths = torch.tensor(causal(rows, length), dtype=torch.int32, device="cuda")
    table = one.table[:1].repeat(rows, 1)
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    del one.out

    def run() -> None:
        prefill_topk(
            queries,
            one.cache,
            weights,
            lengths,
            table,
            out,
            width=length,
            budget_bytes=budget_bytes,
        )

    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, begin.elapsed_time(end)
