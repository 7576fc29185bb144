"""A scripted server as a process of its own, for tests in which clients are processes or block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
GOODBYE_S = 10.0


@contextmanager
def scripted_server(*flags: str, log: Path | None = None) -> Iterator[str]:
    """The URL, without /v1, of `python -m tests.scripted FLAGS`, which ends with the block. `log`:
    what it writes to stderr."""
    command = [sys.executable, "-m", "tests.scripted", *flags]
    errors = subprocess.DEVNULL if log is None else log.open("wb")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http"), f"no server came up: {command}"
        yield url
    finally:
        process.terminate()
        try:
            process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if not isinstance(errors, int):
            errors.close()


def recorded(path: Path, kind: str = "http") -> list[dict[str, Any]]:
    """The lines of `--record` of one kind: `http`; `request`, which has the tokens of the prompt
    and of the cache; or `image`, which has the SHA-256 of the pixels that the engine got."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == kind]
