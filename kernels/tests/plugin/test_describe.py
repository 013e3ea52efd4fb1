"""What a build may promise follows from what was compiled and from the patches."""

from typing import Any

import pytest
from seatrial_kernels import describe, native, selection
from seatrial_kernels.plugin import PATCHES_OF


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for the version of the installed wheel."""
    monkeypatch.setattr(describe, "version", lambda name: "0.0.0")


def told(monkeypatch: pytest.MonkeyPatch, **compiled: Any) -> dict[str, Any]:
    """Return what the package says of itself with this native.json."""
    monkeypatch.setattr(native, "description", lambda: compiled)
    return describe.description()


def test_a_build_without_compiled_kernels_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of the spec's two keys needs the CPU's sparse attention."""
    found = told(monkeypatch)
    assert found["architectures"] == ["cpu"]
    assert found["patches"] == list(PATCHES_OF["cpu"])
    for key, supported in (
        ("index_topk", "supported_index_topk"),
        ("index_key_dtype", "supported_index_key_dtypes"),
    ):
        assert found["patches_needed"][key] == {"cpu_dsa": found[supported]}


def test_a_cuda_build_promises_what_its_kernels_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang has by itself needs no patch; all else names the one that it needs."""
    found = told(
        monkeypatch,
        architectures=["sm_90", "sm_120"],
        supported_index_topk=[64, 512, 1024, 2048],
        stored_index_key_dtypes=["fp8_e4m3", "bf16"],
    )
    assert found["patches"] == list(PATCHES_OF["cuda"])
    assert found["supported_index_topk"] == [64, 512, 1024, 2048]
    assert found["supported_index_key_dtypes"] == ["bf16", "fp8_e4m3"]
    assert found["index_key_bytes_per_token"] == {"fp8_e4m3": 33.0, "bf16": 64.0}
    assert found["patches_needed"] == {
        "index_topk": {"wide_index_topk": [64, 2048]},
        "index_key_dtype": {"index_keys_bf16": ["bf16"]},
    }


def test_kernels_that_declare_nothing_leave_what_sglang_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 and 1024, in fp8."""
    found = told(monkeypatch, architectures=["sm_120"])
    assert found["supported_index_topk"] == list(selection.STOCK_TOPK)
    assert found["supported_index_key_dtypes"] == ["fp8_e4m3"]
    assert found["patches_needed"]["index_topk"] == {"wide_index_topk": []}
