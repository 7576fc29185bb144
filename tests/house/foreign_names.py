"""Private names of other packages that a module reads, overrides or assigns to, by its syntax.

A private name belongs to the package that defines it: a name that no file of a module's own
directory defines is another package's. Three assignments count, too, whatever their name: to an
attribute of what was imported from a library, to `__class__`, and subclasses made by `type(...)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from tests.house.source_tree import Module, absolute_name

DOCUMENTED = {
    *("os._exit", "sys._getframe", "sys._current_frames"),
    *("sys.stdin", "sys.stdout", "sys.stderr", "sys.excepthook"),
}
"""What the standard library's pages offer for use or for assignment."""
TUPLE_METHODS = {"_replace", "_asdict", "_fields", "_make"}
"""Of named tuples, which document them."""
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def list_foreign(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Per module those that it touches, as written there; modules without one are left out."""
    defined: dict[Path, set[str]] = {}
    for module in modules.values():
        defined.setdefault(module.path.parent, set()).update(_define(module))
    foreign = {}
    for name, module in modules.items():
        root = name.partition(".")[0]
        if touched := {*_touch(module, root, defined[module.path.parent])}:
            foreign[name] = sorted(touched)
    return foreign


def _define(module: Module) -> Iterator[str]:
    """Private names of functions, classes, variables, and attributes of `self` and `cls`."""
    for node in module.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store())
            ) if is_private(name):
                yield name
            case ast.Constant(value=str(name)) if is_private(name):
                yield name  # Of `__slots__`.


def _touch(module: Module, root: str, own: AbstractSet[str]) -> Iterator[str]:
    libraries = {*_bind(module, root)}
    for node in module.nodes:
        match node:
            case ast.ImportFrom() | ast.Import():
                yield from _import_private(module, node)
            case ast.Attribute():
                yield from _touch_attribute(node, libraries, own)
            case ast.Call(func=ast.Name(id="type"), args=[_, _, _]):
                yield f"type({ast.unparse(node.args[0])}, ...)"
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                if _find_root(owner) in libraries:
                    yield f"setattr({ast.unparse(owner)}, ...)"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, name, *_]):
                if isinstance(name, ast.Constant) and is_private(str(name.value)):
                    yield ast.unparse(node)
            case ast.ClassDef() if any(_find_root(base) in libraries for base in node.bases):
                yield from _override(module, node)


def _bind(module: Module, root: str) -> Iterator[str]:
    """Names that imports from outside the package bind."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] != root:
                    yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            source = absolute_name(node, module.package)
            if source.partition(".")[0] != root:
                yield from (alias.asname or alias.name for alias in node.names)


def _import_private(module: Module, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """A private module or name, unless a package or its parent imports from itself."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = absolute_name(node, module.package)
        if base == module.package or base.rpartition(".")[0] == module.package:
            return
        names = [f"{base}.{alias.name}" for alias in node.names]
    yield from (name for name in names if any(map(is_private, name.split("."))))


def _touch_attribute(
    node: ast.Attribute,
    libraries: AbstractSet[str],
    own: AbstractSet[str],
) -> Iterator[str]:
    of_library = _find_root(node) in libraries
    if is_private(node.attr):
        foreign = (of_library or node.attr not in own) and node.attr not in TUPLE_METHODS
    else:
        stored = not isinstance(node.ctx, ast.Load)
        foreign = stored and (of_library or node.attr == "__class__")
    if foreign and (written := ast.unparse(node)) not in DOCUMENTED:
        yield written


def _override(module: Module, node: ast.ClassDef) -> Iterator[str]:
    """Private methods of a library's subclass that the module itself never calls."""
    called = {
        attribute.attr
        for attribute in module.nodes
        if isinstance(attribute, ast.Attribute)
        and is_private(attribute.attr)
        and ast.unparse(attribute.value) != "super()"
    }
    for method in node.body:
        if isinstance(method, FUNCTIONS) and is_private(method.name) and method.name not in called:
            yield f"{node.name}.{method.name}"


def _find_root(node: ast.expr) -> str:
    """The first name of a dotted or subscripted expression."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
