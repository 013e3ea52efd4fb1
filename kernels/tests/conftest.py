"""What the tests of every operation ask for: a GPU with code for it, and real weights."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HAS_TORCH = find_spec("torch") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the path of a checkpoint."""
    parser.addoption(
        "--weights",
        type=Path,
        help="folder with *.safetensors: also run the operations on the checkpoint's own tensors",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of tests that sanitize.py runs."""
    config.addinivalue_line(
        "markers", "sanitized: reaches every branch, and is small enough for compute-sanitizer"
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs torch where there is none: on a developer's machine, unlike a build."""
    if HAS_TORCH or collection_path.suffix != ".py":
        return None
    return None if "native" in collection_path.parts else True


def pytest_report_header() -> str:
    """Say what is left out."""
    return f"torch: {'there' if HAS_TORCH else 'none; not run: everything outside of tests/native'}"


@pytest.fixture(scope="session")
def gpu() -> str:
    """Return the device, or say why the test is not run."""
    torch = pytest.importorskip("torch", reason="not run: no torch")
    from seatrial_kernels import native

    if not torch.cuda.is_available():
        pytest.skip("not run: no GPU")
    native.check_device()
    return "cuda"


@pytest.fixture
def weights(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Return ``find(pattern)``: the tensors of the checkpoint, by name."""
    folder = request.config.getoption("--weights")
    if folder is None:
        pytest.skip("not run: no weights (--weights PATH)")
    from seatrial_kernels import testing

    return lambda pattern: testing.checkpoint_tensors(folder, pattern)
