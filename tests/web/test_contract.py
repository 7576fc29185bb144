"""What happens at the edge: keys, sizes, queues, time limits, crashes, clients that leave."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import EOS, FakeEngine
from tests.web.serving import (
    STREAM,
    a_stream_that_goes_on,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    receive_all,
    serving,
)
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import Keys
from trouper.protocol.plans import Plan
from trouper.protocol.sampling import SamplingDefaults
from trouper.protocol.version import VERSION
from trouper.web.openai.completions import CompletionRequest, completion_to_generate


async def test_routes_and_methods_that_are_not_there() -> None:
    async with serving() as served:
        status, _, body = await exchange(served, get("/nothing"))
        assert (status, set(json.loads(body)["error"])) == (
            404,
            {"message", "type", "param", "code"},
        )
        status, headers, _ = await exchange(served, get("/v1/completions"))
        assert (status, "post" in headers["allow"]) == (405, True)
        status, headers, _ = await exchange(served, get("/v1/responses/input_tokens"))
        methods = {method.strip() for method in headers["allow"].lower().split(",")}
        assert (status, methods) == (405, {"post", "options"})
        for path in ("/health", "/livez", "/readyz", "/v1/models", "/v1/models/fake"):
            assert (await exchange(served, get(path)))[0] == 200


async def test_health_has_the_agreed_fields() -> None:
    async with serving() as served:
        body = json.loads((await exchange(served, get("/health")))[2])
    assert body["status"] == "ok"
    assert set(body["cache_stats"]) == {
        "active_sequences",
        "queued_requests",
        "total_blocks",
        "used_blocks",
        "free_blocks",
        "cached_blocks",
        "cache_hits_block",
        "cache_hits_sequence",
        "cache_misses",
        "cache_hit_rate",
        "cache_effectiveness",
        "tokens_generated",
        "total_prefill_tokens",
        "total_cached_tokens",
        "requests_completed",
        "requests_errored",
        "total_requests",
    }


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_413(chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 5000}).encode()
    if chunked:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        request = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    else:
        request = post("/v1/completions", body)
    async with serving(max_body_bytes=2000) as served:
        status, _, answer = await exchange(served, request)
        assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")


async def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("third\n\nfourth\n")
    async with serving(api_key=("first", "second"), api_key_file=file) as served:
        for key in ("first", "second", "third", "fourth"):
            assert (await exchange(served, get("/v1/models", f"Authorization: Bearer {key}\r\n")))[
                0
            ] == 200
            assert (await exchange(served, get("/v1/models", f"X-Api-Key: {key}\r\n")))[0] == 200
        for headers in (
            "",
            "Authorization: Bearer wrong\r\n",
            "Authorization: Basic first\r\n",
            "X-Api-Key: f\r\n",
        ):
            status, said, body = await exchange(served, get("/v1/models", headers))
            assert (status, said["www-authenticate"], json.loads(body)["error"]["code"]) == (
                401,
                "bearer",
                "invalid_api_key",
            )
        assert [
            (await exchange(served, get(path)))[0] for path in ("/health", "/livez", "/readyz")
        ] == [200] * 3
        assert (await ask(served, {"prompt": "a"}))[0] == 401


def test_beyond_loopback_a_key_is_needed() -> None:
    with pytest.raises(SettingsInvalid, match="--api-key"):
        ServerSettings(host="0.0.0.0")
    ServerSettings(host="0.0.0.0", allow_no_key=True)
    ServerSettings(host="0.0.0.0", api_key=("k",))


async def test_request_ids() -> None:
    async with serving() as served:
        _, headers, _ = await exchange(served, get("/livez", "X-Request-Id: mine-1\r\n"))
        assert headers["x-request-id"] == "mine-1"
        _, headers, _ = await exchange(served, get("/livez", "X-Request-Id: not sane\r\n"))
        assert headers["x-request-id"] != "not sane"


async def test_r11_a_full_queue_is_429_with_retry_after() -> None:
    tight = {"completion_batch_size": 1, "max_queue_size": 1}
    async with (
        serving(settings=tight) as served,
        a_stream_that_goes_on(served),
        await served.connect() as queued,
    ):
        await queued.send_all(post("/v1/completions", STREAM))
        await eventually(lambda: served.busy == 2)
        status, headers, body = await exchange(served, post("/v1/completions", STREAM))
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (
            429,
            "1",
            "queue_full",
        )


async def test_a_draining_server_is_503() -> None:
    async with (
        serving() as served,
        trio.open_nursery() as nursery,
        await served.connect() as stream,
    ):
        await stream.send_all(post("/v1/completions", STREAM))
        await eventually(lambda: served.busy == 1)
        nursery.start_soon(served.runtime.drain, 40)
        await eventually(lambda: served.runtime.draining)
        status, headers, body = await exchange(served, post("/v1/completions", {"prompt": "a"}))
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert 10 < int(headers["retry-after"]) <= 40, "what is left of the drain"
        assert (await exchange(served, get("/readyz")))[0] == 503
        assert (await exchange(served, get("/livez")))[0] == 200


@pytest.mark.parametrize(
    ("limit", "status", "code"),
    [
        ({"queue_timeout_s": 0.1, "completion_batch_size": 1}, 503, "queue_timeout"),
        ({"first_token_timeout_s": 0.1}, 504, "first_token_timeout"),
        ({"token_timeout_s": 0.1}, 504, "token_timeout"),
        ({"request_timeout_s": 0.3}, 504, "request_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_r12_f13_f17_each_limit_has_its_own_error(
    limit: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    """Never a part of an answer as if it were whole, and the row is gone."""
    hang = {"first_token_timeout": 1, "token_timeout": 4}.get(code)

    async def before(plan: Plan) -> None:
        await trio.sleep(0.5 if hang is not None and plan.step >= hang - 1 else 0.002)

    async with serving(FakeEngine(before_step=before), settings=limit) as served:
        if code == "queue_timeout":
            blocker = await served.connect()
            await blocker.send_all(post("/v1/completions", STREAM))
            await eventually(lambda: served.busy == 1)
        got, _, answer = await exchange(
            served, post("/v1/completions", STREAM | {"stream": stream})
        )
        assert f'"code":"{code}"'.encode() in answer
        assert b"[DONE]" not in answer
        assert got == (200 if stream else status)
        if code == "queue_timeout":
            await blocker.aclose()
        await eventually(lambda: served.busy == 0)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_silent_stream_gets_comments(choices: int) -> None:
    """R12. An event without data would crash clients. The text of one choice is written by
    StepDelivery, that of several by the stream's task."""

    async def before(_: Plan) -> None:
        await trio.sleep(0.15)

    async with serving(FakeEngine(before_step=before), heartbeat_s=0.05) as served:
        request = {"prompt": "a", "max_tokens": 2, "stream": True, "n": choices}
        _, _, body = await exchange(served, post("/v1/completions", request))
    events = [event for event in body.split(b"\n\n") if b": keep-alive" in event]
    assert len(events) >= 2
    assert body.count(b"data: [DONE]") == 1


