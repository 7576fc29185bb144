"""What huge bodies were made of goes back to the system when their requests have ended."""

from __future__ import annotations

import gc
import gzip
import json
import sys
from weakref import ref

import psutil
import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import Served, ask, eventually, exchange, post, serving
from trouper.protocol.problems import is_shortage
from trouper.protocol.replies import Finished
from trouper.system import heap
from trouper.web.app import AppRequest
from trouper.web.http.guard import Connection
from trouper.web.http.json_response import formatted
from trouper.web.http.paced_body import PacedBody
from trouper.web.serving import current_request
from trouper.web.streaming.response_streams import AnswerEvent, shielded

MB = 2**20
HUGE = "x" * (12 * MB)


class Cycle:
    itself: Cycle


async def several(served: Served, count: int) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(ask, served, {"prompt": HUGE})


async def test_memory_is_given_back_once_for_those_that_end_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "give_back", lambda: trims.append(None))
    async with serving(FakeEngine()) as served:
        for _ in range(3):
            await ask(served, {"prompt": "x" * 1000})
        await several(served, 3)
        await eventually(lambda: bool(trims))
        assert len(trims) <= 3
        before = len(trims)
        await several(served, 1)
        await eventually(lambda: len(trims) > before)


async def test_what_was_held_for_scores_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bodies are small. Those of several requests count together."""
    trims: list[None] = []
    monkeypatch.setattr(heap, "give_back", lambda: trims.append(None))
    body = {"prompt": "x" * 500, "max_tokens": 1, "echo": True}
    async with serving(FakeEngine()) as served:
        await ask(served, body)
        await ask(served, body | {"logprobs": 20})
        assert not trims
        for _ in range(3):
            await ask(served, body | {"logprobs": 20})
        await eventually(lambda: bool(trims))


async def test_what_has_come_of_a_refused_body_is_freed_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever refers to it yet: the exception of Quart's limit and the body refer to each
    other."""
    trims, bodies = list[None](), list[PacedBody]()

    class Noted(PacedBody):
        def __init__(self, *sizes: int | None) -> None:
            super().__init__(*sizes)
            bodies.append(self)

    monkeypatch.setattr(heap, "give_back", lambda: trims.append(None))
    monkeypatch.setattr(AppRequest, "body_class", Noted)
    async with serving(FakeEngine(), max_body_bytes=2 * MB) as served:
        whole = post("/v1/completions", b"x" * 3 * MB)
        request = whole.replace(b"Content-Length: 3145728", b"Transfer-Encoding: chunked")
        head, _, body = request.partition(b"\r\n\r\n")
        chunked = b"%s\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (head, len(body), body)
        assert (await exchange(served, chunked))[0] == 413
        await eventually(lambda: bool(trims))
    [noted] = bodies
    assert not noted._data


async def without_threads(*_: object, **__: object) -> None:
    """As `trio.to_thread.run_sync` where the system starts no thread."""
    await trio.lowlevel.checkpoint()
    raise RuntimeError("can't start new thread")


async def test_without_threads_memory_stays_and_no_request_fails(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """An error in a task of Trio's own would end the server."""
    memory = current_request.Heap()
    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", without_threads)
        memory.give_back_soon()
        await trio.sleep(2 * current_request.GIVE_BACK_AFTER_S)
        await current_request.give_back()
    trims: list[None] = []
    monkeypatch.setattr(heap, "give_back", lambda: trims.append(None))
    memory.give_back_soon()
    await eventually(lambda: bool(trims))


async def test_without_threads_a_long_answer_is_refused_for_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", without_threads)
    piece = AnswerEvent(0, Finished("stop", 1))
    for work in (formatted(dict, is_long=True), shielded(lambda _: b"", piece)):
        with pytest.raises(OSError, match="no further thread") as failed:
            await work
        assert is_shortage(failed.value)


def held_texts() -> list[object]:
    """Texts of some megabytes to which an object refers that a garbage collection would look at."""
    tracked = gc.get_objects()
    texts = [text for text in gc.get_referents(*tracked) if isinstance(text, str | bytes)]
    return [text for text in texts if len(text) > 4 * MB and text is not HUGE]


def refused_request(kind: str) -> bytes:
    body = json.dumps({"prompt": HUGE[: 6 * MB]}).encode()
    headers = "Content-Type: application/json\r\n"
    if kind != "too long":
        body = body[:-1]
    if kind == "no JSON, compressed":
        body, headers = gzip.compress(body), f"{headers}Content-Encoding: gzip\r\n"
    return post("/v1/completions", body, headers)


@pytest.mark.parametrize("kind", ["too long", "no JSON", "no JSON, compressed"])
async def test_a_refused_text_is_freed_without_a_garbage_collection(kind: str) -> None:
    """Frames of threads, traceback and exception referred to each other: all texts were left."""
    async with serving(FakeEngine()) as served:
        gc.disable()
        try:
            status, _, _ = await exchange(served, refused_request(kind))
            assert status == 400
            await ask(served, {"prompt": "x", "max_tokens": 1})  # Actors refer to the newest.
            await eventually(lambda: not held_texts())
        finally:
            gc.enable()


async def test_an_ended_connection_is_freed_without_a_garbage_collection() -> None:
    """It and its protocol referred to each other, with all that either had."""
    async with serving(FakeEngine()) as served:
        gc.collect()  # Other tests' connections.
        gc.disable()
        try:
            await ask(served, {"prompt": "x", "max_tokens": 1})
            await eventually(
                lambda: not [one for one in gc.get_objects() if isinstance(one, Connection)]
            )
        finally:
            gc.enable()


async def test_what_cancelled_requests_leave_is_collected_once_it_may_be_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames of their tasks and the `Cancelled` in them refer to each other, and to the prompt."""
    monkeypatch.setattr(current_request, "GIVE_BACK_AFTER_S", 0.0)
    memory, cycle = current_request.Heap(), Cycle()
    freed, cycle.itself = ref(cycle), cycle
    gc.disable()
    try:
        del cycle
        memory.count(2 * current_request.MAX_GARBAGE_BYTES)
        await eventually(lambda: freed() is None)
    finally:
        gc.enable()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a heap keeps is glibc's")
async def test_eight_bodies_of_12_mb_leave_little_behind() -> None:
    """They left 350 MB."""
    own = psutil.Process()
    async with serving(FakeEngine()) as served:
        await several(served, 2)
        before = own.memory_info().rss
        await several(served, 8)
        await eventually(lambda: own.memory_info().rss < before + 64 * MB)
