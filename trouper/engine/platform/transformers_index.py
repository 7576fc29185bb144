"""The index of models that transformers makes at its import, made once and faster.

transformers/utils/import_utils.py reads all 3,300 files of transformers/models for what each exports, at the import of `transformers`
and again at that of `transformers.models`, since its cache has room for 128 of 500 directories; and it looks at each line of each
file for the last one that begins with `__all__`. Both together were a third of what a process needed to import the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

from trouper.engine.platform.import_hook import around_import

MODULE = "transformers.utils.import_utils"
SCAN, EXPORTS = "create_import_structure_from_path", "fetch__all__"


def make_faster() -> None:
    """Change the two functions when transformers is imported. To be called before it. A version without them is left as it is."""
    around_import(MODULE, _changed)


def _changed(run: Callable[[], None], module: ModuleType) -> None:
    run()
    scan = getattr(getattr(module, SCAN, None), "__wrapped__", None)
    if scan is not None:
        setattr(module, SCAN, cache(scan))
    exports = getattr(module, EXPORTS, None)
    if exports is not None:
        setattr(module, EXPORTS, _from_last(exports))


def _from_last(exports: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Give a file's content from its last `__all__` on, which decides."""
    return lambda content: exports(content[content.rfind("\n__all__") + 1 :])
