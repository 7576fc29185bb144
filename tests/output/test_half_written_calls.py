"""Calls of which a model has left out a part, or wrote it in another family's way; values that are
no JSON; and what long runs cost."""

from __future__ import annotations

import json
from re import Pattern
from typing import Any

import pytest

from tests.output.samples import (
    ARGUMENTS,
    CALLS,
    NAMES,
    TOOL,
    TOOLS,
    FormatTokenizer,
    arguments_of,
    joined,
    parse_complete,
    parser,
    played,
)
from trouper.protocol.output_formats import FUNCTIONARY_32, HARMONY
from trouper.web.output.formats.registry import call_format
from trouper.web.output.formats.text_source import TextSource
from trouper.web.output.tool_calls import Tools

CODER = CALLS["qwen3_coder"]
STARTS = {
    "qwen3_coder": "<tool_call>\n",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
}
"""The marker in front of calls that models of these families leave out now and then."""


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("before", ["", "I look.\n\n"])
def test_a_call_without_the_marker_in_front_of_it(name: str, before: str) -> None:
    text = before + CALLS[name].removeprefix(STARTS[name])
    complete = played(name, [text])
    assert complete == [("Content", "I look.")][: bool(before)] + played(name, [CALLS[name]])
    for place in range(len(text) + 1):
        assert played(name, [text[:place], text[place:]]) == complete


@pytest.mark.parametrize("name", STARTS)
def test_it_is_text_where_it_names_no_tool_and_counted(name: str) -> None:
    outcomes: list[str] = []
    text = "As in " + CALLS[name].removeprefix(STARTS[name]).replace("edit", "delete")
    output = parse_complete(parser(name, report=outcomes.append), text, "stop")
    assert (output.content, output.calls, outcomes) == (text, (), ["no_call"])
    assert played(name, [CODER[len("<tool_call>\n") :][:6]]) == [("Content", "<funct")]


@pytest.mark.parametrize("name", STARTS)
def test_it_is_one_in_reasoning_that_was_never_closed(name: str) -> None:
    call = CALLS[name].removeprefix(STARTS[name])
    found = played(name, [f"<think>\nhm\n{call}"])
    assert [kind for kind, _ in found] == ["Reasoning", "CallStarted", "CallArguments", "CallEnded"]
    considered = played(name, [f"<think>\nhm {call} or not</think>No."])
    assert considered == [("Reasoning", f"hm {call} or not"), ("Content", "No.")]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {HARMONY, FUNCTIONARY_32, "xlam"}))
def test_a_call_behind_text_that_begins_like_one_is_still_a_call(name: str) -> None:
    """An agent that works on a chat template names its markers, and then calls a tool."""
    written, call = call_format(TOOLS, FormatTokenizer.of(name)), CALLS[name]
    for start in (*written.starts, *written.bare):
        text = f"Use {start} tags.\n"
        for pieces in ([text + call], [*text, *call]):
            content, *calls = played(name, pieces)
            # Parsers of mlx-lm pass over text in front of a call.
            assert content in {("Content", text.rstrip()), ("Content", "Use")}
            assert calls == played(name, [call])


@pytest.mark.parametrize("name", ["cwm", "hunyuan", "kimi_k2"])
def test_it_is_one_in_reasoning_that_names_markers_too(name: str) -> None:
    [start, *_] = call_format(TOOLS, FormatTokenizer.of(name)).starts
    events = played(name, [f"<think>\nUse {start} tags.\n{CALLS[name]}"])
    assert events == [("Reasoning", f"Use {start} tags."), *played(name, [CALLS[name]])]


def test_text_between_calls_of_mistral_is_no_name_of_a_tool() -> None:
    outcomes: list[str] = []
    reading, call = parser("mistral", report=outcomes.append), CALLS["mistral"]
    kinds = ["CallStarted", "CallArguments", "CallEnded"]
    assert [kind for kind, _ in joined(reading.push(call))] == kinds
    assert joined(reading.push("And ")) == [("Content", "And")]
    assert [kind for kind, _ in joined(reading.push(call))] == kinds
    assert outcomes == []
    assert (reading.end(cut=True), reading.reason("stop")) == ([], "tool_calls")


def test_objects_and_tags_are_read_in_each_others_place() -> None:
    assert played("qwen3_coder", [CALLS["hermes"]]) == played("hermes", [CALLS["hermes"]])
    assert played("hermes", [CODER]) == played("qwen3_coder", [CODER])
    both = f"{CALLS['hermes']}\n{CODER}"
    assert [kind for kind, _ in played("hermes", [both])] == [
        "CallStarted",
        "CallArguments",
        "CallEnded",
    ] * 2


