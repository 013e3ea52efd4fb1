"""What a selection is: plain integers on the CPU, and the only definition of what is right.

A row's scores are ranked as numbers: +inf, finite ones, -inf, and NaN last; -0 equals +0.
Of equal scores the one with the lower index ranks higher. Only the first ``length`` scores of a
row exist. The k highest ranked are selected, or all, where there are no more.

Shapes: R rows, W scores in a row, P entries of a row's page table.
"""

import torch

MOST = 2048
STEP = 64


def rank_keys(scores: torch.Tensor) -> torch.Tensor:
    """Return for scores, fp32 or bf16, integers of the same order, int64, at least 0.

    NaN has 0. The others have their bits, read as an integer, with all bits turned over if the sign
    is set, and else the sign alone: so floats of one sign already compare.
    """
    bits = (scores.float() + 0.0).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >> 31 == 1, 0xFFFFFFFF - bits, bits | 0x80000000)
    return keys.masked_fill(scores.isnan(), 0)


def reference_topk(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices [R, k] selected in ``scores`` [R, W], ascending, and -1 after the last.

    ``lengths`` [R]: a negative one counts as 0, and one beyond W as W.
    """
    width = scores.shape[1]
    is_there = torch.arange(width) < lengths[:, None]
    keys = rank_keys(scores).masked_fill(~is_there, -1)
    ranked = keys.sort(dim=-1, descending=True, stable=True).indices
    selected = torch.full((len(scores), k), width)
    selected[:, : min(k, width)] = ranked[:, :k]
    counts = lengths.clamp(0, min(k, width))
    selected.masked_fill_(torch.arange(k) >= counts[:, None], width)
    selected = selected.sort(-1).values
    return selected.masked_fill(selected == width, -1).int()


def paged(indices: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return where the selected entries lie: page_table[row, i // size] * size + i % size.

    ``indices`` [R, k], ``table`` [R, P]; -1 stays -1.
    """
    pages = table.long().gather(1, indices.long().clamp_min(0) // page_size)
    return torch.where(indices < 0, -1, pages * page_size + indices % page_size).int()
