"""The definition of a selection, against sorts written out by hand; and the kernel's arithmetic."""

import math

import pytest
import torch
from seatrial_kernels.topk import check, topk_transform
from seatrial_kernels.topk import reference as ref

INF, NAN = math.inf, math.nan


@pytest.fixture
def draw() -> torch.Generator:
    """Return the one source of random numbers, seeded."""
    return torch.Generator().manual_seed(5)


def ranking(row: list[float]) -> list[int]:
    """Return a row's indices from the best to the worst, NaN last, ties by index."""
    return sorted(
        range(len(row)), key=lambda i: (math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i)
    )


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, -3, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_best_are_selected(length: int, dtype: torch.dtype, draw: torch.Generator) -> None:
    """Of the first `length` scores only, with ties, zeros of both signs, inf and NaN among them."""
    scores = torch.randint(-4, 5, (3, 200), generator=draw).to(dtype)
    scores[scores == 4], scores[scores == -4], scores[scores == 3] = INF, -INF, NAN
    scores[:, ::7] = -0.0
    selected = ref.reference_topk(scores, torch.tensor([length] * 3), 64)
    count = min(max(length, 0), 200)
    for row, found in zip(scores, selected, strict=True):
        best = sorted(ranking([float(v) for v in row[:count]])[:64])
        assert found.tolist() == best + [-1] * (64 - len(best))


def test_keys_order_all_kinds_of_numbers() -> None:
    """From NaN over -inf, the smallest and both zeros to +inf."""
    kinds = torch.tensor([NAN, -INF, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, INF])
    keys = ref.rank_keys(kinds).tolist()
    assert keys[5] == keys[6]
    assert sorted(set(keys)) == [*keys[:6], *keys[7:]]
    assert keys[0] == 0
    assert ref.rank_keys(-kinds)[0] == 0


def test_entries_lie_where_the_page_table_says() -> None:
    """Written out for two pages of four."""
    indices = torch.tensor([[0, 3, 4, 7, -1]], dtype=torch.int32)
    assert ref.paged(indices, torch.tensor([[9, 2]]), 4).tolist() == [[36, 39, 8, 11, -1]]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out: out[0].__setitem__(3, out[0, 4]), "twice"),
        (lambda out: out[0].__setitem__(3, -1), "none of the row's"),
        (lambda out: out[1].__setitem__(63, 5), "none of the row's"),
        (lambda out: out[0].__setitem__(0, 150), "higher score was left out"),
        (lambda out: out[0].__setitem__(slice(0, 2), out[0, :2].flip(0)), "not in order"),
    ],
    ids=["double", "missing", "beyond the end", "not the best", "order"],
)
def test_the_check_finds_faults(spoil: object, told: str, draw: torch.Generator) -> None:
    """A right selection passes, and each way to be wrong is told."""
    scores = torch.randn(2, 200, generator=draw)
    scores[0, 150] = -9.0
    lengths = torch.tensor([200, 10], dtype=torch.int32)
    out = ref.reference_topk(scores, lengths, 64)
    assert check.fault(scores, lengths, None, 64, out, ordered=True) is None
    spoil(out)  # type: ignore[operator]
    assert told in str(check.fault(scores, lengths, None, 64, out, ordered=True))


