"""What a model's KV is computed with, as one name: the content of weights and adapter, and the code that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from trouper.protocol.settings import default_cache_dir
from trouper.storage.cache_fingerprint import file_digest, namespace

SHAPING = ("*.safetensors", "config.json")
"""Of the files of a model, those that its KV depends on. Of an adapter's, all."""


def fingerprint(
    directory: Path,
    adapter_path: str | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    rank: Mapping[str, str],
) -> str:
    """Hex digits; "" if the files cannot be read, and then nothing is kept on disk. Takes the time to read the files
    once; a memo in the cache directory spares that until they change. `progress` hears bytes read, of how many. `rank`:
    what tells this rank's KV from other ranks', and from that of another number of them."""
    memo = default_cache_dir() / "digests.json"
    parts = {"mlx-lm": version("mlx-lm"), **rank}
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        files = _files(directory, adapter_path)
        done, total = 0, sum(path.stat().st_size for path in files.values())

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for name, path in files.items():
            parts[name] = file_digest(path, memo, advance)
    except OSError as error:
        report(f"the files of the model could not be read again ({error}); nothing is kept on disk")
        return ""
    return namespace(parts)


def _files(directory: Path, adapter_path: str | None) -> dict[str, Path]:
    """By the names they have in the fingerprint."""
    model = sorted(path for pattern in SHAPING for path in directory.glob(pattern))
    adapter = [path for path in sorted(Path(adapter_path).iterdir()) if path.is_file()] if adapter_path else []
    return {f"model/{path.name}": path for path in model} | {f"adapter/{path.name}": path for path in adapter}
