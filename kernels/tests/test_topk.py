"""The kernel selects what the reference says, whatever the scores, lengths and its way to do it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from seatrial_kernels import topk as op
from seatrial_kernels.testing import REPEATS, lengths_around, poisoned, shuffled_pages
from seatrial_kernels.topk import check, reference

INF, NAN = math.inf, math.nan
PAGE = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Rows:
    """One call's arguments, on the GPU. Beyond its length, a row is NaN."""

    scores: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    out: torch.Tensor
    raw: torch.Tensor
    workspace: torch.Tensor

    def run(self, *, ordered: bool = False, way: str = "by shape") -> None:
        """Select into poisoned memory."""
        self.out.fill_(-7)
        self.raw.fill_(-7)
        op.topk_transform(
            self.scores,
            self.lengths,
            self.table,
            self.out,
            PAGE,
            self.raw,
            ordered=ordered,
            workspace=self.workspace,
            way=way,
        )

    def fault(self, *, ordered: bool = False, way: str = "by shape") -> str | None:
        """Select, and return what is wrong, or None."""
        self.run(ordered=ordered, way=way)
        wrong = check.fault(
            self.scores, self.lengths, self.table, PAGE, self.out, self.raw, ordered=ordered
        )
        if wrong is None and self.workspace[:4096].any():
            return "the workspace's counters are not zero afterwards"
        return wrong


