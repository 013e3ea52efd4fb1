"""Patches applied to the installed SGLang as SGLang applies them, and taken off again."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from seatrial_kernels import plugin, report, selection, upstream

Apply = Callable[..., None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch) -> Iterator[Apply]:
    """Return a function that applies patches by name to this process, through SGLang's registry.

    What would end the process raises SystemExit with the sentence.
    """
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins import hook_registry

    registry = hook_registry.HookRegistry
    apply_hooks = registry.__dict__["apply_hooks"]

    def stopped(patch: str, error: Exception) -> NoReturn:
        raise SystemExit(f"patch {patch} stops this server: {error}")

    for name in ("seatrial_kernels.plugin", "seatrial_kernels.upstream"):
        monkeypatch.setattr(f"{name}.stop", stopped)
    monkeypatch.setattr(selection, "stop", stopped)
    for name in plugin.PATCHES.values():
        if hasattr(importlib.import_module(name), "stop"):
            monkeypatch.setattr(f"{name}.stop", stopped)

    monkeypatch.setattr(selection, "_process", selection._Process())
    monkeypatch.setattr(report, "_published", [])

    def do(*names: str) -> None:
        monkeypatch.setenv("SGLANG_PLUGINS", ",".join(names))
        for name in names:
            getattr(plugin, name)()
        registry.apply_hooks()

    yield do
    for target, original in {
        each.hook.target: each.original for each in upstream._installed
    }.items():
        place, _, name = target.rpartition(".")
        owner: Any = sys.modules.get(place) or upstream._resolve(place)
        patched = getattr(owner, name)
        setattr(owner, name, original)
        hook_registry._propagate_patch(patched, original, owner)
    upstream._installed.clear()
    resolution_hooks._HOOKS.clear()
    registry.reset()
    registry.apply_hooks = apply_hooks
