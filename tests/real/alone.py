"""What each request is answered alone. Nearly all the time of the tests that compare with it went
into that: so it is computed once a run for each model and request, by whichever test is first, and
read by those of all processes."""

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
    """Without drafts, whatever the requests say, and without a prefix cache. `path` None: the
    embedded model, of which nothing is kept."""
    plain = {
        name: attrs.evolve(wish, speculation="off", priority=0) for name, wish in asked.items()
    }
    if path is None or Kept.directory is None:
        return await _answered(path, plain)
    model = _digest_of_files(path)
    files = {
        name: Kept.directory / f"{_digest(model, wish)}.pickle" for name, wish in plain.items()
    }
    for name, heard in (
        await _answered(path, {n: w for n, w in plain.items() if not files[n].exists()})
    ).items():
        written = files[name].with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(heard))
        written.replace(files[name])
    return {name: pickle.loads(file.read_bytes()) for name, file in files.items()}


async def _answered(path: str | None, asked: Wishes) -> dict[str, Heard]:
    if not asked:
        return {}
    async with running(path, cache_memory=0) as runtime:
        return {name: (await ask(runtime, wish))[0] for name, wish in asked.items()}


def _digest(model: bytes, wish: Generate) -> str:
    return hashlib.sha256(model + repr(wish).encode()).hexdigest()


def _digest_of_files(path: str) -> bytes:
    digest = hashlib.sha256()
    for file in sorted(file for file in Path(path).rglob("*") if file.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()
