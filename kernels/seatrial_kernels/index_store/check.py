"""Whether a cache holds what the reference says, and nothing else: for tests and benchmarks."""

import torch

from seatrial_kernels.index_store import reference as ref
from seatrial_kernels.testing import worst

POISON = 0x7F
# Rounding of the transform in float32, as a share of the largest value of a key.
ROUNDING = 2e-6


def fault(wanted: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> str | None:
    """Return what is wrong with a ``cache`` that was all POISON before the call, or None.

    The values: half a step of the dtype around ``wanted`` [N, 128] float64, which is not rounded,
    and float32's own rounding. Everything outside of ``slots`` [N]: as it was.
    """
    wanted, slots, cache = wanted.cpu(), slots.cpu(), cache.cpu()
    is_kept = (slots >= 0) & (slots < len(cache) * ref.PAGE)
    wanted, slots = wanted[is_kept], slots[is_kept]
    found = ref.stored_keys(cache, slots)
    largest = wanted.abs().amax(-1, keepdim=True)
    if cache.shape[1] == ref.PAGE_BYTES["fp8_e4m3"]:
        scale = ref.scales(wanted)[:, None]
        step = torch.exp2((wanted / scale).abs().clamp_min(2**-6).log2().floor() - 3) * scale
        wrong = worst(ref.stored_scales(cache, slots), scale[:, 0], scale[:, 0] * ROUNDING)
        if wrong:
            return f"scales: {wrong}"
    else:
        step = torch.exp2(wanted.abs().clamp_min(2**-126).log2().floor() - 7)
    wrong = worst(found, wanted, step / 2 * (1 + 1e-5) + ROUNDING * largest)
    return f"values: {wrong}" if wrong else touched(cache, slots)


def touched(cache: torch.Tensor, slots: torch.Tensor) -> str | None:
    """Return where ``cache``, on the CPU, lost its poison outside of ``slots``, or None."""
    clean = cache.clone()
    if cache.shape[1] == ref.PAGE_BYTES["fp8_e4m3"]:
        values = clean[:, : ref.PAGE * ref.DIM].view(len(cache), ref.PAGE, ref.DIM)
        scales = clean[:, ref.PAGE * ref.DIM :].view(len(cache), ref.PAGE, ref.SCALE_BYTES)
        for part in (values, scales):
            part[slots // ref.PAGE, slots % ref.PAGE] = POISON
    else:
        clean.view(-1, 2 * ref.DIM)[slots] = POISON
    lost = (clean != POISON).nonzero()
    if len(lost) == 0:
        return None
    return f"{len(lost)} bytes outside of the slots were written, first at {lost[0].tolist()}"
