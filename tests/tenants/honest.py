"""A tenant that uses the server as a chat does: a few conversations, one after another, each turn
streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from random import Random

import attrs
import trio

from tests.abuse.asking import Ask, ask

WORDS = ("river", "stone", "lantern", "harbour", "copper", "meadow", "engine", "window", "violin")
ANSWER_TOKENS = 32
TURNS = 3


def kept(name: str) -> str:
    """Return what a tenant asks first: a prompt of several blocks, with its secret."""
    return f"The word of {name} is {name}-secret. " * 20


@attrs.define
class Tally:
    """What one tenant got in the phases of one kind."""

    tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@attrs.define
class Honest:
    """`streams` conversations at a time."""

    name: str
    port: int
    streams: int
    tallies: dict[str, Tally]
    phase: str = ""
    response: str = ""
    """Id of a stored response of this tenant."""

    @property
    def key(self) -> str:
        return f"sk-{self.name}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self.key}"),)

    async def run(self, seed: int) -> None:
        """Until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for stream in range(self.streams):
                nursery.start_soon(self._converse, Random(f"{seed} {self.name} {stream}"))

    async def keep_something(self) -> None:
        """Store a response, whose id others will know."""
        body = {"input": kept(self.name), "max_output_tokens": 4}
        heard = await ask(
            self.port, Ask(lambda: json.dumps(body).encode(), "/v1/responses", self.headers)
        )
        self.response = json.loads(heard.body)["id"]

    async def _converse(self, dice: Random) -> None:
        while True:
            messages: list[dict[str, str]] = []
            for _ in range(TURNS):
                words = " ".join(dice.choices(WORDS, k=24))
                messages.append({"role": "user", "content": f"{self.name}: {words}"})
                answer = await self._turn(messages, dice.randrange(2**31))
                messages.append({"role": "assistant", "content": answer or "-"})

    async def _turn(self, messages: list[dict[str, str]], seed: int) -> str:
        body = {
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "seed": seed,
            "temperature": 0,
        }
        phase, began, text, first = self.phase, trio.current_time(), "", True
        tally = self.tallies.setdefault(phase, Tally())
        try:
            async for piece in self._pieces(body):
                if first:
                    tally.first_s.append(trio.current_time() - began)
                    first = False
                text += piece
                self.tallies.setdefault(self.phase, Tally()).tokens += 1
        except (OSError, trio.BrokenResourceError, ValueError) as error:
            tally.errors.append(str(error)[:300] or type(error).__name__)
            await trio.sleep(0.2)
        return text

    async def _pieces(self, body: dict[str, object]) -> AsyncIterator[str]:
        """Texts of a stream. Raises `ValueError` for an error."""
        data = json.dumps(body).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode() + data)
            rest = b""
            async for received in stream:
                *whole, rest = (rest + bytes(received)).split(b"\n")
                for line in whole:
                    if line.startswith(
                        (b"HTTP/1.1 4", b"HTTP/1.1 5", b'data: {"error"', b'{"error"')
                    ):
                        raise ValueError((line + rest).decode("utf-8", "replace"))
                    for choice in (
                        json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ()
                    ):
                        if content := choice["delta"].get("content"):
                            yield content
