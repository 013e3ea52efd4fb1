"""What a build is named by, and what `build.json` inside it says."""

import hashlib
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from seatrial.errors import SeatrialError

BUILD_RECIPE = 2
"""Counts changes of how role `build` makes a build: raise it with each that alters the tree."""

KERNELS_LEFT_OUT = (
    "tests",
    "benchmarks",
    "compile_gate",
    "sanitize.py",
    "toolchain.py",
    "*.so",
    "native.json",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*",
)
"""Names under `kernels/` that do not go into the wheel: their changes make no new build."""

Hex16 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Platform = Literal["cpu", "cuda13"]


class BuildError(SeatrialError):
    """A build cannot be named, or its `build.json` does not say what it must."""


class Kernels(BaseModel):
    """The kernels wheel inside a build."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    sha256: Hex64


class Build(BaseModel):
    """`build.json`, schema 1: what a build is and what it supports."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(alias="schema")
    digest: Hex16
    platform: Platform
    python: str
    sglang: str
    torch: str
    kernels: Kernels
    lock_sha256: Hex64
    patches: list[str]
    patches_needed: dict[str, dict[str, list[int | str]]] = {}
    """For keys of the spec: the patch without which a value is not supported. Builds from before
    this key say nothing."""
    supported_index_topk: list[int]
    supported_index_key_dtypes: list[str]
    index_key_bytes_per_token: dict[str, int | float]
    """Bytes of index keys for one token, by dtype, as the kernels package declares them: with CUDA
    in one indexer layer, else in all of them."""
    architectures: list[str]
    """`cpu`, or CUDA architectures such as `sm_120`."""
    shared_libraries: list[str]
    """Sonames that the build's own shared objects need and the host must have."""
    needed_by: dict[str, list[str]]
    """For each of `shared_libraries`: some of the build's files (relative paths) that need it."""
    pruned: list[str]
    """Patterns of files that were left out of the installed wheels."""
    size_bytes: int
    """Bytes on disk of the whole build once unpacked."""

    @model_validator(mode="after")
    def _each_library_has_a_reason(self) -> Self:
        if sorted(self.needed_by) != sorted(self.shared_libraries):
            raise ValueError("needed_by must name exactly the shared_libraries")
        return self


def read_build(text: str) -> Build:
    """`build.json`'s text, checked.

    Raises:
        BuildError: it is not JSON, or not of schema 1; the message says where.
    """
    try:
        return Build.model_validate_json(text)
    except ValidationError as error:
        where = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'build.json'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise BuildError(f"build.json is not of schema 1: {where}") from error


def build_digest(platform: str, python: str, root: str, lock: Path, kernels: Path) -> str:
    """The name of a build: 16 hex digits over everything that it is made from.

    `root` is the folder on the hosts under which builds lie; a virtual environment knows its own
    path, so the path is one of the inputs.

    Raises:
        BuildError: the lock or the kernels' sources are not there.
    """
    if not lock.is_file():
        raise BuildError(f"There is no lock file {lock}; roles/build/files/lock.py writes it.")
    inputs = {
        "recipe": BUILD_RECIPE,
        "platform": platform,
        "python": python,
        "root": root,
        "lock": _sha256(lock),
        "kernels": {name: _sha256(kernels / name) for name in kernels_files(kernels)},
    }
    return hashlib.sha256(_canonical(inputs)).hexdigest()[:16]


def kernels_files(kernels: Path) -> list[str]:
    """What the kernels wheel is made from: paths relative to `kernels`, sorted.

    Raises:
        BuildError: the folder has no `pyproject.toml`.
    """
    if not (kernels / "pyproject.toml").is_file():
        raise BuildError(f"There is no pyproject.toml in the kernels' folder {kernels}.")
    relative = (path.relative_to(kernels) for path in kernels.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in relative if not _is_left_out(path))


def _is_left_out(path: Path) -> bool:
    return any(fnmatch(part, pattern) for part in path.parts for pattern in KERNELS_LEFT_OUT)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _canonical(inputs: dict[str, Any]) -> bytes:
    return json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()
