"""What the score of an index key is: the definition, in float64, and its size for tolerances.

The score of key k for row r is ``sum_h weights[r, h] * relu(queries[r, h] . k)`` over 64 heads,
with k as it is stored, its scale included. The scales of the queries are in the weights already.

Shapes: R rows, W places for scores in a row, P entries of a row's page table.
"""

import torch

from seatrial_kernels.index_store import reference as keys_reference
from seatrial_kernels.index_store.reference import DIM, PAGE

HEADS = 64


def reference_index_logits(
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [R, W] in float64, NaN where a row has no key, and their sizes [R, W].

    ``queries`` [R, 64, 128] e4m3 or bf16, ``cache`` [pages, bytes] uint8 as ``index_store`` lays it
    out, ``weights`` [R, 64], ``lengths`` [R] (below 0 counts as 0, beyond W or the page table as
    that), ``page_table`` [R, P]. A size is the sum of what is summed, each product without its
    sign: rounding is a share of it.
    """
    rows = len(queries)
    scores = torch.full((rows, width), torch.nan, dtype=torch.float64, device=queries.device)
    sizes = torch.zeros_like(scores)
    for row in range(rows):
        length = min(max(int(lengths[row]), 0), width, page_table.shape[1] * PAGE)
        keys = keys_of(cache, page_table[row], length)
        query, weight = queries[row].double(), weights[row].double()
        scores[row, :length] = weight @ (query @ keys.T).relu()
        sizes[row, :length] = weight.abs() @ (query.abs() @ keys.abs().T)
    return scores, sizes


def keys_of(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` keys [length, 128] of a row of the page table, as float64."""
    places = torch.arange(length, device=cache.device)
    slots = pages[places // PAGE].long() * PAGE + places % PAGE
    keys = keys_reference.stored_keys(cache, slots)
    assert keys.shape == (length, DIM)
    return keys
