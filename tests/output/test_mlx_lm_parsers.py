"""What is read here is what mlx-lm's own parsers make of the complete call."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.output.samples import TOOL, arguments_of, played, written
from trouper.engine.loading.call_parsers import PARSERS as PARSERS_OF_CALLS

PARSERS = {
    "hermes": ("json_tools", "<tool_call>", "</tool_call>"),
    "glm": ("glm47", "<tool_call>", "</tool_call>"),
    "qwen3_coder": ("qwen3_coder", "<tool_call>", "</tool_call>"),
    "minimax_m2": ("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
    "kimi_k2": ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "longcat": ("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    "mistral": ("mistral", "[TOOL_CALLS]", ""),
}
"""Modules of mlx_lm.tool_parsers, with the markers that its server takes away."""
STRIPPING = ("glm", "minimax_m2")
"""Formats in which mlx-lm strips strings. Here strings of GLM keep their whitespace; those of
MiniMax lose a line break at either end, as models write one there."""
WORDS = st.text("abcäß\n {}[]:,'\"\\", max_size=30)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "path": WORDS,
        "line": st.integers(-(2**53), 2**53),
        "options": st.dictionaries(
            st.text("ab c", min_size=1),
            st.none() | st.booleans() | st.integers() | WORDS,
            max_size=3,
        ),
    },
)


def of_mlx_lm(name: str, text: str) -> Any:
    module, start, end = PARSERS[name]
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{module}").parse_tool_call
    found = parse(text.removeprefix(start).removesuffix(end), [TOOL])
    call = found[0] if isinstance(found, list) else found
    arguments = call["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@pytest.mark.parametrize("name", PARSERS)
@given(arguments=VALUES)
def test_the_same_arguments(name: str, arguments: dict[str, Any]) -> None:
    text = written(arguments)[name]
    [found] = arguments_of(played(name, [text])) or ["{}"]
    ours = json.loads(found)
    theirs = of_mlx_lm(name, text)
    if name in STRIPPING and "path" in ours:
        ours["path"], theirs["path"] = ours["path"].strip(), theirs["path"].strip()
    else:
        assert ours == arguments
    assert ours == theirs


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{key.strip() or 'k'}:{_gemma(inner)}" for key, inner in value.items())
            + "}"
        )
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _kimi(name: str, value: Any) -> str:
    kind, text = ("string", value) if isinstance(value, str) else ("object", json.dumps(value))
    return f'<|open|>argument key="{name}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


BUFFERED: dict[str, Any] = {
    "gemma4": lambda given: f"call:edit{_gemma(given)}",
    "function_gemma": lambda given: (
        "call:edit{"
        + ",".join(
            f"{key}:{json.dumps(v) if isinstance(v, int) else f'<escape>{v}<escape>'}"
            for key, v in given.items()
        )
        + "}"
    ),
    "kimi_k3": lambda given: (
        '<|open|>call tool="edit" index="1"<|sep|>'
        + "".join(_kimi(*item) for item in given.items())
        + "<|close|>call<|sep|>"
    ),
    "minicpm5": lambda given: (
        '"edit">'
        + "".join(f'<param name="{key}">{_text(value)}</param>' for key, value in given.items())
    ),
    "muse_spark": lambda given: (
        '<atem:invoke name="edit">'
        + "".join(
            f'<atem:parameter name="{key}">{_text(value)}</atem:parameter>'
            for key, value in given.items()
        )
        + "</atem:invoke>"
    ),
    "pythonic": lambda given: (
        f"[edit({', '.join(f'{key}={_text(value)!r}' for key, value in given.items())})]"
    ),
}
"""How each format that is read at the end of a call writes one."""


def outcome_of(parse: Any, text: str) -> Any:
    """Return the calls, or nothing for a text that is refused."""
    try:
        found = parse(text, [TOOL])
    except Exception:  # noqa: BLE001 - mlx-lm's parsers refuse by exceptions of any kind.
        return []
    return [
        (call["name"], call["arguments"])
        for call in (found if isinstance(found, list) else [found])
    ]


@pytest.mark.parametrize("name", BUFFERED)
@given(arguments=VALUES, calls=st.integers(1, 2), cut=st.integers(0, 200))
def test_the_same_calls_where_mlx_lm_takes_longer(
    name: str, arguments: Any, calls: int, cut: int
) -> None:
    """Complete texts, two calls in one text, and texts that end in the middle."""
    text = BUFFERED[name](arguments) * (1 if name in ("minicpm5", "pythonic") else calls)
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    for part in (text, text[:cut]):
        read, expected = (outcome_of(parse, part) for parse in (PARSERS_OF_CALLS[name], theirs))
        # mlx-lm refuses a brace in a string of FunctionGemma.
        assert read == expected or (name == "function_gemma" and "}" in str(arguments))


@pytest.mark.parametrize(
    "text",
    [
        "[edit(path='a\nb', line=7)]",
        "[edit(path=it's, line=7)]",
        '[edit(path="a"b", line=[1)]',
        "[edit(a=1, b = 2)",
    ],
)
def test_the_same_of_what_is_nearly_python(text: str) -> None:
    theirs = importlib.import_module("mlx_lm.tool_parsers.pythonic").parse_tool_call
    assert outcome_of(PARSERS_OF_CALLS["pythonic"], text) == outcome_of(theirs, text)
