"""The compiled kernels: one shared library behind a plain C interface, called through ctypes.

The interface is raw device addresses, sizes and a stream: no type of torch's or Python's, so one
library serves every version of both. A call releases the GIL, costs a few microseconds on the host
and nothing in a CUDA graph.
"""

import ctypes
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libseatrial_kernels.so")
DESCRIPTION = LIBRARY.with_name("native.json")

POINTER, STREAM = ctypes.c_void_p, ctypes.c_void_p
INT, INT64, FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_float


class NativeError(Exception):
    """A compiled kernel is missing or was refused; the message is one sentence."""


@cache
def description() -> dict[str, Any]:
    """Return what was compiled (see native_build.py), or {} if nothing was."""
    if not (DESCRIPTION.is_file() and LIBRARY.is_file()):
        return {}
    told: dict[str, Any] = json.loads(DESCRIPTION.read_text())
    return told


@cache
def library() -> ctypes.CDLL:
    """Load the library; needs neither torch nor a GPU.

    Raises
    ------
    NativeError
        When it is not there or cannot be loaded.
    """
    if not LIBRARY.is_file():
        raise NativeError(
            f"{LIBRARY} is not there: this seatrial-kernels was built without CUDA; build the "
            "wheel with --config-settings nvcc=find, or run native_build.py in a checkout"
        )
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeError(f"{LIBRARY} cannot be loaded: {error}") from error
    loaded.seatrial_error_string.argtypes = [INT]
    loaded.seatrial_error_string.restype = ctypes.c_char_p
    loaded.seatrial_check_device.argtypes = []
    loaded.seatrial_check_device.restype = INT
    return loaded


def check_device() -> None:
    """Ask whether the library has code for this thread's current GPU, and wait for its context.

    A process that has not chosen its GPU yet would make one on the first.

    Raises
    ------
    NativeError
        When it has none, or there is no GPU or driver.
    """
    _raise_for("seatrial_check_device", library().seatrial_check_device())


def function(name: str, *argtypes: Any) -> Callable[..., None]:
    """Return the exported function ``int name(argtypes)``, which raises NativeError unless it is 0.

    The library is loaded and the name looked up at the first call, and only then.
    """

    @cache
    def symbol() -> Any:
        try:
            found = getattr(library(), name)
        except AttributeError as error:
            raise NativeError(
                f"{LIBRARY} has no {name}: it is of another version of this package; build it anew"
            ) from error
        found.argtypes, found.restype = list(argtypes), INT
        return found

    def call(*arguments: Any) -> None:
        code = symbol()(*arguments)
        if code:
            _raise_for(name, code)

    call.__name__ = name
    return call


def _raise_for(name: str, code: int) -> None:
    if code == 0:
        return
    words = library().seatrial_error_string(code).decode()
    targets = ", ".join(description().get("targets", [])) or "unknown targets"
    hint = {
        # cudaErrorNoDevice, cudaErrorInsufficientDriver
        100: "; the compiled kernels need a GPU",
        35: "; the compiled kernels need a newer NVIDIA driver, or there is none",
        # cudaErrorNoKernelImageForDevice
        209: f"; the library has code for {targets} only: build it for this GPU",
    }.get(code, "")
    raise NativeError(f"{name}: CUDA error {code}, {words}{hint}")
