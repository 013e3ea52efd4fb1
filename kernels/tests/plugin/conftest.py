"""Patches applied to the installed SGLang as SGLang applies them, and taken off again."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from seatrial_kernels import plugin, report, selection, upstream

Apply = Callable[..., None]


class Stopped(BaseException):
    """What stands for the end of the process; not swallowed as an Exception would be."""


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch) -> Iterator[Apply]:
    """Return a function that applies patches by name to this process, through SGLang's registry.

    What would end the process raises ``Stopped`` with the sentence.
    """
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins import hook_registry

    registry = hook_registry.HookRegistry
    apply_hooks = registry.__dict__["apply_hooks"]

    def stopped(patch: str, error: Exception) -> NoReturn:
        raise Stopped(f"patch {patch} stops this server: {error}")

    for name in ("seatrial_kernels.plugin", "seatrial_kernels.upstream"):
        monkeypatch.setattr(f"{name}.stop", stopped)
    monkeypatch.setattr(selection, "stop", stopped)
    for name in plugin.PATCHES.values():
        if hasattr(importlib.import_module(name), "stop"):
            monkeypatch.setattr(f"{name}.stop", stopped)

    def do(*names: str) -> None:
        monkeypatch.setenv("SGLANG_PLUGINS", ",".join(names))
        for name in names:
            getattr(plugin, name)()
        registry.apply_hooks()

    yield do
    for patch in {each.hook.target: each for each in upstream._installed}.values():
        owner_name, _, name = patch.hook.target.rpartition(".")
        owner = upstream._resolve(owner_name) if owner_name not in sys.modules else None
        owner = sys.modules[owner_name] if owner is None else owner
        now = getattr(owner, name)
        setattr(owner, name, patch.original)
        hook_registry._propagate_patch(now, patch.original, owner)
    upstream._installed.clear()
    resolution_hooks._HOOKS.clear()
    registry.reset()
    registry.apply_hooks = apply_hooks
    for field in ("selection", "rank", "role", "is_metrics_enabled", "is_reported"):
        if field in vars(selection._Process):
            setattr(selection._Process, field, {"role": "combined", "rank": 0}.get(field))
    selection._Process.is_metrics_enabled = selection._Process.is_reported = False
    report._published.clear()
