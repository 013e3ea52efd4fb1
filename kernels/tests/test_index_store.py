"""The kernel stores what the reference says, touches nothing else, and always the same bits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from seatrial_kernels.index_store import Plan, check, index_store
from seatrial_kernels.index_store import reference as ref
from seatrial_kernels.testing import REPEATS, poisoned, shuffled_pages

EPS = 1e-6
POSITIONS = 4096
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Store:
    """One call's arguments, on the GPU. Pages in an order of their own, a spare row in each."""

    keys: torch.Tensor
    weight: torch.Tensor
    rotations: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor

    def run(self, plan: Plan | None = None) -> None:
        """Store; with a plan, by that."""
        index_store(
            self.keys,
            self.weight,
            self.rotations,
            plan or self.positions,
            self.slots,
            self.cache,
            eps=EPS,
        )


def store(count: int, dtype: str, layout: str, *, skip: int = 5, seed: int = 3) -> Store:
    """Return ``count`` random keys, every ``skip``-th skipped; the last row of pages is free."""
    draw = torch.Generator().manual_seed(seed)
    pages = count // (ref.PAGE - 1) + 2
    order = torch.arange(count)
    slots = shuffled_pages(pages, draw)[order // (ref.PAGE - 1)] * ref.PAGE
    slots = (slots + order % (ref.PAGE - 1))[torch.randperm(count, generator=draw)]
    slots[::skip] = -1
    angles = torch.rand(POSITIONS, ref.ROTATED // 2, generator=draw) * 6.28
    made = Store(
        (torch.randn(count, ref.DIM, generator=draw) * 3).to(DTYPES[dtype]),
        (torch.rand(ref.DIM, generator=draw) + 0.5).to(DTYPES[dtype]),
        torch.stack([angles.cos(), angles.sin()], -1).reshape(POSITIONS, ref.ROTATED),
        torch.randint(POSITIONS, (count,), generator=draw),
        slots,
        poisoned(pages, ref.PAGE_BYTES[layout], dtype=torch.uint8),
    )
    return Store(*(value.cuda() for value in vars(made).values()))


def fault(given: Store) -> str | None:
    """Return what is wrong with the cache after the call, or None."""
    wanted = ref.reference_index_keys(
        given.keys, given.weight, given.rotations, given.positions, EPS
    )
    return check.fault(wanted, given.slots, given.cache)


@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 4, 5, 15, 16, 17, 127, 128, 129, 1000, 32768])
def test_keys_are_stored_as_the_reference_says(
    gpu: str, count: int, dtype: str, layout: str
) -> None:
    """Whatever the number of keys, with shuffled pages, skipped slots and poison between."""
    given = store(count, dtype, layout)
    given.run()
    assert fault(given) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
def test_no_keys_store_nothing(gpu: str, layout: str) -> None:
    """An empty call is a call."""
    given = store(0, "fp32", layout)
    given.run()
    assert check.touched(given.cache.cpu(), torch.empty(0, dtype=torch.int64)) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 0.0])
def test_special_values_are_as_defined(gpu: str, value: float, layout: str) -> None:
    """A key that is not finite is NaN throughout, one of zeros is zero, others are as ever."""
    given = store(40, "fp32", layout, skip=100)
    given.keys[7, 77] = value
    given.keys[8] = value
    given.run()
    assert fault(given) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
def test_what_is_out_of_bounds_stores_nothing(gpu: str, layout: str) -> None:
    """A slot past the cache, and a position past the rotations, are skipped like -1."""
    given = store(64, "fp32", layout)
    given.slots[1] = len(given.cache) * ref.PAGE
    given.slots[2] = 2**40
    given.run()
    assert fault(given) is None
    given = store(64, "fp32", layout)
    given.positions[1], given.positions[2] = POSITIONS, -1
    given.run()
    given.slots[1] = given.slots[2] = -1
    given.positions[1] = given.positions[2] = 0
    assert fault(given) is None


@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
@pytest.mark.parametrize("count", [5, 4096])
def test_repeats_are_bitwise_the_same(gpu: str, count: int, layout: str) -> None:
    """Twenty times, into caches poisoned anew."""
    given = store(count, "fp32", layout)
    given.run()
    first = given.cache.clone()
    for repeat in range(REPEATS):
        given.cache.fill_(check.POISON)
        given.run()
        assert torch.equal(given.cache, first), f"repeat {repeat} stored other bits"


