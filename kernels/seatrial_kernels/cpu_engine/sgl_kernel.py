"""A stand-in for ``sgl_kernel`` on a CPU: the one operator that dense models reach, in PyTorch.

SGLang imports the other names when its modules load and never calls them for a dense model without
speculative decoding; a call says so. Header and reasons: ``startup.py``.
"""

from collections.abc import Callable
from typing import Never

import torch

if torch.version.cuda is not None:
    raise ImportError(
        "sgl_kernel is missing in a CUDA build of PyTorch: install sglang-kernel 0.4.10; "
        "the stand-in of seatrial-kernels is for CPU builds"
    )


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of new tokens into their requests' rows, in the order of the requests.

    ``req_pool_indices``, ``start_offset``, ``end_offset``: [requests]; ``req_to_token``:
    [rows, pool_len], changed in place; ``out_cache_loc``: [sum of end - start].
    """
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Never]:
    """Return a function that says that this operator has no CPU version here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> Never:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in in seatrial-kernels")

    return missing
