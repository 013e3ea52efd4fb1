"""Store index keys into the paged cache: norm, rotation, Hadamard transform, rounding, one launch.

``reference.py`` says what is computed. The kernel runs on the current stream, allocates nothing,
reads no length on the host, and can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch

from seatrial_kernels import native
from seatrial_kernels.index_store.reference import DIM, PAGE, PAGE_BYTES, ROTATED

_FORMATS = {PAGE_BYTES["fp8_e4m3"]: 0, PAGE_BYTES["bf16"]: 1}
_LISTS, _DECODE_PLAN, _EXTEND_PLAN = 0, 1, 2
_OVERLAP = 1
_PLAN_BYTES = 16

_store = native.function(
    "seatrial_index_store",
    *(native.POINTER,) * 6,
    *(native.INT64,) * 4,
    native.FLOAT,
    *(native.INT,) * 5,
    native.STREAM,
)


@dataclass(frozen=True)
class Plan:
    """SGLang 0.5.23's own plan of a step, which says a key's position, and whether there is one.

    Attributes
    ----------
    rows: [N, 16] uint8: its DecodePlan, or its CompressPlan. Both begin with the number of tokens
        up to the key's last one; a CompressPlan then names the row of ``slots`` that is the key's
    is_decode: which of the two; a decode row whose number ``ratio`` does not divide is no key
    ratio: tokens that a key stands for, a power of 2; its position is the number less the ratio
    """

    rows: torch.Tensor
    is_decode: bool
    ratio: int


def index_store(
    keys: torch.Tensor,
    weight: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor | Plan,
    slots: torch.Tensor,
    cache: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Store N keys, each at its slot; a slot or position out of bounds stores nothing.

    Parameters
    ----------
    keys: [N, 128] fp32 or bf16
    weight: [128], the norm's, of the keys' dtype
    rotations: [positions, 64] fp32, pairs of cos and sin
    positions: [N] int64, rows of ``rotations``; or a plan. A plan and its slots must not be
        written by the kernel queued just before, nor by one that may still run beside that
    slots: [N] int64, or as many as a CompressPlan points into; slot // 64 is the page, -1 skips
        the key. No two keys may have the same.
    cache: [pages, 64 * 132] uint8 for fp8 (64 x 128 values, then 64 fp32 scales), or
        [pages, 64 * 256] uint8 for bf16

    Raises
    ------
    ValueError
        When a tensor is not like that, or they are not on one GPU.
    NativeError
        When the kernels are not there, or have no code for this GPU.
    """
    slots_count = len(keys)
    if isinstance(positions, Plan):
        rows, ratio = positions.rows, positions.ratio
        source = _DECODE_PLAN if positions.is_decode else _EXTEND_PLAN
        slots_count = len(keys) if positions.is_decode else len(slots)
        _check("plan", rows, torch.uint8, (len(keys), _PLAN_BYTES))
    else:
        rows, source, ratio = positions, _LISTS, 1
        _check("positions", rows, torch.int64, (len(keys),))
    if keys.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"index_store: keys must be float32 or bfloat16, not {keys.dtype}")
    _check("keys", keys, keys.dtype, (len(keys), DIM))
    _check("weight", weight, keys.dtype, (DIM,))
    _check("rotations", rotations, torch.float32, (len(rotations), ROTATED))
    _check("slots", slots, torch.int64, (slots_count,))
    _check("cache", cache, torch.uint8, (len(cache), cache.shape[-1]))
    if cache.shape[1] not in _FORMATS:
        raise ValueError(
            f"index_store: a page of cache has {cache.shape[1]} bytes; it should have "
            f"{PAGE_BYTES['fp8_e4m3']} (fp8_e4m3) or {PAGE_BYTES['bf16']} (bf16)"
        )
    if not eps > 0:
        raise ValueError(f"index_store: eps must be over 0, not {eps}")
    if ratio < 1 or ratio & (ratio - 1):
        raise ValueError(f"index_store: ratio must be a power of 2, not {ratio}")
    tensors = (keys, weight, rotations, rows, slots, cache)
    if any(tensor.device != keys.device for tensor in tensors) or not keys.is_cuda:
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise ValueError(f"index_store: all tensors must be on one GPU, not on {devices}")
    with torch.cuda.device(keys.device):
        _store(
            *(tensor.data_ptr() for tensor in tensors),
            len(keys),
            len(slots),
            len(rotations),
            len(cache) * PAGE,
            eps,
            ratio,
            keys.dtype.itemsize * 8,
            _FORMATS[cache.shape[1]],
            source,
            _OVERLAP,
            torch.cuda.current_stream().cuda_stream,
        )


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"index_store: {name} must be {str(dtype).removeprefix('torch.')} {list(shape)}, "
            f"not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % 16 != 0:
        raise ValueError(f"index_store: {name} must be contiguous and begin at a multiple of 16")
