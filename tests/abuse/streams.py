"""`python -m tests.abuse.streams PORT COUNT`: clients that read streams, in a process of their own.

A client that makes bodies of 16 MB stops its own event loop for seconds, and would count these as
pauses of the streams. Each line of standard input is a question, with a line of JSON as the answer:
`hear` is answered when each stream has heard a token, `report` with the longest pause in seconds
since the last question, its end on `time.monotonic`, and the streams that broke.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from subprocess import PIPE
from typing import NamedTuple

import trio

from tests.abuse.asking import COMPLETIONS
from tests.web.serving import post

STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": 300,
    "stream": True,
    "ignore_eos": True,
    "speculation": "off",
}


class Pause(NamedTuple):
    seconds: float
    ended_at: float
    """By `time.monotonic`, which all processes share."""


NO_PAUSE = Pause(0.0, 0.0)
REFUSED = re.compile(rb"HTTP/1.1 503 .*\r\nretry-after: (\d+)\r\n", re.DOTALL | re.IGNORECASE)


class Stream:
    """A client that reads one stream after another, and asks again when a refusal says; pauses
    between streams do not count."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._last: float | None = None
        self._longest = NO_PAUSE
        self._heard = trio.Event()
        self.broken = ""

    async def run(self) -> None:
        while True:
            async with await trio.open_tcp_stream("127.0.0.1", self._port) as stream:
                await stream.send_all(
                    post(COMPLETIONS, STREAM, "Content-Type: application/json\r\n")
                )
                wait_s = await self._read(stream)
            await trio.sleep(wait_s)

    async def _read(self, stream: trio.SocketStream) -> float:
        """Read one stream to its end. Returns for how long to wait for the next."""
        self._last, tail = None, b""
        while b"data: [DONE]" not in tail:
            data = bytes(await stream.receive_some(2**16))
            if refusal := REFUSED.match(tail + data):
                return float(refusal[1])
            if not data or b'data: {"error"' in data:
                self.broken = (tail + data)[-300:].decode("utf-8", "replace") or (
                    "the connection ended"
                )
                return 0.0
            tail = tail[-100:] + data
            if b"data: " in data:
                self._note(trio.current_time())
        return 0.0

    def _note(self, now: float) -> None:
        if self._last is not None:
            self._longest = max(self._longest, Pause(now - self._last, time.monotonic()))
        self._last = now
        self._heard.set()
        self._heard = trio.Event()

    async def hears(self) -> None:
        with trio.fail_after(120):
            await self._heard.wait()

    def longest(self) -> Pause:
        """The longest pause since the last call, the one at this moment included."""
        longest = self._longest
        if self._last is not None:
            longest = max(longest, Pause(trio.current_time() - self._last, time.monotonic()))
        self._longest = NO_PAUSE
        return longest


class Streams:
    """The other end: asks the process of the streams."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process

    async def hear(self) -> None:
        """Wait until each stream has heard a token, and begin to measure."""
        await self._ask("hear")

    async def report(self) -> tuple[Pause, list[str]]:
        """Return the longest pause, and what each broken stream heard last."""
        return await self._ask("report")

    async def _ask(self, question: str) -> tuple[Pause, list[str]]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        await process.stdin.send_all(question.encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            data = bytes(await process.stdout.receive_some())
            assert data, "the streams ended: the server is gone"
            line += data
        longest, broken = json.loads(line)
        return Pause(*longest), list(broken)


@asynccontextmanager
async def streams(port: int, count: int) -> AsyncIterator[Streams]:
    """All of them run, and end with this."""
    command = [sys.executable, "-m", "tests.abuse.streams", str(port), str(count)]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, command, stdin=PIPE, stdout=PIPE))
        asking = Streams(process)
        await asking.hear()
        yield asking
        nursery.cancel_scope.cancel()


async def main(port: int, count: int) -> None:
    reading = [Stream(port) for _ in range(count)]
    questions = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
    async with trio.open_nursery() as nursery:
        for stream in reading:
            nursery.start_soon(stream.run)
            await stream.hears()
        async for question in questions:
            if question == b"hear\n":
                for stream in reading:
                    await stream.hears()
            longest = max(stream.longest() for stream in reading)
            broken = [stream.broken for stream in reading if stream.broken]
            for stream in reading:
                stream.broken = ""
            print(json.dumps([longest, broken]), flush=True)  # noqa: T201
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]))
