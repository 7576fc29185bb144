"""A tenant that takes whatever it can get, and looks for what is others'. Bounded in number:
`AT_ONCE` attacks at a time.

`python -m tests.tenants.hostile PORT SECONDS SEED ATTACK VICTIM=RESPONSE...`: a process of its own,
so that the clients of the honest tenants are not slowed down; prints a `Took` as JSON.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from functools import cache
from random import Random
from typing import Any

import attrs
import trio

from tests.abuse.asking import CHAT, COMPLETIONS, EMBEDDINGS, Ask, Heard, ask
from tests.tenants.honest import kept

AT_ONCE = 24
IDLE = 150
"""Connections that say nothing after their first request."""
LONG = "river stone " * 2000
KEY = (("Authorization", "Bearer sk-hostile"),)


def of(path: str = CHAT, leaves: float | None = None, **fields: Any) -> Ask:
    fields.setdefault("max_tokens", 4)
    return Ask(lambda: json.dumps(fields).encode(), path, KEY, leaves_after_s=leaves)


@cache
def bomb() -> bytes:
    body = {"messages": [{"role": "user", "content": "a" * (31 * 2**20)}], "max_tokens": 1}
    return gzip.compress(json.dumps(body).encode(), 6)


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def attacks(dice: Random) -> dict[str, Ask]:
    """One of each kind."""
    salt = f"{dice.random()} "
    endless: dict[str, Any] = {"ignore_eos": True, "messages": says(salt + "Tell me all.")}
    slow = {"regex": "a?" * (20_000 + dice.randrange(99)) + "b"}
    options = {"enum": [f"{salt}{n}" for n in range(3000)]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": options}}
    compressed = (*KEY, ("Content-Encoding", "gzip"))
    return {
        "endless answers": of(max_tokens=4000, leaves=20.0, **endless),
        "priority": of(max_tokens=4000, priority=-1000, leaves=20.0, **endless),
        "choices": of(max_tokens=2000, n=32, leaves=10.0, **endless),
        "long prompt": of(messages=says(salt + LONG), leaves=20.0),
        "long prompt, left": of(messages=says(salt + LONG), leaves=0.3),
        "many prompts": of(COMPLETIONS, prompt=[salt + LONG] * 8, leaves=10.0),
        "slow grammar": of(COMPLETIONS, prompt="a", structured_outputs=slow, leaves=30.0),
        "schema": of(messages=says("a"), response_format=form),
        "embeddings": of(EMBEDDINGS, input=[salt + "a"] * 500),
        "bomb": Ask(bomb, CHAT, compressed),
        "deep": Ask(lambda: b"[" * 10**6, CHAT, KEY),
        "wide": Ask(lambda: b'{"messages":[' + b"{}," * 10**5 + b"{}]}", CHAT, KEY),
        "half a body": Ask(lambda: b"x" * 10**5, CHAT, KEY, cut=10, leaves_after_s=20.0),
        "unload": of("/v1/models/unload", model="x"),
        "adapter": of("/v1/load_lora_adapter", lora_name="x", lora_path="/etc"),
        "tokenize": of("/tokenize", prompt=salt + LONG * 20),
        "no path": of("/v1/" + "a" * 20_000),
        "no key": Ask(lambda: b"{}", CHAT, (("Authorization", "Bearer " + "x" * 9000),)),
        "background": of(
            "/v1/responses", input=salt + LONG, background=True, max_output_tokens=2000
        ),
    }


@attrs.define
class Took:
    """Number of answers by status, and what was seen of others."""

    statuses: Counter[str] = attrs.field(factory=Counter)
    leaks: list[str] = attrs.field(factory=list)


@attrs.define
class Hostile:
    port: int
    victims: dict[str, str]
    """Names of tenants, and the id of a response of each."""
    only: str = ""
    """Name of the one attack; all without it."""
    took: Took = attrs.field(factory=Took)

    async def run(self, seed: int) -> None:
        """Until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for attacker in range(AT_ONCE):
                nursery.start_soon(self._attack, Random(f"{seed} {attacker}"))
            for _ in range(0 if self.only else IDLE):
                nursery.start_soon(self._idle)
            if not self.only:
                nursery.start_soon(self._spy, seed)

    def _count(self, heard: Heard) -> None:
        self.took.statuses[str(heard.status)] += 1

    async def _attack(self, dice: Random) -> None:
        while True:
            possible = attacks(dice)
            name = self.only or dice.choice([*possible])
            self._count(await ask(self.port, possible[name]))
            await trio.sleep(0.01)

    async def _idle(self) -> None:
        while True:
            try:
                async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
                    await stream.send_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    async for _ in stream:
                        pass
            except (OSError, trio.BrokenResourceError):
                pass
            await trio.sleep(1)

    async def _spy(self, seed: int) -> None:
        """Ask for what is others', by its id, and whether somebody has asked a prompt. This tenant
        asks the prompts itself the first time: after that its own cache has them."""
        is_first = seed == 0
        while True:
            for victim, response in self.victims.items():
                for method, path in (
                    ("GET", f"/v1/responses/{response}"),
                    ("DELETE", f"/v1/responses/{response}"),
                    ("GET", f"/v1/responses/{response}/input_items"),
                ):
                    heard = await ask(self.port, Ask(bytes, path, KEY, method=method))
                    if heard.status not in (0, 404, 429, 503):
                        self.took.leaks.append(f"{method} {path}: {heard.status}")
                after = of(
                    "/v1/responses",
                    previous_response_id=response,
                    input="It is",
                    max_output_tokens=4,
                )
                if b"secret" in (heard := await ask(self.port, after)).body or heard.status == 200:
                    self.took.leaks.append(f"{after.path}: {heard.body[:200]!r}")
                heard = await ask(
                    self.port, of("/v1/responses", input=kept(victim), max_output_tokens=4)
                )
                if is_first and _was_cached(heard):
                    self.took.leaks.append(f"a cached prompt: {heard.body[:200]!r}")
            is_first = False
            await trio.sleep(1)


def _was_cached(heard: Heard) -> bool:
    """Whether most of a prompt that this tenant has sent for the first time came from the cache.
    Its own cache has the beginning, which prompts of all victims share."""
    if heard.status != 200:
        return False
    usage = json.loads(heard.body)["usage"]
    return bool(usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] / 2)


def main() -> None:
    os.nice(10)
    port, seconds, seed, only, *victims = sys.argv[1:]
    hostile = Hostile(int(port), dict(victim.split("=", 1) for victim in victims), only)

    async def play() -> None:
        with trio.move_on_after(float(seconds)):
            await hostile.run(int(seed))

    trio.run(play)
    print(json.dumps(attrs.asdict(hostile.took)))  # noqa: T201


if __name__ == "__main__":
    main()
