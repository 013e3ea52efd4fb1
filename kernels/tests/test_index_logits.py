"""The kernel against the definition, on a GPU: both key types, decode and prefill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from seatrial_kernels.index_logits import check, decode_logits, prefill_logits, prefill_topk
from seatrial_kernels.index_store import reference as keys_reference
from seatrial_kernels.index_store.reference import DIM, PAGE, PAGE_BYTES
from seatrial_kernels.testing import REPEATS, lengths_around, poisoned, shuffled_pages, worst
from seatrial_kernels.topk import check as topk_check

K = 512
# Keys, queries, and how they are multiplied: both fp8 ways run on every card.
KINDS = {
    "fp8 as f16": ("fp8_e4m3", torch.float8_e4m3fn, "as f16"),
    "fp8 as fp8": ("fp8_e4m3", torch.float8_e4m3fn, "as fp8"),
    "bf16, fp8 queries": ("bf16", torch.float8_e4m3fn, "by device"),
    "bf16": ("bf16", torch.bfloat16, "by device"),
}
EVEN_AND_ODD = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 2047, 4096, 5001]


@dataclass
class Call:
    """One call's arguments."""

    queries: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    out: torch.Tensor
    way: str

    def given(self) -> check.Given:
        """Return what is read."""
        return self.queries, self.cache, self.weights, self.lengths, self.table

    def decode(self, next_n: int = 1, skip: int = 0, *, is_settled: bool = False) -> "Call":
        """Score as a decode step does."""
        decode_logits(
            *self.given(),
            self.out,
            next_n=next_n,
            skip=skip,
            is_settled=is_settled,
            way=self.way,
        )
        return self

    def prefill(self, skip: int = 0, *, is_settled: bool = False) -> "Call":
        """Score as a prefill does."""
        given = self.given()
        prefill_logits(*given, self.out, skip=skip, is_settled=is_settled, way=self.way)
        return self

    def fault(self, skip: int = 0, rows: list[int] | None = None) -> str | None:
        """Return what is wrong with the scores."""
        return check.fault(self.given(), self.out, skip=skip, rows=rows)


