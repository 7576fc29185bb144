"""Messages in any order, for chat templates that behave like those of the families that agents
meet."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.engine.test_tokenizer import saved
from tests.families import save_tokenizer
from trouper.engine.loading.template_probe import TOOL
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.protocol.problems import RequestFailed

TEMPLATES = Path(__file__).parent.parent / "chat_templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
ENDS = [
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "</s>",
    "<end_of_turn>",
    "<eos>",
    "<call>",
    "[/INST]",
    "<User>",
    "<result>",
]
"""Markers that are special tokens of these tokenizers, as in the real ones."""
ANY_TEXT = "(?:be|ask|answer|file|dir|text|look)-[a-z]+"
"""A text of these conversations."""
Json = dict[str, Any]


def tokenizer_of(directory: Path, template: str) -> HubTokenizer:
    save_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ENDS])
    return saved(backend, directory, chat_template=template)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, HubTokenizer]:
    return {
        name: tokenizer_of(
            tmp_path_factory.mktemp(name), (TEMPLATES / f"{name}.jinja").read_text("utf-8")
        )
        for name in FAMILIES
    }


ADAPTED: dict[str, set[str]] = {
    "qwen3": set(),
    "qwen3_5": {"system", "first_user", "later_system", "system_after_tool"},
    "gpt_oss": {"system", "later_system", "system_after_tool", "parallel_calls"},
    "llama3": {"calls", "parallel_calls"},
    "mistral": {
        "system",
        "later_system",
        "system_after_tool",
        "users",
        "assistants",
        "first_user",
        "user_after_tool",
        "call_ids",
        "calls",
    },
    "gemma": {
        "system",
        "later_system",
        "system_after_tool",
        "users",
        "assistants",
        "first_user",
        "calls",
        "results",
    },
    "deepseek": {"later_system", "system_after_tool", "arguments", "empty_results"},
    "glm": set(),
    "devstral": set(),
    "qwen3_vl": set(),
    "mistral3": set(),
    "parts": {"content", "calls"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_a_template_refuses_or_drops_is_adapted(
    tokenizers: Mapping[str, HubTokenizer], family: str
) -> None:
    report = tokenizers[family].template
    assert {name for name, _ in report.lines} == ADAPTED[family]
    assert report.refused == ()


def message(role: str, content: str, **fields: Any) -> Json:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: Any, content: str = "", **fields: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": f"call_{name}", "type": "function", "function": function}]
    return message("assistant", content, tool_calls=calls, **fields)


def result(name: str, content: str) -> Json:
    return message("tool", content, tool_call_id=f"call_{name}", name=name)


SYSTEM, MORE, LATER = (message("system", text) for text in ("be-short", "be-kind", "be-quick"))
ASK, AGAIN = message("user", "ask-one"), message("user", "ask-two")
ANSWER = message("assistant", "answer-one")
READ, LISTED = call("read", {"path": "file-a"}), call("list", {"path": "dir-b"})
TEXT = result("read", "text-a")
BOTH = message("assistant", "look-now", tool_calls=READ["tool_calls"] + LISTED["tool_calls"])
TURNS: dict[str, tuple[list[Json], list[Json]]] = {
    "a pair at the beginning": ([SYSTEM, MORE, ASK], [ANSWER, AGAIN]),
    "a developer's": ([message("developer", "be-short"), ASK], [ANSWER, AGAIN]),
    "behind the question": ([SYSTEM, ASK, LATER], [ANSWER, AGAIN]),
    "in the middle": ([SYSTEM, ASK, ANSWER, LATER, AGAIN], [ANSWER, ASK]),
    "last": ([SYSTEM, ASK, ANSWER, LATER], [ANSWER, AGAIN]),
    "between two questions": ([ASK, LATER, AGAIN], [ANSWER, AGAIN]),
    "none": ([ASK], [ANSWER, AGAIN]),
    "no question": ([SYSTEM, MORE], [ANSWER, AGAIN]),
    "an answer first": ([SYSTEM, ANSWER, AGAIN], [ANSWER, AGAIN]),
    "two questions": ([ASK, AGAIN], [ANSWER, AGAIN]),
    "behind a result": ([SYSTEM, ASK, READ, TEXT, LATER], [LISTED, result("list", "text-b"), MORE]),
    "two calls": ([ASK, BOTH, TEXT, result("list", "text-b")], [READ, TEXT]),
    "an empty result": ([ASK, READ, result("read", "")], [LISTED, result("list", "text-b")]),
}
"""Messages of a first turn, and what a second one adds: an answer, and what the client says
then."""


def texts(messages: list[Json]) -> list[str]:
    """Every text that a model must see, in order."""
    found = []
    for turn in messages:
        found += [turn["content"]] if turn["content"] else []
        found += [call["function"]["arguments"]["path"] for call in turn.get("tool_calls", ())]
    return found


def rendered(tokenizer: HubTokenizer, messages: list[Json]) -> str:
    text = tokenizer.render_chat(messages, {"add_generation_prompt": False})
    assert text is not None
    return text


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_begins_with_the_tokens_of_the_first(
    tokenizers: Mapping[str, HubTokenizer], family: str, turn: str
) -> None:
    tokenizer, (first, more) = tokenizers[family], TURNS[turn]
    early, late = (
        tokenizer.encode_chat(turns, add_generation_prompt=False)
        for turns in (first, [*first, *more])
    )
    assert late[: len(early)] == early
    assert len(late) > len(early)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost(tokenizers: Mapping[str, HubTokenizer], family: str, turn: str) -> None:
    first, more = TURNS[turn]
    for messages in (first, [*first, *more]):
        text = rendered(tokenizers[family], messages)
        assert sorted(re.findall(ANY_TEXT, text)) == sorted(texts(messages))
        if "two calls" not in turn:  # There, a template may have each result behind its call.
            assert re.findall(ANY_TEXT, text) == texts(messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_result_is_a_result(tokenizers: Mapping[str, HubTokenizer], family: str) -> None:
    history = [ASK, READ, result("read", "")]
    assert rendered(tokenizers[family], history) != rendered(tokenizers[family], history[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_of_a_message_have_the_same_tokens(
    tokenizers: Mapping[str, HubTokenizer], family: str
) -> None:
    """Content as parts, arguments as JSON, an absent content, and a developer's message."""
    tokenizer = tokenizers[family]
    parts = [{"type": "text", "text": "ask-"}, {"type": "text", "text": "one"}]
    written = call("read", json.dumps({"path": "file-a"}))
    del written["content"]
    other = [message("developer", "be-short"), {"role": "user", "content": parts}, written, TEXT]
    assert tokenizer.encode_chat(other) == tokenizer.encode_chat([SYSTEM, ASK, READ, TEXT])


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_are_no_json_do_not_end_the_conversation(
    tokenizers: Mapping[str, HubTokenizer], family: str
) -> None:
    text = rendered(tokenizers[family], [ASK, call("read", "half {of"), TEXT, ANSWER, AGAIN])
    assert "half {of" in text


