"""SGLang as it is expected to be: its version, the meaning of what is hooked, and the hooking.

A patch lists its hooks for each version of SGLang that it is written for. ``install`` compares the
fingerprint of every target with the running SGLang and registers the hooks with SGLang's own
registry; when SGLang has applied them, each target and each name that was imported from it is
looked at again. Whatever is not as expected ends the process.
"""

import __future__

import ast
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from seatrial_kernels import fingerprint
from seatrial_kernels.fingerprint import Edit
from seatrial_kernels.plugin import PatchError, stop

PINS = ("0.5.23", "0.5.17")
"""The versions of SGLang that any patch is written for, the newest first."""

Kind = Literal["before", "after", "around", "replace", "edit", "resolution", "read"]


class Hook(NamedTuple):
    """One function of SGLang and what is done with it.

    Attributes
    ----------
    target: dotted name of a function or method
    sha256: its fingerprint (16 hex digits), see ``fingerprint``
    kind: SGLang's hook types; ``edit`` replaces it with an edited copy of itself; ``resolution``
        wraps a step of SGLang's argument resolution; ``read`` only checks that it is as it was read
    call: the hook; for ``edit`` a function that the copy may call, by its own name
    bindings: modules that hold the target by ``from ... import``
    edits: for ``edit``
    """

    target: str
    sha256: str
    kind: Kind
    call: Callable[..., Any] | None = None
    bindings: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()


class _Installed(NamedTuple):
    patch: str
    hook: Hook
    call: Callable[..., Any]
    original: types.FunctionType


_installed: list[_Installed] = []

_PLUGINS = "sglang.srt.plugins"
_REGISTRY = f"{_PLUGINS}.hook_registry.HookRegistry"
HOOKS = {
    "0.5.23": (
        Hook(f"{_PLUGINS}.load_plugins", "4fef87ac76c2a824", "read"),
        Hook(f"{_REGISTRY}.apply_hooks", "72a353ae49a54504", "read"),
        Hook(f"{_REGISTRY}._apply_target", "b27fcc48dfc41ca9", "read"),
        Hook(f"{_PLUGINS}.hook_registry._wrap_fn", "1d47a366cbf3da4c", "read"),
    ),
    "0.5.17": (
        Hook(f"{_PLUGINS}.load_plugins", "4fef87ac76c2a824", "read"),
        Hook(f"{_REGISTRY}.apply_hooks", "72a353ae49a54504", "read"),
        Hook(f"{_REGISTRY}._apply_target", "b27fcc48dfc41ca9", "read"),
        Hook(f"{_PLUGINS}.hook_registry._wrap_fn", "1d47a366cbf3da4c", "read"),
    ),
}
"""How SGLang comes to apply hooks: what the look afterwards relies on."""


def require_version(*versions: str) -> str:
    """Return SGLang's version.

    Raises
    ------
    PatchError
        When it is none of those that a patch is written for.
    """
    found = version("sglang")
    if found not in versions:
        raise PatchError(f"it is written for sglang {' and '.join(versions)}, not {found}")
    return found


def install(patch: str, *hook_sets: Mapping[str, tuple[Hook, ...]]) -> None:
    """Check and register the hooks that ``patch`` has for the running version of SGLang.

    Raises
    ------
    PatchError
        When SGLang is another version or a target is not what was read.
    """
    for hook in (one for hooks in hook_sets for one in hooks[require_version(*hooks)]):
        if any(hook == other.hook for other in _installed):
            continue  # two patches share it
        original = _checked(hook.target, hook.sha256)
        if hook.kind != "read":
            call = _edited(hook, original) if hook.kind == "edit" else hook.call
            if call is None:
                raise PatchError(f"its hook on {hook.target} has nothing to call")
            _register(hook, call)
            _installed.append(_Installed(patch, hook, call, original))
    _verify_once_applied()


