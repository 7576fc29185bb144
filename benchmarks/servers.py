"""The servers that are compared, each in a process of its own, on the same weights and the same
BLAS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
import psutil

from trouper.protocol.settings import default_cache_dir
from trouper.system.ports import free_ports

START_S = 300.0
"""Time limit for a server's start. On a machine that has run none yet a GPU's kernels are compiled:
two minutes on an H100."""


LOOK_S, QUIET_LOOKS = 0.5, 4
"""Seconds between looks, and how many in a row show an idle server."""


@attrs.frozen
class Server:
    name: str
    port: int
    process: psutil.Process
    model: str | None = None
    """What a request has to name, if it has to."""

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def settle(self) -> None:
        """Wait until the server has prepared what it prepares in idle moments."""
        quiet, used = 0, self.cpu_s()
        while quiet < QUIET_LOOKS:
            time.sleep(LOOK_S)
            before, used = used, self.cpu_s()
            quiet = quiet + 1 if used - before < LOOK_S / 5 else 0

    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)


def made_models() -> Path:
    """Models that are made for benchmarks and kept: below the cache, since /tmp is everybody's."""
    return default_cache_dir() / "benchmarks"


def float32_copy(source: Path) -> Path:
    """The embedded model as a float32 directory: what Trouper computes with on CPU, for a server
    that does not convert."""
    target = made_models() / f"{source.name}-float32"
    if not target.is_dir():
        run_code(
            f"from benchmarks.models import save_float32; save_float32({str(source)!r}, "
            f"{str(target)!r})"
        )
    return target


def tiny_copy(source: Path) -> Path:
    """Two layers with the vocabulary and tokenizer of `source`: there the runtime is what is
    measured."""
    target = made_models() / f"{source.name}-tiny"
    if not target.is_dir():
        run_code(
            f"from benchmarks.models import save_tiny; save_tiny({str(source)!r}, {str(target)!r})"
        )
    return target


def random_model(shape: str, bits: int = 16, tokenizer: str | Path | None = None) -> Path:
    """Random weights of one of `models.SHAPES`. `tokenizer`: a directory; default: the embedded
    model's."""
    target = made_models() / f"random-{shape}-{bits}"
    if not target.is_dir():
        source = str(tokenizer or embedded())
        run_code(
            "from benchmarks.models import save_random; "
            f"save_random({shape!r}, {source!r}, {str(target)!r}, {bits})"
        )
    return target


def random_vision_model(shape: str, tower: str) -> Path:
    """Qwen3-VL with random weights; see `models.SHAPES` and `models.TOWERS`."""
    target = made_models() / f"random-{shape}-vision-{tower}"
    if not target.is_dir():
        run_code(
            "from benchmarks.models import save_random_vision; "
            f"save_random_vision({shape!r}, {tower!r}, 'examples/shapes', {str(target)!r})"
        )
    return target


def embedded() -> Path:
    out = run_code("from trouper.engine.loading.bundled_model import directory; print(directory())")
    return Path(out.strip().splitlines()[-1])


def run_code(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@contextmanager
def trouper(
    model: Path, *flags: str, disk: Path | None = None, checkout: Path | None = None
) -> Iterator[Server]:
    """Without `disk` nothing is kept on one: what an earlier run has cached must not help this
    one. `checkout`: another one, with a `.venv`."""
    [port] = free_ports(1)
    flags = ("--no-ssd", *flags) if disk is None else ("--ssd-cache-dir", str(disk), *flags)
    own = shutil.which("trouper", path=str(Path(sys.executable).parent)) or "trouper"
    command = [
        own if checkout is None else str(checkout / ".venv/bin/trouper"),
        "serve",
        "--model",
        str(model),
    ]
    with serving(
        "trouper", [*command, "--port", str(port), "--request-timeout-s", "0", *flags], port
    ) as server:
        yield server


@contextmanager
def mlx_lm(
    model: Path, *flags: str, environment: Mapping[str, str] | None = None, blas: str = "products"
) -> Iterator[Server]:
    """`blas`: see benchmarks.blas."""
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "benchmarks.mlx_lm_server",
        blas,
        "--model",
        str(model),
        "--port",
        str(port),
        "--log-level",
        "WARNING",
        *flags,
    ]
    with serving("mlx_lm.server", command, port, environment) as server:
        yield server


@contextmanager
def serving(
    name: str,
    command: list[str],
    port: int,
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
) -> Iterator[Server]:
    """`environment`: variables beside those of this process."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
        )
        try:
            _wait_until_it_answers(port, process, model)
            yield Server(name, port, psutil.Process(process.pid), model)
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes], model: str | None) -> None:
    named = {"model": model} if model else {}
    body = json.dumps({"prompt": "Hello", "max_tokens": 2, "temperature": 0} | named).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            # Our own loopback address
            urllib.request.urlopen(request, timeout=600).read()  # noqa: S310
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return  # A model that does not generate says so.
            time.sleep(0.2)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the server does not answer")
