"""Makes the wheel: hatchling's, with the compiled kernels inside if a compiler is named.

    pip wheel kernels                                     # pure Python: references and CPU patches
    pip wheel kernels --config-settings nvcc=PATH         # and CUDA kernels, compiled here and now
    pip wheel kernels --config-settings nvcc=find         # with the compiler that is found

Without the setting there is no CUDA in the wheel, whatever lies in the checkout, and its tag says
so; with it, the wheel is for Linux on x86-64, and for a C library as new as the build host's.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.build import build_editable, build_sdist
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder

sys.path.insert(0, str(Path(__file__).resolve().parent))
import native_build

__all__ = ["build_editable", "build_sdist", "build_wheel"]

# No manylinux: it is linked against the C library of the host that compiles it.
TAG = "py3-none-linux_x86_64"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Make the wheel (PEP 517) and return its file name."""
    builder = WheelBuilder(str(Path.cwd()))
    settings = dict(config_settings or {})
    nvcc = settings.pop("nvcc", None)
    if settings:
        raise SystemExit(f"seatrial-kernels: unknown setting {', '.join(settings)}: only nvcc is")
    with TemporaryDirectory() as scratch:
        if nvcc:
            hook = {"path": "build_backend.py", "nvcc": nvcc, "scratch": scratch}
            builder.target_config.setdefault("hooks", {})["custom"] = hook
        (made,) = builder.build(directory=wheel_directory, versions=["standard"])
    return Path(made).name


class Compiled(BuildHookInterface):
    """Hatchling's hook that puts the library and its description into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a folder of its own, never into the sources."""
        scratch, nvcc = Path(self.config["scratch"]), self.config["nvcc"]
        try:
            native_build.build(
                scratch, native_build.find_nvcc(None if nvcc == "find" else Path(nvcc))
            )
        except native_build.BuildError as error:
            raise SystemExit(f"seatrial-kernels: {error}") from error
        for name in (native_build.LIBRARY, native_build.DESCRIPTION):
            build_data["force_include"][str(scratch / name)] = f"seatrial_kernels/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = TAG
