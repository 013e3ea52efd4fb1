"""The wheel says what it holds, and holds CUDA only where a compiler was named."""

import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import native_build
import pytest
import toolchain

MakeWheel = Callable[..., Path]


def test_without_a_compiler_it_is_pure(make_wheel: MakeWheel) -> None:
    """Whatever native_build.py left in the checkout."""
    made = make_wheel()
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    assert "seatrial_kernels/native.py" in names
    assert "seatrial_kernels.pth" in names
    assert not [name for name in names if name.endswith((".so", "native.json", ".cu"))]


def test_with_a_compiler_it_is_for_linux_and_holds_the_library(cuda_wheel: Path) -> None:
    """Compiled when it is made, described inside, and tagged for what it is."""
    assert cuda_wheel.name.endswith("-py3-none-linux_x86_64.whl")
    held = zipfile.ZipFile(cuda_wheel)
    assert held.read(f"seatrial_kernels/{native_build.LIBRARY}")[:4] == b"\x7fELF"
    told = json.loads(held.read(f"seatrial_kernels/{native_build.DESCRIPTION}"))
    assert told["source_sha256"] == native_build.source_sha256()
    assert told["nvcc"] == native_build.version(toolchain.toolchain() / "bin/nvcc")


@pytest.mark.parametrize("setting", ["nvcc=/absent/nvcc", "ncc=find"])
def test_a_wrong_setting_makes_no_wheel(make_wheel: MakeWheel, setting: str) -> None:
    """A wheel without CUDA must not come of a misspelt wish for one."""
    with pytest.raises(subprocess.CalledProcessError):
        make_wheel(f"--config-settings={setting}")
