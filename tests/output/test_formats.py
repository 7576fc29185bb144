"""Every format: the call it was made for, cut anywhere; half-right calls; calls in reasoning;
detection by the template."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.long_tests import examples
from tests.output.campaign import check
from tests.output.samples import (
    ARGUMENTS,
    CALLS,
    NAMES,
    STREAMED,
    TOOL,
    FormatTokenizer,
    arguments_of,
    joined,
    parse_complete,
    parser,
    played,
)
from tests.scripted.families import FAMILIES
from trouper.engine.loading.output_format_detection import of_names
from trouper.protocol.output_formats import (
    BUFFERED_TOOL_PARSERS,
    CALL_MARKERS,
    FUNCTIONARY_32,
    HARMONY,
    THINKING,
)
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import Settings
from trouper.web.output.formats.registry import FORMATS
from trouper.web.output.parsed_delta import CallArguments
from trouper.web.output.tool_calls import Tools


def test_every_streamed_format_has_a_parser_a_sample_and_its_markers() -> None:
    streamed = set(CALL_MARKERS) - set(BUFFERED_TOOL_PARSERS)
    assert {*FORMATS, HARMONY, FUNCTIONARY_32} == streamed == set(STREAMED)
    assert {*STREAMED, *BUFFERED_TOOL_PARSERS} == set(CALLS)
    for name, markers in CALL_MARKERS.items():
        unknown = [marker for marker in markers if marker not in CALLS[name]]
        assert name in {"granite", "k2_horizon", "mistral", "pythonic", HARMONY} or not unknown


NO_MARKERS = {"b", "path", "line", "options", "deep", "item", "|constrain|", "![CDATA[ä"}


@pytest.mark.parametrize("name", NAMES)
def test_every_marker_of_a_call_may_be_a_special_token(name: str) -> None:
    """Special tokens are no text for a client; those of a call must reach the parser."""
    form = of_names(name, None)
    for tag in re.findall(r"<[^<>\s=\"]+[>=]?|\[[A-Z]+[A-Z_]*\]", CALLS[name]):
        shown = [marker for marker in form.markers if tag.strip("<>") in marker or marker in tag]
        assert shown or tag.strip("</>") in NO_MARKERS, tag


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["", "Now.\n\n"])
def test_a_call_cut_at_every_position(name: str, before: str) -> None:
    before = "" if name == "xlam" else before  # Behind text, a list is text.
    text = before + CALLS[name]
    complete = played(name, [text])
    expected = (
        [("Content", "Now.")] if before and name != HARMONY else complete[:1] if before else []
    )
    assert (
        complete[len(expected) :: 3] == [("CallStarted", "edit")]
        and complete[: len(expected)] == expected
    )
    assert json.loads(complete[len(expected) + 1][1]) == ARGUMENTS
    for place in range(len(text) + 1):
        assert played(name, [text[:place], text[place:]]) == complete


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_are_streamed(name: str) -> None:
    reading = parser(name)
    seen = [delta for char in CALLS[name] for delta in reading.push(char)]
    assert sum(isinstance(delta, CallArguments) for delta in seen) > 10


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_and_one_if_only_one_is_wanted(name: str) -> None:
    text = CALLS[name] + "\n" + CALLS[name]
    if name == "llama3_json":
        text = CALLS[name] + "; " + CALLS[name].removeprefix("<|python_tag|>")
    kinds = [kind for kind, _ in played(name, [text])]
    assert kinds == ["CallStarted", "CallArguments", "CallEnded"] * 2
    reading = parser(name, tools=Tools((TOOL,), several=False))
    assert [kind for kind, _ in joined(reading.push(text) + reading.end())] == kinds[:3]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {HARMONY, FUNCTIONARY_32, "xlam"}))
def test_a_call_in_reasoning_that_was_never_closed(name: str) -> None:
    start, end = THINKING[str(FormatTokenizer.of(name).reasoning_parser)]
    for text in (f"{start}\nhm\n{CALLS[name]}", f"{start}\nhm\n{CALLS[name]}\n{end}"):
        found = played(name, [text])
        assert [kind for kind, _ in found] == [
            "Reasoning",
            "CallStarted",
            "CallArguments",
            "CallEnded",
        ]
        assert found[0] == ("Reasoning", "hm")
    if name not in {"mistral", "llama3_json"}:
        considered = played(name, [f"{start}\nhm {CALLS[name]} or not{end}No."])
        assert considered == [("Reasoning", f"hm {CALLS[name]} or not"), ("Content", "No.")]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_a_tool_that_nobody_offered_is_text_and_counted(name: str) -> None:
    outcomes: list[str] = []
    reading = parser(name, report=outcomes.append)
    text = CALLS[name].replace("edit", "delete")
    found = joined(reading.push(text) + reading.end())
    assert [kind for kind, _ in found] == ["Content"]
    assert outcomes == ([] if name == "xlam" else ["no_call"]), "a list may be an answer"
    if name != HARMONY:
        assert found[0][1] == text


@pytest.mark.parametrize("name", NAMES)
def test_random_texts(name: str) -> None:
    assert [fault for seed in range(examples(96)) if (fault := check(name, seed))] == []


MALFORMED = {
    "a missing brace": ('{"name": "edit", "arguments": {"path": "x"}', {"path": "x"}),
    "two missing braces": ('{"name": "edit", "arguments": {"path": "x"', {"path": "x"}),
    "an open string": ('{"name": "edit", "arguments": {"path": "x', {"path": "x\n"}),
    "single quotes": ("{'name': 'edit', 'arguments': {'path': 'it's'}}", {"path": "it's"}),
    "Python's words": (
        '{"name": "edit", "arguments": {"options": {"a": True, "b": None}}}',
        {"options": {"a": True, "b": None}},
    ),
    "a trailing comma": ('{"name": "edit", "arguments": {"line": 1,},}', {"line": 1}),
    "a missing comma": (
        '{"name": "edit", "arguments": {"line": 1 "path": "x"}}',
        {"line": 1, "path": "x"},
    ),
    "bare keys": ('{"name": "edit", "arguments": {line: 1}}', {"line": 1}),
    "a raw newline": ('{"name": "edit", "arguments": {"path": "a\nb"}}', {"path": "a\nb"}),
    "quotes in a string": (
        '{"name": "edit", "arguments": {"path": "say "hi" now"}}',
        {"path": 'say "hi" now'},
    ),
    "a wrong escape": ('{"name": "edit", "arguments": {"path": "\\d+"}}', {"path": "\\d+"}),
    "half a surrogate pair": (
        '{"name": "edit", "arguments": {"path": "\\ud83dx"}}',
        {"path": "\ufffdx"},
    ),
    "a wrong bracket": ('{"name": "edit", "arguments": {"options": [1, 2}}', {"options": [1, 2]}),
    "a bracket that closes nothing": (
        '{"name": "edit", "arguments": {]"path": "x"}}',
        {"path": "x"},
    ),
    "a string of JSON that lacks a brace": (
        '{"name": "edit", "arguments": "{\\"line\\": 1"}',
        {"line": 1},
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_half_right_json_is_repaired_and_counted(fault: str) -> None:
    written, meant = MALFORMED[fault]
    text, outcomes = f"<tool_call>\n{written}\n</tool_call>", list[str]()
    reading = parser("hermes", report=outcomes.append)
    output = parse_complete(reading, text, "stop")
    assert [json.loads(call.arguments) for call in output.calls] == [meant]
    assert output.content == "" and outcomes == ["repaired"]


@pytest.mark.parametrize(
    "written",
    [
        '{"result": 5}',
        "the word",
        '{"name": "edit", "arguments": }',
        '{"name": "edit", "arguments": 5}',
        '{"arguments": {}}',
        "",
        "[]",
        '{"name"',
    ],
)
def test_what_is_no_call_stays_text(written: str) -> None:
    text, outcomes = f"<tool_call>{written}</tool_call>", list[str]()
    output = parse_complete(parser("hermes", report=outcomes.append), text, "stop")
    assert (output.content, output.calls, outcomes) == (text, (), ["no_call"])


def test_a_marker_in_a_string_does_not_end_the_call() -> None:
    written = {"path": "</tool_call> and <tool_call>"}
    text = f"<tool_call>{json.dumps({'name': 'edit', 'arguments': written})}</tool_call>"
    assert json.loads(played("hermes", [text])[1][1]) == written


def test_a_space_behind_an_unclosed_value_belongs_to_it_wherever_the_text_is_cut() -> None:
    text = "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>x "
    assert (
        played("glm", [text])
        == played("glm", list(text))
        == [("CallStarted", "edit"), ("CallArguments", '{"path": "x "}'), ("CallEnded", "")]
    )


def test_a_call_that_was_cut_stays_incomplete() -> None:
    text = "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>x"
    assert arguments_of(played("glm", [text], cut=True)) == ['{"path": "x']


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_that_was_cut_has_no_end(name: str) -> None:
    text = CALLS[name]
    found = played(name, [text[: text.index("line") + 2]], cut=True)
    assert [kind for kind, _ in found][:1] == ["CallStarted"] and "CallEnded" not in [
        kind for kind, _ in found
    ]


def test_a_call_in_reasoning_that_was_cut_is_reasoning() -> None:
    found = played("hermes", [f"<think>hm{CALLS['hermes']}"], cut=True)
    assert [kind for kind, _ in found] == ["Reasoning"]


def test_an_object_in_the_middle_of_content_is_no_call() -> None:
    written = json.dumps({"name": "edit", "parameters": ARGUMENTS})
    assert [kind for kind, _ in played("llama3_json", [written])] == [
        "CallStarted",
        "CallArguments",
        "CallEnded",
    ]
    assert played("llama3_json", [f"as in {written}"]) == [("Content", f"as in {written}")]


def test_harmony_separates_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi "
        "<b>.<|return|>"
    )
    assert played(HARMONY, [text]) == [("Reasoning", "hm"), ("Content", "Hi <b>.")]
    assert played(HARMONY, ["plain"]) == [("Content", "plain")]
    assert played(HARMONY, ["<|channel|>fin"]) == [], "a header is no text"


TEMPLATES = {
    "qwen3": ("hermes", "think"),
    "qwen3_5": ("qwen3_coder", "think"),
    "gpt_oss": (HARMONY, HARMONY),
    "llama3": ("llama3_json", None),
    "mistral": ("mistral", None),
    "deepseek": ("deepseek_v3", None),
    "glm": ("glm", "think"),
    "gemma": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_says_the_format(template: str, tmp_path: Path) -> None:
    """Detected by what the template writes for a call of an earlier turn."""
    import attrs

    markers: tuple[str, ...] = (
        ("<think>", "</think>") if template.startswith(("qwen", "glm")) else ()
    )
    if template == "gpt_oss":
        markers = CALL_MARKERS[HARMONY]
    family = attrs.evolve(FAMILIES["qwen3"], name=template, template=template, markers=markers)
    tokenizer = family.tokenizer(tmp_path, small=True)
    assert (tokenizer.tool_parser, tokenizer.reasoning_parser) == TEMPLATES[template]


def test_harmony_is_for_both_or_neither() -> None:
    with pytest.raises(SettingsInvalid, match="one format"):
        Settings(tool_parser="openai", reasoning_parser="think")
    Settings(tool_parser="openai", reasoning_parser="gpt_oss")
    with pytest.raises(SettingsInvalid, match="--tool-parser must be auto"):
        Settings(tool_parser="magic")
