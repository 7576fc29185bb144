"""The scripted server itself: what a script says arrives, in each family's format, and is
recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.scripted.conversation import Conversation
from tests.scripted.engine import ScriptedEngine
from tests.scripted.families import EVERY_FAMILY, FAMILIES
from tests.scripted.process import recorded, scripted_server
from tests.scripted.scripts import of_turns, script_of
from tests.web.serving import Served, serving
from tests.web.test_openai_client import in_thread

READ: Any = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
ASKED: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is in it?"},
]
ARGUMENTS = {"path": 'a "file"\nof ünicode'}


def script(conversation: Conversation) -> str:
    if conversation.results:
        return conversation.answer(f"It says: {conversation.results[-1]}")
    return conversation.calls(
        ("read", ARGUMENTS),
        ("read", {"path": "b"}),
        text="Let me look.",
        reasoning="What may it be?",
    )


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY))
@pytest.mark.long(but=("llama3", "gpt_oss", "qwen3_vl"))
async def test_a_loop_in_each_familys_format(family: str, tmp_path: Path) -> None:
    form = EVERY_FAMILY[family]
    engine = ScriptedEngine.of(script, form, tmp_path)

    def use(served: Served) -> None:
        with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            first = client.chat.completions.create(model="any", messages=ASKED, tools=[READ])
            [choice] = first.choices
            calls: list[Any] = [*(choice.message.tool_calls or ())]
            expected = [ARGUMENTS, {"path": "b"}][: 2 if form.parallel else 1]
            assert [json.loads(call.function.arguments) for call in calls] == expected
            assert (choice.message.content or "").strip() == ("Let me look." if form.speaks else "")
            thought = choice.message.to_dict().get("reasoning_content")
            assert thought == ("What may it be?" if form.thinks else None)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": f"text {call.id[:5]}"}
                for call in calls
            ]
            history: list[Any] = [*ASKED, choice.message.to_dict(), *results]
            second = client.chat.completions.create(model="any", messages=history, tools=[READ])
            assert (second.choices[0].message.content or "").strip() == "It says: text call_"
            assert first.usage is not None and second.usage is not None
            assert second.usage.prompt_tokens_details is not None
            cached = second.usage.prompt_tokens_details.cached_tokens or 0
            assert cached > 0.8 * first.usage.prompt_tokens, (
                "the fake engine caches like the real one"
            )

    async with serving(engine) as served:
        await in_thread(use, served)


async def test_a_script_that_fails_is_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine.of(lambda _: str(1 // 0), FAMILIES["qwen3"], tmp_path)

    def use(served: Served) -> None:
        with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="any", messages=ASKED)
            assert "ZeroDivisionError" in (answer.choices[0].message.content or "")

    async with serving(engine) as served:
        await in_thread(use, served)
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_a_prompt_of_a_hundred_thousand_tokens(tmp_path: Path) -> None:
    engine = ScriptedEngine.of(script, FAMILIES["qwen3"], tmp_path)

    def use(served: Served) -> None:
        with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            long: list[Any] = [{"role": "user", "content": "one two three four " * 25_000}]
            cached, length = [], 0
            for question in ("first", "second"):
                asked: list[Any] = [*long, {"role": "user", "content": question}]
                usage = client.chat.completions.create(
                    model="any", messages=asked, max_tokens=5
                ).usage
                assert usage is not None and usage.prompt_tokens_details is not None
                cached.append(usage.prompt_tokens_details.cached_tokens or 0)
                length = usage.prompt_tokens
            assert cached[0] == 0 and cached[1] > 0.99 * length > 99_000

    async with serving(engine) as served:
        await in_thread(use, served)


def test_a_process_that_records(tmp_path: Path) -> None:
    """A streamed call, a refusal, a forced call, and a prompt without messages."""
    record = tmp_path / "record.jsonl"
    flags = ("--script", "tests.scripted.test_scripted:script", "--record", str(record))
    with (
        scripted_server(*flags, "--set", 'served_model_name=["mine"]') as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["mine"]
        with client.chat.completions.stream(model="mine", messages=ASKED, tools=[READ]) as stream:
            calls: list[Any] = [
                *(stream.get_final_completion().choices[0].message.tool_calls or ())
            ]
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, {"path": "b"}]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="mine", messages=ASKED, temperature=-1)
        forced = client.chat.completions.create(
            model="any", messages=ASKED, tools=[READ], tool_choice="required"
        )
        calls = [*(forced.choices[0].message.tool_calls or ())]
        assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS]
        answer = client.completions.create(model="any", prompt="say it")
        assert "Let me look." in answer.choices[0].text
    lines = [line for line in recorded(record) if line["method"] == "POST"]
    assert [line["status"] for line in lines] == [200, 400, 200, 200]
    assert json.loads(lines[0]["body"])["stream"] is True and "[DONE]" in lines[0]["answer"]
    assert (
        all(line["ended"] for line in lines) and lines[0]["event_silence_s"] <= lines[0]["seconds"]
    )
    assert [line["generated_tokens"] > 5 for line in recorded(record, "request")] == [True] * 3, (
        "what is refused before is none"
    )


def test_a_file_of_turns_is_a_script(tmp_path: Path) -> None:
    turns = [{"calls": [{"name": "read", "arguments": ARGUMENTS}]}, {"text": "done"}]
    (tmp_path / "turns.json").write_text(json.dumps(turns), "utf-8")
    script = script_of(str(tmp_path / "turns.json"))
    first, second = (
        script(Conversation(family=FAMILIES["qwen3"], messages=[{"role": "assistant"}] * turn))
        for turn in range(2)
    )
    assert json.dumps(ARGUMENTS) in first and second.strip().endswith("done")


def test_the_last_turn_of_a_file_goes_on() -> None:
    said = of_turns([{"raw": "one"}, {"raw": "two"}])
    messages = [{"role": "assistant", "content": "x"}] * 3
    for turn, text in ((0, "one"), (1, "two"), (3, "two")):
        assert said(Conversation(family=FAMILIES["qwen3"], messages=messages[:turn])) == text
