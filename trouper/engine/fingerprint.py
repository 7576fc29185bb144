"""What a model's KV is computed with, as one name: the content of weights and adapter, and the code that reads them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from trouper.protocol.settings import default_cache_dir
from trouper.storage.fingerprint import file_digest, namespace

SHAPING = ("*.safetensors", "config.json")
"""Of the files of a model, those that its KV depends on. Of an adapter's, all."""


def fingerprint(directory: Path, adapter_path: str | None, report: Callable[[str], None]) -> str:
    """Hex digits; "" if the files cannot be read, and then nothing is kept on disk. Takes the time to read the files
    once; a memo in the cache directory spares that until they change."""
    memo = default_cache_dir() / "digests.json"
    parts = {"mlx-lm": version("mlx-lm")}
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        for path in _files(directory):
            parts[f"model/{path.name}"] = file_digest(path, memo)
        for path in sorted(Path(adapter_path).iterdir()) if adapter_path else ():
            if path.is_file():
                parts[f"adapter/{path.name}"] = file_digest(path, memo)
    except OSError as error:
        report(f"the files of the model could not be read again ({error}); nothing is kept on disk")
        return ""
    return namespace(parts)


def _files(directory: Path) -> list[Path]:
    return sorted(path for pattern in SHAPING for path in directory.glob(pattern))
