"""The entry points that SGLang calls in each of its processes, one per patch.

SGLang only logs an exception of a plugin and then serves without it. A patch that was asked for and
cannot be applied must not become a healthy server without the patch: it ends the process.
"""

import importlib
import os
import sys
from typing import NoReturn

# Imported only when selected: an error in one patch is then reported under its name.
PATCHES = {
    "cpu_engine": "seatrial_kernels.cpu_engine.patch",
    "cpu_dsa": "seatrial_kernels.sparse_attention.patch",
}


class PatchError(Exception):
    """A patch cannot be applied; the message is one sentence that says what to change."""


def cpu_engine() -> None:
    """Apply the patch ``cpu_engine``."""
    _apply("cpu_engine")


def cpu_dsa() -> None:
    """Apply the patch ``cpu_dsa``."""
    _apply("cpu_dsa")


def stop(patch: str, error: Exception) -> NoReturn:
    """Print one sentence and end the process at once, past every handler that would swallow it."""
    reason = str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
    print(f"seatrial-kernels: patch {patch} stops this server: {reason}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def _apply(patch: str) -> None:
    try:
        importlib.import_module(PATCHES[patch]).apply()
    except Exception as error:  # noqa: BLE001 - any failure stops the server
        stop(patch, error)
