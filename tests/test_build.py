"""A build is named by what it is made from, and says of itself what readers rely on."""

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.build import BuildError, build_digest, kernels_files, read_build

DESCRIPTION: dict[str, Any] = {
    "schema": 1,
    "digest": "0123456789abcdef",
    "platform": "cpu",
    "python": "3.11",
    "sglang": "0.5.23",
    "torch": "2.13.0+cpu",
    "kernels": {"version": "0.1.0", "sha256": "a" * 64},
    "lock_sha256": "b" * 64,
    "patches": ["cpu_engine", "cpu_dsa"],
    "patches_needed": {"index_topk": {"cpu_dsa": [512, 1024]}},
    "supported_index_topk": [512, 1024],
    "supported_index_key_dtypes": ["fp8_e4m3", "bf16", "fp32"],
    "index_key_bytes_per_token": {"fp8_e4m3": 33, "bf16": 64, "fp32": 128},
    "architectures": ["cpu"],
    "shared_libraries": ["libcurl.so.4"],
    "needed_by": {"libcurl.so.4": ["lib/python3.11/site-packages/mooncake/engine.so"]},
    "pruned": ["torch/test"],
    "size_bytes": 1_500_000_000,
}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Any]:
    """The inputs of a small build."""
    lock = tmp_path / "engine.lock"
    lock.write_text("sglang==0.5.23 --hash=sha256:00\n")
    package = tmp_path / "kernels" / "seatrial_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "kernels" / "pyproject.toml").write_text("[project]\n")
    return {
        "platform": "cpu",
        "python": "3.11",
        "root": "/opt/seatrial",
        "lock": lock,
        "kernels": tmp_path / "kernels",
    }


def test_same_inputs_give_the_same_name(inputs: dict[str, Any]) -> None:
    """Nothing but the inputs enters: neither time nor place."""
    name = build_digest(**inputs)
    assert name == build_digest(**inputs)
    assert len(name) == 16
    assert set(name) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("key", "value"), [("platform", "cuda13"), ("python", "3.12"), ("root", "/srv/seatrial")]
)
def test_each_setting_changes_the_name(inputs: dict[str, Any], key: str, value: str) -> None:
    """Two builds that differ in a setting never share a name."""
    assert build_digest(**inputs) != build_digest(**{**inputs, key: value})


def test_lock_and_kernels_change_the_name(inputs: dict[str, Any]) -> None:
    """The content of files counts, and so does their name."""
    names = {build_digest(**inputs)}
    inputs["lock"].write_text("sglang==0.5.24 --hash=sha256:00\n")
    names.add(build_digest(**inputs))
    source = inputs["kernels"] / "seatrial_kernels" / "__init__.py"
    source.write_text("A = 1\n")
    names.add(build_digest(**inputs))
    source.rename(source.with_name("other.py"))
    names.add(build_digest(**inputs))
    assert len(names) == 4


def test_tests_and_caches_of_the_kernels_do_not_change_the_name(inputs: dict[str, Any]) -> None:
    """What is not in the wheel makes no new build."""
    name = build_digest(**inputs)
    for path in (
        "tests/test_op.py",
        "benchmarks/op.py",
        "seatrial_kernels/__pycache__/op.cpython-311.pyc",
        "seatrial_kernels.egg-info/PKG-INFO",
        "seatrial_kernels/libseatrial_kernels.so",
        "seatrial_kernels/native.json",
        "benchmarks/run.py",
        "compile_gate/gate.py",
        "sanitize.py",
        "toolchain.py",
        ".mypy_cache/CACHEDIR.TAG",
    ):
        file = inputs["kernels"] / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    assert build_digest(**inputs) == name
    assert kernels_files(inputs["kernels"]) == ["pyproject.toml", "seatrial_kernels/__init__.py"]


def test_missing_inputs_are_named(inputs: dict[str, Any]) -> None:
    """The message says which file, and what writes it."""
    with pytest.raises(BuildError, match=r"no lock file .*lock\.py writes it"):
        build_digest(**{**inputs, "lock": inputs["lock"].with_name("absent.lock")})
    with pytest.raises(BuildError, match=r"no pyproject\.toml"):
        build_digest(**{**inputs, "kernels": inputs["kernels"].with_name("absent")})


def test_a_description_is_read_as_it_was_written() -> None:
    """What goes in comes out, the key `schema` included."""
    build = read_build(json.dumps(DESCRIPTION))
    assert build.model_dump(by_alias=True) == DESCRIPTION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema: Input should be 1"),
        ({"flavour": "nightly"}, "flavour: Extra inputs are not permitted"),
        ({"digest": "short"}, "digest: String should match"),
        ({"needed_by": {}}, "needed_by must name exactly"),
        ({"kernels": {"version": "1"}}, r"kernels\.sha256: Field required"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_description_is_refused(change: dict[str, Any], message: str) -> None:
    """Unknown keys and another schema are errors that say where."""
    with pytest.raises(BuildError, match=message):
        read_build(json.dumps(DESCRIPTION | change))
