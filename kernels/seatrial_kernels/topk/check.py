"""Whether a selection is what the reference says: for tests and benchmarks, on the CPU or a GPU."""

import torch

from seatrial_kernels.topk.reference import paged, rank_keys


def fault(  # noqa: PLR0911 - one for each kind of fault
    scores: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
    raw: torch.Tensor | None = None,
    *,
    ordered: bool = False,
) -> str | None:
    """Return what is wrong with a selection, in one sentence, or None.

    ``out`` and ``raw`` [R, k] as topk_transform() writes them. Without ``ordered``, equal scores
    may stand for one another and the order is free: then the ranks of what was selected are
    compared. With it, the indices themselves are. Without ``raw`` and with a ``table``, every page
    of the table must be another.
    """
    width = scores.shape[1]
    k = out.shape[1]
    if raw is None:
        raw = out if table is None else _unpaged(out, table, page_size)
    places = torch.arange(k, device=out.device)
    limit = width if table is None else min(width, table.shape[1] * page_size)
    there = lengths.clamp(0, limit).long()
    is_valid = places < there.clamp_max(k)[:, None]
    selected = raw.long()
    is_wrong = torch.where(is_valid, (selected < 0) | (selected >= there[:, None]), selected != -1)
    if is_wrong.any():
        return f"{_first(is_wrong)}: index {int(raw[is_wrong][0])} is none of the row's"
    ascending = torch.where(is_valid, selected, width + places).sort(-1).values
    is_double = ascending[:, 1:] == ascending[:, :-1]
    if is_double.any():
        return f"{_first(is_double)}: an index is selected twice"
    if table is not None:
        wanted = paged(raw, table, page_size)
        if not torch.equal(out, wanted):
            at = _first(out != wanted)
            return f"{at}: {int(out[out != wanted][0])} instead of {int(wanted[out != wanted][0])}"
    keys = rank_keys(scores)
    is_there = torch.arange(width, device=out.device) < there[:, None]
    keys.masked_fill_(~is_there, -1)
    best = min(k, width)
    wanted = keys.topk(best, dim=-1).values
    found = keys.gather(1, selected.clamp_min(0)).masked_fill(~is_valid, -1)
    found = found.sort(-1, descending=True).values[:, :best]
    is_wrong = found != wanted
    if is_wrong.any():
        return (
            f"{_first(is_wrong)}: a higher score was left out ({int(is_wrong.any(-1).sum())} rows)"
        )
    if not ordered:
        return None
    ranked = keys.sort(dim=-1, descending=True, stable=True).indices[:, :best]
    valid = is_valid[:, :best]
    ranked = torch.where(valid, ranked, width + places[:best]).sort(-1).values
    in_order = torch.where(valid, selected[:, :best], width + places[:best])
    if not torch.equal(ranked, in_order):
        at = _first(ranked != in_order)
        return f"{at}: not the lowest of equal scores, or not in order"
    return None


def _unpaged(out: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    order = table.long().sort(-1)
    at = torch.searchsorted(order.values, (out.long() // page_size).clamp_min(0))
    pages = order.indices.gather(1, at.clamp_max(table.shape[1] - 1))
    return torch.where(out < 0, out.long(), pages * page_size + out % page_size).to(out.dtype)


def _first(is_wrong: torch.Tensor) -> str:
    row, place = (int(i) for i in is_wrong.nonzero()[0])
    return f"row {row}, place {place}"
