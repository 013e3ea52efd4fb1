"""Turn an artifact that was copied to this host into a build, or leave nothing behind.

The build appears whole, by one rename. The artifact is removed in any case. What went wrong is one
line on standard output: over a terminal connection, standard error is not kept apart.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


class ArtifactError(Exception):
    """The artifact is not what was built."""


def main() -> None:
    """Receive, or say why not and exit with 1."""
    parser = argparse.ArgumentParser(description="Verify and unpack a build's artifact.")
    parser.add_argument("--artifact", type=Path, required=True, help="removed when this ends")
    parser.add_argument("--sha256", required=True, help="what the artifact's bytes must hash to")
    parser.add_argument("--to", type=Path, required=True, help="the build's folder, <digest>")
    given = parser.parse_args()
    incoming = given.to.with_name(f".incoming-{given.to.name}")
    # Two runs may ship the same build at once: the second one finds what the first has unpacked.
    # Held until this program ends.
    fcntl.flock(os.open(given.to.parent, os.O_RDONLY), fcntl.LOCK_EX)
    try:
        if not (given.to / "build.json").exists():
            verify(given.artifact, given.sha256)
            unpack(given.artifact, incoming)
            (incoming / given.to.name).rename(given.to)
    except ArtifactError as error:
        print(error)
        sys.exit(1)
    finally:
        given.artifact.unlink(missing_ok=True)
        shutil.rmtree(incoming, ignore_errors=True)


def verify(artifact: Path, wanted: str) -> None:
    """Hash the artifact.

    Raises:
        ArtifactError: these are not the bytes that were built.
    """
    try:
        with artifact.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ArtifactError(
            "Another run took the artifact away, since it could not unpack it. Run this again."
        ) from None
    if found != wanted:
        raise ArtifactError(
            f"The artifact's SHA-256 is {found}, should be {wanted}: damaged or replaced since it "
            "was built. Nothing was unpacked. Delete it and its .sha256 on the controller and "
            "build again."
        )


def unpack(artifact: Path, incoming: Path) -> None:
    """Unpack into a fresh folder.

    Raises:
        ArtifactError: tar could not.
    """
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    told = subprocess.run(
        ["tar", "--extract", "--zstd", "--file", artifact, "--directory", incoming],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    if told.returncode:
        raise ArtifactError(f"The artifact could not be unpacked: {told.stderr.strip()}")


if __name__ == "__main__":
    main()
