"""What the tests and benchmarks of every operation share: hostile memory, and failures that tell.

Nothing here is imported when serving.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch

REPEATS = 20


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Return memory that shows when it is read or left alone: NaN, or all bits set but one."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return made.fill_(float("nan"))
    made.view(torch.uint8).fill_(0x7F)  # NaN in e4m3; far outside of any index
    return made


def shuffled_pages(pages: int, draw: torch.Generator) -> torch.Tensor:
    """Return the pages' numbers in an order of their own, int64 [pages]."""
    return torch.randperm(pages, generator=draw)


def lengths_around(k: int) -> list[int]:
    """Return the lengths at which a selection of ``k`` changes its way."""
    return sorted({0, 1, k - 1, k, k + 1})


def worst(found: torch.Tensor, wanted: torch.Tensor, tolerance: torch.Tensor | float) -> str | None:
    """Return None if ``found`` is within ``tolerance`` of ``wanted`` everywhere, else a sentence.

    Both have the same shape; NaN equals NaN, and inf the same inf. The sentence names the worst
    position and both values.
    """
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if found.numel() == 0:
        return None
    a, b = found.detach().cpu().double(), wanted.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    excess = (a - b).abs() - torch.as_tensor(tolerance).cpu().double()
    excess = torch.where(same, -torch.inf, torch.where(excess.isnan(), torch.inf, excess))
    at = int(excess.argmax())
    if not excess.flatten()[at] > 0:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
    wrong = int((excess > 0).sum())
    return (
        f"{wrong} of {a.numel()} values are wrong, worst at {index}: "
        f"{a.flatten()[at].item():.9g} instead of {b.flatten()[at].item():.9g}"
    )


def checkpoint_tensors(folder: Path, pattern: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint whose names the regular expression matches, on the CPU.

    Raises
    ------
    FileNotFoundError
        When the folder has no such tensor: a run on real weights must not be a run on none.
    """
    from safetensors import safe_open

    found = False
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - it is no dictionary
                if re.search(pattern, name):
                    found = True
                    yield name, checkpoint.get_tensor(name)
    if not found:
        raise FileNotFoundError(f"no tensor in {folder}/*.safetensors has a name like {pattern}")
