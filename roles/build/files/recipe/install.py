"""Install the locked wheels and the kernels into the environment whose Python runs this.

The last line printed is the SHA-256 of the kernels wheel.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

# 1 January 1980, the first day that a zip file knows: the same sources give the same wheel.
EPOCH = "315532800"


def main() -> None:
    """Install; every step's failure is the program's."""
    parser = argparse.ArgumentParser(description="Install the locked wheels and the kernels.")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the locked wheels")
    parser.add_argument("--lock", type=Path, required=True, help="their versions and hashes")
    parser.add_argument("--kernels", type=Path, required=True, help="the kernels' sources")
    parser.add_argument("--compiler", type=Path, help="folder of the wheels of nvcc: with CUDA")
    given = parser.parse_args()
    pip = next(given.wheels.glob("pip-*.whl")) / "pip"

    run(pip, "install", "--require-hashes", "--find-links", given.wheels, "-r", given.lock)
    settings = []
    if given.compiler:
        # Apart from the environment, which has an nvcc of its own for what SGLang compiles.
        apart = given.kernels.with_name("compiler-unpacked")
        run(
            *(pip, "install", "--require-hashes", "--find-links", given.compiler),
            *("-r", given.kernels / "nvcc.lock", "--target", apart),
        )
        (nvcc,) = apart.glob("nvidia/cu*/bin/nvcc")
        settings = ["--config-settings", f"nvcc={nvcc}"]
    made = given.kernels.with_name("kernels-wheel")
    run(pip, "wheel", "--no-build-isolation", *settings, "--wheel-dir", made, given.kernels)
    (wheel,) = made.glob("*.whl")
    run(pip, "install", wheel)
    print(hashlib.sha256(wheel.read_bytes()).hexdigest())


def run(pip: Path, verb: str, *arguments: str | Path) -> None:
    """Run one pip command that sees no index, no settings of the host, and no dependencies."""
    # Byte code comes later, for everything at once and in the form that a read-only tree needs.
    options = ["--no-compile"] if verb == "install" else []
    subprocess.run(
        [
            *(sys.executable, pip, "--isolated", "--quiet", "--no-cache-dir"),
            *(verb, "--no-index", "--no-deps", *options, *arguments),
        ],
        check=True,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
    )


if __name__ == "__main__":
    main()
