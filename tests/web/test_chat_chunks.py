"""Chunks of a streamed chat: those with nothing but text are made from shells that were rendered
once, and are as all others."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from tests.fakes import ByteTokenizer
from trouper.actors.runtime.answer import Answer
from trouper.protocol.replies import Delta, joined
from trouper.web.openai.chat_dialect import ChatDialect
from trouper.web.openai.openai_dialect import Envelope, Extras
from trouper.web.openai.parameters import StreamOptions
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import NO_TOOLS

ENVELOPE = Envelope(
    id="chatcmpl-1", created=1, model='m"', fingerprint="f", tokenizer=ByteTokenizer()
)
NOBODY = cast(Answer, None)
"""Only chunks with usage look at the answer."""


def dialect(*, parses: bool, token_ids: bool = False) -> ChatDialect:
    def parser() -> OutputParser:
        return OutputParser(NO_TOOLS, ByteTokenizer(), thinks=False)

    return ChatDialect(ENVELOPE, Extras(StreamOptions(), token_ids, 1), parser if parses else None)


def chunks(data: bytes) -> list[Any]:
    return [
        msgspec.json.decode(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event
    ]


def deltas_of(made: ChatDialect, index: int, *texts: str) -> list[tuple[int, dict[str, str]]]:
    deltas = [Delta(text, (1,), (), 0.0) for text in texts]
    choices = [chunk["choices"][0] for chunk in chunks(made.text(index, joined(deltas), NOBODY))]
    return [(choice["index"], choice["delta"]) for choice in choices]


@pytest.mark.parametrize("index", [0, 1])
def test_text_and_reasoning_say_what_they_are(index: int) -> None:
    made = dialect(parses=True)
    assert deltas_of(made, index, '<think>so "it') == [(index, {"reasoning_content": 'so "it'})]
    assert deltas_of(made, index, " is") == [(index, {"reasoning_content": " is"})]
    both = [(index, {"reasoning_content": "."}), (index, {"content": "\u00fc"})]
    assert deltas_of(made, index, ".", "</think>", "\u00fc") == both
    assert deltas_of(made, index, "\n\0") == [(index, {"content": "\n\0"})]
    assert deltas_of(made, index, " ") == []


@pytest.mark.parametrize("parses", [False, True])
def test_a_shell_is_an_ordinary_chunk(parses: bool) -> None:
    [shelled] = chunks(dialect(parses=parses).text(0, Delta("a", (97,), (), 0.0), NOBODY))
    [ordinary] = chunks(
        dialect(parses=parses, token_ids=True).text(0, Delta("a", (97,), (), 0.0), NOBODY)
    )
    assert ordinary["choices"][0].pop("token_ids") == [97]
    assert shelled == ordinary
