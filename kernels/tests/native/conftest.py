"""These tests compile: they need the sources, and run with a Python that has no torch."""

from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these tests out where only the tests lie, as on a rehearsal's host."""
    return None if (KERNELS / "csrc").is_dir() else True


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library that the locked compiler makes of this checkout."""
    import native_build
    import toolchain

    made = tmp_path_factory.mktemp("native")
    native_build.build(made, toolchain.toolchain() / "bin/nvcc")
    return made
