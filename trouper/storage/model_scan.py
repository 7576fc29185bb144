"""The models in the hub's cache or in directories (--models-from), by configs, headers and
tokenizer files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import attrs

from trouper.protocol.paths import encodable, exists, expanded, is_directory, is_file
from trouper.protocol.problems import SettingsInvalid, printable
from trouper.protocol.settings import HUB_CACHE, NAMED_SOURCES
from trouper.storage.model_files import ModelFiles, read_model_files, unreadable
from trouper.storage.other_programs import directory_of_program, ollama_models

ANSWER_S = 10.0
# Maximum path on Linux.
LONGEST_NAME = 4096
FilesState = tuple[tuple[str, float, int], ...]
Described = tuple[FilesState, ModelFiles]
"""State of the files, and their description."""
# As huggingface_hub names directories: models--OWNER--NAME/snapshots/COMMIT.
SNAPSHOTS = "models--*"
CONTENT = ("config.json", "*.gguf")
"""What a model's directory has; one with GGUF files alone is listed and not served."""


def hub_cache() -> Path:
    """The hub's cache, as huggingface_hub finds the directory."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def require_hub_cache(sources: Sequence[str]) -> None:
    """Raises `SettingsInvalid` if a requested hub cache exists and is no directory."""
    if HUB_CACHE in sources and exists(path := hub_cache()) and not is_directory(path):
        raise SettingsInvalid(
            f"the hub's cache {path} is no directory; HF_HUB_CACHE or HF_HOME names it",
            "--models-from",
        )


def directory_of(source: str) -> Path:
    if source == HUB_CACHE:
        return hub_cache()
    return directory_of_program(source) if source in NAMED_SOURCES else expanded(source)


class ModelScan:
    """Finds models, and reads only changed directories again. A directory without answer within
    `answer_s` (a dead mount, a FIFO) is listed with a problem."""

    def __init__(self, sources: Sequence[str], answer_s: float = ANSWER_S) -> None:
        self._sources, self._answer_s = tuple(sources), answer_s
        self._known: dict[Path, Described] = {}
        # Threads whose directory has not answered.
        self._reading: dict[Path, Thread] = {}

    def models(self) -> list[ModelFiles]:
        """All models by name; the first directory wins."""
        found: dict[str, ModelFiles] = {}
        known: dict[Path, Described] = {}
        for source in self._sources:
            root = directory_of(source)
            for files in ollama_models(root):
                found.setdefault(files.name, attrs.evolve(files, source=source))
            for path, directory in model_directories(root):
                if (name := printable(encodable(path), LONGEST_NAME)) in found:
                    continue
                described = self._described(name, directory)
                if described is None:
                    files = unreadable(
                        name, directory, f"{directory} does not answer within {self._answer_s:g} s"
                    )
                else:
                    known[directory], files = described, described[1]
                found[name] = attrs.evolve(files, source=source)
        self._known = known
        return [found[name] for name in sorted(found, key=str.lower)]

    def _described(self, name: str, directory: Path) -> Described | None:
        # Describe a directory; None without an answer. The thread is left alone until its end.
        before, read = self._known.get(directory), list[Described]()

        def work() -> None:
            state = state_of(directory)
            read.append(
                before
                if before is not None and before[0] == state
                else (state, read_model_files(name, directory))
            )

        if (thread := self._reading.pop(directory, None)) is None or not thread.is_alive():
            thread = Thread(target=work, name=f"files of {name}", daemon=True)
            thread.start()
            thread.join(self._answer_s)
        if not read:
            self._reading[directory] = thread
        return read[0] if read else None


def model_directories(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and directory of each model: a hub cache, or directories with config.json or GGUF files
    at most two levels deep."""
    if not is_directory(root):
        return
    for repository in sorted(root.glob(SNAPSHOTS)):
        if (snapshot := _snapshot(repository)) is not None:
            yield repository.name.removeprefix("models--").replace("--", "/"), snapshot
    for pattern in ("*", "*/*"):
        for directory in sorted({path.parent for path in _content(root, pattern)}):
            # What is below a model is a module of it, as `1_Pooling` of an embedder.
            is_module = directory.parent != root and (directory.parent / "config.json").exists()
            hidden = directory.relative_to(root).parts[0].startswith(("models--", "."))
            if not is_module and not hidden:
                yield directory.relative_to(root).as_posix(), directory


def _content(root: Path, pattern: str) -> Iterator[Path]:
    for name in CONTENT:
        yield from root.glob(f"{pattern}/{name}")


def _has_content(directory: Path) -> bool:
    return any(next(directory.glob(name), None) is not None for name in CONTENT)


def _snapshot(repository: Path) -> Path | None:
    snapshots = repository / "snapshots"
    try:
        with suppress(OSError, ValueError):
            main = repository / "refs" / "main"
            current = snapshots / main.read_text().strip() if is_file(main) else snapshots / ""
            if current != snapshots and current.is_dir():
                return current if _has_content(current) else None
        present = [path for path in snapshots.glob("*") if path.is_dir()]
        newest = max(present, key=lambda path: path.stat().st_mtime, default=None)
        return newest if newest is not None and _has_content(newest) else None
    except OSError:  # It is not ours to read, or it was removed meanwhile.
        return None


def state_of(directory: Path) -> FilesState:
    """Names, times and sizes of the readable files, and of the modules' configs below."""
    values: list[tuple[str, float, int]] = []
    for pattern in ("*", "*/*.json"):
        for path in sorted(directory.glob(pattern)):
            with suppress(OSError):
                if path.is_file():
                    stat = path.stat()
                    name = path.relative_to(directory).as_posix()
                    values.append((name, stat.st_mtime, stat.st_size))
    return tuple(values)
