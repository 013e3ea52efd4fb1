"""The patches' hooks against the real wheels of SGLang: no GPU, nothing installed or imported.

The wheels come from the package index once, are checked against the hashes below, and are kept
outside the clone. A version of SGLang that means something else in a hooked place fails here, and
stops a server with the same sentence.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
sys.path.insert(0, str(KERNELS))

from seatrial_kernels import fingerprint, plugin, upstream  # noqa: E402 - from this checkout
from seatrial_kernels.fingerprint import Edit, EditError  # noqa: E402
from seatrial_kernels.upstream import Hook  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "seatrial/wheels"
# The wheel for CPython 3.11 of each version that a patch is written for; 22 and 39 MB.
WHEELS = {
    "0.5.23": "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    "0.5.17": "575e38f5683624ded3b4bb267f637a098e5ed37d13a1d1ff5ea09bd781a04d16",
}
# Where DeepSeek-V4's keys are sized, written, scored and selected.
PATH = (
    "sglang.kernels.ops.attention.dsv4",
    "sglang.srt.layers.attention.deepseek_v4_backend",
    "sglang.srt.layers.attention.dsv4.compressor_v2",
    "sglang.srt.layers.attention.dsv4.indexer",
    "sglang.srt.layers.attention.dsv4.metadata",
    "sglang.srt.model_executor.pool_configurator",
)
# Shared by several patches: how hooks come to be applied, what reads and reports the selection.
SHARED = {name: f"seatrial_kernels.{name}" for name in ("upstream", "selection", "report")}


class Case(NamedTuple):
    """One hook of one patch, for one version."""

    patch: str
    pin: str
    hook: Hook


def cases() -> Iterator[Case]:
    """Yield every hook that is written for any version."""
    for patch, name in {**plugin.PATCHES, **SHARED}.items():
        for pin, hooks in importlib.import_module(name).HOOKS.items():
            for hook in hooks:
                yield Case(patch, pin, hook)


CASES = list(cases())
IDS = [f"{patch}-{pin}-{'.'.join(hook.target.split('.')[-2:])}" for patch, pin, hook in CASES]


@cache
def wheel(pin: str) -> zipfile.ZipFile:
    """Return SGLang's wheel, fetched if it is not kept yet; pip checks its hash."""
    kept = CACHE / f"{WHEELS[pin]}.whl"
    if not kept.exists():
        fetch = CACHE / f".sglang-{pin}-{os.getpid()}"
        fetch.mkdir(parents=True)
        wanted = fetch / "requirements.txt"
        wanted.write_text(f"sglang=={pin} --hash=sha256:{WHEELS[pin]}\n")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--require-hashes", "--only-binary=:all:", "--python-version=3.11"),
                *("--implementation=cp", "--abi=cp311", "--platform=manylinux_2_34_x86_64"),
                f"--dest={fetch}",
                f"--requirement={wanted}",
            ],
            check=True,
        )
        (found,) = fetch.glob("*.whl")
        found.rename(kept)
        wanted.unlink()
        fetch.rmdir()
    return zipfile.ZipFile(kept)


@cache
def source(pin: str, module: str) -> str | None:
    """Return the text of a module, or None if the wheel has no such module."""
    path = module.replace(".", "/")
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if name in wheel(pin).namelist():
            return wheel(pin).read(name).decode("utf-8-sig")
    return None