@pytest.mark.parametrize("family", ["gpt_oss", "llama3"])
def test_a_call_without_its_result_is_still_a_call(
    tokenizers: Mapping[str, HubTokenizer], family: str
) -> None:
    """Templates of one call a message: the second call was aborted, and the conversation went on or
    ended there."""
    for more in ([], [AGAIN], [AGAIN, READ, TEXT]):
        text = rendered(tokenizers[family], [ASK, BOTH, TEXT, *more])
        assert sorted(re.findall(ANY_TEXT, text)) == sorted(texts([ASK, BOTH, TEXT, *more]))


ALTERNATING = """
    {%- set state = namespace(turn=0) -%}
    {%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
    {%- if (m.role == 'user') != (state.turn % 2 == 0) -%}{{ raise_exception('no') }}{%- endif -%}
    {%- set state.turn = state.turn + 1 -%}
    {%- endfor -%}
    {%- for m in messages -%}
    {%- if not m.content and m.role == 'assistant' and not m.tool_calls -%}
        {{ raise_exception('no') }}
    {%- endif -%}
    {{ m.role }}: {{ m.content }}
    {%- for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}<|end|>
    {%- endfor -%}"""
"""As Ministral 3's: roles alternate but for calls and results, and an answer has text or calls."""


@pytest.mark.parametrize(
    "turns",
    [
        [ASK, READ, TEXT, AGAIN],
        [ASK, READ, AGAIN],
        [ASK, message("assistant", "", reasoning_content="hm"), AGAIN],
    ],
)
def test_an_answer_without_text_is_a_blank_where_the_template_refuses_none(
    tmp_path: Path, turns: list[Json]
) -> None:
    """Such stands between a result and the user's next message, which all agents send."""
    tokenizer = tokenizer_of(tmp_path, ALTERNATING)
    assert tokenizer.template.refused == ()
    assert re.findall(ANY_TEXT, rendered(tokenizer, turns)) == texts(turns)


