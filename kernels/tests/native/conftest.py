"""These tests compile: they need the sources, and run with a Python that has no torch."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests out where only the tests lie, as on a rehearsal's host."""
    return None if (KERNELS / "csrc").is_dir() else True


MakeWheel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_wheel(tmp_path_factory: pytest.TempPathFactory) -> MakeWheel:
    """Return ``make(*options)``: the wheel, made as role build makes it, without an index."""

    def make(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--isolated", "wheel", "--quiet", "--no-index"),
                *("--no-deps", "--no-build-isolation", *options),
                *(f"--wheel-dir={folder}", str(KERNELS)),
            ],
            check=True,
        )
        (made,) = folder.glob("*.whl")
        return made

    return make


@pytest.fixture(scope="session")
def cuda_wheel(make_wheel: MakeWheel) -> Path:
    """Return the wheel with what the locked compiler makes of this checkout."""
    import toolchain

    return make_wheel(f"--config-settings=nvcc={toolchain.toolchain() / 'bin/nvcc'}")


@pytest.fixture(scope="session")
def built(cuda_wheel: Path) -> Path:
    """Return the folder seatrial_kernels of that wheel, unpacked."""
    with zipfile.ZipFile(cuda_wheel) as held:
        held.extractall(cuda_wheel.parent)
    return cuda_wheel.parent / "seatrial_kernels"