def test_a_value_without_its_end_ends_where_another_parameter_begins() -> None:
    for name, text in (
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=edit>\n<parameter=path>\n{}\n<parameter=line>\n7\n"
                "</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            "glm",
            (
                "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>{}\n<arg_key>line</arg_key>\n"
                "<arg_value>7</arg_value>\n</tool_call>"
            ),
        ),
    ):
        for value in ("x", "", "a\n\n<b>\nc"):
            for pieces in ([text.format(value)], [*text.format(value)]):
                [arguments] = arguments_of(played(name, pieces))
                assert json.loads(arguments) == {"path": value, "line": 7}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_tool_by_its_name_in_another_case(name: str) -> None:
    """Otherwise it would be text, and the agent's turn would end with it."""
    text = CALLS[name].replace("edit", "Edit")
    assert played(name, [text]) == played(name, [*text]) == played(name, [CALLS[name]])
    both = Tools(
        tuple(
            {**TOOL, "function": {**TOOL["function"], "name": written}}
            for written in ("EDIT", "edit")
        )
    )
    output = parse_complete(parser(name, tools=both), text, "stop")
    assert output.calls == (), "which of the two is meant, nobody knows"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>edit\n{}\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=edit>\n{}\n</function>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="edit">{}</invoke></minimax:tool_call>'),
    ],
)
def test_arguments_as_an_object_behind_the_name_are_those_of_the_call(name: str, text: str) -> None:
    """Read as none, the tool would run without them."""
    text = text.format(json.dumps(ARGUMENTS))
    for pieces in ([text + "Done."], [*text, "Done."]):
        found = played(name, pieces)
        assert [kind for kind, _ in found] == [
            "CallStarted",
            "CallArguments",
            "CallEnded",
            "Content",
        ]
        assert (json.loads(found[1][1]), found[3][1]) == (ARGUMENTS, "Done.")
    cut = played(name, [text[: text.index("line")]], cut=True)
    assert [kind for kind, _ in cut] == ["CallStarted", "CallArguments"]
    outcomes: list[str] = []
    parse_complete(parser(name, report=outcomes.append), text, "stop")
    assert outcomes == ["repaired"]


def test_kimis_section_by_its_other_name() -> None:
    text = CALLS["kimi_k2"].replace("tool_calls_section", "tool_call_section")
    assert played("kimi_k2", [text + "Done."]) == [
        *played("kimi_k2", [CALLS["kimi_k2"]]),
        ("Content", "Done."),
    ]


def test_a_header_of_mistral_without_its_marker_behind() -> None:
    for text in (
        '[TOOL_CALLS]edit{"line": 1}',
        '[TOOL_CALLS]edit{"line": 1}[TOOL_CALLS]edit{"line": 1}',
    ):
        found = played("mistral", [text])
        assert found[:3] == [
            ("CallStarted", "edit"),
            ("CallArguments", '{"line": 1}'),
            ("CallEnded", ""),
        ]
        assert len(found) == 3 * text.count("edit")
        assert played("mistral", [*text]) == found


HEADER = "<|channel|>commentary to=functions.edit <|constrain|>json<|message|>"


@pytest.mark.parametrize("ending", ["<|call|>", "", "\n<|end|>"])
def test_a_call_of_harmony_without_text_has_no_arguments(ending: str) -> None:
    for pieces in ([HEADER + ending], [*HEADER, *ending]):
        assert played(HARMONY, pieces) == [
            ("CallStarted", "edit"),
            ("CallArguments", "{}"),
            ("CallEnded", ""),
        ]
    assert played(HARMONY, [HEADER], cut=True) == []
    assert played(HARMONY, [f"{HEADER}no object<|call|>"]) == [("Content", "no object")]


@pytest.mark.parametrize("opened", ["<think>", "\n<think>\n"])
def test_reasoning_that_the_prompt_and_the_model_have_opened(opened: str) -> None:
    text = f"{opened}hm</think>Yes."
    assert played("hermes", [text], thinks=True) == [("Reasoning", "hm"), ("Content", "Yes.")]
    assert played("hermes", [*text], thinks=True) == [("Reasoning", "hm"), ("Content", "Yes.")]
    assert played("hermes", ["\n <thin</think>Yes."], thinks=True) == [
        ("Reasoning", " <thin"),
        ("Content", "Yes."),
    ]


def test_a_marker_of_special_tokens_opens_reasoning_anywhere() -> None:
    text = "Hi.<|channel>thought\nhm<channel|>Yes."
    assert played("gemma4", [text]) == [
        ("Content", "Hi."),
        ("Reasoning", "hm"),
        ("Content", "Yes."),
    ]


# -- values that are no JSON ---------------------------------------------------------------------


