"""What the tests of all operations lean on finds what it should."""

from pathlib import Path

import pytest
import torch
from seatrial_kernels.testing import checkpoint_tensors, lengths_around, poisoned, worst

NAN, INF = float("nan"), float("inf")


def test_the_worst_position_and_both_values_are_named() -> None:
    """And how many are wrong."""
    found, wanted = torch.tensor([[1.0, 2.0], [3.5, 9.0]]), torch.tensor([[1.0, 2.5], [3.5, 4.0]])
    assert worst(found, wanted, 0.1) == ("2 of 4 values are wrong, worst at (1, 1): 9 instead of 4")


def test_what_is_within_its_tolerance_is_right() -> None:
    """Each value has its own; the bound itself is allowed."""
    found, wanted = torch.tensor([1.25, 9.0]), torch.tensor([1.0, 4.0])
    assert worst(found, wanted, torch.tensor([0.25, 5.0])) is None
    assert worst(torch.empty(0, 3), torch.empty(0, 3), 0.0) is None


@pytest.mark.parametrize(("found", "wanted"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (INF, -INF)])
def test_what_is_not_finite_is_only_right_where_it_is_meant(found: float, wanted: float) -> None:
    """NaN never passes by being incomparable, nor inf by an infinite tolerance."""
    assert worst(torch.tensor([found]), torch.tensor([wanted]), 1e30) is not None
    assert worst(torch.tensor([found]), torch.tensor([found]), 0.0) is None


def test_another_shape_is_wrong() -> None:
    """Before anything is broadcast."""
    assert worst(torch.zeros(2, 1), torch.zeros(1, 2), 1.0) == "shape (2, 1) instead of (1, 2)"


def test_poison_shows() -> None:
    """NaN in floating dtypes, e4m3 too; an index far outside in integers."""
    assert poisoned(3, dtype=torch.bfloat16).isnan().all()
    assert poisoned(3, dtype=torch.uint8).view(torch.float8_e4m3fn).float().isnan().all()
    assert (poisoned(3, dtype=torch.int32) > 2**30).all()


def test_lengths_around_a_selection_are_those_where_it_turns() -> None:
    """Once each, in order."""
    assert lengths_around(512) == [0, 1, 511, 512, 513]
    assert lengths_around(1) == [0, 1, 2]


def test_a_run_on_weights_is_not_a_run_on_none(tmp_path: Path) -> None:
    """A folder without the tensors is an error."""
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match=r"no tensor in .* has a name like norm"):
        list(checkpoint_tensors(tmp_path, "norm"))
