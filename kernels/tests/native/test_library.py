"""One library for every torch: a C interface that loads, and refuses, without torch and GPU."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import native_build
import pytest
from seatrial_kernels import native


@pytest.fixture
def loaded(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Return the library, loaded as the package loads its own."""
    monkeypatch.setattr(native, "LIBRARY", built / native_build.LIBRARY)
    monkeypatch.setattr(native, "DESCRIPTION", built / native_build.DESCRIPTION)
    native.library.cache_clear()
    native.description.cache_clear()
    yield native.library()
    native.library.cache_clear()
    native.description.cache_clear()


def test_it_needs_nothing_but_the_c_library(built: Path) -> None:
    """No torch, no CUDA runtime, no driver: so no version of them is asked for."""
    told = subprocess.run(
        ["readelf", "--dynamic", built / native_build.LIBRARY],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in told.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert needed


def test_it_loads_without_torch(loaded: ctypes.CDLL) -> None:
    """This very process has no torch, and the library answers."""
    assert "torch" not in sys.modules
    assert loaded.seatrial_error_string(0) == b"no error"


def test_without_a_gpu_a_call_says_so(loaded: ctypes.CDLL) -> None:
    """One sentence: what was called, what is missing."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("not run: this machine has a GPU")
    with pytest.raises(native.NativeError, match=r"^seatrial_check_device: CUDA error .* needs? a"):
        native.check_device()


def test_another_version_of_the_library_is_named(loaded: ctypes.CDLL) -> None:
    """A name that is not exported is not an AttributeError."""
    with pytest.raises(native.NativeError, match=r"has no seatrial_absent: .* build it anew$"):
        native.function("seatrial_absent", native.INT)(1)


def test_a_package_without_cuda_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pure wheel names the setting."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / native_build.LIBRARY)
    native.library.cache_clear()
    with pytest.raises(native.NativeError, match=r"built without CUDA; .*nvcc=find"):
        native.library()


def test_it_describes_itself(built: Path) -> None:
    """Compiler, targets and the digest of the sources, as build.json wants them."""
    told = json.loads((built / native_build.DESCRIPTION).read_text())
    assert told["nvcc"].startswith("13.0.")
    assert told["architectures"] == ["sm_90", "sm_120"]
    assert told["targets"] == ["sm_90a", "sm_120a"]
    assert told["source_sha256"] == native_build.source_sha256()


def test_a_compiler_error_is_shown(tmp_path: Path) -> None:
    """What nvcc says reaches whoever asked."""
    import toolchain

    (tmp_path / "op").mkdir()
    (tmp_path / "op/op.cu").write_text("this is not CUDA\n")
    with pytest.raises(native_build.BuildError, match=r"nvcc failed:\n.*op\.cu"):
        native_build.build(tmp_path, toolchain.toolchain() / "bin/nvcc", tmp_path)


def test_no_compiler_is_one_sentence(tmp_path: Path) -> None:
    """Before anything is compiled."""
    with pytest.raises(native_build.BuildError, match=r"^no nvcc: .*absent is no program"):
        native_build.find_nvcc(tmp_path / "absent")