async def test_tokens_without_text_are_silence_too() -> None:
    """R12. The client hears comments although the engine is busy."""

    async def before(_: Plan) -> None:
        await trio.sleep(0.02)

    engine = FakeEngine(
        before_step=before, token_at=lambda _, position: EOS if position < 20 else 97
    )
    async with serving(engine, heartbeat_s=0.05) as served:
        request = {"prompt": "a", "max_tokens": 21, "stream": True, "ignore_eos": True}
        _, _, body = await exchange(served, post("/v1/completions", request))
    assert body.count(b": keep-alive") >= 2
    assert body.count(b'"text":"a"') == 1


async def test_each_prompt_draws_its_own_seed() -> None:
    """Unless one was given: the same prompt twice asks for two answers."""
    for asked, seeds in (({}, 2), ({"seed": 1}, 1)):
        parsed = CompletionRequest.parse({"prompt": ["a", "a"]} | asked)
        assert (
            len(
                {
                    wanted.sampling.seed
                    for wanted in completion_to_generate(parsed, "id", SamplingDefaults())
                }
            )
            == seeds
        )
        assert {
            wanted.sampling.seed
            for wanted in completion_to_generate(parsed, "id", SamplingDefaults(7))
        } == {asked.get("seed", 7)}


async def test_http_that_is_none_gets_an_error_in_the_same_shape() -> None:
    async with serving() as served, await served.connect() as client:
        await client.send_all(b"GET /livez HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        head, _, body = (await receive_all(client)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_the_server_does_not_configure_logging() -> None:
    # Whatever another test has had of Hypercorn's own.
    logging.getLogger("hypercorn.error").handlers.clear()
    async with serving() as served:
        assert (await exchange(served, get("/livez")))[0] == 200
    assert not logging.getLogger("hypercorn.error").handlers


def test_keys_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for broken, said in ((b"", "no key"), (b"\xff\xfe\x00", "not a text file")):
        file.write_bytes(broken)
        with pytest.raises(SettingsInvalid, match=said):
            Keys.of(ServerSettings(api_key_file=file))
    for key, said in (
        ("", "empty"),
        (" ", "empty"),
        ("schlüssel", "a character"),
        ("a\x07b", "a character"),
    ):
        with pytest.raises(SettingsInvalid, match=f"--api-key.*{said}"):
            Keys.of(ServerSettings(api_key=(key,)))
    with pytest.raises(SettingsInvalid, match="--api-key-file"):
        Keys.of(ServerSettings(api_key_file=tmp_path / "none"))


async def test_the_engine_crashes_in_the_middle_of_8_streams() -> None:
    """Readiness goes 503 and then 200, and each client has its answer whole."""
    crash, crashed = trio.Event(), trio.Event()

    async def before(plan: Plan) -> None:
        await pace(plan)
        if crash.is_set() and not crashed.is_set() and len(plan.decode) == 8:
            crashed.set()
            raise RuntimeError("the device failed")

    async with serving(FakeEngine(before_step=before)) as served:
        answers: list[tuple[int, bytes]] = []

        async def client(stream: bool) -> None:
            wish = STREAM | {"stream": stream, "max_tokens": 200}
            status, _, body = await exchange(served, post("/v1/completions", wish))
            answers.append((status, body))

        async with trio.open_nursery() as nursery:
            for place in range(8):
                nursery.start_soon(client, place % 2 == 0)
            await eventually(lambda: served.runtime.health().scheduler.tokens_generated > 40)
            crash.set()
            await eventually(lambda: served.runtime.health().status == "restarting")
            assert (await exchange(served, get("/readyz")))[0] == 503
        assert [status for status, _ in answers] == [200] * 8
        assert not any(b'"error"' in body for _, body in answers)
        assert sum(b"[DONE]" in body for _, body in answers) == 4
        await eventually(lambda: served.runtime.health().ready)
        assert (await exchange(served, get("/readyz")))[0] == 200
        assert (await ask(served, {"prompt": "a", "max_tokens": 3}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_d4_f14_a_client_that_leaves_frees_its_row(stream: bool) -> None:
    """Queued, prefilling and decoding; the others' streams go on."""

    async def before(plan: Plan) -> None:
        await trio.sleep(0.02 if plan.prefill else 0.002)

    shape = {"completion_batch_size": 3, "prefill_step_size": 1}
    async with (
        serving(FakeEngine(before_step=before), settings=shape) as served,
        a_stream_that_goes_on(served),
    ):
        clients = []
        for busy, prompt in ((2, "a"), (3, "long" * 20), (4, "queued")):
            client = await served.connect()
            await client.send_all(
                post("/v1/completions", STREAM | {"prompt": prompt, "stream": stream})
            )
            await eventually(partial(lambda n: served.busy == n, busy))
            clients.append(client)
        for client in clients:
            await client.aclose()
        await eventually(lambda: served.busy == 1)


async def test_d4_200_streams_cut_by_their_clients() -> None:
    async with serving(settings={"max_queue_size": 400}) as served:
        clients = [await served.connect() for _ in range(200)]
        for client in clients:
            await client.send_all(post("/v1/completions", STREAM))
        await eventually(lambda: served.busy == 200)
        for client in clients:
            client.socket.close()
        with trio.fail_after(5):
            assert (await ask(served, {"prompt": "a", "max_tokens": 3}))[0] == 200
        await eventually(lambda: served.busy == 0)


async def test_several_prompts_stream_side_by_side() -> None:
    async with serving() as served:
        body = {
            "prompt": ["a", "bb", "ccc"],
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        _, _, answer = await exchange(served, post("/v1/completions", body))
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert events[-1]["usage"]["completion_tokens"] == 60
    indices = [event["choices"][0]["index"] for event in events[:-1]]
    assert set(indices) == {0, 1, 2}
    assert indices != sorted(indices), "they took turns"


async def test_utf8_is_never_split() -> None:
    """F4. A character of several tokens comes whole; a torn one at the end is U+FFFD."""
    text = "né€😀"
    data = list(text.encode())
    engine = FakeEngine(token_at=lambda _, position: data[position % len(data)])
    async with serving(engine) as served:
        for tokens in range(1, len(data) + 1):
            request = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True}
            _, whole = await ask(served, request)
            _, _, answer = await exchange(
                served, post("/v1/completions", request | {"stream": True})
            )
            chunks = [
                json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")
            ]
            streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert (
                streamed
                == whole["choices"][0]["text"]
                == bytes(data[:tokens]).decode(errors="replace")
            )


async def test_a_failed_admission_of_one_prompt_leaves_none_of_the_others() -> None:
    """F14."""
    async with serving() as served:
        status, answer = await ask(
            served, {"prompt": ["a", "b", ""], "max_tokens": 1000, "ignore_eos": True}
        )
        assert (status, answer["error"]["code"]) == (400, "empty_prompt")
        await eventually(lambda: served.busy == 0)


async def test_the_version_is_an_answer_as_vllm_has_it() -> None:
    async with serving() as served:
        status, _, body = await exchange(served, get("/version"))
    assert (status, json.loads(body)) == (200, {"version": VERSION})
