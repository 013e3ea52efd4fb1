"""One library for every torch: a C interface that loads, and refuses, without torch and GPU."""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native_build
import pytest
from seatrial_kernels import native

INDEX_STORE = (
    *([native.POINTER] * 6),
    *([native.INT64] * 4),
    native.FLOAT,
    *([native.INT] * 5),
    native.STREAM,
)


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


def test_it_loads_without_torch(built: Path) -> None:
    """In a process without torch every function of the operations is found and can be called."""
    program = f"""
import ctypes, sys
library = ctypes.CDLL({str(built / native_build.LIBRARY)!r})
library.seatrial_error_string.restype = ctypes.c_char_p
assert library.seatrial_error_string(0) == b"no error"
for name in sys.argv[1:]:
    getattr(library, name)
assert "torch" not in sys.modules
"""
    names = re.findall(
        r'extern "C" SEATRIAL_EXPORT [\w\s*]+?(\w+)\(',
        "".join(path.read_text() for path in native_build.SOURCES.glob("*/*.cu")),
    )
    assert {"seatrial_check_device", "seatrial_index_store"} <= set(names)
    subprocess.run([sys.executable, "-S", "-c", program, *names], check=True)


def test_without_a_gpu_a_call_says_so(loaded: ctypes.CDLL) -> None:
    """One sentence: what was called, what is missing."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("not run: this machine has a GPU")
    with pytest.raises(native.NativeError, match=r"^seatrial_check_device: CUDA error .* needs? a"):
        native.check_device()
    store = native.function("seatrial_index_store", *INDEX_STORE)
    store(*[0] * len(INDEX_STORE))  # no keys: nothing to launch
    with pytest.raises(native.NativeError, match=r"^seatrial_index_store: CUDA error .* needs? a"):
        store(*[1 if kind is native.INT64 else 0 for kind in INDEX_STORE[:11]], 1, 32, 0, 0, 0, 0)


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


def test_what_is_compiled_reaches_the_builds_description(
    loaded: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build with the library is for its cards and has the patches and dtypes of CUDA."""
    from seatrial_kernels import describe

    monkeypatch.setattr(describe, "version", lambda name: "1")
    told: dict[str, Any] = describe.description()
    assert told["architectures"] == ["sm_90", "sm_120"]
    assert set(told["supported_index_key_dtypes"]) == {"fp8_e4m3", "bf16"}
    assert told["index_key_bytes_per_token"] == {"fp8_e4m3": 33.0, "bf16": 64.0}
    assert "index_store" in told["patches"]
    assert "cpu_dsa" not in told["patches"]
    assert {512, 1024} <= set(told["supported_index_topk"])
    with monkeypatch.context() as without:
        without.setattr(native, "description", dict)
        assert describe.description()["architectures"] == ["cpu"]


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
