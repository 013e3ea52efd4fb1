"""Whether scores are what the reference says: for tests, benchmarks and the self-test."""

import torch

from seatrial_kernels.index_logits.reference import reference_index_logits
from seatrial_kernels.testing import worst

# Of the sum of what is summed, without signs: float32's rounding in a sum of 128 and one of 64.
ROUNDING = 1e-6
# Queries, cache, weights, lengths, page table.
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def fault(
    given: Given,
    found: torch.Tensor,
    *,
    skip: int = 0,
    rows: list[int] | None = None,
) -> str | None:
    """Return what is wrong with ``found`` [R, W], which was all NaN before the call, or None.

    ``given``: queries, cache, weights, lengths, page table. Rows of up to ``skip`` keys, and what
    lies beyond a row's length, must still be NaN, in all rows. Values are looked at in ``rows``,
    or in all.
    """
    queries, cache, weights, lengths, table = given
    width = found.shape[1]
    there = lengths.clamp(0, min(width, table.shape[1] * 64))
    there = torch.where(there > skip, there, 0)
    outside = torch.arange(width, device=found.device) >= there[:, None]
    if bool((outside & ~found.isnan()).any()):
        row, place = (int(i) for i in (outside & ~found.isnan()).nonzero()[0])
        return f"row {row} of {int(lengths[row])} keys: place {place} was written"
    at = torch.arange(len(found)) if rows is None else torch.tensor(rows)
    at = at.to(found.device)
    wanted, sizes = reference_index_logits(
        queries[at], cache, weights[at], there[at], table[at], width
    )
    wrong = worst(found[at], wanted, sizes * ROUNDING)
    return f"scores of rows {at.tolist()[:8]}: {wrong}" if wrong else None
