"""The checks of `trouper doctor`, one function for each subject."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import attrs
from rich.filesize import decimal

from trouper import __version__, workarounds
from trouper.cli.address import CannotListenError, require_address, url_to
from trouper.protocol.api_keys import Keys
from trouper.protocol.installing import command_for
from trouper.protocol.names import DRAFT_FLAG
from trouper.protocol.private_files import owner_or_writers
from trouper.protocol.problems import ModelUnusable, SettingsInvalid
from trouper.protocol.settings import ServerSettings, Settings
from trouper.protocol.version import installed_version
from trouper.storage.file_operations import Disk
from trouper.web.http.connections import other_files

PACKAGES = ("mlx", "mlx-lm", "trio", "quart-trio", "hypercorn", "transformers", "llguidance")
SLOW_GFLOPS = 10.0  # The reference BLAS reaches 2 to 3, OpenBLAS more than 10 on an old core.
SLOW_READ = 200e6  # Bytes per second. A small model computes faster.
PROBE_BYTES = 2**26
PIECE_BYTES = 2**22
SHORT_CONTEXT_TOKENS = 4096
NVIDIA = Path("/proc/driver/nvidia/version")


@attrs.frozen
class Finding:
    level: Literal["ok", "warn", "fail"]
    message: str
    remedy: str = ""


@attrs.frozen
class CheckedSettings:
    models: Sequence[Settings]
    server: ServerSettings
    file: Path | None = None
    misspelt: Sequence[tuple[str, str]] = ()
    """Variables without effect, each with the one that was probably meant"""


Check: TypeAlias = Callable[[CheckedSettings], Iterator[Finding]]


def versions(_: CheckedSettings) -> Iterator[Finding]:
    installed = ", ".join(f"{name} {installed_version(name, 'not installed')}" for name in PACKAGES)
    yield Finding(
        "ok", f"trouper {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield Finding("ok", installed)


def settings(checked: CheckedSettings) -> Iterator[Finding]:
    yield Finding(
        "ok",
        f"of {checked.file}" if checked.file else "no settings file; flags, variables and defaults",
    )
    for name, meant in checked.misspelt:
        yield Finding(
            "warn",
            f"{name} is no variable of trouper and has no effect",
            f"use {meant}, or unset it",
        )


def device(_: CheckedSettings) -> Iterator[Finding]:
    try:
        from trouper.engine import probe
    except ImportError as error:
        remedy = f"on Linux: {command_for('cpu')}, with an NVIDIA GPU {command_for('cuda')}"
        yield Finding("fail", f"MLX cannot be imported: {error}", remedy)
        return
    device = probe.device_stats()
    if device.is_cpu and NVIDIA.exists():
        yield Finding(
            "warn",
            f"{device.name}: MLX computes on the CPU beside an NVIDIA GPU",
            command_for("cuda"),
        )
    else:
        yield Finding("ok", f"{device.name}, {'CPU' if device.is_cpu else 'GPU'}")
    speed = probe.product_gflops()
    message = f"float32 products: {speed:.0f} GFLOP/s"
    if device.fast_blas is not None:
        message += f", with {device.fast_blas.name}"
    if device.is_cpu and speed < SLOW_GFLOPS:
        busy = "other programs keep the machine busy, or OPENBLAS_NUM_THREADS is too low"
        yield Finding(
            "warn",
            message,
            busy if device.fast_blas else f"{command_for('cpu')} brings OpenBLAS",
        )
    else:
        yield Finding("ok", message)


def memory(_: CheckedSettings) -> Iterator[Finding]:
    from trouper.engine import probe

    total, free = probe.device_stats().memory_bytes, _free_memory()
    free = None if free is None else min(free, total)  # A container may have less than the machine.
    if free is None:
        yield Finding("ok", decimal(total))
    elif free < total / 4:
        yield Finding(
            "warn", f"{decimal(free)} of {decimal(total)} free", "end what else needs memory"
        )
    else:
        yield Finding("ok", f"{decimal(free)} of {decimal(total)} free")


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def model(checked: CheckedSettings) -> Iterator[Finding]:
    for settings in checked.models:
        try:
            yield _model(settings)
            yield from _images(settings)
            yield from _draft_model(settings)
        except ModelUnusable as unusable:
            yield Finding(
                "fail",
                unusable.message,
                unusable.remedy or "give another --model, or what this one lacks",
            )


def _model(settings: Settings) -> Finding:
    """Whether the model is here, can be opened, and fits with a useful context."""
    from trouper.engine import probe
    from trouper.engine.loading import bundled_model, lora_adapter

    if settings.adapter_path is not None:
        lora_adapter.require(settings.adapter_path)
    name = settings.model or bundled_model.NAME
    if not probe.is_here(settings.model):
        if name == bundled_model.NAME:
            bundled_model.require_cache()
        return Finding("warn", f"{name} is not here yet", "the first start downloads it")
    probe.require_parts(settings)
    fit, limit = probe.fit(settings), probe.device_stats().memory_bytes
    kind = "" if fit.kind == "generator" else f", {fit.kind}"
    message = f"{name} ({fit.architecture}{kind}): {decimal(fit.weights_bytes)} of weights"
    room = int(limit * settings.memory_fraction) - fit.weights_bytes
    if room <= 0:
        return Finding(
            "fail",
            f"{message}, more than {decimal(limit)} hold",
            "use a smaller or a quantized model",
        )
    if not fit.token_bytes:
        return Finding("ok", f"{message}; {decimal(room)} are left")
    kept = room if settings.kv_memory is None else min(room, int(settings.kv_memory))
    bounded = kept < room
    of_them = f", {decimal(kept)} of them (--kv-memory)" if bounded else ""
    message += (
        f"; {decimal(room)} are left{of_them}, for keys and values of {kept // fit.token_bytes:,} "
        "tokens"
    )
    if kept // fit.token_bytes < SHORT_CONTEXT_TOKENS:
        return Finding(
            "warn",
            message,
            f"{'give more by --kv-memory' if bounded else 'use a smaller model'}, or --kv-bits 8",
        )
    return Finding("ok", message)


def _images(settings: Settings) -> Iterator[Finding]:
    from trouper.engine import probe

    if not probe.is_here(settings.model) or not probe.reads_images(settings):
        return
    if find_spec("PIL") is None:
        yield Finding("warn", "images: no, Pillow decodes them", command_for("images"))
    else:
        yield Finding("ok", "images: yes")


def _draft_model(settings: Settings) -> Iterator[Finding]:
    from trouper.engine import probe

    if settings.draft_model is not None and not probe.is_here(settings.draft_model, DRAFT_FLAG):
        yield Finding(
            "warn",
            f"{settings.draft_model} ({DRAFT_FLAG}) is not here yet",
            "the first start downloads it",
        )


def self_check(checked: CheckedSettings) -> Iterator[Finding]:
    for settings in checked.models:
        with suppress(ModelUnusable):  # `model` names the fault.
            yield _self_check(settings)


def _self_check(settings: Settings) -> Finding:
    """Raises `ModelUnusable`."""
    from trouper.engine import probe

    if settings.self_check == "off":
        return Finding(
            "warn",
            "--self-check off: what rows may do is guessed from the model's caches",
            "leave --self-check out",
        )
    if probe.is_here(settings.model) and probe.fit(settings).encodes:
        return Finding("ok", "none is made for an encoder")
    if not probe.is_here(settings.model) or (line := probe.checked(settings)) is None:
        return Finding(
            "ok",
            "not made yet for these weights, settings, versions and device; the first start "
            "makes it",
        )
    if line.off:
        return Finding(
            "warn",
            line.summary,
            "requests are answered rightly, but slower; docs/self-check.md says what it means",
        )
    return Finding("ok", line.summary)


def disk(checked: CheckedSettings) -> Iterator[Finding]:
    first = checked.models[0]
    if first.blocks_dir is None:
        yield Finding("ok", "--no-ssd: nothing is kept on disk")
        return
    try:
        directory = nearest(first.blocks_dir.absolute())
        free, measured = Disk().free_bytes(directory), measure_disk(directory)
    except OSError as error:
        message = f"{first.blocks_dir}: {error.strerror}; nothing will be kept there"
        yield Finding("warn", message, "give another --ssd-cache-dir, or --no-ssd")
        return
    message = f"{decimal(free)} free for {first.blocks_dir}"
    if free < first.ssd_keep_free + PROBE_BYTES:
        yield Finding(
            "warn", f"{message}: nothing will be kept there", "make room, or lower --ssd-keep-free"
        )
    else:
        yield Finding("ok", message)
    message = f"reads {decimal(int(measured.read))}/s, writes {decimal(int(measured.write))}/s"
    if measured.read < SLOW_READ:
        yield Finding("warn", message, "put --ssd-cache-dir on a faster disk, or use --no-ssd")
    else:
        yield Finding("ok", message)


def batches(checked: CheckedSettings) -> Iterator[Finding]:
    directory = checked.server.batches_dir
    if directory is None:
        yield Finding("ok", "--no-batches: files and batches are not served")
        return
    try:
        existing = nearest(directory.absolute())
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(b"x")  # A full disk still makes empty files.
        free = Disk().free_bytes(existing)
    except OSError as error:
        message = f"{directory}: {error.strerror}; uploads of files and batches will be refused"
        yield Finding("warn", message, "give another --batch-dir, or --no-batches")
        return
    message = f"{decimal(free)} free for {directory}"
    if free < checked.server.max_file_bytes:
        message += ", less than one file may have (--max-file-bytes)"
        yield Finding("warn", message, "make room, or give another --batch-dir")
    else:
        yield Finding("ok", message)


def port(checked: CheckedSettings) -> Iterator[Finding]:
    host, number = checked.server.host, checked.server.port
    try:
        require_address(host, number)
    except CannotListenError as error:
        yield Finding("fail", str(error), _remedy_of_port(host, number, error.reason))
    else:
        yield Finding("ok", f"{host}:{number} is free" if number else f"any free port of {host}")


def _remedy_of_port(host: str, number: int, reason: int | None) -> str:
    match reason:
        case errno.EADDRINUSE:
            return f"or see who is there: trouper top --url {url_to(host, number)}"
        case errno.EACCES:
            return "only an administrator's process may listen on such a port"
        case _:
            return "give an address of this machine as --host"


def keys(checked: CheckedSettings) -> Iterator[Finding]:
    try:
        needed = Keys.of(checked.server).needed
    except SettingsInvalid as invalid:
        file = checked.server.api_key_file
        if invalid.flag == "--api-key-file" and file is not None:
            remedy = _remedy_of_key_file(file)
        else:
            remedy = "give another --api-key, or leave the flag out"
        yield Finding("fail", str(invalid), remedy)
        return
    if not needed and checked.server.allow_no_key:
        yield Finding(
            "warn", "anybody who reaches it may use the model", "give --api-key or --api-key-file"
        )
    else:
        yield Finding(
            "ok", "clients need a key" if needed else "no key; only this machine is let in"
        )


def _remedy_of_key_file(file: Path) -> str:
    if file.is_file() and (owner_or_writers(file) or not os.access(file, os.R_OK)):
        name = shlex.quote(str(file))
        return f'sudo chown "$(id -un)" {name}; sudo chmod 600 {name}'
    return "write one key a line into that file"


def pages(checked: CheckedSettings) -> Iterator[Finding]:
    # Without keys, any page that is opened on this machine may use the server.
    server = checked.server
    keyed = bool(server.api_key or server.api_key_file)
    if not keyed and "*" in server.cors_origins:
        yield Finding(
            "warn",
            "any web page may use the model (--cors-origins *)",
            "name the origins, or give --api-key",
        )
    if not keyed and "*" in server.allowed_hosts:
        message = "a page that rebinds its name may use the model (--allowed-hosts *)"
        yield Finding("warn", message, "name the hosts, or give --api-key")
    if keyed or "*" not in (*server.cors_origins, *server.allowed_hosts):
        origins = ", ".join(server.cors_origins)
        yield Finding(
            "ok",
            f"pages of {origins} may use the model" if origins else "none but the server's own",
        )


def files(checked: CheckedSettings) -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # A server raises the soft one.
    connections = checked.server.max_connections
    needed = connections + other_files()
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = f"this process may open {hard} files; {connections} connections want more"
        yield Finding("warn", message, f"ulimit -n {needed}, or a lower --max-connections")
    else:
        yield Finding("ok", f"enough for {connections} connections")


def list_workarounds(_: CheckedSettings) -> Iterator[Finding]:
    for name in workarounds.list_unknown():
        remedy = f"name one of those below in {workarounds.VARIABLE}"
        yield Finding("warn", f"no workaround is named {name}", remedy)
    names = workarounds.list_names()
    active = [name for name in names if workarounds.is_active(name)]
    yield Finding(
        "ok", f"{len(active)} faults of MLX and others are worked around: docs/workarounds.md"
    )
    for name in names:
        if name not in active:
            summary = f"off: {name}: {workarounds.summarize(name)}"
            yield Finding("warn", summary, f"remove it from {workarounds.VARIABLE}")


CHECKS: dict[str, Check] = {
    "versions": versions,
    "settings": settings,
    "device": device,
    "memory": memory,
    "model": model,
    "self-check": self_check,
    "disk": disk,
    "batches": batches,
    "port": port,
    "keys": keys,
    "web pages": pages,
    "open files": files,
    "workaround": list_workarounds,
}


@attrs.frozen
class DiskSpeed:
    """Bytes per second."""

    write: float
    read: float


def measure_disk(directory: Path) -> DiskSpeed:
    """Measure with a temporary file: writes include fsync, reads bypass the page cache. Raises
    `OSError`."""
    piece = os.urandom(PIECE_BYTES)  # Some disks compress.
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter()
        _forget_pages(file.fileno())
        file.seek(0)
        read_began = time.perf_counter()
        while file.read(PIECE_BYTES):
            pass
        return DiskSpeed(
            PROBE_BYTES / (written - began), PROBE_BYTES / (time.perf_counter() - read_began)
        )


def _forget_pages(descriptor: int) -> None:
    # Evict the file from the page cache, as far as possible.
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def nearest(directory: Path) -> Path:
    """The directory or its nearest existing parent. Raises `OSError` if the parent is a file."""
    first = next(path for path in (directory, *directory.parents) if path.exists())
    if not first.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(first))
    return first
