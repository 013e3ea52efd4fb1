"""Let the real SGLang of the build read the command lines of a release; says what it refuses."""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path


def refuse_all_but_known(parser: argparse.ArgumentParser, argv: list[str]) -> str:
    """Return why the parser refuses the words, or nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(argv)
    except SystemExit as end:
        if end.code:
            return said.getvalue().strip().splitlines()[-1]
    return ""


def engine_parser() -> argparse.ArgumentParser:
    """Return SGLang's own parser of server arguments."""
    from seatrial_kernels import plugin  # noqa: F401,PLC0415 - names the plugin's own choices
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415 - in the build only

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def main() -> int:
    """Check each server of the release.json given as the argument."""
    release = json.loads(Path(sys.argv[1]).read_text())
    for role, server in release["servers"].items():
        if role == "router":
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            parser = engine_parser()
        problem = refuse_all_but_known(parser, server["argv"][3:])
        if problem:
            print(f"roles.{role}.args: SGLang {release['sglang']} says: {problem}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