def when_imported(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` now if the module is loaded, else right after it is.

    For what only some processes load: SGLang's own hooks would load it in all of them.
    """
    if module in sys.modules:
        hook(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Watch(module, hook))


def require_source(target: str, sha256: str) -> None:
    """Raise PatchError unless ``target`` means what was read."""
    _checked(target, sha256)


def verify() -> None:
    """Raise PatchError, naming the patch, unless every installed hook is what SGLang will call."""
    for patch, hook, call, original in _installed:
        if hook.kind == "resolution":
            _verify_resolution(patch, hook)
            continue
        now = _resolve(hook.target)
        if not _reaches(now, call, original):
            raise PatchError(f"after SGLang applied the hooks, {hook.target} is not {patch}'s")
        name = hook.target.rpartition(".")[2]
        for place in hook.bindings:
            bound = getattr(importlib.import_module(place), name, None)
            if not _reaches(bound, call, original):
                raise PatchError(f"{place} still holds its own {name}, not {patch}'s")
    stale = {id(each.original): each for each in _installed if each.hook.kind != "resolution"}
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()) if isinstance(module, ModuleType) else ():
            if id(value) in stale:
                target = stale[id(value)].hook.target
                raise PatchError(f"{module.__name__} still holds SGLang's own {target}")


def _checked(target: str, sha256: str) -> types.FunctionType:
    """Return the function ``target`` as SGLang ships it."""
    import sglang.srt.plugins.hook_registry

    module, name = _split(target)
    found = _resolve(target)
    found = getattr(found, "__func__", found)  # of a class method
    if not isinstance(found, types.FunctionType):
        raise PatchError(f"{target} is not there, or is no function")
    file, code = module.__file__ or "", found.__code__
    definition = _definition(file, name)
    # A decorator's wrapper comes from another file of SGLang, as a hook's does.
    is_decorated = bool(getattr(definition, "decorator_list", None))
    hooks = sglang.srt.plugins.hook_registry.__file__
    if code.co_filename != file and (not is_decorated or code.co_filename == hooks):
        raise PatchError(f"{target} is somebody else's already, from {code.co_filename}")
    digest = fingerprint.fingerprint(definition)
    if digest != sha256:
        raise PatchError(
            f"{target} means something else (fingerprint {digest}) than what the patch was "
            f"written against ({sha256}): read it again"
        )
    return found


def _register(hook: Hook, call: Callable[..., Any]) -> None:
    if hook.kind == "resolution":
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(hook.target.rpartition(".")[2])(call)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    kinds = {
        "before": HookType.BEFORE,
        "after": HookType.AFTER,
        "around": HookType.AROUND,
        "replace": HookType.REPLACE,
        "edit": HookType.REPLACE,
    }
    HookRegistry.register(hook.target, call, kinds[hook.kind])


def _edited(hook: Hook, original: types.FunctionType) -> Callable[..., Any]:
    """Return SGLang's function with the hook's edits, compiled where it was compiled."""
    module, name = _split(hook.target)
    definition = _definition(original.__code__.co_filename, name)
    if not isinstance(definition, ast.FunctionDef):
        raise PatchError(f"{hook.target} cannot be edited; it is no plain function")
    tree = ast.Module(body=[fingerprint.edited(definition, hook.edits)], type_ignores=[])
    features = (getattr(__future__, each) for each in __future__.all_feature_names)
    future = original.__code__.co_flags & sum(each.compiler_flag for each in features)
    code = compile(
        tree, f"<seatrial-kernels: {hook.target}>", "exec", flags=future, dont_inherit=True
    )
    if hook.call is not None:
        setattr(module, hook.call.__name__, hook.call)
    made: dict[str, Any] = {}
    exec(code, vars(module), made)  # noqa: S102 - the text is SGLang's own, and fingerprinted
    result: Callable[..., Any] = made[original.__name__]
    return result


def _verify_once_applied() -> None:
    """Have ``verify`` called when SGLang has applied the hooks; it swallows its own errors."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_hooks = HookRegistry.apply_hooks
    if getattr(apply_hooks, "is_verified", False):
        return
    for hook in HOOKS[require_version(*HOOKS)]:
        _checked(hook.target, hook.sha256)

    def apply_and_verify() -> None:
        apply_hooks()
        try:
            verify()
        except Exception as error:  # noqa: BLE001 - any failure stops the server
            stop(", ".join(sorted({each.patch for each in _installed})), error)

    apply_and_verify.is_verified = True  # type: ignore[attr-defined]
    HookRegistry.apply_hooks = staticmethod(apply_and_verify)


def _verify_resolution(patch: str, hook: Hook) -> None:
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    name = hook.target.rpartition(".")[2]
    if hook.call not in _HOOKS.get(name, []):
        raise PatchError(f"SGLang's argument resolution lost {patch}'s step {name}")


def _reaches(found: object, call: Callable[..., Any], original: types.FunctionType) -> bool:
    """Return whether ``found`` is a chain of wrappers over ``original`` that holds the hook."""
    holds = False
    while isinstance(found, types.FunctionType) and found is not original:
        cells = [cell.cell_contents for cell in found.__closure__ or ()]
        holds = holds or any(content is call for content in cells)
        found = getattr(found, "__wrapped__", None)
    return found is original and holds


def _resolve(target: str) -> object:
    module, name = _split(target)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@cache
def _split(target: str) -> tuple[ModuleType, str]:
    """Return the module of a dotted name, loaded, and the rest of the name."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            return importlib.import_module(".".join(parts[:cut])), ".".join(parts[cut:])
        except ModuleNotFoundError as error:
            if not (error.name and ".".join(parts[:cut]).startswith(error.name)):
                raise
    raise PatchError(f"{target} is not there")


@cache
def _definition(file: str, name: str) -> ast.AST:
    found = fingerprint.find(Path(file).read_text("utf-8-sig"), name)
    if found is None:
        raise PatchError(f"{file} does not define {name}")
    return found


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
