"""The process that decodes images (`decoding_script.py`). It starts with the first image, and after
a crash; a bad image costs its own request."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import trio

from trouper.actors.runtime.decoding_script import (
    ANSWER,
    CPU_S,
    DAMAGED,
    DECODED,
    FORMATS,
    NO_FORMAT,
    NO_MEMORY,
    NO_PILLOW,
    ORDER,
)
from trouper.actors.runtime.image_headers import SENDABLE, ImageRefused, read_header
from trouper.protocol.installing import command_for
from trouper.protocol.media import DecodeImage, Pixels
from trouper.protocol.problems import is_shortage

log = logging.getLogger("trouper.image_decoder")
SCRIPT = Path(__file__).with_name("decoding_script.py")
START_S = 60.0
WAIT_S = 30.0
"""For one image. The script limits CPU time (CPU_S)."""
END_S = 1.0
UNAVAILABLE = "image_decoder_unavailable"
"""Code of every fault that is the server's own (503)."""
REFUSALS = {
    DAMAGED: ("image_damaged", "the image is damaged: it cannot be decoded"),
    NO_MEMORY: (
        "image_too_large",
        "the image takes more memory to decode than an image may; send it smaller",
    ),
    NO_FORMAT: ("image_format", f"the server's Pillow does not read this format; {SENDABLE}"),
}
"""Codes and reasons by the script's answer."""


class DecodingProcess:
    """Decodes one image at a time."""

    def __init__(self, script: Path = SCRIPT, wait_s: float = WAIT_S) -> None:
        self._script, self._wait_s = script, wait_s
        self._process: trio.Process | None = None

    async def decode(self, order: DecodeImage) -> Pixels:
        """Raises `ImageRefused`."""
        data, shape = order.source.data, order.shape
        header = read_header(data)
        sizes = (*shape.resized, *(shape.scaled or shape.resized), *(shape.overview or (0, 0)))
        stored = (header.width, header.height)
        codes = (FORMATS.index(header.format.upper()), header.orientation, shape.resample)
        head = ORDER.pack(*codes, *stored, *sizes, len(data))
        if self._process is not None and self._process.poll() is not None:
            await self.stop()  # Killed from outside while idle: no image is to blame.
        process = self._process or await self._start()
        try:
            with trio.fail_after(self._wait_s):
                pixels = await _exchange(process, head, data, shape.num_bytes)
        except (trio.TooSlowError, trio.BrokenResourceError, EOFError) as error:
            raise await self._explain(error) from None
        return Pixels.of(shape, pixels)

    async def _start(self) -> trio.Process:
        """Raises `ImageRefused`."""
        try:
            if not sys.executable:
                raise OSError("this program has no Python of its own")
            process = self._process = await trio.lowlevel.open_process(
                [sys.executable, "-P", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the server, which ends this process.
            )
            with trio.fail_after(START_S):
                kind, _ = ANSWER.unpack(await _receive(process, ANSWER.size))
        # Trio raises RuntimeError where the system starts no thread for the start.
        except (OSError, EOFError, MemoryError, RuntimeError, trio.TooSlowError) as error:
            await self.stop()
            raise _refuse_start(error) from None
        if kind == NO_PILLOW:
            await self.stop()
            reason = "the server needs Pillow for images, which is not installed"
            raise ImageRefused(UNAVAILABLE, f"{reason}: `{command_for('images')}`")
        return process

    async def _explain(self, error: Exception) -> ImageRefused:
        """End the process, whose next answer would be that of this image."""
        process = self._process
        late = isinstance(error, trio.TooSlowError)
        if process is not None and not late:
            # The process closed its pipes, so it ends by itself.
            with trio.move_on_after(END_S):
                await process.wait()
        ended_by = None if process is None else process.returncode
        await self.stop()
        if ended_by == -signal.SIGKILL:
            reason = "the process that decodes images was ended from outside; send it again"
            return ImageRefused(UNAVAILABLE, reason)
        log.warning(
            "an image ended the process that decodes images (%s)",
            f"more than {self._wait_s:g} s" if late else f"exit status {ended_by}",
        )
        reason = f"the image crashes its decoder, or takes more than {CPU_S} s to decode"
        return ImageRefused("image_crashes_decoder", f"{reason}; convert it to another format")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with trio.CancelScope(deadline=trio.current_time() + END_S, shield=True):
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.aclose()
            await process.stdout.aclose()
            await process.wait()


def _refuse_start(error: Exception) -> ImageRefused:
    if is_shortage(error):
        reason = "the process that decodes images cannot be started for the moment; send it again"
        return ImageRefused(UNAVAILABLE, reason)
    log.warning("the process that decodes images cannot be started (%s)", str(error) or "it ended")
    return ImageRefused(UNAVAILABLE, "the process that decodes images cannot be started")


async def _exchange(process: trio.Process, head: bytes, data: bytes, length: int) -> bytes:
    """Send an order, return pixels. Raises `ImageRefused`, `BrokenResourceError`, and EOFError,
    also for an answer of another length."""
    assert process.stdin is not None
    await process.stdin.send_all(head)
    await process.stdin.send_all(data)
    kind, sent = ANSWER.unpack(await _receive(process, ANSWER.size))
    if kind in REFUSALS:
        raise ImageRefused(*REFUSALS[kind])
    if kind != DECODED or sent != length:
        raise EOFError
    return await _receive(process, length)


async def _receive(process: trio.Process, length: int) -> bytes:
    assert process.stdout is not None
    received = list[bytes | bytearray]()
    while length:
        part = await process.stdout.receive_some(length)
        if not part:
            raise EOFError
        received.append(part)
        length -= len(part)
    return b"".join(received)
