"""What transformers exports is what it is without our change, which only makes the index sooner."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import transformers
from transformers.utils import import_utils

from trouper.engine.platform.transformers_index import EXPORTS, SCAN

MODELS = Path(transformers.__file__).parent / "models"


def unchanged() -> ModuleType:
    """The module once more, as it is installed."""
    spec = importlib.util.find_spec(import_utils.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_is_the_same() -> None:
    plain = unchanged()
    assert plain.define_import_structure(MODELS) == import_utils.define_import_structure(MODELS)
    assert getattr(plain, EXPORTS) is not getattr(import_utils, EXPORTS), "the one in use was changed"


def test_no_directory_is_read_twice() -> None:
    """At the import of transformers.models, which asks with a string and not with a path."""
    scan = getattr(import_utils, SCAN)
    import_utils.define_import_structure(MODELS)
    read = scan.cache_info().misses
    import_utils.define_import_structure(str(MODELS / "__init__.py"))
    assert scan.cache_info().misses <= read + 1
    assert read > 128


def test_the_last_list_of_exports_counts() -> None:
    exports, plain = getattr(import_utils, EXPORTS), getattr(unchanged(), EXPORTS)
    lists = ['__all__ = ["a"]', '__all__ = [\n    "b",\n    "c",\n]']
    contents = ["", "x = 1\n", "x = '__all__'\n", *lists, *(f"import x\n{each}\n" for each in lists)]
    contents += [f"{first}\n\n{last}\ny = 1\n" for first in lists for last in lists] + [
        "x\x0c__all__ = ['d']\n",
        "x\r\n__all__ = ['e']\r\n",
    ]
    assert [exports(content) for content in contents] == [plain(content) for content in contents]
