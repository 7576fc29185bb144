"""The servers of a soak: one with keys and two of three models at a time, one whose model has LoRA
adapters, and a group of two ranks. All stay for as long as the soak does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import attrs
import psutil

from tests.adapters import save_adapter
from tests.families import FAMILIES, build
from tests.families import save as save_family
from tests.ranks.launching import environments
from tests.soak.client import KEY, LIMITED_KEY
from tests.soak.wishes import Model, vocabulary_of
from tests.test_process import PATIENCE_S, RUN
from tests.vision_model.files import DIRECTORY
from trouper.system.ports import free_ports

LARGE, SMALL, OTHER, SPLIT, TUNED = "large", "small-a", "small-b", "small-split", "small-tuned"
SEES = "small-sees"
"""The model of examples/shapes, beside text models; `SPLIT` is a copy of it over ranks."""
ADAPTED = (TUNED, f"{TUNED}:north", f"{TUNED}:south")
"""A base, and the base with each of its adapters."""
KEYS = f"""{KEY} name=soak admin=true observability=true cache=shared
{LIMITED_KEY} name=limited requests_per_minute=6 cache=shared
"""
EMBEDDED = "SmolLM2-135M-Instruct"
CERTAIN = {LARGE: 0.1}
CERTAIN_SMALL = 0.004
"""Tiny models in float32 add up to within 1e-4."""
MODEL_MEMORY = 585_000_000
"""Room for the embedded model (538 MB), the one that sees (8 MB) and one of the others (26 MB)."""
SSD_BYTES = 60_000_000
COMMON = (
    "--gather-ms",
    "0",
    "--cache-memory",
    "40MB",
    # Small enough to be full in the first part, which is not judged.
    "--image-cache",
    "15MB",
    "--ssd-keep-free",
    "100MB",
    "--janitor-interval-s",
    "2",
    "--stored-responses",
    "20",
    "--stored-responses-bytes",
    "2MB",
    "--completion-batch-size",
    "8",
)
PATIENT = ("--queue-timeout-s", "300", "--first-token-timeout-s", "300", "--token-timeout-s", "300")
"""Neighbours on the machine are no fault of the server's."""


@attrs.frozen
class Models:
    """Directories of the models. `large`: the embedded one, or in short tests a tiny one."""

    large: str
    small: Path
    other: Path
    split: Path
    tuned: Path
    keys: Path

    @classmethod
    def saved(cls, place: Path, *, tiny: bool) -> Models:
        wide = {"max_position_embeddings": 4096}
        tall = wide | ({} if tiny else {"intermediate_size": 8192})
        large = EMBEDDED
        if tiny:
            large = str(save_family("llama", place / "large", {**FAMILIES["llama"], **wide}))
        return cls(
            large,
            save_family("llama", place / "a", {**FAMILIES["llama"], **tall}),
            save_family("qwen3", place / "b", {**FAMILIES["qwen3"], **tall}),
            Path(copytree(DIRECTORY, place / "split")),
            _tuned(place / "tuned"),
            _keys(place / "keys"),
        )

    def described(self, name: str) -> Model:
        large = name == LARGE and self.large == EMBEDDED
        certain = CERTAIN[LARGE] if large else CERTAIN_SMALL
        vocabulary = vocabulary_of(LARGE if large else "small")
        return Model(name, certain, vocabulary, 60 if large else 40, name in (SEES, SPLIT))

    def flags(self, **more: Path) -> list[str]:
        """Of a server with those that no other has, and more by their names."""
        named = {
            LARGE: self.large,
            SMALL: str(self.small),
            OTHER: str(self.other),
            SEES: str(DIRECTORY),
            **{n: str(path) for n, path in more.items()},
        }
        flags = [flag for path in named.values() for flag in ("--model", path)]
        flags += [
            flag
            for name, path in named.items()
            for flag in ("--served-model-name", f"{name}={path}")
        ]
        return [*flags, "--api-key-file", str(self.keys), *self._checked()]

    def tuned_flags(self) -> list[str]:
        adapters = [
            f"--adapter={name.partition(':')[2]}={self.tuned / name.partition(':')[2]}"
            for name in ADAPTED[1:]
        ]
        return [
            "--model",
            str(self.tuned),
            "--served-model-name",
            TUNED,
            *adapters,
            *self._checked(),
        ]

    def split_flags(self) -> list[str]:
        return ["--model", str(self.split), "--served-model-name", SPLIT, *self._checked()]

    def _checked(self) -> list[str]:
        return [] if self.large == EMBEDDED else ["--self-check", "off"]


def _tuned(place: Path) -> Path:
    wide = {**FAMILIES["llama"], "max_position_embeddings": 4096}
    save_family("llama", place, wide)
    for seed, name in enumerate(ADAPTED[1:]):
        save_adapter(build("llama", config=wide), place / name.partition(":")[2], seed)
    return place


def _keys(file: Path) -> Path:
    file.write_text(KEYS)
    file.chmod(0o600)
    return file


@attrs.frozen
class Group:
    """The processes of one model server: several ranks, or one. `port`: rank 0's; `place`: its
    cache and temporary files."""

    name: str
    port: int
    processes: Sequence[psutil.Process]
    place: Path

    @property
    def cache(self) -> Path:
        return self.place / "cache"

    @property
    def temporary(self) -> Path:
        return self.place / "tmp"


@contextmanager
def group(
    name: str, place: Path, flags: Sequence[str], *, ranks: int = 1, quiet: bool = False
) -> Iterator[Group]:
    """`quiet`: it keeps nothing, and drafts nothing. Raises `AssertionError` if it does not
    start."""
    [port], own = free_ports(1), place / name
    (own / "tmp").mkdir(parents=True)
    command = [sys.executable, "-c", RUN, "serve", "--port", str(port), *flags, *PATIENT]
    command += ["--cache-memory", "0", "--no-ssd", "--speculation", "off"] if quiet else [*COMMON]
    if not quiet:
        command += ["--ssd-cache-dir", str(own / "cache"), "--ssd-max-bytes", str(SSD_BYTES)]
    command += ["--batch-dir", str(own / "batches")]
    processes: list[subprocess.Popen[str]] = []
    with (own / "log").open("w") as log, environments(ranks) as each:
        try:
            for environment in each:
                added = {
                    "OPENBLAS_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "TMPDIR": str(own / "tmp"),
                }
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment | added,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )
            assert processes[0].stdout is not None
            assert any("is ready at" in line for line in processes[0].stdout), (
                own / "log"
            ).read_text()[-3000:]
            yield Group(name, port, [psutil.Process(process.pid) for process in processes], own)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                _ended(process)


def _ended(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()


def neighbours() -> float:
    """How many processes of the whole machine want a core."""
    return os.getloadavg()[0]
