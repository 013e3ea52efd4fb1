"""Select the k best scores of each row and say where their entries lie, in one launch.

``reference.py`` says what is selected. The kernel runs on the current stream, reads the lengths on
the GPU, allocates nothing, and can be captured in a CUDA graph, whatever the lengths at replay.
"""

import torch

from seatrial_kernels import native
from seatrial_kernels.topk.reference import MOST, STEP

# How the kernel goes about it; 0 lets the shape decide. See topk.cu; others are for tests.
WAYS = {
    "by shape": 0,
    "2048 by 256": 1,
    "4096 by 256": 2,
    "4096 by 512": 3,
    "8192 by 256": 4,
    "8192 by 512": 5,
    "16384 by 512": 6,
    "long by 256": 7,
    "long by 512": 8,
    "long by 1024": 9,
    "split": 10,
}
# At most 264 chunks, each with k entries and 256 more that share the last bin, 8 bytes each.
WORKSPACE_BYTES = 4096 + 264 * (MOST + 256) * 8

_topk = native.function(
    "seatrial_topk",
    native.POINTER,
    native.INT,
    *(native.POINTER,) * 5,
    *(native.INT64,) * 3,
    *(native.INT,) * 7,
    native.STREAM,
)
_workspaces: dict[tuple[int, int], torch.Tensor] = {}


def topk_transform(  # noqa: PLR0913 - SGLang's six, and three to tell how
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    out: torch.Tensor,
    page_size: int = 64,
    raw: torch.Tensor | None = None,
    *,
    ordered: bool = False,
    workspace: torch.Tensor | None = None,
    way: str = "by shape",
) -> None:
    """Write the k best of each row's scores into ``out``, and -1 where a row has fewer.

    Of equal scores at the end, any are taken, and the order is free and may differ from call to
    call; with ``ordered``, the lowest indices are, and they ascend. NaN ranks below -inf.

    Parameters
    ----------
    scores: [R, W] fp32 or bf16; rows may be strided, by a multiple of 16 bytes. What lies beyond
        a row's length is not read
    lengths: [R] int32, on the GPU; below 0 counts as 0, and beyond W, or what the page table
        covers, as that
    page_table: [R, P] int32, rows may be strided; entry i lies at table[i // size] * size +
        i % size. None: ``out`` has the indices as they are
    out: [R, k] int32; k is a multiple of 64 up to 2048
    page_size: entries in a page, a power of 2
    raw: [R, k] int32, the indices before the transform, or None
    ordered: equal scores to the lowest index, indices ascending, the same bits every time; slower
    workspace: uint8, zero, for few long rows; WORKSPACE_BYTES are always enough, and it is left
        zero where it must be. Calls that may overlap need one each. None: one that is kept for
        each GPU and stream, made at the first call outside of a graph; without any, such rows
        take another way
    way: one of WAYS

    Raises
    ------
    ValueError
        When a tensor is not like that, or they are not on one GPU.
    NativeError
        When the kernels are not there, or have no code for this GPU.
    """
    rows, width = scores.shape
    k = out.shape[-1]
    _check_sizes(scores, k, page_size)
    _check("lengths", lengths, (rows,))
    _check("out", out, (rows, k))
    tensors = [scores, lengths, out]
    if raw is not None:
        _check("raw", raw, (rows, k))
        tensors.append(raw)
    if page_table is not None:
        _check("page_table", page_table, (rows, page_table.shape[-1]), is_strided=True)
        tensors.append(page_table)
    if workspace is not None:
        tensors.append(workspace)
    _check_device(tensors)
    stride = scores.stride(0) if rows > 1 else -(-width // 8) * 8
    if stride * scores.itemsize % 16 or scores.data_ptr() % 16 or scores.stride(1) != 1:
        raise ValueError(
            "topk: a row's scores must lie side by side and begin at a multiple of 16 bytes"
        )
    with torch.cuda.device(scores.device):
        stream = torch.cuda.current_stream().cuda_stream
        if workspace is None:
            workspace = _workspace(scores.device, stream)
        _topk(
            scores.data_ptr(),
            scores.dtype == torch.bfloat16,
            lengths.data_ptr(),
            None if page_table is None else page_table.data_ptr(),
            out.data_ptr(),
            None if raw is None else raw.data_ptr(),
            None if workspace is None else workspace.data_ptr(),
            0 if workspace is None else workspace.numel(),
            stride,
            0 if page_table is None else page_table.stride(0),
            rows,
            width,
            k,
            page_size,
            0 if page_table is None else page_table.shape[1],
            ordered,
            WAYS[way],
            stream,
        )


def _check_sizes(scores: torch.Tensor, k: int, page_size: int) -> None:
    if scores.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"topk: scores must be float32 or bfloat16, not {scores.dtype}")
    if k % STEP or not 0 < k <= MOST:
        raise ValueError(f"topk: k must be a multiple of {STEP} up to {MOST}, not {k}")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"topk: page_size must be a power of 2, not {page_size}")


def _check_device(tensors: list[torch.Tensor]) -> None:
    device = tensors[0].device
    if device.type != "cuda" or any(tensor.device != device for tensor in tensors):
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise ValueError(f"topk: all tensors must be on one GPU, not on {devices}")


def _workspace(device: torch.device, stream: int) -> torch.Tensor | None:
    key = (device.index, stream)
    if key not in _workspaces:
        if torch.cuda.is_current_stream_capturing():
            return None
        _workspaces[key] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[key]


def _check(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], *, is_strided: bool = False
) -> None:
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"topk: {name} must be int32 {list(shape)}, "
            f"not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    is_right = tensor.stride(-1) == 1 or tensor.shape[-1] < 2
    if not (is_right if is_strided else tensor.is_contiguous()):
        raise ValueError(f"topk: {name} must be contiguous")
