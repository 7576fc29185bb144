"""`python -m tests.tenants.images [ROUNDS]`: whether the time to a first token tells one API key
that another has sent an image.

In each round one key sends a new picture, and another key the same picture and one that nobody has
sent, in turns of either order. Prints the medians of both, of the first key's own second time, and
in how many pairs the shared picture was the faster one, with the chance of such a difference by
coin. Exits 1 below one in a thousand.
"""

# ruff: noqa: T201
from __future__ import annotations

import os
import statistics
import sys
from math import comb
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import attrs
import trio

from tests.abuse.playing import server
from tests.pictures import data_url, screenshot
from tests.web.serving import post
from tests.web.test_key_rights import bearer
from trouper.engine.loading.model_source import SHAPES

ROUNDS = 40
SIZE = (640, 400)
KEYS = ("sk-first", "sk-second")
CHANCE = 0.001


@attrs.define
class Times:
    """Seconds to the first token: a picture that nobody sent, one that the other key sent, and one
    that the same key sent."""

    cold: list[float] = attrs.field(factory=list)
    others: list[float] = attrs.field(factory=list)
    own: list[float] = attrs.field(factory=list)

    @property
    def faster(self) -> int:
        """Pairs in which the other key's picture was the faster one."""
        return sum(other < cold for other, cold in zip(self.others, self.cold, strict=True))

    @property
    def chance(self) -> float:
        """Of a difference of so many pairs or more, either way, if neither is faster."""
        pairs = len(self.cold)
        farther = max(self.faster, pairs - self.faster)
        tail = sum(comb(pairs, count) for count in range(farther, pairs + 1))
        return min(1.0, 2 * tail * 0.5**pairs)

    def __str__(self) -> str:
        medians = [
            f"{statistics.median(times):.3f}" for times in (self.cold, self.others, self.own)
        ]
        cold, others, own = medians
        return (
            f"first token, median seconds of {len(self.cold)}: never sent {cold}, sent by another "
            f"key {others}, sent by the same key {own}; another key's was the faster one in "
            f"{self.faster} pairs, chance {self.chance:.2f}"
        )


async def first_token_s(port: int, key: str, seed: int) -> float:
    image = {"type": "image_url", "image_url": {"url": data_url(screenshot(seed, *SIZE))}}
    content = [image, {"type": "text", "text": "What color is it?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "stream": True,
    }
    sent = post("/v1/chat/completions", body, bearer(key))
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        began = trio.current_time()
        await stream.send_all(sent)
        received = b""
        while b'"content":"' not in received.replace(b'"content":""', b""):
            piece = bytes(await stream.receive_some())
            assert piece, received
            received += piece
        return trio.current_time() - began


async def play(port: int, rounds: int) -> Times:
    times, random = Times(), Random(1)
    first, second = KEYS
    for seed in range(0, 2 * (rounds + 3), 2):
        shared, fresh = seed, seed + 1
        await first_token_s(port, first, shared)
        turns = [(times.others, shared), (times.cold, fresh)]
        random.shuffle(turns)
        for kept, number in turns:
            kept.append(await first_token_s(port, second, number))
        times.own.append(await first_token_s(port, first, shared))
    # The first rounds build what later ones use.
    return Times(times.cold[3:], times.others[3:], times.own[3:])


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with TemporaryDirectory() as scratch:
        keys = Path(scratch, "keys")
        keys.touch(mode=0o600)
        keys.write_text("".join(f"{key} name={key[3:]}\n" for key in KEYS))
        with server(SHAPES, "--api-key-file", str(keys)) as (port, _):
            times = trio.run(play, port, rounds)
    print(times)
    return times.chance < CHANCE


if __name__ == "__main__":
    sys.exit(main())
