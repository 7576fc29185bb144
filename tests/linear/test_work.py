"""Parsers and scanners of others' texts: their work for a text is in proportion to its length,
counted in lines that are run.

Each has the worst texts that are known for it: those that were quadratic, and what looks like the
beginning of something again and again. What reads a stream gets its text in pieces of 4 characters,
and whole. C code runs no lines: `test_expressions.py` reads the expressions of `re`, and texts
whose copies and comparisons are counted show those of parsers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.family_configs import LONG
from tests.output.samples import CALLS, NAMES, TOOLS, parser
from trouper.actors.scheduling.answer_output import TextStream
from trouper.cli.agents import jsonc
from trouper.cli.agents.config_files import _masked_line
from trouper.cli.agents.config_formats import _has_deeper_lists
from trouper.engine.loading.call_parsers import PARSERS
from trouper.engine.spec_decode.prompt_lookup import DRAFTING
from trouper.protocol.api_keys import split_options
from trouper.protocol.hosts import Host, Origin, host_pattern
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.setting_fields import ByteSize
from trouper.web.anthropic.message_dialect import Blocks
from trouper.web.http.body_parsing import with_replacements
from trouper.web.http.meant_paths import meant_path
from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.lenient_json import LenientJson, completed
from trouper.web.output.formats.parameter_types import ANY, converted
from trouper.web.output.formats.text_source import TextSource
from trouper.web.output.freeform_input import FreeformInput
from trouper.web.output.parsed_delta import Content
from trouper.web.output.tool_calls import Tools
from trouper_lab.certify.certificate import without_directories

SIZES = (1_000, 10_000, 100_000) if LONG else (600, 2_400)
PIECE = 4
MORE = 1.5
"""How much more work a character of the longest text may be than one of the shortest."""
MADE_OF = {
    "deepseek_v3": "headers",
    "glm": "tags without lines",
    "harmony": "messages",
    "hermes": "objects",
    "qwen3_coder": "tags on lines",
    "gemma4": "complete calls",
    "functionary_v32": "recipients",
    "pythonic": "calls in Python",
}
"""One format of each kind. The short version plays no others; the long one only these with the
longest texts, and whole."""


def repeated(unit: str, length: int) -> str:
    return (unit * (length // len(unit) + 1))[:length]


def answers_of(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield a name, how an answer begins, and what comes again and again."""
    call = CALLS[name]
    start, half, tail = call.split("edit")[0], call[: len(call) // 2], call[-14:]
    value = call.split('"q"')[0] if '"q"' in call else half
    yield "calls", "", call + " x "
    yield "starts", "", start
    yield "half calls", "", half
    yield "markers", "", "<"
    yield "line breaks", "", "\n"
    yield "thoughts", "", "<think>a</think>\n"
    yield "calls in thoughts", "<think>", call + " hm "
    yield "half calls in thoughts", "<think>", half
    yield "ends in a value", value, tail
    yield "ends and lines in a value", value, tail + "\n"
    yield "lines in a value", value, "\n" * 30 + "x"
    yield "space in a header", start, " "
    yield "names in a header", start, "edit "
    # The same code reads them in each format.
    if '"options": ' in call and (LONG or name == "hermes"):
        options = call.split('"options": ')[0] + '"options": '
        yield "opened", options, "["
        yield "wrong brackets", options + '{"a":' * 60, "]"
        yield "words", options, "a"
        yield "quotes", options + '"', '"x'
        yield "quotes and space", options + '"', '"' + " " * 50
        yield "commas", options, ","
        yield "halves of pairs", options + '"', "\\ud83d"


def read(name: str, text: str, piece: int) -> None:
    reading = parser(name)
    for begin in range(0, len(text), piece):
        reading.push(text[begin : begin + piece])
    reading.end()


def steps(work: Callable[[], object]) -> int:
    """Number of lines that `work` runs, in all functions; each turn of a loop is one at least."""
    count = 0

    def trace(_frame: FrameType, _event: str, _: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def check_linear(work: Callable[[int], object], sizes: tuple[int, ...] = SIZES) -> None:
    """`work` is done with a text of so many characters."""
    work(8)  # What is made once is made here.
    fixed = steps(lambda: work(8))
    counts = [max(1, steps(partial(work, length)) - fixed) / length for length in sizes]
    assert counts[-1] <= MORE * max(counts[0], 0.1), counts


FORMATS = [
    pytest.param(
        name, begin, unit, piece, id=f"{name}: {what}, {'whole' if piece > PIECE else 'in pieces'}"
    )
    for name in NAMES
    for what, begin, unit in answers_of(name)
    for piece in (PIECE, 10**6)
    if (name in MADE_OF and (LONG or piece == PIECE)) or (LONG and piece == PIECE)
]


@pytest.mark.parametrize(("name", "begin", "unit", "piece"), FORMATS)
def test_answers(name: str, begin: str, unit: str, piece: int) -> None:
    sizes = SIZES if name in MADE_OF else SIZES[:2]
    check_linear(lambda length: read(name, begin + repeated(unit, length), piece), sizes)


def _freeform(text: str) -> None:
    reading = FreeformInput()
    for begin in range(0, len(text), PIECE):
        reading.push(text[begin : begin + PIECE])
    reading.end()


def _stops(text: str, stops: tuple[str, ...]) -> None:
    stream = TextStream(stops)
    for begin in range(0, len(text), PIECE):
        stream.push(text[begin : begin + PIECE].encode())
    stream.flush()


def _blank(text: str) -> None:
    blocks = Blocks(omitted=False)
    for begin in range(0, len(text), PIECE):
        blocks.say([Content(text[begin : begin + PIECE])])
    blocks.end()


def _drafts(text: str) -> None:
    proposer = DRAFTING.proposer([*text[:PIECE].encode()])
    for begin in range(PIECE, len(text), PIECE):
        proposer.append([*text[begin : begin + PIECE].encode()])
        proposer.draft(8)


def _refused(work: Callable[[str], object], text: str) -> None:
    with suppress(ValueError, SettingsInvalid, NotACall, RecursionError, MemoryError, SyntaxError):
        work(text)


SCANNERS: list[tuple[str, Any, str, str, str]] = [
    ("brackets", completed, '{"a":' * 200, "]", ""),
    ("pairs of brackets", completed, "", "[{", ""),
    ("a bare word", completed, "[", "a", ""),
    ("space behind a quote", completed, '["a"', " ", "x"),
    ("values", lambda text: converted(text, ANY), "[", "'a',", ""),
    ("input: space", _freeform, "", " ", ""),
    ("input: another shape", _freeform, "{", '"a":1,', ""),
    ("input: a text", _freeform, '{"input":"', "a\\n", ""),
    ("input: behind it", _freeform, '{"input":"a"', " ", ""),
    (
        "a stop string that almost comes",
        partial(_stops, stops=("a" * 511 + "b",)),
        "",
        "a" * 510 + "c",
        "",
    ),
    (
        "stop strings",
        partial(_stops, stops=("ab" * 255, "ba" * 200 + "c")),
        "",
        "ab" * 190 + "b",
        "",
    ),
    ("blank content", _blank, "", " ", ""),
    ("drafts", _drafts, "", "a", ""),
    ("drafts of two", _drafts, "", "abc", ""),
    ("comments", jsonc.loads, "[", "/*/ */", "1]"),
    ("an open comment", jsonc.loads, "[", "/*", ""),
    ("lines of comments", jsonc.loads, "[", "//\n", "1]"),
    ("items", jsonc.loads, "[", "1 ,", "1]"),
    ("a text", jsonc.loads, '["', "\\u", ""),
    ("deep", jsonc.loads, "", "[", ""),
    ("lists", _has_deeper_lists, "a:\n", " #\n", ""),
    ("blank lines", _has_deeper_lists, "", "\n", ""),
    ("keys", _has_deeper_lists, "", "a:a:", ""),
    ("secrets", _masked_line, "", "key", ""),
    ("secrets with dashes", _masked_line, "", "key-key=", ""),
    ("space behind a secret", _masked_line, "key", " ", ""),
    ("paths", lambda text: without_directories({"a": text}, {}), "", "/a", ":"),
    ("slashes", lambda text: without_directories({"a": text}, {}), "", "/~/", ""),
    ("escapes", lambda text: with_replacements(text.encode()), "", "\\\\ud83d", ""),
    ("bases", meant_path, "", "/v1/api", ""),
    ("more bases", meant_path, "", "/v1", "/x"),
    ("a host", Host.parse, "", "a", ":"),
    ("an address", Host.parse, "[", ":", ""),
    ("an origin", Origin.parse, "", "a+", ""),
    ("domains", host_pattern, "", "a.", "!"),
    ("options", lambda text: split_options(text, "a"), "k", " a", "="),
    ("space", ByteSize, "1", " ", "x"),
    ("digits", ByteSize, "", "1", "x"),
    *(
        (
            f"{name}: starts",
            parse,
            "",
            {
                "apertus": '[{"a": ',
                "cwm": "a>{",
                "gemma4": "call:a{",
                "function_gemma": "call:a",
                "kimi_k3": "<|open|>call",
                "minicpm5": '<param name="a">',
                "muse_spark": "<atem:invoke ",
                "lfm2": "[a(",
                "minimax_m3": "]<]minimax[>[<a>",
                "olmo3": "a(\n",
                "pythonic": "[a(",
            }[name],
            "",
        )
        for name, parse in PARSERS.items()
    ),
    *(
        (f"{name}: parameters", parse, begin, unit, "")
        for name, parse, begin, unit in (
            ("gemma4", PARSERS["gemma4"], "call:a{", '<|"|>{'),
            ("gemma4", PARSERS["gemma4"], "call:a{", "{a:"),
            (
                "kimi_k3",
                PARSERS["kimi_k3"],
                '<|open|>call tool="a"<|sep|>',
                '<|open|>argument key="a"<|sep|>',
            ),
            ("minicpm5", PARSERS["minicpm5"], "a>", '<param name="a">a'),
            ("minimax_m3", PARSERS["minimax_m3"], "", "]<]minimax[>[<a>]<]minimax[>[</a>"),
            ("minimax_m3", PARSERS["minimax_m3"], "]<]minimax[>[<a>", "]<]minimax[>[ "),
            (
                "muse_spark",
                PARSERS["muse_spark"],
                '<atem:invoke name="a">',
                '<atem:parameter name="a">',
            ),
            ("pythonic", PARSERS["pythonic"], "[a(", "a=\"'a"),
            ("pythonic", PARSERS["pythonic"], "[a(", "aa"),
        )
    ),
]
"""Each with the beginning of a text, what comes again and again, and its end."""


@pytest.mark.parametrize(
    ("work", "begin", "unit", "end"), [pytest.param(*each[1:], id=each[0]) for each in SCANNERS]
)
def test_scanners(work: Callable[[str], object], begin: str, unit: str, end: str) -> None:
    check_linear(lambda length: _refused(work, begin + repeated(unit, length) + end))


class Compared(str):
    """A character whose comparisons run lines, also those of a search in a list."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


@pytest.mark.parametrize(
    ("begin", "unit"), [("[", "}"), ('{"a":', "]"), ("[", "]"), ('[{"a":', "]")]
)
def test_brackets_are_not_searched(begin: str, unit: str) -> None:
    """As many closing ones as there are open."""

    def work(length: int) -> None:
        value = LenientJson()
        for char in repeated(begin, length // 2) + repeated(unit, length // 2):
            value.push(Compared(char))
        value.close()

    check_linear(work, (400, 1600))


@example("a:\n# b\n  - c")
@example("a:\n\n  - c")
@given(st.text("a:# -\n\t", max_size=20))
def test_lists_that_are_indented_are_found(text: str) -> None:
    backtracking = r"^\s*[^\s#-][^\n]*:[ \t]*\n(?:[ \t]*#[^\n]*\n)*[ \t]+- "
    assert _has_deeper_lists(text) == bool(re.search(backtracking, text, re.MULTILINE))


def test_many_tools_cost_a_call_nothing() -> None:
    """An answer may have thousands of calls, and a request thousands of tools with as many
    parameters each."""

    def calls(tools: int) -> int:
        offered: Any = tuple(
            {
                "type": "function",
                "function": {
                    "name": f"Tool_{n}",
                    "parameters": {"properties": {str(key): {} for key in range(tools)}},
                },
            }
            for n in range(tools)
        )
        reading = parser("qwen3_coder", tools=Tools(offered))
        call = (
            "<tool_call>\n<function=tool_1>\n<parameter=1>\n<\n</parameter>\n</function>\n"
            "</tool_call>\n"
        )
        reading.push(call)
        thought = parser("qwen3_coder", tools=Tools(offered), thinks=True)
        return steps(lambda: (reading.push(call * 5), thought.push(call * 5)))

    assert calls(200) < 1.2 * calls(4) + 4_000


class _CountedText(str):
    """Text that counts the characters of the copies that are made of it and of what is made of
    it."""

    __slots__ = ()
    copied = 0

    def _counted(self, text: str) -> _CountedText:
        _CountedText.copied += len(text)
        return _CountedText(text)

    def __add__(self, other: str) -> _CountedText:
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> _CountedText:
        return self._counted(str.__add__(other, self))

    def __getitem__(self, at: Any) -> _CountedText:
        return self._counted(str.__getitem__(self, at))


def _read_all(source: TextSource) -> None:
    while not source.is_dry:
        next(source.next(), None)


@pytest.mark.parametrize("back", [0, 3, 40])
def test_pieces_are_copied_a_bounded_number_of_times(back: int) -> None:
    """Much is read and may be read again, and now and then some of it is."""

    def copied(pieces: int) -> int:
        source, _CountedText.copied = TextSource(), 0
        source.pinned = True
        for _ in range(pieces):
            source.feed(_CountedText("abcd"))
            _read_all(source)
            source.rewind(max(0, source.position - back))
            _read_all(source)
        assert source.position == 4 * pieces
        return _CountedText.copied

    assert copied(2_000) <= 1.1 * 20 * copied(100)


def test_a_sink_names_tools_that_are_alike() -> None:
    tools = (
        {"function": {"name": "Bash"}},
        {"function": {"name": "read"}},
        {"function": {"name": "READ"}},
    )
    sink = CallSink(Tools(tools), lambda _outcome: None)
    assert sink.name_of(" functions.bash") == "Bash" and sink.name_of("READ") == "READ"
    with pytest.raises(NotACall):
        sink.name_of("Read")
    assert TOOLS.offered
