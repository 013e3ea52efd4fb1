"""The self-test runs what operations bring, and calls a case that breaks a failure."""

import importlib
import sys
from pathlib import Path

import pytest
from seatrial_kernels.selftest import findings

CASES = """
def broken():
    raise RuntimeError("no GPU")


def cases():
    yield "right", lambda: None
    yield "wrong", lambda: "3 of 64 values are wrong"
    yield "broken", broken
"""


def test_every_case_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, wrong and broken cases are one finding each; packages without a self-test are none."""
    for name in ("ops_of_a_test/some_op", "ops_of_a_test/without"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "ops_of_a_test/__init__.py").write_text("")
    (tmp_path / "ops_of_a_test/some_op/selftest.py").write_text(CASES)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = list(findings(importlib.import_module("ops_of_a_test")))
    assert found == [
        {"op": "some_op", "case": "right", "ok": True, "message": ""},
        {"op": "some_op", "case": "wrong", "ok": False, "message": "3 of 64 values are wrong"},
        {"op": "some_op", "case": "broken", "ok": False, "message": "RuntimeError: no GPU"},
    ]
    sys.modules.pop("ops_of_a_test")
