"""The examples do what they say, with the fake engine; tests/test_commands.py runs one with a real
model.

embed.py has its test in tests/actors/test_embed.py."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from examples import mounted, replicas, summarizer
from examples.summarizer import Document, NotSummarized, Outcome, Pending, Summarized
from tests.actors.bench import running
from tests.fakes import FakeEngine
from tests.one_answer import UNREACHABLE_PROXY, one_answer
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import get, pace, receive_all
from trouper import Runtime, ServerSettings, Settings
from trouper.protocol.plans import Plan

QUIET = Settings(no_ssd=True, gather_ms=0)


async def a_second(_: Plan) -> None:
    await trio.sleep(1)


@asynccontextmanager
async def summarizing(
    engine: FakeEngine, **how: float
) -> AsyncIterator[tuple[Runtime, trio.MemorySendChannel[Document], trio.CancelScope]]:
    """The runtime, the actor's inbox, and what cancels the actor. At the end both must end by
    themselves."""
    scope = trio.CancelScope()

    async def actor(runtime: Runtime, inbox: trio.MemoryReceiveChannel[Document]) -> None:
        with scope:
            await summarizer.run_summarizer(runtime, inbox, **{"at_a_time": 2} | how)  # type: ignore[arg-type]

    documents, inbox = trio.open_memory_channel[Document](16)
    async with running(engine) as runtime, trio.open_nursery() as nursery:
        nursery.start_soon(actor, runtime, inbox)
        with documents:
            yield runtime, documents, scope


async def test_each_document_has_its_summary(autojump_clock: object) -> None:
    outcomes: list[Outcome] = []

    async def ask(text: str) -> None:
        with Pending.of(text) as pending:
            await documents.send(pending.document)
            outcomes.append(await pending.outcome())

    async with summarizing(FakeEngine()) as (_, documents, _), trio.open_nursery() as nursery:
        for number in range(7):
            nursery.start_soon(ask, f"text {number}")
    assert len(outcomes) == 7
    assert all(
        isinstance(one, Summarized) and one.tokens == 96 and len(one.text) == 96 for one in outcomes
    )


async def test_a_document_withdrawn_while_it_runs_leaves_the_batch_within_a_step_or_two(
    autojump_clock: object,
) -> None:
    async with summarizing(FakeEngine(before_step=a_second)) as (runtime, documents, _):
        with Pending.of("text") as pending:
            await documents.send(pending.document)
            await trio.sleep(10.5)
            assert runtime.health().scheduler.active_sequences == 1
        await trio.sleep(2)
        facts = runtime.health().scheduler
        assert (facts.active_sequences, facts.queued_requests) == (0, 0)
        assert 0 < facts.tokens_generated < 20


async def test_a_document_withdrawn_in_the_inbox_asks_nothing(autojump_clock: object) -> None:
    async with summarizing(FakeEngine(before_step=a_second), at_a_time=1, limit_s=600) as (
        runtime,
        documents,
        _,
    ):
        with Pending.of("first") as first:
            await documents.send(first.document)
            with Pending.of("second") as second:
                await documents.send(second.document)
                await wait_all_tasks_blocked()
            assert isinstance(await first.outcome(), Summarized)
        await wait_all_tasks_blocked()
        assert runtime.health().scheduler.total_requests == 1
        assert second.document.outcomes.statistics().open_send_channels == 0


async def test_a_limit_that_is_met_is_an_outcome(autojump_clock: object) -> None:
    async with summarizing(FakeEngine(before_step=a_second), limit_s=5) as (_, documents, _):
        with Pending.of("text") as pending:
            await documents.send(pending.document)
            assert await pending.outcome() == NotSummarized(
                "the request took longer than 5 s (--request-timeout-s)"
            )


async def test_a_cancelled_actor_answers_what_runs_and_what_lies_in_its_inbox(
    autojump_clock: object,
) -> None:
    async with summarizing(FakeEngine(before_step=a_second), at_a_time=1) as (_, documents, scope):
        with Pending.of("first") as first, Pending.of("second") as second:
            await documents.send(first.document)
            await documents.send(second.document)
            await trio.sleep(3)
            scope.cancel(reason="the test wants it")
            for one in (first, second):
                assert await one.outcome() == NotSummarized("the summarizer ended")


async def test_the_program_prints_summaries_and_withdraws_what_takes_too_long(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async def slow_later(plan: Plan) -> None:
        await trio.sleep(0.1 if plan.step < 150 else 10)

    engine = FakeEngine(before_step=slow_later)
    await summarizer.main(["a text"] * 6, seconds=30, settings=QUIET, engine=engine)
    printed = capsys.readouterr().out.splitlines()
    assert len({line.split(". ")[0] for line in printed[:4] if line.endswith(" [96 tokens]")}) == 4
    assert printed[4:] == ["[withdrawn after 30 s]"]
    assert not engine.rows


async def fetch(port: int, request: bytes) -> tuple[int, bytes]:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        head, _, body = (await receive_all(stream)).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_the_api_is_mounted_beside_pages_of_ones_own(tmp_path: Path) -> None:
    leaving = trio.Event()
    server = ServerSettings(port=0, api_key=("secret",), batch_dir=tmp_path / "batches")
    async with trio.open_nursery() as nursery:
        start = partial(
            mounted.main, QUIET, server, engine=FakeEngine(before_step=pace), leaving=leaving
        )
        url: str = await nursery.start(start)
        port = int(url.rsplit(":", 1)[1])
        status, poem = await fetch(port, get("/poem/rain"))
        assert status == 200 and len(poem) >= 64
        status, body = await fetch(port, get("/llm/v1/models", "Authorization: Bearer secret\r\n"))
        assert status == 200 and json.loads(body)["object"] == "list"
        assert (await fetch(port, get("/llm/v1/models")))[0] == 401
        assert (await fetch(port, get("/v1/models")))[0] == 404
        assert (await fetch(port, get("/llm/readyz")))[0] == 200
        await trio.to_thread.run_sync(run_a_batch, f"http://127.0.0.1:{port}/llm/v1")
        leaving.set()


def run_a_batch(base_url: str) -> None:
    """The nursery that `create_app` gets runs it, and ends with the runtime: else the test would
    never end."""
    with strict(base_url, "secret") as client:
        batch = ended(client, started(client, [request("a"), request("b")]))
        assert batch.status == "completed" and output(client, batch.output_file_id).keys() == {
            "a",
            "b",
        }


def test_replicas_ask_no_proxy_about_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the program waits for its router for ever where a proxy is in the environment."""
    for name, url in UNREACHABLE_PROXY.items():
        monkeypatch.setenv(name, url)
    with one_answer(200, b'{"healthy_workers": 2}') as asked:
        assert replicas.healthy(asked.port) == 2
