"""What SGLang's source says, free of layout: the fingerprint of a function, and edits of its tree.

Two texts have the same fingerprint when Python would compile them to the same program: comments,
white space, line breaks and docstrings do not count. Nothing is imported from SGLang, so that the
fingerprints can be checked against a wheel that is not installed.
"""

import ast
import copy
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Fields that say nothing of meaning, or that only some Python versions have.
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_params"})


class Edit(NamedTuple):
    """One expression or statement of a function, and what stands there instead."""

    old: str
    new: str


class EditError(Exception):
    """The text to edit is not there exactly once; the message says what was found."""


def fingerprint(node: ast.AST) -> str:
    """Return the first 16 hex digits of the sha256 over the meaning of a syntax tree."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:16]


def find(source: str, name: str) -> ast.AST | None:
    """Return the definition of ``name`` (``function``, ``Class`` or ``Class.method``), or None.

    Where a module defines a name more than once, the last definition counts, as in Python.
    """
    body: Sequence[ast.stmt] = ast.parse(source).body
    found: ast.AST | None = None
    for part in name.split("."):
        found = None
        for node in _statements(body):
            if isinstance(node, Function | ast.ClassDef) and node.name == part:
                found = node
        if not isinstance(found, Function | ast.ClassDef):
            return None
        body = found.body
    return found


def parameters(node: Function) -> list[str]:
    """Return the names of a function's parameters, in their order; ``*`` starts keyword ones."""
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if given.vararg is not None:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg is not None else [])


def imports(source: str, name: str) -> bool:
    """Return whether a module's top level holds ``from ... import name``."""
    return any(
        isinstance(node, ast.ImportFrom)
        and any(alias.name == name and alias.asname in (None, name) for alias in node.names)
        for node in _statements(ast.parse(source).body)
    )


def edited(function: Function, edits: Sequence[Edit]) -> Function:
    """Return a copy of a function in which each edit has replaced the one place that it names.

    Raises
    ------
    EditError
        When a place is missing or is there more than once.
    """
    result = copy.deepcopy(function)
    for edit in edits:
        swap = _Swap(_piece(edit.old), _piece(edit.new))
        swap.generic_visit(result)
        if swap.count != 1:
            raise EditError(f"`{edit.old}` stands {swap.count} times in {function.name}, not once")
    ast.fix_missing_locations(result)
    return result


def _statements(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in their order, those under ``if`` and ``try`` too."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += _statements([*node.body, *node.orelse])
    return found


def _canonical(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__}:{node!r}"
    fields = []
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, Function | ast.ClassDef | ast.Module):
            value = _without_docstring(value)
        if name not in _LEFT_OUT and value is not None and value != []:
            fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _without_docstring(body: list[ast.stmt] | None) -> list[ast.stmt] | None:
    if body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return body[1:]
    return body


def _piece(text: str) -> ast.AST:
    """Return the tree of an expression, or of one statement."""
    statement = ast.parse(text).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Swap(ast.NodeTransformer):
    """Replace what equals ``old``, and count."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new, self.count = old, new, 0
        self.canonical = _canonical(old)

    def visit(self, node: ast.AST) -> ast.AST:
        if type(node) is type(self.old) and _canonical(node) == self.canonical:
            self.count += 1
            return ast.copy_location(copy.deepcopy(self.new), node)
        return super().generic_visit(node)
