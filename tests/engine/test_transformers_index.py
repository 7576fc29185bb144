"""What transformers exports is what it is without our change, which only makes the index sooner."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import transformers
from transformers.utils import import_utils

from trouper.engine.platform.transformers_index import EXPORTS, LAZY, SCAN, STATE, BegunIndex

MODELS = Path(transformers.__file__).parent / "models"


@cache
def unchanged() -> ModuleType:
    """The module once more, as it is installed: by its file, for its own spec runs our change."""
    spec = importlib.util.spec_from_file_location(import_utils.__name__, import_utils.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_index_is_the_same() -> None:
    plain = unchanged()
    assert plain.define_import_structure(MODELS) == import_utils.define_import_structure(MODELS).complete()
    assert getattr(plain, EXPORTS) is not getattr(import_utils, EXPORTS), "the one in use was changed"


def test_no_directory_is_read_twice() -> None:
    """At the import of transformers.models, which asks with a string and not with a path."""
    scan = getattr(import_utils, SCAN)
    import_utils.define_import_structure(MODELS).complete()
    read = scan.cache_info().misses
    import_utils.define_import_structure(str(MODELS / "__init__.py")).complete()
    assert scan.cache_info().misses <= read + 1
    assert read > 128


def indexed(module: ModuleType) -> Any:
    """A lazy module, made as transformers makes its first."""
    index = module.define_import_structure(MODELS, prefix="models")
    index[frozenset()].update({"configuration_utils": ["PreTrainedConfig"], "models": []})
    return getattr(module, LAZY)(
        "transformers", str(MODELS.parent / "__init__.py"), index, extra_objects={"__version__": "7"}
    )


class Counted(Exception):
    """All files would be read."""


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: BegunIndex) -> NoReturn:
        raise Counted

    monkeypatch.setattr(BegunIndex, "complete", refuse)


def test_all_names_are_there_and_each_is_found_where_it_was() -> None:
    lazy, plain = indexed(import_utils), indexed(unchanged())
    assert sorted(lazy.__all__) == sorted(plain.__all__)
    assert dir(lazy) == sorted({*dir(plain)} | {name for name in dir(lazy) if "trouper" in name})
    for each in STATE:
        found, expected = vars(lazy)[each], vars(plain)[each]
        assert (sorted(found) == sorted(expected)) if isinstance(expected, list) else found == expected, each
    assert lazy.__reduce__()[1] == plain.__reduce__()[1]


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", ["AutoTokenizer", "AutoConfig", "PreTrainedConfig", "AutoModel", "__version__"])
def test_what_a_server_asks_for_reads_no_model(name: str) -> None:
    assert getattr(indexed(import_utils), name) is not None


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", ["__wrapped__", "__len__"])
def test_what_python_asks_each_module_for_reads_no_model(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(indexed(import_utils), name)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", ["LlamaConfig", "__all__", "nothing"])
def test_other_names_are_looked_for_in_all_models(name: str) -> None:
    with pytest.raises(Counted):
        getattr(indexed(import_utils), name)


def test_a_name_of_a_model_is_that_model_s_and_one_of_none_is_an_error() -> None:
    lazy = indexed(import_utils)
    assert lazy.LlamaConfig is transformers.models.llama.LlamaConfig
    assert lazy.LlamaTokenizerFast.__name__ == "LlamaTokenizer", "as transformers itself falls back"
    assert "PyTorch" in error_of(lazy.LlamaModel)
    with pytest.raises(AttributeError, match="nothing"):
        _ = lazy.nothing


def error_of(model: Callable[[], object]) -> str:
    with pytest.raises(ImportError) as caught:
        model()
    return str(caught.value)


def test_the_last_list_of_exports_counts() -> None:
    exports, plain = getattr(import_utils, EXPORTS), getattr(unchanged(), EXPORTS)
    lists = ['__all__ = ["a"]', '__all__ = [\n    "b",\n    "c",\n]']
    contents = ["", "x = 1\n", "x = '__all__'\n", *lists, *(f"import x\n{each}\n" for each in lists)]
    contents += [f"{first}\n\n{last}\ny = 1\n" for first in lists for last in lists] + [
        "x\x0c__all__ = ['d']\n",
        "x\r\n__all__ = ['e']\r\n",
    ]
    assert [exports(content) for content in contents] == [plain(content) for content in contents]
