"""A real server beside whose one running stream abuses are played, and what that stream and the
memory made of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Self

import attrs
import psutil
import trio

from tests.abuse.asking import Ask, Heard, ask
from tests.abuse.listed import Abuse
from tests.abuse.streams import Streams, streams
from tests.families import FAMILIES, save
from tests.test_process import serving
from trouper.engine.loading import bundled_model
from trouper.system.ports import free_ports

QUIET_S = 1.0
"""What is still heard of the stream after the last answer."""
BACK_S = 45.0
"""Memory may take so long to come back: releases that gain nothing are up to 40 s apart."""
WITHIN = 1.10
EXTRA_S = 0.5
"""Beyond what honest requests cause, a pause of a stream may be so long."""
LIMITS = (
    "--request-timeout-s",
    "900",
    "--queue-timeout-s",
    "300",
    "--first-token-timeout-s",
    "300",
)
"""The stream and what is played beside it take longer here than the defaults allow."""


@contextmanager
def server(model: Path | None, *flags: str) -> Iterator[tuple[int, psutil.Process]]:
    """Its port and process. No model: the embedded one."""
    [port] = free_ports(1)
    with serving(model, port, *LIMITS, *flags, stderr=DEVNULL) as process:
        yield port, psutil.Process(_pid(process))


def tiny_model(directory: Path) -> Path:
    """Save a tiny random model with the embedded model's chat template, whose context has room for
    the prompts of abuses."""
    save("llama", directory, {**FAMILIES["llama"], "max_position_embeddings": 32768})
    config = directory / "tokenizer_config.json"
    embedded = json.loads((bundled_model.directory() / config.name).read_text())
    fields = json.loads(config.read_text()) | {"chat_template": embedded["chat_template"]}
    config.write_text(json.dumps(fields))
    return directory


def _pid(process: Popen[str]) -> int:
    return process.pid


@attrs.frozen
class Memory:
    """Bytes: of the process, and what MLX says is in use."""

    process: int
    active: int

    def exceeds(self, before: Self) -> bool:
        """Whether more is in use than may be left behind."""
        return self.process > before.process * WITHIN or self.active > before.active * WITHIN

    @classmethod
    async def of(cls, port: int, process: psutil.Process) -> Self:
        heard = await ask(port, Ask(bytes, "/health", method="GET"))
        return cls(process.memory_info().rss, json.loads(heard.body)["memory"]["active_bytes"])

    @classmethod
    async def back(
        cls,
        port: int,
        process: psutil.Process,
        before: Self,
        seconds: float = BACK_S,
    ) -> Self:
        """Return it when no more is in use than may be left behind, or after so many seconds."""
        memory = await cls.of(port, process)
        with trio.move_on_after(seconds):
            while memory.exceeds(before):
                await trio.sleep(0.5)
                memory = await cls.of(port, process)
        return memory


@attrs.frozen
class Played:
    """What one of them did."""

    heard: tuple[Heard, ...]
    gap_s: float
    seconds: float
    memory: Memory
    broken: str = ""

    @property
    def statuses(self) -> str:
        counts = {
            one.status: sum(other.status == one.status for other in self.heard)
            for one in self.heard
        }
        return ", ".join(
            f"{status}" if n == 1 else f"{n}x {status}" for status, n in sorted(counts.items())
        )


class Stage:
    """A server and its stream."""

    def __init__(self, port: int, process: psutil.Process, streams: Streams) -> None:
        self.port, self._process, self._streams = port, process, streams

    async def play(self, asks: Sequence[Ask], before: Memory | None = None) -> Played:
        """All at once; then until memory is what it was before, for a while."""
        heard = [Heard(0)] * len(asks)

        async def one(place: int, wish: Ask) -> None:
            heard[place] = await ask(self.port, wish)

        await self._streams.hear()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for place, wish in enumerate(asks):
                nursery.start_soon(one, place, wish)
        took = trio.current_time() - began
        await trio.sleep(QUIET_S)
        gap, broken = await self._streams.report()
        if before is None:
            memory = await Memory.of(self.port, self._process)
        else:
            memory = await Memory.back(self.port, self._process, before)
        return Played(tuple(heard), gap.seconds, took, memory, "; ".join(broken))


@asynccontextmanager
async def staged(port: int, process: psutil.Process) -> AsyncIterator[Stage]:
    """The stream runs, and ends with this."""
    async with streams(port, 1) as running:
        yield Stage(port, process, running)


def faults(abuse: Abuse, heard: Sequence[Heard]) -> list[str]:
    """What of the answers is not as it must be."""
    return [
        fault
        for one, wish in zip(heard, abuse.asks, strict=True)
        if (fault := _fault(abuse, one, wish))
    ]


def _fault(abuse: Abuse, heard: Heard, wish: Ask) -> str:
    if heard.status == 0:
        return "" if wish.leaves_after_s is not None else "no answer"
    if heard.status < 300:
        return "" if abuse.answered else "it was served"
    if heard.status >= 500 or (not abuse.refused and heard.status != 429):
        return f"{heard.status}: {heard.body[:200]!r}"
    problem = heard.problem
    if not problem.get("message"):
        return f"{heard.status} without a message: {heard.body[:200]!r}"
    if heard.status != 400 or abuse.param is None:
        return ""
    names = f"{problem.get('param') or ''} {problem['message']}"
    return "" if abuse.param in names else f"{abuse.param} is not named: {names[:200]}"
