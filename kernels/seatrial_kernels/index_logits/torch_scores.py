"""Scores of paged bf16 index keys in PyTorch: what a CPU, or a build without kernels, has."""

import torch

PAGE, WIDTH = 64, 128
BUDGET_BYTES = 256 * 2**20
"""What the temporary tensors of one step may take; the scores themselves come on top."""


def paged_scores(
    queries: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    _schedule: object,
    width: int,
    _is_clean: bool = False,
) -> torch.Tensor:
    """Return the scores [R, width] fp32 of R queries: ``sum_h w_h relu(q_h . k)``.

    The parameters are those of SGLang's paged MQA logits functions, so that it stands where they
    are called. Positions from a row's length on hold -inf.

    Parameters
    ----------
    queries: [R, 1, H, 128], fp8_e4m3 or bf16; their scales are in the weights
    pages: [pages, 64, 1, 256] bytes, each entry 128 bf16 values
    weights: [R, H] fp32
    lengths: [R] or [R, 1], entries that a row may see
    page_table: [R, P] page numbers; those beyond a row's length may be anything
    width: of the result, in entries

    Every row gathers its own keys, so a prefill of R rows reads them R times: right, and slow.
    No step takes more than BUDGET_BYTES. In a CUDA graph the whole page table is gone through;
    otherwise only as many pages as the longest row has.
    """
    rows, _, heads, _ = queries.shape
    lengths = lengths.reshape(rows)
    keys = pages.view(torch.bfloat16).view(-1, PAGE, WIDTH)
    scores = weights.new_full((rows, width), -torch.inf, dtype=torch.float32)
    count = min(page_table.shape[1], -(-width // PAGE))
    if rows and not _is_capturing(queries):
        count = min(count, -(-int(lengths.max()) // PAGE))
    step_rows, step_pages = _steps(rows, count, heads)
    for row in range(0, rows, step_rows):
        now = slice(row, row + step_rows)
        asked = queries[now, 0].float().transpose(1, 2)
        for page in range(0, count, step_pages):
            numbers = page_table[now, page : min(page + step_pages, count)].clamp(0, len(keys) - 1)
            gathered = keys[numbers.long()].flatten(1, 2)
            products = torch.bmm(gathered.float(), asked).relu_()
            part = torch.bmm(products, weights[now, :, None].float())[..., 0]
            first = page * PAGE
            places = torch.arange(first, first + part.shape[1], device=part.device)
            part.masked_fill_(places >= lengths[now, None], -torch.inf)
            scores[now, first : first + part.shape[1]] = part[:, : width - first]
    return scores


def _steps(rows: int, pages: int, heads: int) -> tuple[int, int]:
    """Return how many rows and pages one step may take under the budget, each at least one."""
    one = PAGE * (WIDTH * (2 + 4) + heads * 4 + 4)
    places = max(1, BUDGET_BYTES // one)
    step_pages = max(1, min(pages, places))
    return max(1, min(rows, places // step_pages)), step_pages


def _is_capturing(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())
