"""The entry points that SGLang calls in each of its processes, one per patch.

SGLang only logs an exception of a plugin and then serves without it. A patch that was asked for and
cannot be applied must not become a healthy server without the patch: it ends the process.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import NoReturn

GROUP = "sglang.srt.plugins"

# Imported only when selected: an error in one patch is then reported under its name.
PATCHES = {
    "cpu_engine": "seatrial_kernels.cpu_engine.patch",
    "cpu_dsa": "seatrial_kernels.sparse_attention.patch",
    "pd_contract": "seatrial_kernels.patches.pd_contract",
    "wide_index_topk": "seatrial_kernels.patches.wide_index_topk",
    "index_keys_bf16": "seatrial_kernels.patches.index_keys_bf16",
    "index_logits_budget": "seatrial_kernels.patches.index_logits_budget",
    "index_logits": "seatrial_kernels.patches.index_logits",
    "index_store": "seatrial_kernels.patches.index_store",
    "topk": "seatrial_kernels.patches.topk",
    "topk_v2_sm120": "seatrial_kernels.patches.topk_v2_sm120",
}
# What a build of each platform can run.
PATCHES_OF = {
    "cpu": ("cpu_engine", "cpu_dsa", "pd_contract"),
    "cuda": tuple(name for name in PATCHES if not name.startswith("cpu_")),
}
# Two answers to one question.
EXCLUDE_EACH_OTHER = (("topk", "topk_v2_sm120"), ("index_logits", "index_keys_bf16"))


class PatchError(Exception):
    """A patch cannot be applied; the message is one sentence that says what to change."""


def selected() -> tuple[str, ...]:
    """Return the names in SGLANG_PLUGINS, in their order.

    SGLang takes an empty list for "all of them"; here it means none.
    """
    names = os.environ.get("SGLANG_PLUGINS", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def active() -> tuple[str, ...]:
    """Return the names in SGLANG_PLUGINS that are patches of this package."""
    return tuple(name for name in selected() if name in PATCHES)


def stop(patch: str, error: Exception) -> NoReturn:
    """Print one sentence and end the process at once, past every handler that would swallow it."""
    reason = str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
    print(f"seatrial-kernels: patch {patch} stops this server: {reason}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def check_selection(names: tuple[str, ...], known: set[str]) -> None:
    """Raise PatchError if SGLANG_PLUGINS names what nobody has, or two that exclude each other.

    SGLang passes over a name that it does not find.
    """
    for name in names:
        if name not in known:
            raise PatchError(
                f"SGLANG_PLUGINS names {name}, which no installed package has; "
                f"there are {', '.join(sorted(known))}"
            )
    for one, other in EXCLUDE_EACH_OTHER:
        if one in names and other in names:
            raise PatchError(f"{one} and {other} replace the same kernel; choose one")


def _apply(patch: str) -> None:
    names = selected()
    if patch not in names:
        return
    try:
        check_selection(names, {entry.name for entry in entry_points(group=GROUP)})
        importlib.import_module(PATCHES[patch]).apply()
    except Exception as error:  # noqa: BLE001 - any failure stops the server
        stop(patch, error)


# What the entry points in pyproject.toml name.
cpu_engine: Callable[[], None] = partial(_apply, "cpu_engine")
cpu_dsa: Callable[[], None] = partial(_apply, "cpu_dsa")
pd_contract: Callable[[], None] = partial(_apply, "pd_contract")
wide_index_topk: Callable[[], None] = partial(_apply, "wide_index_topk")
index_keys_bf16: Callable[[], None] = partial(_apply, "index_keys_bf16")
index_logits_budget: Callable[[], None] = partial(_apply, "index_logits_budget")
index_logits: Callable[[], None] = partial(_apply, "index_logits")
index_store: Callable[[], None] = partial(_apply, "index_store")
topk: Callable[[], None] = partial(_apply, "topk")
topk_v2_sm120: Callable[[], None] = partial(_apply, "topk_v2_sm120")
