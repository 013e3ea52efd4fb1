"""What an index key is, and how it lies in the paged cache: the definition, in float64.

DeepSeek-V4's indexer as SGLang 0.5.23 serves it (`fused_norm_rope_indexer`): RMSNorm, then RoPE on
the last 64 of 128 dimensions in interleaved pairs, then a normalised Hadamard transform, then
storage. N is the number of keys, P of pages; a page holds 64 keys.
"""

import torch

DIM, ROTATED, PAGE = 128, 64, 64
E4M3_MAX, SMALLEST = 448.0, 1e-4
SCALE_BYTES = 4
# Bytes of a page: 64 x 128 values, then 64 fp32 scales; or 64 x 128 values of 2 bytes.
PAGE_BYTES = {"fp8_e4m3": PAGE * (DIM + SCALE_BYTES), "bf16": PAGE * DIM * 2}


def reference_index_keys(
    keys: torch.Tensor,
    weight: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return the index keys [N, 128], float64, before they are rounded for storage.

    ``keys`` [N, 128] and ``weight`` [128] of any floating dtype, ``rotations`` [positions, 64] of
    (cos, sin) pairs, ``positions`` [N]. A key with a value that is not finite, or whose sum of
    squares leaves float32, is NaN throughout: it shows, where SGLang stores 1e-4 or 0.
    """
    x = keys.double()
    squares = x.square().sum(-1, keepdim=True)
    x = x / (squares / DIM + eps).sqrt() * weight.double()
    pairs = torch.view_as_complex(x[:, DIM - ROTATED :].reshape(len(x), -1, 2))
    turns = torch.view_as_complex(rotations.double()[positions].reshape(len(x), -1, 2))
    turned = torch.view_as_real(pairs * turns).reshape(len(x), ROTATED)
    x = torch.cat([x[:, : DIM - ROTATED], turned], -1) @ hadamard(x.device)
    return torch.where(squares.float().isfinite(), x, torch.nan)


def hadamard(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the normalised Hadamard matrix [128, 128] in Sylvester's order, float64; symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < DIM:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / DIM**0.5


def scales(index_keys: torch.Tensor) -> torch.Tensor:
    """Return the fp8 scale [N] of each key, float64: its largest value becomes 448."""
    return index_keys.abs().amax(-1).clamp_min(SMALLEST) / E4M3_MAX


def reference_index_store(
    index_keys: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor
) -> None:
    """Store ``index_keys`` [N, 128] float64 at ``slots`` [N] of ``cache`` [P, PAGE_BYTES], uint8.

    A slot outside of the cache is skipped. The bytes of a page say which layout it is.
    """
    for key, scale, slot in zip(index_keys, scales(index_keys), slots.tolist(), strict=True):
        page, row = divmod(slot, PAGE)
        if not 0 <= slot < len(cache) * PAGE:
            continue
        if cache.shape[1] == PAGE_BYTES["bf16"]:
            cache[page, row * 2 * DIM :][: 2 * DIM] = key.to(torch.bfloat16).view(torch.uint8)
            continue
        value = (key / scale).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
        cache[page, row * DIM :][:DIM] = value.view(torch.uint8)
        at = PAGE * DIM + row * SCALE_BYTES
        cache[page, at : at + SCALE_BYTES] = scale.float().reshape(1).view(torch.uint8)


def stored_keys(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what ``cache`` [P, PAGE_BYTES] holds at ``slots`` [N], as float64 [N, 128]."""
    pages, rows = slots // PAGE, slots % PAGE
    if cache.shape[1] == PAGE_BYTES["bf16"]:
        return cache.view(torch.bfloat16).reshape(-1, PAGE, DIM)[pages, rows].double()
    values = cache[:, : PAGE * DIM].reshape(-1, PAGE, DIM)[pages, rows]
    return values.view(torch.float8_e4m3fn).double() * stored_scales(cache, slots)[:, None]


def stored_scales(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the scales that an fp8 ``cache`` holds at ``slots`` [N], as float64 [N]."""
    tail = cache[:, PAGE * DIM :].contiguous().view(torch.float32)
    return tail[slots // PAGE, slots % PAGE].double()
