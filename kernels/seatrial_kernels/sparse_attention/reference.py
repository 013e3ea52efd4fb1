"""The reference of the sparse selection: plain PyTorch, fp32, one sequence.

An *entry* stands for GROUP consecutive tokens. Its *index key* is the mean of their attention keys,
seen through the indexer's projection, and is stored in ``index_key_dtype`` without a scale. A query
sees the ``topk`` entries whose index keys score best, and the last WINDOW tokens in any case. Only
complete entries that lie before the query count; while there are no more than ``topk`` of them,
all are seen.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) for scores and top-k; groups of 4 and window
of 128 as in SGLang 0.5.23, ``layers/attention/dsv4``. There the compressor is learned and several
index heads are rectified; here a mean and one head stand for them.

Shapes: R queries, T tokens, N entries, H attention heads, C channels of a head, D of an index key.
"""

import torch

GROUP = 4
WINDOW = 128
KEY_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def index_keys(keys: torch.Tensor, projection: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the index keys [N, D] in ``dtype`` of attention keys [GROUP * N, C].

    ``projection``: [D, C]. Values beyond the range of ``dtype`` saturate; e4m3 has no infinity.
    """
    means = keys.float().unflatten(0, (-1, GROUP)).mean(dim=1)
    limit = torch.finfo(dtype).max
    return (means @ projection.T).clamp(-limit, limit).to(dtype)


def index_scores(
    queries: torch.Tensor, projection: torch.Tensor, stored: torch.Tensor
) -> torch.Tensor:
    """Return the scores [R, N] of stored index keys [N, D] for attention queries [R, H, C].

    The heads' queries are summed into one index query, which is projected as the keys were.
    """
    return queries.float().sum(dim=1) @ projection.T @ stored.float().T


def visible_entries(positions: torch.Tensor) -> torch.Tensor:
    """Return how many entries [R] are complete at the positions [R] of the queries."""
    return (positions + 1) // GROUP


def select_entries(scores: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Write into ``out`` [R, topk] which entries each query sees, and -1 where there are fewer.

    The width of ``out`` is ``topk``. ``scores``: [R, N], of which only those of entries that are
    visible at ``positions`` [R] count.
    """
    visible = torch.arange(scores.shape[1]) < visible_entries(positions)[:, None]
    width = min(out.shape[1], scores.shape[1])
    best = scores.masked_fill(~visible, -torch.inf).topk(width).indices
    out[:, :width] = best.masked_fill(~visible.gather(1, best), -1)
    out[:, width:] = -1


def allowed_tokens(selected: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of ``length`` tokens [R, length] each query sees: its entries and its window.

    ``selected``: [R, topk] entry numbers or -1; ``positions``: [R].
    """
    entries = torch.zeros((len(positions), length // GROUP + 2), dtype=torch.bool)
    entries.scatter_(1, selected + 1, value=True)  # -1 goes to column 0, which is nobody's
    allowed = entries[:, 1:].repeat_interleave(GROUP, dim=1)[:, :length]
    distance = positions[:, None] - torch.arange(length)
    return (allowed | (distance < WINDOW)) & (distance >= 0)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return [R, H, C]: softmax attention of queries [R, H, C] over the allowed tokens.

    ``keys``, ``values``: [T, G, C] with G dividing H; ``allowed``: [R, T], or None for the first T
    queries of a sequence, each of which sees all tokens up to its own.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        queries.movedim(0, 1)[None],
        keys.movedim(0, 1)[None],
        values.movedim(0, 1)[None],
        attn_mask=allowed,
        is_causal=allowed is None,
        scale=scale,
        enable_gqa=True,
    )[0].movedim(1, 0)
