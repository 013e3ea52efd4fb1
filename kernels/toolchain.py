"""The compiler that nvcc.lock pins, installed apart from everything else and kept.

    python toolchain.py          # installs it if it is not there, prints the folder

It lies in the user's cache under the digest of the lock, so every clone of the same lock shares
it. Needs the package index that pip is set up for, once; the download is some 110 MB.
"""

import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

LOCK = Path(__file__).resolve().with_name("nvcc.lock")
CACHE = Path.home() / ".cache/seatrial/nvcc"


def main() -> None:
    """Print the folder with ``bin/nvcc``, ``bin/cuobjdump`` and ``bin/nvdisasm``."""
    print(toolchain())


def toolchain(lock: Path = LOCK, cache: Path = CACHE) -> Path:
    """Return the folder of the compiler that ``lock`` pins, after installing it if need be."""
    kept = cache / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, "toolchain")
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"),
                    *("--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"),
                    *(f"--requirement={lock}", f"--target={made}"),
                ],
                check=True,
            )
            try:
                made.rename(kept)  # complete or not there at all
            except OSError:
                if not kept.is_dir():  # else another run was first, with the same content
                    raise
    (root,) = kept.glob("nvidia/cu*")
    return root


if __name__ == "__main__":
    main()
