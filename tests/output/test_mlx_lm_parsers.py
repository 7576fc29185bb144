"""What is streamed here is what mlx-lm's own parsers make of the complete call."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.output.samples import TOOL, arguments_of, played, written

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
"""Formats in which mlx-lm strips strings. Here strings of GLM keep their whitespace; those of MiniMax lose a line break at
either end, as models write one there."""
WORDS = st.text("abcäß\n {}[]:,'\"\\", max_size=30)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "path": WORDS,
        "line": st.integers(-(2**53), 2**53),
        "options": st.dictionaries(
            st.text("ab c", min_size=1), st.none() | st.booleans() | st.integers() | WORDS, max_size=3
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
