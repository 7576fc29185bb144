"""Why `serve` would refuse models, for `trouper models`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import msgspec

from trouper.protocol.paths import encodable
from trouper.protocol.problems import ModelUnusable, printable
from trouper.protocol.settings import Settings, default_cache_dir
from trouper.protocol.version import VERSION, installed_version
from trouper.storage.memos import add_to_memo, read_memo
from trouper.storage.model_files import ModelFiles
from trouper.storage.model_scan import state_of

MEMO = "models-that-pass.json"
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers")
MAX_REMEMBERED = 1000


class Passed(msgspec.Struct, frozen=True):
    """`state`: of the files and of the packages that read them."""

    state: str


# A model is opened as `serve` opens one, which takes about a second. Models that passed are
# remembered by the state of their files and of the code that reads them; the code of a plugin may
# change without its version, and models that need one are opened each time.
def with_problems(models: Sequence[ModelFiles]) -> list[ModelFiles]:
    """The models with `problem` as `serve` would say it."""
    if not models:
        return []  # The lookup is slow to import.
    from trouper.engine.architectures.architecture_lookup import descriptions, registered

    versions = [installed_version(name, "") for name in PACKAGES]
    memo, code = default_cache_dir() / MEMO, repr((VERSION, *versions, *descriptions()))
    before = read_memo(memo, Passed)
    changing = registered()
    states = {
        _key(files): Passed(_state(files, code))
        for files in models
        if files.architecture not in changing
    }
    remembered = {key for key, state in states.items() if before.get(key) == state}
    checked = [
        files if files.problem or _key(files) in remembered else _opened(files) for files in models
    ]
    sound = {_key(files) for files in checked if not files.problem}
    passed = {key: state for key, state in states.items() if key in sound}
    if not passed.keys() <= remembered:
        add_to_memo(memo, Passed, passed, MAX_REMEMBERED)
    return checked


def _opened(files: ModelFiles) -> ModelFiles:
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


def _state(files: ModelFiles, code: str) -> str:
    state = repr((code, *state_of(files.directory)))
    return hashlib.sha256(state.encode()).hexdigest()
