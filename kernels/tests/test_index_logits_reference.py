"""The definition of an index key's score, against loops and bytes written out by hand."""

import pytest
import torch
from seatrial_kernels.index_logits import (
    check,
    decode_logits,
    prefill_logits,
    prefill_topk,
    rows_of_chunk,
)
from seatrial_kernels.index_logits.reference import reference_index_logits
from seatrial_kernels.index_store import reference as keys_reference


def small(layout: str = "bf16") -> check.Given:
    """Return two rows of 70 and 3 keys, in pages 2 and 0 of three."""
    draw = torch.Generator().manual_seed(11)
    cache = torch.full((3, keys_reference.PAGE_BYTES[layout]), 0x7F, dtype=torch.uint8)
    keys = torch.randn(70, 128, generator=draw, dtype=torch.float64)
    slots = torch.cat([torch.arange(128, 192), torch.arange(6)])
    keys_reference.reference_index_store(keys, slots, cache)
    queries = torch.randn(2, 64, 128, generator=draw).to(torch.float8_e4m3fn)
    weights = torch.randn(2, 64, generator=draw)
    table = torch.tensor([[2, 0], [2, 99]], dtype=torch.int32)
    return queries, cache, weights, torch.tensor([70, 3], dtype=torch.int32), table


@pytest.mark.parametrize("layout", keys_reference.PAGE_BYTES)
def test_a_score_is_a_sum_over_heads(layout: str) -> None:
    """Written out with loops, for keys of both pages."""
    given = small(layout)
    queries, cache, weights, _, _ = given
    scores, sizes = reference_index_logits(*given, 80)
    for row, key, slot in ((0, 0, 128), (0, 63, 191), (0, 64, 0), (0, 69, 5), (1, 2, 130)):
        values = keys_reference.stored_keys(cache, torch.tensor([slot]))[0].tolist()
        total = size = 0.0
        for head in range(64):
            asked = [float(v) for v in queries[row, head]]
            dot = sum(a * b for a, b in zip(asked, values, strict=True))
            total += float(weights[row, head]) * max(dot, 0.0)
            size += abs(float(weights[row, head])) * sum(
                abs(a * b) for a, b in zip(asked, values, strict=True)
            )
        assert scores[row, key].item() == pytest.approx(total, abs=1e-9)
        assert sizes[row, key].item() == pytest.approx(size, abs=1e-9)
    assert scores[0, 70:].isnan().all()
    assert scores[1, 3:].isnan().all()


def test_a_key_that_is_not_a_number_has_no_score() -> None:
    """Relu does not make it 0."""
    given = small()
    keys = torch.full((1, 128), torch.nan, dtype=torch.float64)
    keys_reference.reference_index_store(keys, torch.tensor([129]), given[1])
    scores, _ = reference_index_logits(*given, 80)
    assert scores[0, 1].isnan()
    assert scores[0, 2].isfinite()


def test_the_check_finds_what_is_wrong() -> None:
    """A neighbour's score, a sign, a write too many, a row that was to be left out."""
    given = small("fp8_e4m3")
    right = reference_index_logits(*given, 80)[0].float()
    assert check.fault(given, right) is None
    for place, value in ((5, right[0, 6]), (69, -right[0, 69]), (10, torch.tensor(torch.nan))):
        wrong = right.clone()
        wrong[0, place] = value
        assert f"worst at (0, {place})" in str(check.fault(given, wrong))
    assert check.fault(given, right, skip=3) == "row 1 of 3 keys: place 0 was written"
    right[1, 3] = 0.0
    assert check.fault(given, right) == "row 1 of 3 keys: place 3 was written"


@pytest.mark.parametrize(
    ("rows", "width", "budget", "chunk"),
    [
        (8192, 262144, 256 << 20, 256),
        (8192, 32768, 256 << 20, 2048),
        (8192, 262143, 12 << 20, 8),
        (8192, 262144, 5 << 20, 5),
        (3, 100, 256 << 20, 3),
        (0, 100, 256 << 20, 0),
    ],
)
def test_chunks_of_rows_fit_the_budget(rows: int, width: int, budget: int, chunk: int) -> None:
    """Whole groups of eight where eight rows fit."""
    assert rows_of_chunk(rows, width, budget) == chunk
    assert chunk * width * 4 <= budget


def test_a_budget_below_one_row_is_refused() -> None:
    """In one sentence, with both numbers."""
    with pytest.raises(ValueError, match="takes 4000 bytes, and budget_bytes is 3999"):
        rows_of_chunk(1, 1000, 3999)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({0: torch.zeros(2, 64, 128)}, "queries must be float8_e4m3fn or bfloat16"),
        ({0: torch.zeros(2, 32, 128).bfloat16()}, r"queries must be bfloat16 \[2, 64, 128\]"),
        ({0: torch.zeros(2, 128, 64).bfloat16().mT}, "queries must be contiguous"),
        ({1: torch.zeros(3, 64 * 128).byte()}, "cache has 8192 bytes; it should have 8448"),
        ({1: torch.zeros(3, 8448).byte(), 0: torch.zeros(2, 64, 128).bfloat16()}, "need fp8 quer"),
        ({2: torch.zeros(2, 64).bfloat16()}, r"weights must be float32 \[2, 64\], not bfloat16"),
        ({3: torch.zeros(2).long()}, r"lengths must be int32 \[2\], not int64"),
        ({4: torch.zeros(1, 2).int()}, r"page_table must be int32 \[2, \.\.\.\]"),
        ({5: torch.zeros(80, 2).T}, "a row's out must lie side by side"),
        ({5: torch.zeros(2, 80).half()}, r"out must be float32 \[2, \.\.\.\], not float16"),
        ({}, "all tensors must be on one GPU, not on cpu"),
    ],
)
def test_wrong_arguments_are_one_sentence(change: dict[int, torch.Tensor], sentence: str) -> None:
    """Before anything is launched, with or without a GPU."""
    given = [*small(), torch.zeros(2, 80)]
    for place, tensor in change.items():
        given[place] = tensor
    for operation in (decode_logits, prefill_logits):
        with pytest.raises(ValueError, match=f"^index_logits: .*{sentence}"):
            operation(*given)


def test_wrong_numbers_are_one_sentence() -> None:
    """How many rows a request has, and which are left out."""
    given = (*small(), torch.zeros(2, 80))
    with pytest.raises(ValueError, match="next_n must be 1 to 4, not 5"):
        decode_logits(*given, next_n=5)
    with pytest.raises(ValueError, match="2 rows are no whole number of requests of 3"):
        decode_logits(*given, next_n=3)
    with pytest.raises(ValueError, match="skip must be at least 0, not -1"):
        decode_logits(*given, skip=-1)
    with pytest.raises(ValueError, match="all tensors must be on one GPU"):
        prefill_topk(*given[:5], torch.zeros(2, 64).int(), width=80)
