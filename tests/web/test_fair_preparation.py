"""Clients beside one that sends slow grammars and many long prompts, over real sockets. What is
slow ends when the test says so."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, Lock

import pytest
import trio

from tests.fakes import ByteTokenizer, FakeEngine
from tests.web.serving import PATIENCE_S, Served, ask, eventually, exchange, pace, post, serving
from tests.web.test_key_rights import bearer, key_file
from trouper.actors.runtime.prompt_tokenizing import LONG_TEXT
from trouper.protocol.grammar import FollowedGrammar, Grammar

A, B = bearer("sk-a"), bearer("sk-b")
SLOW = "(slow)"
LONG = "y" * (LONG_TEXT + 1)


class Held(ByteTokenizer):
    """Grammars and texts that have SLOW in them wait for `free`."""

    def __init__(self) -> None:
        self.free, self._lock = Event(), Lock()
        self.at_work = 0

    def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
        self._hold(grammar.source)
        return FollowedGrammar(grammar)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        self._hold(text)
        return super().encode(text[:100])

    def _hold(self, text: str) -> None:
        if SLOW in text:
            with self._lock:
                self.at_work += 1
            assert self.free.wait(PATIENCE_S)


def grammar(source: str, **more: object) -> dict[str, object]:
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": source}, **more}


async def expect(served: Served, status: int, body: object, path: str, headers: str) -> None:
    answer = await ask(served, body, path, headers)
    assert answer[0] == status, answer


@pytest.mark.parametrize("long", [False, True], ids=["short grammars", "long grammars"])
async def test_nobody_waits_for_slow_grammars_of_another_client(tmp_path: Path, long: bool) -> None:
    held, file = Held(), key_file(tmp_path, "sk-a\nsk-b\n")
    bodies = [grammar(f"{SLOW}{n}" + "x" * (9000 if long else 0)) for n in range(4)]
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    async with serving(FakeEngine(before_step=pace, tokenizer=held), api_key_file=file) as served:
        async with trio.open_nursery() as nursery:
            for body in bodies:
                nursery.start_soon(expect, served, 200, body, "/v1/completions", A)
            await eventually(lambda: held.at_work == 1)
            for mine in (B, A):
                await expect(served, 200, chat, "/v1/chat/completions", mine)
            for count in range(3):
                await expect(served, 200, grammar(f"quick {count}"), "/v1/completions", B)
            assert held.at_work == 1, "a client has one grammar compiled at a time"
            held.free.set()
        assert held.at_work == len(bodies)


async def test_one_long_prompt_beside_many_of_another_client(tmp_path: Path) -> None:
    held, file = Held(), key_file(tmp_path, "sk-a\nsk-b\n")
    many = {"prompt": SLOW + LONG, "max_tokens": 1}
    async with (
        serving(
            FakeEngine(before_step=pace, tokenizer=held), {"max_queue_size": 8}, api_key_file=file
        ) as served,
        trio.open_nursery() as nursery,
    ):
        codes: list[int] = []

        async def note(body: object, headers: str) -> None:
            codes.append((await ask(served, body, headers=headers))[0])

        for _ in range(20):
            nursery.start_soon(note, many, A)
        await eventually(lambda: codes.count(429) == 10)
        nursery.start_soon(note, {"prompt": LONG, "max_tokens": 1}, B)
        await eventually(lambda: codes.count(429) == 11)
        assert codes == [429] * 11, "it has the place of one of the many"
        held.free.set()
    assert sorted(codes) == [200] * 10 + [429] * 11


async def test_a_request_says_what_it_has_waited_for(tmp_path: Path) -> None:
    held, file = Held(), key_file(tmp_path, "sk-a\nsk-b\n")
    settings = {"queue_timeout_s": 0.2}
    async with serving(
        FakeEngine(before_step=pace, tokenizer=held), settings, api_key_file=file
    ) as served:
        for count, reason in enumerate(
            ("its grammar to be compiled", "compiled, behind 1 of the same client")
        ):
            status, headers, data = await exchange(
                served, post("/v1/completions", grammar(f"{SLOW}{count}"), A)
            )
            error = json.loads(data)["error"]
            assert (status, error["code"], headers["retry-after"]) == (
                503,
                "preparation_timeout",
                "1",
            )
            assert f"{reason} (--queue-timeout-s)" in error["message"]
        held.free.set()