def clumps(rows: int, width: int, draw: torch.Generator) -> torch.Tensor:
    """Return scores that are high in runs of 64."""
    is_high = (torch.rand(rows, width // 64 + 1, generator=draw) < 0.03).repeat_interleave(64, 1)
    return torch.randn(rows, width, generator=draw) + 8 * is_high[:, :width]


def hidden(rows: int, width: int, draw: torch.Generator) -> torch.Tensor:
    """Return scores whose high ones are just where a long row's sample does not look."""
    runs = -(-width // 8192)
    is_seen = torch.arange(width) // 32 % max(runs, 1) == 0
    return torch.randn(rows, width, generator=draw) + torch.where(is_seen, 0.0, 5.0)


def special(rows: int, width: int, draw: torch.Generator) -> torch.Tensor:
    """Return scores of which half are inf, -inf or NaN."""
    made = torch.randn(rows, width, generator=draw)
    chance = torch.rand(rows, width, generator=draw)
    made[chance < 0.01], made[(chance > 0.01) & (chance < 0.3)] = INF, -INF
    return made.masked_fill((chance > 0.3) & (chance < 0.5), NAN)


def outliers(rows: int, width: int, draw: torch.Generator) -> torch.Tensor:
    """Return scores of which four are far above all others."""
    made = torch.randn(rows, width, generator=draw)
    made[:, :4] = 1e30
    return made


SCORES: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {
    "normal": lambda r, w, d: torch.randn(r, w, generator=d),
    "narrow": lambda r, w, d: 10 + 0.05 * torch.randn(r, w, generator=d),
    "equal": lambda r, w, d: torch.full((r, w), 3.25),
    "two values": lambda r, w, d: (torch.rand(r, w, generator=d) < 0.5).float(),
    "signed zeros": lambda r, w, d: torch.where(torch.rand(r, w, generator=d) < 0.5, -0.0, 0.0),
    "mostly zeros": lambda r, w, d: torch.relu(torch.randn(r, w, generator=d) - 1.6),
    "rising": lambda r, w, d: torch.arange(w) / w + 0.1 * torch.randn(r, w, generator=d),
    "falling": lambda r, w, d: -torch.arange(w).float().repeat(r, 1),
    "clumps": clumps,
    "hidden": hidden,
    "outliers": outliers,
    "special": special,
    "all NaN": lambda r, w, d: torch.full((r, w), NAN),
    "huge": lambda r, w, d: 2e38 * torch.randn(r, w, generator=d),
    "exponential": lambda r, w, d: torch.exp(3 * torch.randn(r, w, generator=d)),
}


def rows_of(
    scores: torch.Tensor, lengths: list[int], k: int, dtype: str = "fp32", *, pad: int = 24
) -> Rows:
    """Put scores into wider rows of NaN, with shuffled pages; lengths are repeated as needed."""
    rows, width = scores.shape
    draw = torch.Generator().manual_seed(7)
    stride = -(-(width + pad) // 8) * 8
    memory = poisoned(rows, stride, dtype=DTYPES[dtype])
    memory[:, :width] = scores.to(DTYPES[dtype])
    given = torch.tensor([lengths[i % len(lengths)] for i in range(rows)], dtype=torch.int32)
    memory.masked_fill_(torch.arange(stride) >= given[:, None], NAN)
    pages = width // PAGE + 2
    table = torch.stack([shuffled_pages(pages, draw) for _ in range(rows)]).int()
    return Rows(
        memory.cuda()[:, :width],
        given.cuda(),
        table.cuda()[:, : pages - 1],
        torch.empty(rows, k, dtype=torch.int32, device="cuda"),
        torch.empty(rows, k, dtype=torch.int32, device="cuda"),
        torch.zeros(op.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
    )


def drawn(kind: str, rows: int, width: int) -> torch.Tensor:
    """Return scores of a kind, seeded."""
    return SCORES[kind](rows, width, torch.Generator().manual_seed(3))


# Way, width, k: each way at sizes where it takes one round, several, and odd ones.
SIZES = [
    ("2048 by 256", 2048, 512),
    ("2048 by 256", 1999, 1024),
    ("4096 by 256", 4095, 448),
    ("4096 by 512", 4096, 2048),
    ("8192 by 256", 8192, 512),
    ("8192 by 512", 8190, 2048),
    ("16384 by 512", 16381, 576),
    ("long by 256", 20003, 1024),
    ("long by 512", 8193, 2048),
    ("long by 512", 33001, 64),
    ("long by 1024", 70001, 2048),
    ("split", 40007, 512),
    ("split", 131072, 2048),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("way", "width", "k"), SIZES)
def test_the_best_are_selected(
    gpu: str, way: str, width: int, k: int, kind: str, dtype: str
) -> None:
    """In every way, at full length and at mixed ones, with NaN wherever a row has ended."""
    scores = drawn(kind, 11, width)
    mixed = [*lengths_around(k), width, width - 1, width - 3, width // 2 + 1, width + 5, -1]
    for lengths in ([width], mixed):
        assert rows_of(scores, lengths, k, dtype).fault(way=way) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 448, 512, 576, 1024, 2048])
@pytest.mark.parametrize("rows", [1, 2, 33, 132, 265, 1024])
@pytest.mark.parametrize("width", [100, 2048, 5000, 12000, 40000])
def test_the_shape_decides_for_a_way_that_selects(
    gpu: str, rows: int, width: int, k: int, dtype: str
) -> None:
    """For any number of rows, width and k."""
    lengths = [width, *(length for length in lengths_around(k) if length <= width)]
    assert rows_of(drawn("normal", rows, width), lengths, k, dtype).fault() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(("width", "k"), [(1999, 64), (9001, 512), (40007, 2048)])
def test_in_order_the_indices_are_the_reference(
    gpu: str, width: int, k: int, kind: str, dtype: str
) -> None:
    """Equal scores to the lowest index, ascending: the very indices of the reference."""
    given = rows_of(drawn(kind, 7, width), [width, k + 1, k, 3, 0], k, dtype)
    given.run(ordered=True)
    wanted = reference.reference_topk(given.scores.cpu(), given.lengths.cpu(), k)
    assert torch.equal(given.raw.cpu(), wanted)
    assert torch.equal(given.out.cpu(), reference.paged(wanted, given.table.cpu(), PAGE))


@pytest.mark.parametrize("kind", ["normal", "equal", "two values", "special"])
@pytest.mark.parametrize("width", [8192, 40007])
def test_in_order_repeats_are_bitwise_the_same(gpu: str, width: int, kind: str) -> None:
    """Twenty times."""
    given = rows_of(drawn(kind, 9, width), [width, width // 2], 512)
    given.run(ordered=True)
    first = given.out.clone()
    for repeat in range(REPEATS):
        given.run(ordered=True)
        assert torch.equal(given.out, first), f"repeat {repeat} selected otherwise"


@pytest.mark.parametrize("way", ["8192 by 512", "long by 512", "split"])
def test_repeats_select_equally_good_entries(gpu: str, way: str) -> None:
    """Twenty times: what changes is the order, and which of equal scores."""
    width = 8192 if way == "8192 by 512" else 40000
    given = rows_of(drawn("mostly zeros", 9, width), [width], 1024)
    for repeat in range(REPEATS):
        assert given.fault(way=way) is None, f"repeat {repeat}"


@pytest.mark.parametrize("width", [6000, 50000])
def test_a_graph_serves_changed_lengths_and_scores(gpu: str, width: int) -> None:
    """Captured once; replayed with other scores and lengths, from nothing to all."""
    given = rows_of(drawn("normal", 4, width), [width], 512)
    given.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.run()
    for lengths in ([width], [0, 1, 511, 512], [513, width, 700, width // 3]):
        fresh = rows_of(drawn("clumps", 4, width), lengths, 512)
        given.scores.copy_(fresh.scores)
        given.lengths.copy_(fresh.lengths)
        graph.replay()
        wrong = check.fault(given.scores, given.lengths, given.table, PAGE, given.out, given.raw)
        assert wrong is None
        assert not given.workspace[:4096].any()


def test_captured_without_a_workspace_it_still_selects(gpu: str) -> None:
    """On a stream that has made none yet, long rows take a way that needs none."""
    given = rows_of(drawn("normal", 2, 50000), [50000], 512)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        op.topk_transform(given.scores, given.lengths, given.table, given.out, PAGE, given.raw)
    graph.replay()
    wrong = check.fault(given.scores, given.lengths, given.table, PAGE, given.out, given.raw)
    assert wrong is None


def test_calls_of_other_shapes_share_a_workspace(gpu: str) -> None:
    """What one leaves behind does not disturb the next."""
    given = [
        rows_of(drawn("normal", rows, width), [width], k)
        for rows, width, k in ((1, 131072, 2048), (16, 60000, 512), (3, 40000, 64))
    ]
    for one in (*given, *given):
        one.workspace = given[0].workspace
        assert one.fault(way="split") is None


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_pages_have_any_power_of_two_entries(gpu: str, page_size: int) -> None:
    """Whether or not the table fits into shared memory."""
    given = rows_of(drawn("normal", 5, 7000), [7000, 6999], 512)
    pages = -(-7000 // page_size)
    draw = torch.Generator().manual_seed(1)
    table = torch.stack([shuffled_pages(pages, draw) for _ in range(5)]).int().cuda()
    op.topk_transform(given.scores, given.lengths, table, given.out, page_size, given.raw)
    assert check.fault(given.scores, given.lengths, table, page_size, given.out, given.raw) is None


def test_a_short_page_table_limits_the_row(gpu: str) -> None:
    """Nothing beyond it is selected, whatever the length says."""
    given = rows_of(drawn("rising", 3, 4000), [4000], 512)
    given.table = given.table[:, :20].contiguous()
    assert given.fault() is None


def test_without_a_page_table_indices_stay(gpu: str) -> None:
    """`out` has the indices themselves."""
    given = rows_of(drawn("normal", 3, 4000), [4000, 100, 600], 512)
    op.topk_transform(given.scores, given.lengths, None, given.out)
    assert check.fault(given.scores, given.lengths, None, PAGE, given.out) is None


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", ["normal", "equal", "special", "hidden", "mostly zeros"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("way", "width", "k"),
    [
        ("2048 by 256", 1999, 512),
        ("8192 by 512", 8190, 1024),
        ("long by 256", 9001, 512),
        ("long by 512", 17003, 512),
        ("split", 17003, 64),
    ],
)
def test_nothing_out_of_bounds_is_touched(
    gpu: str, way: str, width: int, k: int, kind: str, dtype: str
) -> None:
    """For the sanitizer: exact allocations, rows that end in mid-vector, every way to select."""
    given = rows_of(drawn(kind, 3, width), [width, k + 1, k - 1], k, dtype, pad=0)
    assert given.fault(way=way) is None
    assert given.fault(ordered=True) is None


def test_scores_of_a_checkpoint(gpu: str, weights: Callable[[str], object]) -> None:
    """Rows of real tensors as scores: a distribution that nobody chose."""
    for name, tensor in weights(r"indexer.*weight$"):  # type: ignore[attr-defined]
        flat = tensor.float().flatten()[:65536]
        given = rows_of(flat[None], [len(flat)], 512)
        assert given.fault() is None, name