@pytest.mark.parametrize("text", ["", "look-now"])
def test_reasoning_before_a_call_is_a_part_where_the_template_reads_parts_alone(
    tmp_path: Path, text: str
) -> None:
    """As Ministral 3's, whose makers say to send it again."""
    template = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}
        {{- m.content }}{% else %}
        {%- for p in m.content or () %}{% if p.type == 'text' %}{{ p.text }}
        {%- else %}[THINK]{{ p.thinking }}[/THINK]{% endif %}{% endfor %}{% endif %}
        {%- for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"""
    tokenizer = tokenizer_of(tmp_path, template)
    assert tokenizer.template.adaptation.reasoning == "chunk"
    turn = call("read", {"path": "file-a"}, text) | {"reasoning_content": "hm"}
    assert f"assistant: [THINK]hm[/THINK]{text}{{" in rendered(tokenizer, [ASK, turn, TEXT])
    printed = tokenizer_of(
        tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    assert printed.template.adaptation.reasoning == "given", "a list is no text"


def test_text_in_front_of_a_later_call_is_not_lost(tmp_path: Path) -> None:
    """DeepSeek R1's template writes the text of the first message with calls alone."""
    template = """{% set state = namespace(called=false) %}{% for m in messages %}
        {%- if not (m.tool_calls and state.called) %}{{ m.role }}: {{ m.content }}<|end|>{% endif %}
        {%- for c in m.tool_calls or () %}{{ c.function | tojson }}{% set state.called = true %}{% endfor %}
        {%- endfor %}"""
    tokenizer = tokenizer_of(tmp_path, template)
    turns = [ASK, call("read", {"path": "file-a"}, "look-now"), TEXT]
    turns += [call("read", {"path": "file-b"}, "look-again"), TEXT]
    assert re.findall(ANY_TEXT, rendered(tokenizer, turns)) == texts(turns)


def test_a_result_has_the_name_of_its_call(tmp_path: Path) -> None:
    """Kimi K2's template writes it, and the ids are all that clients of chat and responses send."""
    template = """{% for m in messages %}{{ m.get('name') or m.role }}: {{ m.content }}
        {%- for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"""
    tokenizer = tokenizer_of(tmp_path, template)
    alone = {name: value for name, value in TEXT.items() if name != "name"}
    assert "read: text-a" in rendered(tokenizer, [ASK, READ, alone])
    assert "other: text-a" in rendered(tokenizer, [ASK, READ, TEXT | {"name": "other"}])


def test_results_in_another_order_do_not_move_the_text(
    tokenizers: Mapping[str, HubTokenizer],
) -> None:
    turns = [ASK, BOTH, result("list", "text-b"), TEXT]
    order = ["ask-one", "look-now", "dir-b", "text-b", "file-a", "text-a"]
    assert re.findall(ANY_TEXT, rendered(tokenizers["gpt_oss"], turns)) == order


def test_arguments_are_no_python(tmp_path: Path) -> None:
    """A template that writes arguments down as they are takes an object, too, and makes of it what
    no model has seen."""
    template = """{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or () %}
        {{- call.function.name }} {{ call.function.arguments }}{% endfor %}<|end|>{% endfor %}"""
    tokenizer = tokenizer_of(tmp_path, template)
    assert dict(tokenizer.template.lines).keys() == {"arguments"}
    assert 'read {"path": "file-a"}' in rendered(tokenizer, [ASK, READ, TEXT])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_instructions_behind_a_result_keep_the_reasoning_before_it(
    tokenizers: Mapping[str, HubTokenizer], family: str
) -> None:
    """As a user's message they would end the step, and these templates drop the reasoning of steps
    that have ended."""
    history = [ASK, call("read", {"path": "file-a"}, reasoning_content="let-me-see"), TEXT]
    before, after = (rendered(tokenizers[family], turns) for turns in (history, [*history, LATER]))
    assert "let-me-see" in before and "let-me-see" in after
    assert "let-me-see" not in rendered(tokenizers[family], [*history, AGAIN])


def test_the_messages_of_the_caller_stay_as_they_are(
    tokenizers: Mapping[str, HubTokenizer],
) -> None:
    messages = [SYSTEM, MORE, ASK, BOTH, TEXT, LATER]
    copy = json.loads(json.dumps(messages))
    for tokenizer in tokenizers.values():
        tokenizer.encode_chat(messages)
    assert messages == copy


def test_the_offered_tools_change_no_decision(tokenizers: Mapping[str, HubTokenizer]) -> None:
    for family in FAMILIES:
        for first, _ in TURNS.values():
            if family == "llama3" and all(turn["role"] == "system" for turn in first):
                continue  # It has tools in the first question, and here is none.
            assert tokenizers[family].encode_chat(first, tools=[TOOL])


def test_what_no_change_helps_is_named_and_refused(tmp_path: Path) -> None:
    template = """{% for m in messages %}
        {%- if m.role == 'system' and not loop.first or '</system>' in m.content %}{{ raise_exception('no') }}{% endif %}
        {{- m.role }}: {{ m.content }}<|end|>{% endfor %}"""
    tokenizer = tokenizer_of(tmp_path, template)
    lines = dict(tokenizer.template.lines)
    assert lines["not_rendered"].startswith("user system; ")
    with pytest.raises(RequestFailed):
        tokenizer.encode_chat([ASK, LATER])


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{% for m in messages %}{{ m }", "unexpected '}'"),
        ("always the same", "the question is not in it, or not once"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_renders_no_question_is_named_and_nothing_is_adapted(
    tmp_path: Path, template: str, fault: str
) -> None:
    """Found by use: each chat was refused as if its messages were at fault, and neither log nor
    doctor said a word."""
    report = tokenizer_of(tmp_path, template).template
    assert report.lines == (("not_rendered", "user"),)
    assert (
        report.summary
        == f"the chat template does not render a question ({fault}); /v1/completions needs no template"
    )


def test_a_refusal_says_that_the_template_refuses_any_question(tmp_path: Path) -> None:
    with pytest.raises(RequestFailed) as caught:
        tokenizer_of(tmp_path, "{{ 1 / 0 }}").encode_chat([ASK])
    problem = caught.value.problem
    assert (problem.status, problem.param) == (400, "messages")
    assert (
        "division by zero; it renders no question at all, and /v1/completions needs no template"
        in problem.message
    )


def test_several_templates_none_of_them_the_default(tmp_path: Path) -> None:
    """Found by use: the error asked for the argument `chat_template`, which is refused. With tools
    there is a template."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_tokenizer(tmp_path)
    named: list[Json] = [
        {"name": name, "template": name + template} for name in ("rag", "tool_use")
    ]
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = saved(backend, tmp_path, chat_template=named)
    fault = "of its templates (rag, tool_use) none is named default"
    assert tokenizer.template.fault == fault
    with pytest.raises(RequestFailed, match=re.escape(fault)):
        tokenizer.encode_chat([ASK])
    assert tokenizer.render_chat([ASK], {"tools": [TOOL]}) == f"tool_use{ASK['content']}"


def test_a_tokenizer_without_a_template_is_not_probed(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = saved(Backend.from_file(str(tmp_path / "tokenizer.json")), tmp_path)
    assert tokenizer.template.lines == ()


ROLES = ("system", "developer", "user", "assistant", "call", "calls", "tool")


def conversation(roles: list[str]) -> list[Json]:
    """Messages of these roles, each with a text of its own; results answer the latest calls."""
    messages: list[Json] = []
    for index, role in enumerate(roles):
        match role:
            case "call" | "calls":
                names = [f"{index}{letter}" for letter in ("ab" if role == "calls" else "a")]
                made = [call(name, {"path": f"p-{name}"})["tool_calls"][0] for name in names]
                messages.append(message("assistant", "", tool_calls=made))
                messages += [result(name, f"r-{name}") for name in names]
            case "tool":
                messages += [
                    call(f"{index}", {"path": f"p-{index}"}, "look"),
                    result(f"{index}", ""),
                ]
            case _:
                messages.append(message(role, f"text-{index}"))
    return messages


@given(st.lists(st.sampled_from(ROLES), min_size=1, max_size=12), st.data())
def test_an_answer_changes_no_message_before_it(
    tokenizers: Mapping[str, HubTokenizer], roles: list[str], data: st.DataObject
) -> None:
    """Whatever the conversation is: what was adapted for one turn is the beginning of what is
    adapted for the next."""
    messages = conversation(roles)
    answers = [
        index
        for index, turn in enumerate(messages)
        if turn["role"] == "assistant" and index and messages[index - 1]["role"] != "assistant"
    ]
    end = data.draw(st.sampled_from([*answers, len(messages)]))
    for tokenizer in tokenizers.values():
        early, late = (
            tokenizer.template.adaptation.adapted(turns) for turns in (messages[:end], messages)
        )
        assert late[: len(early)] == early
