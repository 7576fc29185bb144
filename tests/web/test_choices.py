"""n and best_of: several answers to one prompt, whole and streamed."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import msgspec
import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import (
    STREAM,
    a_stream_that_goes_on,
    ask,
    eventually,
    exchange,
    pace,
    post,
    receive_all,
    serving,
)

LONG = "a prompt that is longer than two blocks of the cache, so that it is worth waiting for"


async def test_one_prefill_serves_all_choices() -> None:
    async with serving(FakeEngine()) as served:
        status, body = await ask(served, {"prompt": LONG, "n": 5, "max_tokens": 4})
        facts = served.runtime.health().scheduler
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4]
    assert body["usage"]["prompt_tokens"] == len(LONG)
    assert body["usage"]["completion_tokens"] == 20
    assert facts.total_prefill_tokens <= len(LONG) + 4 * 1, (
        "the others compute their last token only"
    )


async def test_choices_of_each_prompt_follow_each_other() -> None:
    async with serving(FakeEngine()) as served:
        _, body = await ask(served, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
        texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert body["usage"]["prompt_tokens"] == 2


async def test_prompts_of_a_request_enter_together_beside_a_stream() -> None:
    """Each once waited until the one before it was in the queue, and so came a step later."""
    engine = FakeEngine(before_step=pace)
    async with serving(engine) as served, a_stream_that_goes_on(served):
        before = len(engine.plans_seen)
        prompts = [chr(97 + place) * 3 for place in range(8)]
        status, _ = await ask(served, {"prompt": prompts, "max_tokens": 2})
        assert status == 200
        admits = [len(plan.admit) for plan in engine.plans_seen[before:] if plan.admit]
    assert sum(admits) == 8
    assert len(admits) <= 3, "a step may begin while they come"


async def test_streamed_choices_are_the_whole_ones() -> None:
    async with serving(FakeEngine()) as served:
        request = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 6}
        _, whole = await ask(served, request)
        asked = request | {"stream": True, "stream_options": {"include_usage": True}}
        _, _, body = await exchange(served, post("/v1/completions", asked))
    texts: dict[int, str] = defaultdict(str)
    usage: Any = None
    for event in re.findall(rb"data: (\{.*\})", body):
        chunk = msgspec.json.decode(event)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert usage["completion_tokens"] == 24 and usage["prompt_tokens"] == 4


async def test_best_of_keeps_the_most_likely() -> None:
    async with serving(FakeEngine()) as served:
        _, body = await ask(served, {"prompt": "a", "best_of": 3, "n": 2, "max_tokens": 2})
        assert len(body["choices"]) == 2
        assert body["choices"][0]["logprobs"] is None, "nobody asked for them"
        assert body["usage"]["completion_tokens"] == 6, "all that was generated"


async def test_best_of_zero_is_n() -> None:
    request = {"prompt": "a", "best_of": 0, "n": 2, "max_tokens": 2}
    async with serving(FakeEngine()) as served:
        status, body = await ask(served, request)
        streamed, _, _ = await exchange(served, post("/v1/completions", request | {"stream": True}))
    assert (status, streamed, len(body["choices"])) == (200, 200, 2)
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
    ],
)
async def test_impossible_numbers_of_choices(wrong: dict[str, Any], param: str) -> None:
    async with serving(FakeEngine()) as served:
        status, body = await ask(served, {"prompt": "a"} | wrong)
    assert (status, body["error"]["param"]) == (400, param)


async def test_choices_that_fail_together_are_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads them is gone after the first; the others have nobody to tell, which is nobody's
    fault."""
    async with serving() as served, trio.open_nursery() as nursery:
        async with await served.connect() as stream:
            await stream.send_all(
                post("/v1/completions", STREAM | {"n": 3}, "Connection: close\r\n")
            )
            await eventually(lambda: served.runtime.health().scheduler.active_sequences == 3)
            nursery.start_soon(served.runtime.drain, 0)
            said = await receive_all(stream)
        assert said.count(b'"error"') == 1
        assert b"[DONE]" not in said
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_leaves_several_choices_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            await stream.send_all(post("/v1/completions", STREAM | {"n": 3}))
            await eventually(lambda: served.runtime.health().scheduler.active_sequences == 3)
        await eventually(lambda: served.busy == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
