"""A server of the chaos: it is started on a directory that stays, and started again after it was
killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import attrs
import psutil

from tests.chaos.faulty import Dials
from tests.families import FAMILIES, save
from tests.ranks.launching import environments
from tests.soak.wishes import Model, vocabulary_of
from tests.test_process import get
from tests.vision_model.files import DIRECTORY
from trouper.actors.runtime.decoding_process import SCRIPT
from trouper.system.ports import free_ports

FIRST, SECOND, SPLIT = "first", "second", "split"
CERTAIN = 0.004
SSD_BYTES, DISK_BYTES = 2_000_000, 3_000_000
"""The tier's bound, and the size of its disk."""
MODEL_MEMORY = "7700KB"
"""For one of the two models, of 7.3 and 0.9 MB: who asks for the other has it loaded."""
FLAGS = (
    "--self-check",
    "off",
    "--gather-ms",
    "0",
    "--block-size",
    "16",
    "--cache-memory",
    "400KB",
    "--ssd-keep-free",
    "1KB",
    "--ssd-max-bytes",
    str(SSD_BYTES),
    "--janitor-interval-s",
    "0.5",
    "--completion-batch-size",
    "4",
    "--heartbeat-s",
    "0.5",
    "--log-level",
    "error",
    # A busy machine is no fault of the server's.
    "--queue-timeout-s",
    "110",
)
START_S = 120.0


def models(place: Path) -> dict[str, Path]:
    wide = {"max_position_embeddings": 4096}
    return {
        FIRST: DIRECTORY,
        SECOND: save("qwen3", place / SECOND, {**FAMILIES["qwen3"], **wide}),
        SPLIT: DIRECTORY,
    }


def described(name: str) -> Model:
    return Model(name, CERTAIN, vocabulary_of("small"), 40, sees=name != SECOND)


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A file system of its own that can be full, where this process may mount one; else a
    directory, and False."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


@attrs.define
class House:
    """`ranks`: processes of one server. `names`: of its models. `disk`: holds its cached files."""

    place: Path
    disk: Path
    directories: dict[str, Path]
    names: Sequence[str]
    ranks: int = 1
    port: int = 0
    processes: list[subprocess.Popen[str]] = attrs.field(factory=list)
    _open: ExitStack = attrs.field(factory=ExitStack, init=False)
    """The ranks' file of addresses, and the log."""

    @property
    def cache(self) -> Path:
        return self.disk / "cache"

    @property
    def log(self) -> Path:
        return self.place / "log"

    def dials(self) -> Dials:
        return Dials(self.place / "dials")

    def command(self) -> list[str]:
        flags = [flag for name in self.names for flag in ("--model", str(self.directories[name]))]
        flags += [
            flag
            for name in self.names
            for flag in ("--served-model-name", f"{name}={self.directories[name]}")
        ]
        if len(self.names) == 1:
            flags = [
                "--model",
                str(self.directories[self.names[0]]),
                "--served-model-name",
                self.names[0],
            ]
        else:
            flags += ["--model-memory", MODEL_MEMORY]
        module = [sys.executable, "-m", "tests.chaos.faulty", str(self.place / "dials")]
        return [
            *module,
            "serve",
            "--port",
            str(self.port),
            *flags,
            *FLAGS,
            "--ssd-cache-dir",
            str(self.cache),
        ]

    def start(self) -> None:
        """The processes, without waiting until they serve."""
        [self.port] = free_ports(1)
        self.dials().turn()
        log = self._open.enter_context(self.log.open("a"))
        for environment in self._open.enter_context(environments(self.ranks)):
            own = {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self.processes.append(
                subprocess.Popen(
                    self.command(),
                    env=environment | own,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            )

    def until_ready(self, patience_s: float = START_S) -> None:
        end = time.monotonic() + patience_s
        while not self.ready():
            dead = [process.returncode for process in self.processes if process.poll() is not None]
            assert not dead, f"it ended with {dead}: {self.said()}"
            assert time.monotonic() < end, (
                f"it is not ready after {patience_s:.0f} s: {self.states()}: {self.said()}"
            )
            time.sleep(0.02)

    def ready(self) -> bool:
        with suppress(OSError, HTTPException, ValueError):
            return get(self.port, "/readyz")[0] == 200
        return False

    def states(self) -> Any:
        """What /health says of each model, as far as it says anything."""
        with suppress(OSError, HTTPException, ValueError):
            health = self.health()
            models = health.get("models", {"": health})
            return {
                name: (model.get("state"), model.get("status"), model.get("detail"))
                for name, model in models.items()
            }
        return "no answer"

    def health(self) -> Any:
        return get(self.port, "/health")[1]

    def send(self, number: signal.Signals, rank: int = 0) -> None:
        with suppress(ProcessLookupError):
            self.processes[rank].send_signal(number)

    def descriptors(self, rank: int = 0) -> int:
        return psutil.Process(self.processes[rank].pid).num_fds()

    def decoders(self) -> list[psutil.Process]:
        """Children that decode images."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.processes[0].pid).children()
            return [child for child in children if str(SCRIPT) in child.cmdline()]
        return []

    def limit_descriptors(self, count: int) -> None:
        _, hard = resource.prlimit(self.processes[0].pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.processes[0].pid, resource.RLIMIT_NOFILE, (min(count, hard), hard))

    def kill(self) -> None:
        """Nothing of it is left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()
        self._open.close()

    def end(self, patience_s: float) -> list[int | None]:
        """Exit codes of all processes; None for one that does not end by itself, which is
        killed."""
        limit = time.monotonic() + patience_s
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.0, limit - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        self.kill()
        return codes

    def said(self) -> str:
        return self.log.read_text()[-2500:] if self.log.exists() else ""