def value_of(written: str, schema: dict[str, Any]) -> Any:
    """The value of the parameter `x` of a call in tags, as a strict reader of JSON reads it."""
    parameters = {"type": "object", "properties": {"x": schema}}
    tools = Tools(({"type": "function", "function": {"name": "edit", "parameters": parameters}},))
    reading = parser("qwen3_coder", tools=tools)
    text = (
        f"<tool_call>\n<function=edit>\n<parameter=x>\n{written}\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    [arguments] = arguments_of(joined(reading.push(text) + reading.end()))
    return json.loads(arguments, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["x"]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_json_lacks_is_never_written(word: str) -> None:
    assert value_of(word, {"type": "number"}) == word
    assert value_of(f"[{word}]", {"type": "array"}) in ([None], [word])
    assert value_of(f"[{word}]", {}) == f"[{word}]"
    assert value_of("['a', 1e999]", {"type": "array"}) == ["a", 1e999]


def test_a_value_deeper_than_python_reads_ends_no_answer() -> None:
    """A model that repeats one bracket for ever: what it wrote is completed, and the others of its
    answer are read."""
    reading = parser("qwen3_coder")
    text = (
        f'<tool_call>\n<function=edit>\n<parameter=options>\n{{"a":{"[" * 50_000}\n</parameter>\n'
        "</function>\n</tool_call>Done."
    )
    found = joined(reading.push(text) + reading.end())
    assert [kind for kind, _ in found] == ["CallStarted", "CallArguments", "CallEnded", "Content"]
    assert found[1][1].count("[") == found[1][1].count("]") == 50_000


@pytest.mark.parametrize("value", ["[" * 50_000 + "]" * 50_000, f'{{"a": {"9" * 5000}}}'])
def test_arguments_before_the_name_that_python_does_not_read_are_text(value: str) -> None:
    text = f'<tool_call>{{"arguments": {value}, "name": "edit"}}</tool_call>'
    output = parse_complete(parser("hermes"), text, "stop")
    assert (output.content, output.calls) == (text, ())


# -- what long runs cost -------------------------------------------------------------------------


class Counted(TextSource):
    """Counts the characters that are read, again ones too."""

    read = 0
    characters = 0
    """Those that were read one by one."""

    def next(self) -> Any:
        Counted.read += 1
        Counted.characters += 1
        return super().next()

    def take(self, pattern: Pattern[str]) -> str:
        taken = super().take(pattern)
        Counted.read += len(taken) + 1
        return taken


RUNS = {
    "newlines in a value": ("qwen3_coder", CODER.partition("<b>")[0], "\n", "x"),
    "ends of calls in a string": (
        "hermes",
        '<tool_call>{"name": "edit", "arguments": {"path": "',
        "</tool_call>",
        '"}}',
    ),
    "ends in Kimi's string": (
        "kimi_k2",
        CALLS["kimi_k2"].partition("<b>")[0],
        "<|tool_call_end|>",
        "x",
    ),
    "ends in harmony's": (HARMONY, CALLS[HARMONY].partition("<b>")[0], "<|call|> ", "x"),
    "starts of calls": ("cwm", "", "<tool:", ""),
    "starts of calls in reasoning": ("cwm", "<think>", "<tool:", "</tool>"),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_long_run_is_not_read_again_for_each_of_its_characters(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise 10,000 newlines of one model would stop the streams of all for a minute."""
    monkeypatch.setattr("trouper.web.output.output_parser.TextSource", Counted)
    name, before, unit, after = RUNS[run]
    counts = []
    for times in (50, 100, 200):
        Counted.read = 0
        reading = parser(name)
        for piece in (before, *[unit] * times, after):
            reading.push(piece)
        reading.end(cut=True)
        counts.append(Counted.read)
    assert counts[2] - counts[1] < 2.2 * (counts[1] - counts[0]), counts


IN_WORDS = {
    "content": ("hermes", "a"),
    "reasoning": ("hermes", "<think>a"),
    "harmony's content": (HARMONY, "<|channel|>final<|message|>a"),
    "harmony's reasoning": (HARMONY, "<|channel|>analysis<|message|>a"),
    "a string of JSON": ("hermes", '<tool_call>{"name": "edit", "arguments": {"path": "'),
    "a tagged value": ("qwen3_coder", CODER.partition("<b>")[0]),
}


@pytest.mark.parametrize("name", IN_WORDS)
def test_words_are_not_read_by_the_character(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream's text passes here, token by token, in the one thread that all have."""
    monkeypatch.setattr("trouper.web.output.output_parser.TextSource", Counted)
    family, before = IN_WORDS[name]
    reading = parser(family)
    reading.push(before)
    Counted.characters = 0
    words = [" one", " two,", ".x", " a[3]", "ü"]
    parts = [part for word in words for part in reading.push(word)]
    assert "".join(getattr(part, "text", "?") for part in parts) == "".join(words)
    assert not Counted.characters


@pytest.mark.parametrize("before", ["a", "<think>a"])
def test_a_long_run_of_space_that_comes_at_once_is_read_at_once(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find no word in it takes a look at all of it."""
    monkeypatch.setattr("trouper.web.output.output_parser.TextSource", Counted)
    counts = []
    for times in (50, 200):
        Counted.read = 0
        reading = parser("hermes")
        reading.push(before + " \n" * times + "b")
        reading.end(cut=True)
        counts.append(Counted.read - 2 * times)
    assert counts[0] == counts[1]


def test_the_arguments_of_a_long_run_are_those_that_were_written() -> None:
    arguments = ARGUMENTS | {"path": "\n" * 40 + "</tool_call>\n" * 3 + "x"}
    text = f"<tool_call>{json.dumps({'name': 'edit', 'arguments': arguments})}</tool_call>"
    for pieces in ([text], [*text]):
        assert [json.loads(written) for written in arguments_of(played("hermes", pieces))] == [
            arguments
        ]


def two_calls(before: str, end: str, between: str, behind: str) -> tuple[str, str, str]:
    """What is before and behind a value of the first call, and its end; the second one has the
    value `second`."""
    return before, end, f"{between}{before}second{end}{behind}"


FUNCTION = "<function=edit>\n<parameter=path>\n"
TWO_CALLS = {
    "qwen3_coder": two_calls(
        f"<tool_call>\n{FUNCTION}",
        "\n</parameter>",
        "\n</function>\n</tool_call>\n",
        "\n</function>\n</tool_call>",
    ),
    "one section": (
        f"<tool_call>\n{FUNCTION}",
        "\n</parameter>",
        f"\n</function>\n{FUNCTION}second\n</parameter>\n</function>\n</tool_call>",
    ),
    "no end of the function": two_calls(
        f"<tool_call>\n{FUNCTION}",
        "\n</parameter>",
        "\n</tool_call>\n",
        "\n</function>\n</tool_call>",
    ),
    "glm": two_calls(
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>",
        "</arg_value>",
        "</tool_call>\n",
        "\n</tool_call>",
    ),
    "minimax_m2": two_calls(
        '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">',
        "</parameter>",
        "\n</invoke>\n</minimax:tool_call>",
        "\n</invoke>\n</minimax:tool_call>",
    ),
    "hermes": two_calls(
        '<tool_call>\n{"name": "edit", "arguments": {"path": "',
        '"}}',
        "\n</tool_call>\n",
        "\n</tool_call>",
    ),
}
"""Two calls of `edit`: what is before a value of the first, the value's end, and all the rest."""


@pytest.mark.parametrize("name", TWO_CALLS)
@pytest.mark.parametrize("value", ["first", "<b> </c>"])
def test_a_value_without_its_end_swallows_no_second_call(name: str, value: str) -> None:
    before, end, behind = TWO_CALLS[name]
    for written_end in (end, ""):
        answer = f"{before}{value}{written_end}{behind}"
        for pieces in ([answer], [*answer]):
            found = played(name if name in CALLS else "qwen3_coder", pieces)
            paths = [json.loads(one)["path"].rstrip("\n") for one in arguments_of(found)]
            assert paths == [value, "second"]
            assert [kind for kind, _ in found].count("CallEnded") == 2


@pytest.mark.parametrize(
    "inner",
    [
        "</function>\n</tool_call>\n<tool_call>\n<function=delete>",
        "</function>\n</tool_call>\nand <tool_call>\n<function=edit>",
        "</tool_call>\n<function=edit>",
        "<tool_call>\n<function=edit>",
        "</function>\n</tool_call>\n<tool_call>\n<function=edit",
        "<parameter=other>",
        "<parameter=path>",
        "<parameter=",
        "<parameter=line",
    ],
)
def test_what_begins_no_call_or_parameter_of_a_tool_is_text_of_the_value(inner: str) -> None:
    text = (
        f"<tool_call>\n<function=edit>\n<parameter=path>\na\n{inner}\nb\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    for pieces in ([text], [*text]):
        [arguments] = arguments_of(played("qwen3_coder", pieces))
        assert json.loads(arguments) == {"path": f"a\n{inner}\nb"}


@pytest.mark.parametrize(
    "inner", ["</tool_call> <tool_call>", '</tool_call><tool_call>{\\"name\\"', "</tool_call>{"]
)
def test_markers_in_a_string_are_its_text(inner: str) -> None:
    text = f'<tool_call>{{"name": "edit", "arguments": {{"path": "a{inner}b"}}}}</tool_call>'
    for pieces in ([text], [*text]):
        [arguments] = arguments_of(played("hermes", pieces))
        assert json.loads(arguments) == {"path": json.loads(f'"a{inner}b"')}
