"""The build's own parser has the last word about a release's command lines."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "roles/release/files/parse_arguments.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Return the program as a module."""
    loader = importlib.util.spec_from_file_location("parse_arguments", PROGRAM)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Return a parser with an argument of two spellings, as SGLang has some."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int)
    parser.add_argument("--port", type=int)
    return parser


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--tp-size 4 --port 1", ""),
        ("--tp-size 4 --tensor-parallel-size 2", "are one argument, said twice"),
        ("--port 1 --port 2", "--port and --port are one argument, said twice"),
        ("--tensor 4", "unrecognized arguments: --tensor 4"),
        ("--port x", "invalid int value: 'x'"),
    ],
)
def test_what_the_parser_would_take_in_silence_is_refused_too(
    program: ModuleType, parser: argparse.ArgumentParser, words: str, refusal: str
) -> None:
    """A flag that is said twice: the last one wins, and nothing tells."""
    said = program.refusal(parser, words.split())
    assert refusal in said
    assert bool(said) == bool(refusal)
