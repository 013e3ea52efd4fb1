"""Let the real SGLang of the build read the command lines of a release; says what it refuses."""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path


def refusal(parser: argparse.ArgumentParser, argv: list[str]) -> str:
    """Return why the parser refuses the words, or a flag that is said twice, or nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(argv)
    except SystemExit as end:
        if end.code:
            return said.getvalue().strip().splitlines()[-1]
    return repeated(parser, argv)


def repeated(parser: argparse.ArgumentParser, argv: list[str]) -> str:
    """Return which two words mean one argument: the last would win, and nothing would say so."""
    spelling: dict[str, str] = {}
    for word in argv:
        action = parser._option_string_actions.get(word)  # noqa: SLF001 no public way to ask
        if action is None:
            continue
        if action.dest in spelling:
            return f"{spelling[action.dest]} and {word} are one argument, said twice"
        spelling[action.dest] = word
    return ""


def engine_parser() -> argparse.ArgumentParser:
    """Return SGLang's own parser of server arguments, with the choices that plugins add."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def main() -> int:
    """Check each engine of the release.json given as the argument."""
    release = json.loads(Path(sys.argv[1]).read_text())
    engines = {role: one for role, one in release["servers"].items() if role != "router"}
    for role, server in engines.items():
        os.environ.update(server["env"], HOME="/tmp", SGLANG_CACHE_DIR="/tmp")
        problem = refusal(engine_parser(), server["argv"][3:])
        if problem:
            print(f"roles.{role}.args: SGLang {release['sglang']} says: {problem}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
