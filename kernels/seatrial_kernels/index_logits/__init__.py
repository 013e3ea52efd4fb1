"""Score paged index keys, fp8 or bf16, for a decode step or a prefill.

``reference.py`` says what a score is. The kernel runs on the current stream, reads the lengths on
the GPU, allocates nothing, and can be captured in a CUDA graph, whatever the lengths at replay.
What it costs depends on the keys that rows have, and not on how many they could have.
"""

import torch

from seatrial_kernels import native
from seatrial_kernels.index_logits.reference import HEADS
from seatrial_kernels.index_logits.torch_scores import paged_scores
from seatrial_kernels.index_store.reference import DIM, PAGE, PAGE_BYTES
from seatrial_kernels.topk import topk_transform

MOST_NEXT_N = 4
# Rows that a prefill scores together.
GROUP = 8
# How fp8 keys are multiplied: as the device does it best; made f16 first, which is exact; or as
# they are, which sm_90 emulates. The latter two are for tests and benchmarks.
WAYS = {"by device": 0, "as f16": 1, "as fp8": 2}
BUDGET_BYTES = 256 * 2**20

_logits = native.function(
    "seatrial_index_logits",
    *(native.POINTER,) * 6,
    *(native.INT64,) * 3,
    *(native.INT,) * 9,
    native.STREAM,
)


def decode_logits(  # noqa: PLR0913 - six tensors, and four to tell how
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    *,
    next_n: int = 1,
    skip: int = 0,
    is_settled: bool = False,
    way: str = "by device",
) -> None:
    """Write the scores of each row's keys into ``out``; beyond its length nothing is written.

    Parameters
    ----------
    queries: [R, 64, 128] e4m3, or bf16 where the keys are; their scales are in the weights
    cache: [pages, 64 * 132] uint8 for fp8 keys (64 x 128 values, then 64 fp32 scales), or
        [pages, 64 * 256] for bf16
    weights: [R, 64] fp32
    lengths: [R] int32, on the GPU; below 0 counts as 0, and beyond W, or what the page table
        covers, as that
    page_table: [R, P] int32, rows may be strided; entries beyond a row's length may be anything
    out: [R, W] fp32, rows may be strided
    next_n: rows of a request, 1 to 4, which follow one another; the first one's page table counts
        for all, and their keys are read once
    skip: rows of up to so many keys are left out: a selection of k takes all k there
    is_settled: whether neither the kernel queued just before, nor one that may still run beside
        that, writes lengths or page table: then these are read while it ends
    way: one of WAYS

    Raises
    ------
    ValueError
        When a tensor is not like that, or they are not on one GPU.
    NativeError
        When the kernels are not there, or have no code for this GPU.
    """
    if not 1 <= next_n <= MOST_NEXT_N:
        raise ValueError(f"index_logits: next_n must be 1 to {MOST_NEXT_N}, not {next_n}")
    if len(queries) % next_n:
        raise ValueError(
            f"index_logits: {len(queries)} rows are no whole number of requests of {next_n}"
        )
    _queue((queries, cache, weights, lengths, page_table, out), next_n, skip, is_settled, way)


def prefill_logits(  # noqa: PLR0913 - as decode_logits
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    *,
    skip: int = 0,
    is_settled: bool = False,
    way: str = "by device",
) -> None:
    """Like ``decode_logits``, for many rows of each request.

    Eight neighbouring rows share what they read as far as their page tables are equal, which is
    looked at on the GPU: rows of a request must agree in all entries up to the longest one's
    length, or they are taken for rows of several.
    """
    _queue((queries, cache, weights, lengths, page_table, out), GROUP, skip, is_settled, way)


def prefill_topk(  # noqa: PLR0913 - as decode_logits and topk_transform
    queries: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    *,
    width: int,
    budget_bytes: int = BUDGET_BYTES,
    raw: torch.Tensor | None = None,
    ordered: bool = False,
) -> None:
    """Write where the k best keys of each row lie into ``out`` [R, k], scoring by chunks of rows.

    The scores of a chunk are all that is allocated, at most ``budget_bytes``, whatever R and
    ``width`` are; at least one row's. ``width`` is the longest length that a row may have. For the
    rest see ``prefill_logits`` and ``topk_transform``.
    """
    rows, k = len(queries), out.shape[1]
    chunk = rows_of_chunk(rows, width, budget_bytes)
    scores = torch.empty(chunk, stride_of(width), dtype=torch.float32, device=queries.device)
    scores = scores[:, :width]
    for first in range(0, rows, max(chunk, 1)):
        now = slice(first, first + chunk)
        asked = queries[now]
        part = scores[: len(asked)]
        given = (asked, cache, weights[now], lengths[now], page_table[now])
        prefill_logits(*given, part, skip=k)
        topk_transform(
            part,
            lengths[now],
            page_table[now],
            out[now],
            PAGE,
            None if raw is None else raw[now],
            ordered=ordered,
        )


