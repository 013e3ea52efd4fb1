"""The public kernels that ours are timed beside, compiled from the sglang that is installed.

    python benchmarks/peers.py OP FOLDER [--arch sm_90a] [--nvcc PATH]

`peers/<op>.cu` includes SGLang's source and gives it a C function; nothing of SGLang is kept here.
Where there is no sglang, a folder with libraries made elsewhere will do (run.py --peers).
"""

import argparse
import ctypes
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build

folder = Path.home() / ".cache/seatrial/peers"


def main() -> None:
    """Compile one."""
    parser = argparse.ArgumentParser(description="Compile a public kernel for the benchmarks.")
    parser.add_argument("op", choices=sorted(path.stem for path in HERE.glob("peers/*.cu")))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--nvcc", type=Path)
    given = parser.parse_args()
    make(given.op, given.folder, given.arch, given.nvcc)


@cache
def library(op: str) -> ctypes.CDLL:
    """Return the public kernel of an operation, compiled for this GPU if it is not there yet.

    Raises:
        ModuleNotFoundError: it is not there, and neither is sglang.
    """
    import torch

    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}a"
    made = folder / f"peer_{op}_{arch}.so"
    if not made.is_file():
        make(op, folder, arch)
    return ctypes.CDLL(str(made))


def address(tensor: Any) -> ctypes.c_void_p:
    """Return a tensor's address as an argument."""
    return ctypes.c_void_p(tensor.data_ptr())


def single(value: float) -> ctypes.c_float:
    """Return a number as an argument of type float."""
    return ctypes.c_float(value)


def stream() -> ctypes.c_void_p:
    """Return the current stream as an argument."""
    import torch

    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def make(op: str, to: Path, arch: str, nvcc: Path | None = None) -> None:
    """Compile `peers/<op>.cu` with the flags of SGLang's own compiler calls."""
    jit, ffi = package("sglang") / "kernels/jit", package("tvm_ffi")
    compiler = native_build.find_nvcc(nvcc)
    to.mkdir(parents=True, exist_ok=True)
    native_build.run(
        *(compiler, "-shared", "-cudart=static", "-O3", "-std=c++20", "-Xcompiler=-fPIC"),
        *("--expt-relaxed-constexpr", f"-DSGL_CUDA_ARCH={int(arch.strip('sm_a')) * 10}"),
        *(f"-gencode=arch=compute_{arch[3:]},code={arch}", *native_build.libraries(compiler)),
        *(f"-I{place}" for place in (jit / "include", jit / "csrc", ffi / "include")),
        *("-o", to / f"peer_{op}_{arch}.so", HERE / f"peers/{op}.cu"),
    )


def package(name: str) -> Path:
    """Return where a package lies, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed, and {folder} has no library for it")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
