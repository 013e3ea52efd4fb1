"""The definition of an index key, against loops and bytes written out by hand."""

import cmath

import pytest
import torch
from seatrial_kernels.index_store import Plan, index_store
from seatrial_kernels.index_store import reference as ref

EPS = 1e-6


@pytest.fixture
def draw() -> torch.Generator:
    """Return the one source of random numbers, seeded."""
    return torch.Generator().manual_seed(11)


def rotations(count: int, draw: torch.Generator) -> torch.Tensor:
    """Return cos and sin of random angles, float32 [count, 64]."""
    angles = torch.rand(count, ref.ROTATED // 2, generator=draw) * 6.28
    return torch.stack([angles.cos(), angles.sin()], -1).reshape(count, ref.ROTATED)


def test_a_key_is_normed_rotated_and_transformed(draw: torch.Generator) -> None:
    """Written out with loops: complex pairs, and signs by the parity of common bits."""
    keys = torch.randn(3, ref.DIM, generator=draw)
    weight = torch.rand(ref.DIM, generator=draw) + 0.5
    turns, positions = rotations(10, draw), torch.tensor([0, 9, 4])
    found = ref.reference_index_keys(keys, weight, turns, positions, EPS)
    for n in range(3):
        row = [float(v) for v in keys[n]]
        root = (sum(v * v for v in row) / ref.DIM + EPS) ** 0.5
        row = [v / root * float(w) for v, w in zip(row, weight, strict=True)]
        turn = [float(v) for v in turns[positions[n]]]
        for pair in range(ref.ROTATED // 2):
            at = ref.DIM - ref.ROTATED + 2 * pair
            angle = cmath.phase(complex(turn[2 * pair], turn[2 * pair + 1]))
            size = abs(complex(turn[2 * pair], turn[2 * pair + 1]))
            turned = complex(row[at], row[at + 1]) * cmath.rect(size, angle)
            row[at], row[at + 1] = turned.real, turned.imag
        for out in range(ref.DIM):
            total = sum(v * (-1) ** (out & d).bit_count() for d, v in enumerate(row))
            assert found[n, out].item() == pytest.approx(total / ref.DIM**0.5, abs=1e-9)


def test_the_transform_keeps_products(draw: torch.Generator) -> None:
    """It is orthonormal and its own inverse, so scores are those of untransformed keys."""
    matrix = ref.hadamard()
    assert torch.equal(matrix, matrix.T)
    assert (matrix @ matrix - torch.eye(ref.DIM, dtype=torch.float64)).abs().max() < 1e-15


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_key_that_is_not_finite_shows(draw: torch.Generator, value: float) -> None:
    """All of it is NaN, and the key beside it is not touched."""
    keys = torch.randn(2, ref.DIM, generator=draw)
    keys[0, 77] = value
    turns, positions = rotations(1, draw), torch.tensor([0, 0])
    found = ref.reference_index_keys(keys, torch.ones(ref.DIM), turns, positions, EPS)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_fp8_pages_are_planar() -> None:
    """64 x 128 bytes of values, then 64 scales of four bytes: byte by byte."""
    cache = torch.full((2, ref.PAGE_BYTES["fp8_e4m3"]), 0x55, dtype=torch.uint8)
    key = torch.zeros(1, ref.DIM, dtype=torch.float64)
    key[0, 0], key[0, 1], key[0, 127] = 896.0, -1.0, 2.0
    ref.reference_index_store(key, torch.tensor([64 + 5]), cache)
    row = cache[1, 5 * 128 : 6 * 128].tolist()
    # Scale 2: 448 is the largest e4m3, and -0.5 and 1 are exact.
    assert row[:2] == [0x7E, 0xB0]
    assert row[127] == 0x38
    assert cache[1, 8192 + 20 : 8192 + 24].view(torch.float32).item() == 2.0
    assert (cache[0] == 0x55).all()
    assert (cache[1] == 0x55).sum() == ref.PAGE_BYTES["fp8_e4m3"] - 128 - 4


def test_bf16_pages_are_rows() -> None:
    """A key's 256 bytes lie at 256 times its slot."""
    cache = torch.full((2, ref.PAGE_BYTES["bf16"]), 0x55, dtype=torch.uint8)
    key = torch.arange(ref.DIM, dtype=torch.float64)[None] / 8
    ref.reference_index_store(key, torch.tensor([70]), cache)
    assert torch.equal(cache.view(torch.bfloat16).reshape(-1, ref.DIM)[70].double(), key[0])
    assert (cache == 0x55).sum() >= cache.numel() - 2 * ref.DIM


@pytest.mark.parametrize("dtype", ref.PAGE_BYTES)
def test_what_is_stored_is_read_back(draw: torch.Generator, dtype: str) -> None:
    """Within half a step of the dtype, wherever the slot lies; skipped slots store nothing."""
    keys = torch.randn(6, ref.DIM, generator=draw, dtype=torch.float64)
    slots = torch.tensor([3, 191, -1, 64, 192, 63])  # 192 is past the end
    cache = torch.full((3, ref.PAGE_BYTES[dtype]), 0x7F, dtype=torch.uint8)
    before = cache.clone()
    ref.reference_index_store(keys, slots, cache)
    kept = (slots >= 0) & (slots < 192)
    found = ref.stored_keys(cache, slots[kept])
    step = {"fp8_e4m3": 2**-4, "bf16": 2**-8}[dtype]
    assert ((found - keys[kept]).abs() <= step * keys[kept].abs() + 1e-3).all()
    assert (cache != before).any(1).tolist() == [True, True, True]


def test_small_keys_have_the_smallest_scale() -> None:
    """A key of zeros is stored as zeros and not as 0 / 0."""
    zeros = torch.zeros(1, ref.DIM, dtype=torch.float64)
    assert ref.scales(zeros).item() == ref.SMALLEST / ref.E4M3_MAX
    cache = torch.full((1, ref.PAGE_BYTES["fp8_e4m3"]), 0x7F, dtype=torch.uint8)
    ref.reference_index_store(zeros, torch.tensor([0]), cache)
    assert (ref.stored_keys(cache, torch.tensor([0])) == 0).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"keys": torch.zeros(4, 64)}, r"keys must be float32 \[4, 128\], not float32 \[4, 64\]"),
        ({"keys": torch.zeros(4, 128).half()}, r"keys must be float32 or bfloat16"),
        ({"weight": torch.zeros(128).bfloat16()}, r"weight must be float32 \[128\], not bfloat16"),
        ({"slots": torch.zeros(4).int()}, r"slots must be int64 \[4\], not int32"),
        ({"positions": torch.zeros(3).long()}, r"positions must be int64 \[4\], not int64 \[3\]"),
        ({"cache": torch.zeros(1, 64 * 128).byte()}, r"cache has 8192 bytes; it should have 8448"),
        ({"keys": torch.zeros(128, 4).T}, r"keys must be contiguous"),
        ({"eps": 0.0}, r"eps must be over 0, not 0.0"),
        (
            {"positions": Plan(torch.zeros(3, 16).byte(), is_decode=True, ratio=4)},
            r"plan must be uint8 \[4, 16\], not uint8 \[3, 16\]",
        ),
        (
            {"positions": Plan(torch.zeros(4, 16).byte(), is_decode=True, ratio=6)},
            r"ratio must be a power of 2, not 6",
        ),
        ({}, r"all tensors must be on one GPU, not on cpu"),
    ],
)
def test_wrong_arguments_are_one_sentence(change: dict[str, object], sentence: str) -> None:
    """Before anything is launched, with or without a GPU."""
    given = {
        "keys": torch.zeros(4, 128),
        "weight": torch.zeros(128),
        "rotations": torch.zeros(8, 64),
        "positions": torch.zeros(4).long(),
        "slots": torch.zeros(4).long(),
        "cache": torch.zeros(1, 8448).byte(),
        "eps": EPS,
    }
    with pytest.raises(ValueError, match=f"^index_store: .*{sentence}"):
        index_store(**{**given, **change})
