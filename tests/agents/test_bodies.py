"""What agents sent, as recorded, is answered in every family's format; `just agents` runs the
agents themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.agents.programs import AGENTS
from tests.agents.shapes import BODIES, STAND_IN, load, shape
from tests.scripted.conversation import Conversation
from tests.scripted.engine import ScriptedEngine
from tests.scripted.families import FAMILIES
from tests.web.serving import exchange, post, serving

IGNORED = {"", "tools.web_search", "messages.provider_specific_fields"}
"""What may be left out: Codex offers a search that OpenAI's servers would run, and LiteLLM sends
notes of its own back."""
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.completed",
}
CALLS = {
    "/v1/chat/completions": '"tool_calls":[{',
    "/v1/messages": '"type":"tool_use"',
    "/v1/responses": '"type":"function_call"',
}
WORD = "tangerine"


def script(conversation: Conversation) -> str:
    if not conversation.tools:
        return conversation.answer(WORD)
    name = conversation.tools[-1]["function"]["name"]
    return conversation.calls((name, {WORD: [1, 'two "ü"']}), reasoning="The last of them.")


def test_every_agent_has_bodies() -> None:
    assert {path.stem for path in BODIES.iterdir()} == set(AGENTS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.long(but=("gpt_oss", "qwen3_5", "llama3"))
async def test_they_are_answered(family: str, tmp_path: Path) -> None:
    engine = ScriptedEngine.of(script, FAMILIES[family], tmp_path)
    async with serving(engine) as served:
        for agent in AGENTS:
            for request in load(agent):
                path, body = request["path"], request["body"]
                status, headers, data = await exchange(served, post(path, body))
                text = data.decode()
                assert status == 200, (agent, text)
                assert headers.get("x-trouper-ignored", "") in IGNORED, agent
                assert not body.get("tools") or CALLS[path] in text, (agent, text)
                if body.get("stream"):
                    assert ENDS[path] in text, (agent, text[-300:])
                    assert '"error"' not in text.replace('"error": null', "").replace(
                        '"error":null', ""
                    )


def test_a_shape_has_no_text_of_the_agent() -> None:
    tool: Any = {
        "name": "f",
        "description": "Theirs.",
        "input_schema": {"properties": {"text": {"type": "string"}}},
    }
    body = {"system": [{"type": "text", "text": "Theirs."}], "tools": [tool], "cwd": "/tmp/x/work"}
    tool = tool | {"description": STAND_IN}
    expected = {
        "system": [{"type": "text", "text": STAND_IN}],
        "tools": [tool],
        "cwd": "/home/agent/work",
    }
    assert shape(body, "/tmp/x") == expected
