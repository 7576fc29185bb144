"""Whether this interpreter has all that the package and its tests name: `python -W error -m
tests.oldest_python`.

`requires-python` says 3.11, and 3.11.0 to 3.11.3 lack what later patch releases brought: Debian 12
has 3.11.2. `just check` runs this with the first such interpreter that it finds; tests look for the
keywords that a name does not show.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("trouper", "packages", "tests", "benchmarks", "examples")
IMPORTED = {"trouper": "", "packages/trouper-lab/trouper_lab": "", "tests": "test_"}
"""Packages whose modules are imported, if their names begin so: helpers may be programs, which a
test that needs one imports."""
OF_SYSTEMS = {("fcntl", "F_NOCACHE")}
"""Names that another system has."""
LATE_KEYWORDS = {
    ("extractall", "filter"),  # tarfile, shutil: 3.11.4
    ("extract", "filter"),
    ("unpack_archive", "filter"),
    ("getaddresses", "strict"),  # email.utils: 3.11.10
    ("parseaddr", "strict"),
    ("rmtree", "onexc"),  # 3.12, as what follows
    ("NamedTemporaryFile", "delete_on_close"),
    ("TemporaryDirectory", "delete"),
    ("relative_to", "walk_up"),
    ("glob", "case_sensitive"),
    ("create_task", "eager_start"),
}
"""Keywords of functions of the standard library which came after 3.11.0."""


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        yield path, path.read_text("utf-8")


def late_keywords(text: str) -> Iterator[tuple[str, str]]:
    """Find keywords that 3.11.0 does not know, by the name of what is called."""
    if not any(f"{name}(" in text and f"{keyword}=" in text for name, keyword in LATE_KEYWORDS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            yield from LATE_KEYWORDS & {(name, keyword.arg or "") for keyword in node.keywords}


def standard_names(text: str) -> Iterator[tuple[str, str]]:
    """Find names of the standard library's modules, also those that are imported, or used, in a
    function."""
    modules: dict[str, str] = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name: alias.name
                for alias in node.names
                if _is_standard(alias.name)
            }
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and _is_standard(node.module)
        ):
            yield from ((node.module, alias.name) for alias in node.names)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            yield modules[node.value.id], node.attr


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names and module != "__future__"


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    try:
        return hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def main() -> None:
    """Exits with what is missing, one a line."""
    wrong = [
        f"{path}: {module}.{name} is not there"
        for path, text in sources()
        for module, name in {*standard_names(text)} - OF_SYSTEMS
        if not is_there(module, name)
    ]
    for package, begin in IMPORTED.items():
        folder = ROOT / package
        for found in pkgutil.walk_packages([str(folder)], f"{folder.name}."):
            if (name := found.name.rpartition(".")[2]).startswith(begin) and name != "__main__":
                try:
                    importlib.import_module(found.name)
                except Exception as error:  # noqa: BLE001  Whatever an import raises is what is looked for.
                    wrong.append(f"{found.name}: {type(error).__name__}: {error}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
