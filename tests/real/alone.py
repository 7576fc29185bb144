"""What each request is answered alone. Nearly all the time of the tests that compare with it went into that: so it is computed once a run
for each model and its requests, by whichever test is first, and read by those of all processes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import attrs

from tests.real.serving import Heard, ask, running
from trouper import Generate

Wishes = Mapping[str, Generate]


class Kept:
    """directory: of this run of the tests; None: nothing is kept."""

    directory: Path | None = None


async def alone_of(path: str | None, asked: Wishes) -> dict[str, Heard]:
    """Without drafts, whatever the requests say, and without a prefix cache. `path` None: the embedded model, of which nothing is kept."""
    plain = {name: attrs.evolve(wish, speculation="off", priority=0) for name, wish in asked.items()}
    if path is None or Kept.directory is None:
        return await _answered(path, plain)
    kept = Kept.directory / f"{_digest(path, plain)}.pickle"
    if kept.exists():
        return dict(pickle.loads(kept.read_bytes()))
    alone = await _answered(path, plain)
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_bytes(pickle.dumps(alone))
    written.replace(kept)
    return alone


async def _answered(path: str | None, asked: Wishes) -> dict[str, Heard]:
    async with running(path, cache_memory=0) as runtime:
        return {name: (await ask(runtime, wish))[0] for name, wish in asked.items()}


def _digest(path: str, asked: Wishes) -> str:
    """Of the model's files and of the requests."""
    digest = hashlib.sha256(repr(sorted(asked.items(), key=lambda item: item[0])).encode())
    for file in sorted(file for file in Path(path).rglob("*") if file.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
