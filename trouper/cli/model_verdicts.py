"""Why `serve` would refuse models, for `trouper models`.

A model is opened as `serve` opens one, which takes about a second. Models that passed are
remembered by the state of their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import attrs
import msgspec

from trouper.protocol.paths import encodable
from trouper.protocol.problems import ModelUnusable, printable
from trouper.protocol.settings import Settings, default_cache_dir
from trouper.protocol.version import VERSION
from trouper.storage.cache_directory import read_memo, write_memo
from trouper.storage.model_files import ModelFiles
from trouper.storage.model_scan import state_of

MEMO = "models-that-pass.json"
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers")
MAX_REMEMBERED = 1000


class Passed(msgspec.Struct, frozen=True):
    """`state`: of the files and of the packages that read them."""

    state: str


def with_problems(models: Sequence[ModelFiles]) -> list[ModelFiles]:
    """The models with `problem` as `serve` would say it."""
    memo = default_cache_dir() / MEMO
    before = read_memo(memo, Passed)
    checked = [_checked(files, before) for files in models]
    passed = {_key(files): Passed(_state(files)) for files in checked if not files.problem}
    if any(before.get(name) != value for name, value in passed.items()):
        write_memo(memo, dict([*(before | passed).items()][-MAX_REMEMBERED:]))
    return checked


def _checked(files: ModelFiles, before: dict[str, Passed]) -> ModelFiles:
    if files.problem or before.get(_key(files)) == Passed(_state(files)):
        return files
    from trouper.engine.loading.model_loading import check

    try:
        check(Settings(model=str(files.directory)))
    except ModelUnusable as unusable:
        return attrs.evolve(files, problem=str(unusable))
    except Exception as error:  # noqa: BLE001
        # Any bytes may be in the files: the others are listed.
        return attrs.evolve(files, problem=printable(f"{type(error).__name__}: {error}"))
    return files


def _key(files: ModelFiles) -> str:
    return encodable(str(files.directory.absolute()))


def _state(files: ModelFiles) -> str:
    state = repr((VERSION, *state_of(files.directory), *_versions()))
    return hashlib.sha256(state.encode()).hexdigest()


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield version(name)
        except PackageNotFoundError:
            yield ""