def test_the_check_reads_the_page_table(draw: torch.Generator) -> None:
    """An entry of another page is a fault, with and without the indices beside it."""
    scores, lengths = torch.randn(1, 200, generator=draw), torch.tensor([200], dtype=torch.int32)
    table = torch.randperm(50, generator=draw)[None].int()
    raw = ref.reference_topk(scores, lengths, 64)
    out = ref.paged(raw, table, 4)
    assert check.fault(scores, lengths, table, 4, out, raw) is None
    assert check.fault(scores, lengths, table, 4, out) is None
    out[0, 7] += 4
    assert check.fault(scores, lengths, table, 4, out, raw) is not None
    assert check.fault(scores, lengths, table, 4, out) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 128, dtype=torch.float16)}, "float32 or bfloat16"),
        ({"out": torch.zeros(2, 100, dtype=torch.int32)}, "multiple of 64"),
        ({"out": torch.zeros(2, 2112, dtype=torch.int32)}, "up to 2048"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths must be int32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must be int32 \\[2\\]"),
        ({"page_size": 48}, "power of 2"),
        ({}, "on one GPU"),
    ],
    ids=["dtype", "k", "k too large", "length dtype", "length shape", "page size", "device"],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    """With a sentence that names the argument, before anything is compiled or loaded."""
    given: dict[str, object] = {
        "scores": torch.zeros(2, 128),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "out": torch.zeros(2, 64, dtype=torch.int32),
        "page_size": 64,
    }
    with pytest.raises(ValueError, match=message):
        topk_transform(**(given | change))  # type: ignore[arg-type]


# What follows is the kernel's arithmetic, in float32 as the kernel has it.


def bins(scores: torch.Tensor, low: float, high: float, count: int) -> torch.Tensor:
    """Return each score's bin as topk.cuh's Scale has it: two roundings, then whole numbers."""
    span = torch.tensor(high) - torch.tensor(low)
    per_score = torch.tensor(count - 2.0) / span
    zero = 2.0**23 + 32
    exact = (scores - low).double() * per_score.double() + zero  # fma: rounded once
    return exact.float() - zero


@pytest.mark.parametrize("center", [0.0, 10.0, -1e6, 3e-20])
@pytest.mark.parametrize("spread", [1.0, 0.05, 1e-6])
def test_bins_keep_the_order_and_their_edges_hold(
    center: float, spread: float, draw: torch.Generator
) -> None:
    """Also where the scores differ by a few roundings only: a higher bin has no lower score.

    And with edges moved out as the kernel moves them, what is above the upper one lies in higher
    bins, and what lies in the bin is above the lower one.
    """
    scores = (
        (center + spread * abs(center or 1.0) * torch.randn(4096, generator=draw)).sort().values
    )
    low, high = float(scores[100]), float(scores[-1])
    if not high > low:
        pytest.skip("all scores are equal: the kernel goes by digits")
    found = bins(scores, low, high, 2048)
    assert (found[1:] >= found[:-1]).all()
    assert found.max() <= 2047
    width = (torch.tensor(high) - torch.tensor(low)) * torch.tensor(1 / 2046)
    moved = 0.52 * width + 5e-7 * max(abs(low), abs(high))
    for at in (200, 2000, 4000, 4095):
        middle = found[at] * width
        upper, lower = low + (middle + moved), low + (middle - moved)
        assert (found[scores > upper] > found[at]).all()
        assert (scores[found == found[at]] > lower).all()


@pytest.mark.parametrize("threads", [256, 512, 1024])
@pytest.mark.parametrize("vectors", [4, 8])
@pytest.mark.parametrize("total", [1, 255, 2048, 2049, 8192, 9001, 65536])
def test_every_vector_of_a_row_has_one_owner(threads: int, vectors: int, total: int) -> None:
    """And the first round of a long row, the sample, has a line of every run of the row."""
    rounds = max(1, -(-total // (threads * vectors)))
    thread = torch.arange(threads)[:, None, None]
    j, turn = torch.arange(vectors)[:, None], torch.arange(rounds)
    if rounds == 1:
        owned = thread + j * threads + 0 * turn
    else:
        owned = (thread // 8) * (vectors * rounds * 8) + thread % 8 + j * rounds * 8 + turn * 8
    counted = torch.bincount(owned[owned < total].flatten(), minlength=total)
    assert (counted == 1).all()
    sample = owned[:, :, 0].flatten()
    lines = sample[sample < total] // 8
    gaps = lines.unique().diff()
    assert len(gaps) == 0 or int(gaps.max()) <= rounds