@pytest.mark.sanitized
@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
@pytest.mark.parametrize("count", [1, 50, 3000])
def test_a_decode_plan_says_position_and_skips(gpu: str, count: int, layout: str) -> None:
    """A row whose tokens the ratio does not divide is no key yet."""
    given = store(count, "fp32", layout)
    ratio = 4
    tokens = (given.positions % (POSITIONS // ratio) * ratio + ratio).int()
    tokens[1::3] += 1
    plan = poisoned(count, 16, dtype=torch.uint8, device="cuda")
    plan.view(torch.int32)[:, 0] = tokens
    given.run(Plan(plan, is_decode=True, ratio=ratio))
    given.positions = tokens.long() - ratio
    given.slots[1::3] = -1
    assert fault(given) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
@pytest.mark.parametrize("count", [1, 50, 3000])
def test_an_extend_plan_says_position_and_slot(gpu: str, count: int, layout: str) -> None:
    """Its rows point into the slots of all tokens; invalid rows store nothing."""
    given = store(count, "fp32", layout)
    ratio = 4
    tokens = (given.positions % (POSITIONS // ratio) * ratio + ratio).int()
    rows = torch.randperm(4 * count, device="cuda")[:count]
    slots = torch.full((4 * count,), -1, dtype=torch.int64, device="cuda")
    slots[rows] = given.slots
    plan = poisoned(count, 16, dtype=torch.uint8, device="cuda")
    plan.view(torch.int32)[:, 0] = tokens
    plan.view(torch.int32)[:, 1] = rows.int() | 0x70000
    plan.view(torch.int32)[2::7] = -1
    replace(given, slots=slots).run(Plan(plan, is_decode=False, ratio=ratio))
    given.positions = tokens.long() - ratio
    given.slots[2::7] = -1
    assert fault(given) is None


def test_a_graph_replays_with_what_lies_in_memory_then(gpu: str) -> None:
    """Nothing about keys, slots or plans is kept on the host."""
    given = store(300, "fp32", "fp8_e4m3")
    given.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.run()
    other = store(300, "fp32", "fp8_e4m3", seed=4)
    for mine, theirs in zip(vars(given).values(), vars(other).values(), strict=True):
        mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    assert fault(given) is None


@pytest.mark.parametrize("layout", ref.PAGE_BYTES)
def test_a_checkpoints_own_norms_hold(
    gpu: str, weights: Callable[[str], Iterator[tuple[str, torch.Tensor]]], layout: str
) -> None:
    """The index compressors' norms of real weights, in the dtype that they have."""
    for name, weight in weights(r"indexer\.compressor\.norm\.weight$"):
        print(name)
        dtype = "bf16" if weight.dtype == torch.bfloat16 else "fp32"
        given = store(256, dtype, layout)
        given.weight.copy_(weight)
        given.run()
        assert fault(given) is None, name


def test_sglangs_own_kernel_stores_the_same(gpu: str) -> None:
    """The reference is what SGLang 0.5.23 computes: its kernel passes the check as ours does."""
    try:
        from benchmarks import index_store as bench
    except ModuleNotFoundError:
        pytest.skip("not run: no benchmarks beside the tests")
    given = bench.inputs(3000, "fp8_e4m3", 5)
    try:
        bench.sglang(given)
    except ModuleNotFoundError as error:
        pytest.skip(f"not run: {error}")
    assert check.fault(bench.wanted(given), given.slots, given.cache) is None


def test_another_gpu_than_the_current_one_is_served(gpu: str) -> None:
    """The tensors say which GPU; the library's own CUDA runtime follows."""
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: one GPU only")
    first = store(100, "fp32", "fp8_e4m3")
    given = Store(*(value.to("cuda:1") for value in vars(first).values()))
    given.run()
    assert torch.cuda.current_device() == 0
    assert fault(given) is None
    with torch.cuda.device(1):
        given.cache.fill_(check.POISON)
        given.run()
    assert fault(given) is None