def call(
    kind: str, requests: list[list[int]], *, width: int = 0, seed: int = 3, shared_pages: int = 0
) -> Call:
    """Return queries of requests, each a list of its rows' lengths, over pages of random keys.

    What no row reads is NaN: unused pages and keys, and a page number far outside of the cache.
    The first ``shared_pages`` pages are the same in all requests.
    """
    layout, query_dtype, way = KINDS[kind]
    draw = torch.Generator().manual_seed(seed)
    longest = max((length for rows in requests for length in rows), default=0)
    width = width or -(-max(longest, 1) // 4) * 4
    pages = sum(-(-max([0, *rows]) // PAGE) for rows in requests) + 2
    order = shuffled_pages(pages, draw).int()
    cache = poisoned(pages, PAGE_BYTES[layout], dtype=torch.uint8)
    lengths = torch.tensor([length for rows in requests for length in rows], dtype=torch.int32)
    table = poisoned(len(lengths), -(-width // PAGE), dtype=torch.int32)
    row = used = 0
    for rows in requests:
        need = -(-max([0, *rows]) // PAGE)
        mine = order[used : used + need].clone()
        common = min(shared_pages, need)
        mine[:common] = order[:common]
        table[row : row + len(rows), :need] = mine
        keys = torch.randn(max([0, *rows]), DIM, generator=draw, dtype=torch.float64)
        places = torch.arange(len(keys))
        slots = mine[places // PAGE].long() * PAGE + places % PAGE
        is_new = places >= (common * PAGE if used else 0)
        keys_reference.reference_index_store(keys[is_new], slots[is_new], cache)
        row, used = row + len(rows), used + need
    queries = torch.randn(len(lengths), 64, DIM, generator=draw).to(query_dtype)
    weights = torch.randn(len(lengths), 64, generator=draw)
    made = (queries, cache, weights, lengths, table)
    out = poisoned(len(lengths), width, dtype=torch.float32, device="cuda")
    queries, cache, weights, lengths, table = (tensor.cuda() for tensor in made)
    return Call(queries, cache, weights, lengths, table, out, way)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [0, K])
def test_a_decode_step_scores_as_the_reference_says(gpu: str, kind: str, skip: int) -> None:
    """Mixed lengths around every step of kernel and selection; skipped rows untouched."""
    lengths = sorted({*EVEN_AND_ODD, *lengths_around(K)})
    given = call(kind, [[length] for length in lengths])
    assert given.decode(skip=skip).fault(skip) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_rows_of_a_request_share_their_keys(gpu: str, kind: str, next_n: int) -> None:
    """Each with its own length, as drafted tokens have; one of them may be skipped."""
    longest = [0, 1, 70, 515, 130]
    requests = [[max(0, n - next_n + 1 + j) for j in range(next_n)] for n in longest]
    given = call(kind, requests)
    assert given.decode(next_n).fault() is None
    given.out.fill_(torch.nan)
    assert given.decode(next_n, skip=K, is_settled=True).fault(K) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("next_n", "requests"), [(1, 1), (1, 700), (2, 300), (4, 513), (3, 40)])
def test_any_batch_is_served(gpu: str, kind: str, next_n: int, requests: int) -> None:
    """Also of more requests than one launch has room for."""
    draw = torch.Generator().manual_seed(requests)
    longest = torch.randint(0, 200, (requests,), generator=draw).tolist()
    given = call(kind, [[max(0, n - next_n + 1 + j) for j in range(next_n)] for n in longest])
    assert given.decode(next_n).fault() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, 300])
def test_a_causal_prefill_scores_as_the_reference_says(gpu: str, kind: str, rows: int) -> None:
    """Four tokens an entry: row i sees (i + 1) // 4 entries more than the first."""
    given = call(kind, [[1500 + (i + 1) // 4 for i in range(rows)]])
    assert given.prefill().fault() is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared_pages", [0, 1])
def test_a_group_of_rows_may_be_of_several_requests(gpu: str, kind: str, shared_pages: int) -> None:
    """Also with short ones between, and where their first pages are the same."""
    requests = [[130, 131, 131], [1], [150], [150, 151], [0], [], [64, 65, 66, 67, 67], [300] * 5]
    given = call(kind, requests, shared_pages=shared_pages)
    assert given.prefill().fault() is None
    given.out.fill_(torch.nan)
    assert given.prefill(skip=64, is_settled=True).fault(64) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prefill_is_right_where_it_is_looked_at(gpu: str, kind: str) -> None:
    """More rows than one launch has room for, and nothing beyond any row's length is written."""
    rows = 4096 + 13
    given = call(kind, [[(i + 1) // 4 for i in range(rows)]])
    picked = [0, 3, 7, 8, 511, 2047, 2048, 4095, 4096, rows - 1]
    assert given.prefill(skip=K).fault(K, picked) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_keys_are_calls(gpu: str, kind: str) -> None:
    """Nothing is written."""
    assert call(kind, []).decode().fault() is None
    assert call(kind, [[0], [0]]).decode().fault() is None
    assert call(kind, [[0] * 9]).prefill().fault() is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", KINDS)
def test_lengths_out_of_bounds_are_cut(gpu: str, kind: str) -> None:
    """To the width, and to what the page table covers; below 0 is 0."""
    given = call(kind, [[300], [260], [256]])
    given.lengths[0], given.lengths[2] = 2**31 - 1, -5
    given.table = given.table[:, :4].contiguous()
    assert given.decode().fault() is None
    narrow = replace(given, out=given.out[:, :100].contiguous().fill_(torch.nan))
    assert narrow.prefill().fault() is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_outside_of_the_cache_is_not_read(gpu: str, kind: str) -> None:
    """Its scores are those of another page: memory is safe, and the other rows are right."""
    given = call(kind, [[200], [200]])
    given.table[0, 1], given.table[0, 2] = 2**31 - 1, -1
    given.decode()
    assert given.fault(rows=[1]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_not_a_number_shows(gpu: str, kind: str) -> None:
    """Its score is NaN, which a selection ranks last; its neighbours are as ever."""
    given = call(kind, [[100], [100]])
    slot = int(given.table[0, 0]) * PAGE + 17
    keys = torch.full((1, DIM), torch.nan, dtype=torch.float64)
    cache = given.cache.cpu()
    keys_reference.reference_index_store(keys, torch.tensor([slot]), cache)
    given.cache.copy_(cache)
    assert given.decode().fault() is None
    assert given.out[0, 17].isnan()
    assert not given.out[0, :17].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_scores_and_pages_may_be_strided(gpu: str, kind: str) -> None:
    """What lies between them is not touched."""
    given = call(kind, [[300], [65], [129]])
    wide = poisoned(3, 1000, dtype=torch.float32, device="cuda")
    tables = poisoned(3, 77, dtype=torch.int32, device="cuda")
    tables[:, : given.table.shape[1]] = given.table
    strided = replace(given, out=wide[:, 4:304], table=tables[:, : given.table.shape[1]])
    assert strided.decode().fault() is None
    assert wide[:, :4].isnan().all()
    assert wide[:, 304:].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_prefill", [False, True])
def test_repeats_are_bitwise_the_same(gpu: str, kind: str, is_prefill: bool) -> None:
    """Twenty times: who scores a key does not change how."""
    given = call(kind, [[900 + 7 * i] for i in range(40)] if not is_prefill else [[900] * 40])
    run = given.prefill if is_prefill else given.decode
    run()
    first = given.out.clone()
    for repeat in range(REPEATS):
        given.out.fill_(torch.nan)
        run()
        assert torch.equal(given.out.nan_to_num(7), first.nan_to_num(7)), f"repeat {repeat}"


def test_both_ways_of_fp8_agree(gpu: str) -> None:
    """Products of e4m3 are exact in f16: what differs is the order of sums."""
    one = call("fp8 as f16", [[1000]]).decode()
    other = replace(one, out=one.out.clone().fill_(torch.nan), way="as fp8").decode()
    assert worst(other.out, one.out, 2e-4) is None


def test_a_graph_replays_with_what_lies_in_memory_then(gpu: str) -> None:
    """Lengths too: nothing is kept on the host."""
    first = call("fp8 as f16", [[600], [2], [700]], width=1024)
    other = call("fp8 as f16", [[20], [1024], [513]], width=1024, seed=4)
    pages = max(len(first.cache), len(other.cache))
    given = replace(first, cache=poisoned(pages, 8448, dtype=torch.uint8, device="cuda"))
    given.cache[: len(first.cache)] = first.cache
    given.decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.decode()
    given.cache[: len(other.cache)] = other.cache
    for mine, theirs in zip(given.given(), other.given(), strict=True):
        if mine is not given.cache:
            mine.copy_(theirs)
    given.out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert given.fault() is None


@pytest.mark.parametrize("kind", ["fp8 as f16", "bf16"])
@pytest.mark.parametrize("budget", [1 << 20, 1 << 26])
def test_a_prefill_selects_within_its_budget(gpu: str, kind: str, budget: int) -> None:
    """The same entries as from all scores at once; the budget is all that is allocated."""
    given = call(kind, [[3000 + (i + 1) // 4 for i in range(450)], [40, 700, 1200]])
    rows = len(given.lengths)
    out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
    raw = torch.empty_like(out)
    arguments = (*given.given(), out)
    width = given.out.shape[1]
    prefill_topk(*arguments, width=width, budget_bytes=budget, raw=raw)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prefill_topk(*arguments, width=width, budget_bytes=budget, raw=raw)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= budget
    given.way = "by device"
    given.prefill(skip=0)
    assert given.fault(rows=[0, rows - 1]) is None
    wrong = topk_check.fault(given.out, given.lengths, given.table, PAGE, out, raw)
    assert wrong is None


def test_another_gpu_than_the_current_one_is_served(gpu: str) -> None:
    """The tensors say which GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: one GPU only")
    first = call("bf16", [[300], [900]])
    moved = {
        name: value.to("cuda:1") if isinstance(value, torch.Tensor) else value
        for name, value in vars(first).items()
    }
    given = Call(**moved)
    assert given.decode().fault() is None
    assert torch.cuda.current_device() == 0


def test_a_checkpoints_own_weights_hold(
    gpu: str, weights: Callable[[str], Iterator[tuple[str, torch.Tensor]]]
) -> None:
    """Head weights as the indexer's own projection makes them of random hidden states."""
    for name, projection in weights(r"indexer\.weights_proj\.weight$"):
        print(name)
        given = call("fp8 as f16", [[800], [1600]])
        hidden = torch.randn(2, projection.shape[1], generator=torch.Generator().manual_seed(1))
        given.weights.copy_(hidden @ projection.float().T)
        assert given.decode().fault() is None, name
