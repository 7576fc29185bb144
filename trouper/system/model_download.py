"""Download of a model in a process of its own: a thread would delay the server's end until the
files are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import trio

from trouper.protocol.problems import ModelUnusable

Report: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and in all."""
Fetch: TypeAlias = Callable[[str, Report], Awaitable[None]]


async def download_model(name: str, report: Report) -> None:
    """Run `trouper models pull`, which is killed when this is cancelled. Raises `ModelUnusable`."""
    command = [sys.executable, "-P", "-m", "trouper", "models", "pull", "--progress", "--", name]
    errors = bytearray()
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
            )
        )
        assert process.stdout is not None and process.stderr is not None
        nursery.start_soon(_collect, process.stderr, errors)
        await _read_progress(process.stdout, report)
    if process.returncode:
        raise ModelUnusable(
            _reason(errors.decode(errors="replace")) or f"{name} was not downloaded"
        )


async def _collect(stream: trio.abc.ReceiveStream, into: bytearray) -> None:
    async for data in stream:
        into += data


async def _read_progress(stream: trio.abc.ReceiveStream, report: Report) -> None:
    rest = b""
    async for data in stream:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            words = line.split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                report(int(words[0]), int(words[1]))


def _reason(errors: str) -> str:
    """The command's last line, which begins with its name."""
    last = errors.strip().splitlines()[-1:]
    return last[0].removeprefix("trouper: ") if last else ""