def scores_for_sglang(  # noqa: PLR0913, PLR0917 - SGLang's eight, and whether it is a prefill
    is_prefill: bool,
    queries: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    schedule: object,
    width: int,
    is_clean: bool = False,
) -> torch.Tensor:
    """Return the scores [R, width] as SGLang's paged MQA logits functions do.

    ``queries`` [R, 1, 64, 128], ``pages`` [pages, 64, 1, bytes of a key]; see ``decode_logits``.
    What lies beyond a row's length is anything. On a CPU, bf16 keys are scored in PyTorch.
    """
    if not queries.is_cuda:
        given = (queries, pages, weights, lengths, page_table, schedule, width, is_clean)
        return paged_scores(*given)
    rows = len(queries)
    out = torch.empty(rows, stride_of(width), dtype=torch.float32, device=queries.device)
    out = out[:, :width]
    cache = pages.view(torch.uint8).flatten(1)
    run = prefill_logits if is_prefill else decode_logits
    run(queries[:, 0], cache, weights, lengths.reshape(rows), page_table, out)
    return out


def stride_of(width: int) -> int:
    """Return the places that a row of ``width`` scores takes; each begins at a multiple of 16."""
    return -(-max(width, 1) // 4) * 4


def rows_of_chunk(rows: int, width: int, budget_bytes: int) -> int:
    """Return how many rows are scored at once: whole groups that fit the budget, or what does.

    Raises
    ------
    ValueError
        When not even one row does.
    """
    fitting = budget_bytes // (4 * stride_of(width))
    if fitting < 1:
        raise ValueError(
            f"index_logits: a row of {width} scores takes {4 * stride_of(width)} bytes, "
            f"and budget_bytes is {budget_bytes}"
        )
    return min(rows, fitting - fitting % GROUP if fitting >= GROUP else fitting)


def _queue(
    tensors: tuple[torch.Tensor, ...], unit_rows: int, skip: int, is_settled: bool, way: str
) -> None:
    queries, cache, weights, lengths, page_table, out = tensors
    rows = len(queries)
    if queries.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(
            f"index_logits: queries must be float8_e4m3fn or bfloat16, not {queries.dtype}"
        )
    _check("queries", queries, queries.dtype, (rows, HEADS, DIM))
    _check("weights", weights, torch.float32, (rows, HEADS))
    _check("lengths", lengths, torch.int32, (rows,))
    _check("cache", cache, torch.uint8, (len(cache), cache.shape[-1]))
    bits = {PAGE_BYTES["fp8_e4m3"]: 8, PAGE_BYTES["bf16"]: 16}.get(cache.shape[1])
    if bits is None:
        raise ValueError(
            f"index_logits: a page of cache has {cache.shape[1]} bytes; it should have "
            f"{PAGE_BYTES['fp8_e4m3']} (fp8_e4m3) or {PAGE_BYTES['bf16']} (bf16)"
        )
    if bits == 8 and queries.dtype != torch.float8_e4m3fn:
        raise ValueError("index_logits: fp8 keys need fp8 queries")
    _check_rows("page_table", page_table, torch.int32, rows)
    _check_rows("out", out, torch.float32, rows)
    if skip < 0:
        raise ValueError(f"index_logits: skip must be at least 0, not {skip}")
    if any(tensor.device != queries.device for tensor in tensors) or not queries.is_cuda:
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise ValueError(f"index_logits: all tensors must be on one GPU, not on {devices}")
    with torch.cuda.device(queries.device):
        _logits(
            *(tensor.data_ptr() for tensor in tensors),
            page_table.stride(0),
            out.stride(0),
            len(cache),
            rows,
            out.shape[1],
            page_table.shape[1],
            unit_rows,
            skip,
            bits,
            queries.dtype.itemsize * 8,
            WAYS[way],
            is_settled,
            torch.cuda.current_stream().cuda_stream,
        )


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"index_logits: {name} must be {str(dtype).removeprefix('torch.')} {list(shape)}, "
            f"not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    if not tensor.is_contiguous() or (tensor.data_ptr() % 16 != 0 and name != "lengths"):
        raise ValueError(f"index_logits: {name} must be contiguous and begin at a multiple of 16")


def _check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, rows: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != 2 or len(tensor) != rows:
        raise ValueError(
            f"index_logits: {name} must be {str(dtype).removeprefix('torch.')} [{rows}, ...], "
            f"not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"index_logits: a row's {name} must lie side by side")
