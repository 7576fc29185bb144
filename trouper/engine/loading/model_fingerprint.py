"""Fingerprint of a model's KV: a hash of weights, adapter and versions of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from trouper.protocol.problems import is_shortage
from trouper.protocol.settings import default_cache_dir
from trouper.storage.cache_fingerprint import file_digest, namespace

SHAPING = ("*.safetensors", "config.json")


def fingerprint(
    directory: Path,
    adapter_path: str | None,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
    rank: Mapping[str, str],
) -> str:
    """Return hex digits; "" if files are unreadable. A memo saves reading unchanged files.
    `progress` gets bytes read and total bytes. `rank` distinguishes ranks' KV. Raises `OSError` for
    lack of descriptors or memory."""
    memo = default_cache_dir() / "digests.json"
    parts = {"mlx-lm": version("mlx-lm"), **rank}
    try:
        files = _files(directory, adapter_path)
        done, total = 0, sum(path.stat().st_size for path in files.values())

        def advance(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for name, path in files.items():
            parts[name] = file_digest(path, memo, advance)
    except OSError as error:
        if is_shortage(error):  # The model is loaded again soon.
            raise
        report(f"the files of the model could not be read again ({error}); nothing is kept on disk")
        return ""
    return namespace(parts)


def _files(directory: Path, adapter_path: str | None) -> dict[str, Path]:
    model = sorted(path for pattern in SHAPING for path in directory.glob(pattern))
    adapter = (
        [path for path in sorted(Path(adapter_path).iterdir()) if path.is_file()]
        if adapter_path
        else []
    )
    return {f"model/{path.name}": path for path in model} | {
        f"adapter/{path.name}": path for path in adapter
    }
