"""Tools for a model that was not trained to call any: omitted and named, so that an agent's session
works as plain text."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import attrs
import pytest

from tests.fakes import FakeEngine
from tests.web.responses import Verbatim, prompts_of, saying
from tests.web.scraping import scrape
from tests.web.serving import Served, exchange, get, post, serving
from trouper.cli.server_process import lines_of
from trouper.protocol.model import MemoryStats
from trouper.protocol.suggested_models import AGENT_TOKENS, SUGGESTED, that_fit
from trouper.web.serving.tool_support import notice

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID: list[Json] = [{"role": "user", "content": "x"}]
OFFERED: dict[str, Json] = {
    CHAT: {"messages": SAID, "tools": [{"type": "function", "function": {"name": "weigh"}}]},
    RESPONSES: {"input": "x", "tools": [{"type": "function", "name": "weigh"}]},
    MESSAGES: {
        "messages": SAID,
        "max_tokens": 100,
        "tools": [{"name": "weigh", "input_schema": {"type": "object"}}],
    },
}
AUTO: dict[str, Any] = {CHAT: "auto", RESPONSES: "auto", MESSAGES: {"type": "auto"}}
FORCED: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
HEADER, METRIC = "x-trouper-ignored", "trouper_ignored_parameters_total"
GIB = 2**30
MEMORY = 64 * GIB


class Untaught(Verbatim):
    tool_parser = None


def untaught(*texts: str) -> FakeEngine:
    stats = MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=MEMORY)
    return saying(*texts, tokenizer=Untaught(), stats=stats)


async def sent(served: Served, path: str, body: Json) -> tuple[int, dict[str, str], str]:
    status, headers, data = await exchange(served, post(path, body))
    return status, headers, data.decode()


@pytest.mark.parametrize("path", OFFERED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, AUTO])
async def test_the_answer_is_plain_text(
    path: str, stream: bool, choice: dict[str, Any] | None
) -> None:
    engine = untaught("plain words")
    body = (
        OFFERED[path]
        | {"stream": stream}
        | ({} if choice is None else {"tool_choice": choice[path]})
    )
    async with serving(engine) as served:
        status, headers, data = await sent(served, path, body)
        assert (status, headers[HEADER]) == (200, "tools")
        assert "plain words" in "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', data))
        assert not re.search(r'"(tool_calls|tool_use|function_call)"', data)
        counted = {
            dict(labels)["name"]: value
            for (name, labels), value in (await scrape(served)).samples.items()
            if name == METRIC
        }
        assert counted == {"tools": 1}
    [prompt] = set(prompts_of(engine))
    assert "weigh" not in prompt, "a model that cannot call it does not see it"


@pytest.mark.parametrize("path", OFFERED)
async def test_a_forced_call_needs_no_training(path: str) -> None:
    engine = untaught('{"name": "weigh", "arguments": {}}')
    async with serving(engine) as served:
        status, headers, data = await sent(
            served, path, OFFERED[path] | {"tool_choice": FORCED[path]}
        )
        assert status == 200 and HEADER not in headers
        assert '"weigh"' in data


@pytest.mark.parametrize("path", OFFERED)
async def test_strict_refuses(path: str) -> None:
    async with serving(untaught("x"), strict=True) as served:
        status, headers, data = await sent(served, path, OFFERED[path])
        assert status == 400 and "tools" in json.loads(data)["error"]["message"]
        assert HEADER not in headers
        status, *_ = await sent(served, path, OFFERED[path] | {"tool_choice": FORCED[path]})
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": SAID, "tools": OFFERED[MESSAGES]["tools"]}),
        ("/v1/responses/input_tokens", OFFERED[RESPONSES]),
    ],
)
async def test_counts_are_those_of_the_prompt_that_would_be_sent(path: str, body: Json) -> None:
    async with serving(untaught("x")) as served:
        status, headers, with_tools = await sent(served, path, body)
        assert (status, headers[HEADER]) == (200, "tools")
        plain = {name: value for name, value in body.items() if name != "tools"}
        assert (await sent(served, path, plain))[2] == with_tools


async def test_the_log_names_models_that_can_and_fit_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trouper.web"):
        async with serving(untaught("x")) as served:
            for path in (*OFFERED, *OFFERED):
                assert (await sent(served, path, OFFERED[path]))[0] == 200
    lines = [
        record.getMessage()
        for record in caplog.records
        if "was not trained to call tools" in record.getMessage()
    ]
    assert len(lines) == 1
    assert "mlx-community/" in lines[0] and "trouper doctor --for agents" in lines[0]
    named = [record for record in caplog.records if "'tools' is read past" in record.getMessage()]
    assert len(named) == 1


async def test_models_and_health_say_whether_tools_are_called() -> None:
    for engine, can in ((untaught("x"), False), (saying("x"), True)):
        async with serving(engine) as served:
            [model] = json.loads((await exchange(served, get("/v1/models")))[2])["data"]
            assert model["tool_calls"] is can
            assert json.loads((await exchange(served, get("/health")))[2])["tool_calls"] is can


async def test_the_start_says_it_where_it_is_so() -> None:
    @attrs.frozen
    class Entry:
        runtime: Any
        names: tuple[str, ...] = ("mine",)

    @attrs.frozen
    class Manager:
        runtime: Any

        def entries(self) -> list[Entry]:
            return [Entry(self.runtime)]

    for engine, can in ((untaught("x"), False), (saying("x"), True)):
        async with serving(engine) as served:
            manager: Any = Manager(served.runtime)
            lines = [*lines_of("http://here", manager, False)]
            assert [line.startswith("mine was not trained") for line in lines].count(True) == (
                not can
            )
            assert can or "mlx-community/" in lines[-1]
            assert lines[0].endswith("is ready at http://here/v1"), "programs read the first line"
            assert bool(notice("mine", served.runtime)) != can


def test_what_fits() -> None:
    assert that_fit(0, float32=False) == ()
    everything = that_fit(2**50, float32=False)
    assert everything == tuple(reversed(SUGGESTED))
    for model in SUGGESTED:
        needed = model.needed_bytes(float32=False)
        assert needed == model.weights_bytes + AGENT_TOKENS * model.token_bytes
        assert model in that_fit(needed, float32=False) and model not in that_fit(
            needed - 1, float32=False
        )
        assert model not in that_fit(needed, float32=True), "float32 needs more"
        assert model.context_length >= AGENT_TOKENS
    sizes = [model.weights_bytes for model in SUGGESTED]
    assert sizes == sorted(sizes)
