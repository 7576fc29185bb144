"""Responses that outlive their connection, and the ends that a response may come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import openai
import pytest
import trio
import trio.testing
from openai.types.responses import Response, ResponseStreamEvent

from tests.fakes import FakeEngine, FakeRow
from tests.web.responses import by_client, saying, says
from tests.web.serving import Served, ask, eventually, exchange, get, pace, post, serving
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.actors.runtime.served_models import Lease, OneModel
from trouper.web.server import serve_http
from trouper.web.serving.state_database import StateDatabase


async def state(served: Served, response_id: str) -> Any:
    return json.loads((await exchange(served, get(f"/v1/responses/{response_id}")))[2])


async def until(served: Served, response_id: str, status: str) -> Any:
    with trio.fail_after(20):
        while (now := await state(served, response_id))["status"] != status:  # noqa: ASYNC110
            await trio.sleep(0.005)
    return now


async def test_the_background_outlives_the_connection() -> None:
    """From the queue to the end, and what was said so far on the way."""
    hurry = trio.Event()

    async def before(_: object) -> None:
        await trio.sleep(0.002 if hurry.is_set() else 0.05)

    engine = FakeEngine(before_step=before, token_at=says("y" * 100))
    async with serving(engine, settings={"completion_batch_size": 1}) as served:
        _, first = await ask(served, {"input": "one", "background": True}, "/v1/responses")
        _, second = await ask(served, {"input": "two", "background": True}, "/v1/responses")
        assert (first["status"], second["status"], first["background"]) == (
            "queued",
            "queued",
            True,
        )
        status, said = await ask(
            served, {"input": "x", "previous_response_id": first["id"]}, "/v1/responses"
        )
        assert (status, said["error"]["param"]) == (400, "previous_response_id")
        await until(served, first["id"], "in_progress")
        await eventually(lambda: served.runtime.health().scheduler.tokens_generated > 5)
        running = await state(served, first["id"])
        assert (
            running["output"][0]["status"] == "in_progress"
            and "yyy" in running["output"][0]["content"][0]["text"]
        )
        assert (await state(served, second["id"]))["status"] == "queued"
        hurry.set()
        done = await until(served, first["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "y" * 100
        Response.model_validate(done, strict=False)
        await until(served, second["id"], "completed")


async def test_a_full_queue_refuses_before_there_is_a_response() -> None:
    tight = {"completion_batch_size": 1, "max_queue_size": 0}
    async with serving(FakeEngine(before_step=pace), settings=tight) as served:
        body = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 3000}
        _, running = await ask(served, body, "/v1/responses")
        await eventually(lambda: served.busy == 1)
        status, said = await ask(served, body, "/v1/responses")
        assert (status, said["error"]["code"]) == (429, "queue_full")
        await ask(served, {}, f"/v1/responses/{running['id']}/cancel")
        await eventually(lambda: served.busy == 0)


LONG = {"input": "x", "ignore_eos": True, "max_output_tokens": 3000}


@pytest.mark.parametrize("how", ["cancel", "request", "id in the body", "delete"])
async def test_a_response_in_the_background_is_cancelled(how: str) -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        _, made = await ask(
            served, LONG | {"background": True}, "/v1/responses", "X-Request-Id: mine\r\n"
        )
        await until(served, made["id"], "in_progress")
        if how == "cancel":
            for _ in range(2):
                cancelled: Response = await by_client(
                    served, lambda client: client.responses.cancel(made["id"])
                )
                assert cancelled.status == "cancelled" and cancelled.error is None
        elif how == "request":
            assert (await ask(served, {}, "/v1/requests/mine/cancel"))[0] == 200
        elif how == "id in the body":  # It is not the request's own, as that of a chat is.
            assert (await ask(served, {}, f"/v1/requests/{made['id']}/cancel"))[0] == 200
        else:
            await by_client(served, lambda client: client.responses.delete(made["id"]))
            assert (await exchange(served, get(f"/v1/responses/{made['id']}")))[0] == 404
        await eventually(lambda: served.busy == 0)
        if how != "delete":
            after = await state(served, made["id"])
            assert after["status"] == "cancelled"
            assert {item["status"] for item in after["output"]} <= {"incomplete"}
            body = {"input": "x", "previous_response_id": made["id"]}
            status, said = await ask(served, body, "/v1/responses")
            assert (status, said["error"]["param"]) == (400, "previous_response_id")


async def test_a_stream_is_cancelled_by_its_response_id() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:

        def use(client: openai.OpenAI) -> list[ResponseStreamEvent]:
            events = []
            for event in client.responses.create(
                model="fake", stream=True, input="x", extra_body=LONG
            ):
                events.append(event)
                if event.type == "response.created":
                    assert client.responses.retrieve(event.response.id).status == "in_progress"
                if len(events) == 10:
                    client.responses.cancel(events[0].response.id)  # type: ignore[union-attr]
            return events

        events = await by_client(served, use)
        assert [event.sequence_number for event in events] == sorted(
            {event.sequence_number for event in events}
        )
        last = events[-1]
        assert last.type == "response.failed" and (last.response.status, last.response.error) == (
            "cancelled",
            None,
        )
        assert (await state(served, last.response.id))["status"] == "cancelled"
        await eventually(lambda: served.busy == 0)


async def test_a_stream_whose_client_leaves_is_over() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        async with await served.connect() as client:
            await client.send_all(post("/v1/responses", LONG | {"stream": True}))
            received = b""
            while b"output_text.delta" not in received:
                received += await client.receive_some()
        response_id = json.loads(received.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        await eventually(lambda: served.busy == 0)
        with trio.fail_after(20):
            while (await exchange(served, get(f"/v1/responses/{response_id}")))[0] != 404:  # noqa: ASYNC110
                await trio.sleep(0.005)


async def test_a_background_stream_can_be_read_again_from_the_middle() -> None:
    def use(client: openai.OpenAI) -> None:
        with client.responses.create(
            model="fake", input="x", background=True, stream=True
        ) as first:
            begun = [next(first) for _ in range(6)]
        assert [event.type for event in begun[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        response_id = begun[0].response.id  # type: ignore[union-attr]
        rest = list(
            client.responses.retrieve(
                response_id, stream=True, starting_after=begun[-1].sequence_number
            )
        )
        again = list(client.responses.retrieve(response_id, stream=True))
        assert [event.to_dict() for event in again] == [
            event.to_dict() for event in [*begun, *rest]
        ]
        assert again[-1].type == "response.completed"
        assert again[-1].response == client.responses.retrieve(response_id)
        with client.responses.stream(response_id=response_id, starting_after=4) as stream:
            assert [event.sequence_number for event in stream] == list(range(5, len(again)))
            assert stream.get_final_response().output_text == again[-1].response.output_text
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=10**6)) == []
        plain = client.responses.create(model="fake", input="x")
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            client.responses.retrieve(plain.id, stream=True)

    async with serving(saying("Hello there, " * 8)) as served:
        await by_client(served, use)


def events_of(body: bytes) -> list[Any]:
    return [
        json.loads(line.removeprefix(b"data: "))
        for line in body.splitlines()
        if line.startswith(b"data: ")
    ]


async def test_a_quiet_background_stream_shows_signs_of_life() -> None:
    async def before(_: object) -> None:
        await trio.sleep(0.15)

    async with serving(FakeEngine(before_step=before), heartbeat_s=0.05) as served:
        body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 2}
        _, _, said = await exchange(served, post("/v1/responses", body))
    beats = [
        event
        for event in events_of(said)[2:]
        if event["type"] in ("response.queued", "response.in_progress")
    ]
    assert len(beats) >= 3, "one is logged: the response leaves the queue"
    assert b": keep-alive" not in said, (
        "a comment does not reset the timer of a client that counts events"
    )
    numbers = [event["sequence_number"] for event in events_of(said)]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1)), (
        "a heartbeat repeats the number of the event before it"
    )


async def test_shutdown_leaves_no_response_running() -> None:
    """serving() sees to it that everything ends, and soon."""
    async with serving(FakeEngine(before_step=pace)) as served:
        for stream in (False, True):
            async with await served.connect() as client:
                await client.send_all(
                    post("/v1/responses", LONG | {"background": True, "stream": stream})
                )
                await client.receive_some()
        await eventually(lambda: served.busy == 2)


async def test_a_drain_lets_the_background_finish() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        body = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 100}
        _, made = await ask(served, body, "/v1/responses")
        assert await served.runtime.drain(20)
        done = await until(served, made["id"], "incomplete")
        assert done["usage"]["output_tokens"] == 100
        status, said = await ask(served, body, "/v1/responses")
        assert (status, said["error"]["code"]) == (503, "draining")


class Counted(OneModel):
    """Knows how many requests use it."""

    leases = 0

    async def lease(self, name: str | None) -> Lease:
        lease = await super().lease(name)
        self.leases += 1
        return Lease(lease.name, lease.runtime, self._returned)

    def _returned(self) -> None:
        self.leases -= 1


async def test_the_background_keeps_its_model() -> None:
    """Until it has ended, not until its connection has; nothing else keeps one."""
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        chosen, engine = Settings(no_ssd=True, gather_ms=0), FakeEngine(before_step=pace)
        runtime: Runtime = await nursery.start(partial(run_runtime, chosen, engine=engine))
        models = Counted(runtime)
        [url] = await nursery.start(
            partial(serve_http, models, ServerSettings(port=0), shutdown=shutdown)
        )
        served = Served(int(url.rsplit(":", 1)[1]), runtime, engine, shutdown)
        _, made = await ask(served, LONG | {"background": True}, "/v1/responses")
        await ask(served, {"input": "x", "max_output_tokens": 2}, "/v1/responses")
        await eventually(lambda: models.leases == 1)
        assert (await state(served, made["id"]))["status"] in ("queued", "in_progress")
        await ask(served, {}, f"/v1/responses/{made['id']}/cancel")
        await eventually(lambda: models.leases == 0)
        await runtime.drain(0)
        shutdown.set()


@pytest.mark.parametrize("background", [False, True])
async def test_an_engine_that_crashes(background: bool) -> None:
    """One `error` and a response that failed; whoever asks later reads the same."""

    def dies(rows: Sequence[FakeRow]) -> bool:
        return any(row.position == 20 for row in rows)

    async with serving(FakeEngine(before_step=pace, dies=dies)) as served:

        def use(client: openai.OpenAI) -> None:
            body: Any = LONG | {"background": background}
            events = list(
                client.responses.create(model="fake", stream=True, input="x", extra_body=body)
            )
            kinds = [event.type for event in events]
            assert kinds.count("error") == 1 and kinds[-1] == "response.failed"
            [error] = [event for event in events if event.type == "error"]
            assert error.code == "request_crashes_engine"
            response = events[-1].response  # type: ignore[union-attr]
            assert response.status == "failed" and response.error is not None
            assert client.responses.retrieve(response.id) == response

        await by_client(served, use)
        if not background:
            await eventually(lambda: served.runtime.health().ready)
            assert (await ask(served, LONG, "/v1/responses"))[0] == 422


async def test_a_client_that_vanishes_during_the_storing_loses_no_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is slow, and the client that cancelled a response waits no longer."""
    opens, waits, may_open = StateDatabase.open, trio.Event(), trio.Event()

    async def opens_late(database: StateDatabase, *, create: bool) -> bool:
        waits.set()
        await may_open.wait()
        return await opens(database, create=create)

    async with serving(FakeEngine(before_step=pace)) as served:
        _, made = await ask(served, LONG | {"background": True}, "/v1/responses")
        await until(served, made["id"], "in_progress")
        monkeypatch.setattr(StateDatabase, "open", opens_late)
        with trio.move_on_after(20) as gone:
            async with trio.open_nursery() as nursery:
                cancel = post(f"/v1/responses/{made['id']}/cancel", {})
                nursery.start_soon(exchange, served, cancel)
                await waits.wait()
                gone.cancel()
        await eventually(lambda: served.busy == 0)
        await trio.testing.wait_all_tasks_blocked(0.01)
        may_open.set()
        assert (await until(served, made["id"], "cancelled"))["error"] is None
