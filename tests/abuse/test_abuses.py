"""The abuses that are small enough for every run, on a tiny model behind real sockets: what is
answered, that the stream beside them goes on, and that the engine's thread compiled none of their
grammars. `just abuse` plays all, with figures."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path

import pytest
import trio

from tests.abuse.asking import PATIENCE_S, Ask, Heard, ask, chat
from tests.abuse.listed import ABUSES, Abuse
from tests.abuse.playing import faults
from tests.abuse.streams import Stream
from tests.families import FAMILIES, save
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.host import MlxEngine
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.web.server import serve_http

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
MOST_BYTES = 400_000
"""Of all bodies of an abuse that is played in every run."""
DEAR = {
    "a body in 20,000 chunks of a byte",
    "60 clients at once",
    "n of 128",
    "a grammar that repeats what may be left out 50,000 times",
}
"""Small, and yet seconds of work."""


@cache
def is_small(abuse: Abuse) -> bool:
    if abuse.kind in ("scores", "many") or abuse.name in DEAR:
        return False
    return sum(len(one.body()) for one in abuse.asks) <= MOST_BYTES


def played() -> list[Abuse]:
    return [abuse for abuse in ABUSES if LONG or is_small(abuse)]


@pytest.mark.long
def test_there_are_enough_of_them_and_each_has_its_name() -> None:
    assert len({abuse.name for abuse in ABUSES}) == len(ABUSES) >= 60
    assert len({abuse.kind for abuse in played()}) >= 4
    assert len(played()) >= 30


@pytest.mark.long
async def test_abuses_are_answered_and_a_stream_goes_on_beside_them(tmp_path: Path) -> None:
    config = {**FAMILIES["llama"], "max_position_embeddings": 8192}
    settings = Settings(
        model=str(save("llama", tmp_path, config)), no_ssd=True, gather_ms=0, grammar_timeout_s=2.0
    )
    shutdown, wrong = trio.Event(), list[str]()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            partial(run_runtime, settings, engine=MlxEngine(settings))
        )
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        port = int(url.rsplit(":", 1)[1])
        stream = Stream(port)
        async with trio.open_nursery() as beside:
            beside.start_soon(stream.run)
            for abuse in played():
                await stream.hears()
                wrong += [
                    f"{abuse.name}: {fault}" for fault in faults(abuse, await all_of(port, abuse))
                ]
                if stream.broken:
                    wrong.append(f"{abuse.name}: the stream broke: {stream.broken}")
                    stream.broken = ""
            await stream.hears()
            beside.cancel_scope.cancel()
        health = runtime.health()
        assert isinstance(runtime.tokenizer, HubTokenizer)
        assert runtime.tokenizer.grammars is not None
        inline = runtime.tokenizer.grammars.compiled_inline
        last = await ask(port, Ask(chat()))
        await runtime.drain(5)
        shutdown.set()
    assert not wrong, "\n".join(wrong)
    assert health.ready
    assert not any(actor.restarts for actor in health.actors)
    assert inline == 0, "grammars are compiled before a row is admitted"
    assert last.status == 200


async def all_of(port: int, abuse: Abuse) -> list[Heard]:
    heard = [Heard(0)] * len(abuse.asks)

    async def one(place: int, wish: Ask) -> None:
        heard[place] = await ask(port, wish)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for place, wish in enumerate(abuse.asks):
                nursery.start_soon(one, place, wish)
    return heard


@pytest.mark.parametrize(
    ("heard", "fault"),
    [
        (Heard(200), "it was served"),
        (Heard(500, b"{}"), "500"),
        (Heard(400, b"{}"), "without a message"),
        (Heard(400, b'{"error": {"message": "no", "param": "stop"}}'), "is not named"),
        (Heard(400, b'{"error": {"message": "no", "param": "top_k"}}'), ""),
        (Heard(0), "no answer"),
    ],
)
def test_what_counts_as_a_fault(heard: Heard, fault: str) -> None:
    found = faults(Abuse("x", "odd", (Ask(chat()),), "top_k"), [heard])
    assert (fault in found[0]) if fault else not found