def definition(pin: str, target: str) -> ast.AST | None:
    """Return the definition of a dotted name in the wheel."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        text = source(pin, ".".join(parts[:cut]))
        if text is not None:
            return fingerprint.find(text, ".".join(parts[cut:]))
    return None


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_hooked_function_means_what_was_read(case: Case) -> None:
    """The target is there, and its fingerprint is the one that the patch was written against."""
    found = definition(case.pin, case.hook.target)
    assert found is not None, f"sglang {case.pin} has no {case.hook.target}"
    assert fingerprint.fingerprint(found) == case.hook.sha256, (
        f"{case.hook.target} of sglang {case.pin} means something else: read it again"
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_hook_fits_its_target(case: Case) -> None:
    """A replacement takes the same parameters, an edit finds its place, a binding is one."""
    hook = case.hook
    found = definition(case.pin, hook.target)
    assert isinstance(found, fingerprint.Function)
    if hook.kind == "replace":
        assert hook.call is not None
        assert names_of(hook.call) == fingerprint.parameters(found)
    assert bool(hook.edits) == (hook.kind == "edit")
    if hook.edits:
        copy = fingerprint.edited(found, hook.edits)
        assert fingerprint.fingerprint(copy) != hook.sha256
        compile(ast.Module(body=[copy], type_ignores=[]), hook.target, "exec", dont_inherit=True)
    for place in hook.bindings:
        text = source(case.pin, place)
        assert text is not None, f"sglang {case.pin} has no {place}"
        name = hook.target.rpartition(".")[2]
        assert fingerprint.imports(text, name), f"{place} does not import {name}"


def names_of(function: object) -> list[str]:
    """Return a function's parameters as ``fingerprint.parameters`` does."""
    tree = ast.parse(inspect.getsource(function)).body[0]  # type: ignore[arg-type]
    assert isinstance(tree, fingerprint.Function)
    return fingerprint.parameters(tree)


@pytest.mark.parametrize("pin", WHEELS)
def test_no_importer_on_the_model_s_path_is_forgotten(pin: str) -> None:
    """A module of DeepSeek-V4's path that imports a target by name is among its bindings."""
    for case in CASES:
        if case.pin == pin and case.hook.kind != "read":
            name = case.hook.target.rpartition(".")[2]
            importers = {
                module
                for module in PATH
                if fingerprint.imports(source(pin, module) or "", name)
                and not case.hook.target.startswith(f"{module}.")
            }
            assert importers <= {*case.hook.bindings}, case.hook.target


def test_both_versions_are_covered() -> None:
    """The versions with wheels here are those that the patches name, and each names the newest."""
    assert set(WHEELS) == {case.pin for case in CASES} == set(upstream.PINS)
    for patch in plugin.PATCHES.values():
        assert upstream.PINS[0] in importlib.import_module(patch).HOOKS


def test_a_changed_function_is_noticed_and_a_new_layout_is_not() -> None:
    """One operator is enough; comments, docstrings, blank lines and quotes are not."""
    text = "def f(a, *, b=1):\n    '''Says.'''\n    return a + b  # sum\n"
    (was,) = ast.parse(text).body
    (laid_out,) = ast.parse("def f(\n    a,\n    *,\n    b=1,\n):\n\n    return (a +\n b)").body
    (changed,) = ast.parse(text.replace("a + b", "a - b")).body
    (renamed,) = ast.parse(text.replace("b=1", "b=1.0")).body
    assert fingerprint.fingerprint(was) == fingerprint.fingerprint(laid_out)
    assert fingerprint.fingerprint(was) != fingerprint.fingerprint(changed)
    assert fingerprint.fingerprint(was) != fingerprint.fingerprint(renamed)


def test_an_edit_that_finds_no_place_or_two_is_refused() -> None:
    """The sentence names the place and the count."""
    (function,) = ast.parse("def f(a):\n    return a * 132 + a * 132\n").body
    assert isinstance(function, ast.FunctionDef)
    with pytest.raises(EditError, match=r"`a \* 132` stands 2 times in f, not once"):
        fingerprint.edited(function, [Edit("a * 132", "a")])
    with pytest.raises(EditError, match="`a - 1` stands 0 times in f"):
        fingerprint.edited(function, [Edit("a - 1", "a")])
    done = fingerprint.edited(function, [Edit("a * 132 + a * 132", "a * 256")])
    assert ast.unparse(done) == "def f(a):\n    return a * 256"


def test_entry_points_name_every_patch() -> None:
    """SGLang finds exactly the patches that the table has, and each starts a patch by its name."""
    project = tomllib.loads((KERNELS / "pyproject.toml").read_text())["project"]
    found = project["entry-points"][plugin.GROUP]
    assert found == {name: f"seatrial_kernels.plugin:{name}" for name in plugin.PATCHES}
    assert all(callable(getattr(plugin, name)) for name in found)
