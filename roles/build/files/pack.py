"""Pack a finished build into one artifact, and write the artifact's SHA-256 beside it.

The same tree gives the same bytes: names sorted, no times, no owners.
"""

import argparse
import hashlib
import subprocess
from pathlib import Path


def main() -> None:
    """Pack; the checksum is written last."""
    parser = argparse.ArgumentParser(description="Pack a finished build.")
    parser.add_argument("--build", type=Path, required=True, help="folder of the finished build")
    parser.add_argument("--to", type=Path, required=True, help="the artifact, *.tar.zst")
    parser.add_argument("--level", type=int, required=True, help="zstd's level")
    given = parser.parse_args()

    given.to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *("tar", "--create", "--format=gnu", "--sort=name", "--mtime=@0"),
            *("--owner=0", "--group=0", "--numeric-owner"),
            *("--use-compress-program", f"zstd --quiet --threads=0 -{given.level}"),
            *("--file", given.to, "--directory", given.build.parent, given.build.name),
        ],
        check=True,
    )
    with given.to.open("rb") as artifact:
        checksum = hashlib.file_digest(artifact, "sha256").hexdigest()
    given.to.with_name(f"{given.to.name}.sha256").write_text(f"{checksum}  {given.to.name}\n")


if __name__ == "__main__":
    main()
