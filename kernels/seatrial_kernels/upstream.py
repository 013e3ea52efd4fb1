"""SGLang as it is expected to be: its version, the text of what is hooked, and the hooking."""

import hashlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import version
from types import ModuleType
from typing import Any

from seatrial_kernels.plugin import PatchError

SGLANG = "0.5.23"


def require_version() -> None:
    """Raise PatchError unless SGLang is the version that the patches are written for."""
    if version("sglang") != SGLANG:
        raise PatchError(f"it is written for sglang {SGLANG}, not {version('sglang')}")


def source_sha256(target: str) -> str:
    """Return the sha256 of a function's or class's source text, by its dotted name."""
    return hashlib.sha256(inspect.getsource(pkgutil.resolve_name(target)).encode()).hexdigest()


def require_source(target: str, sha256: str) -> None:
    """Raise PatchError unless the source text of ``target`` is the one that was read."""
    found = source_sha256(target)
    if found != sha256:
        raise PatchError(
            f"{target} has another text (sha256 {found[:16]}) than the one the patch was "
            f"written against ({sha256[:16]}): read it again"
        )


def after(target: str, hook: Callable[..., Any]) -> None:
    """Have ``hook(result, *args, **kwargs)`` called after ``target``; its result replaces it.

    SGLang applies hooks later and only logs a target that does not exist, so it is looked up now.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{target} is not there: {error}") from error
    HookRegistry.register(target, hook, HookType.AFTER)


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` now if the module is loaded, else right after it is.

    For what only some processes load: SGLang's own hooks would load it in all of them.
    """
    if module in sys.modules:
        hook(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Watch(module, hook))


class _Watch:
    """A finder that finds one module as Python does, and runs a hook when it has been loaded."""

    def __init__(self, module: str, hook: Callable[[ModuleType], None]) -> None:
        self.module, self.hook = module, hook

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _HookedLoader(name, spec.loader.path, self.hook)
        return spec


class _HookedLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, hook: Callable[[ModuleType], None]) -> None:
        super().__init__(name, path)
        self.hook = hook

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.hook(module)
