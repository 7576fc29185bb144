"""Log-probabilities are those of the text beside them: no reasoning, no markers, no calls, no stop
strings. Streamed and whole answers agree, however deltas are joined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.output.samples import CALLS, TOOLS, FormatTokenizer
from tests.web.streams import joined, joined_chat
from tests.web.test_response_shape import HEAD, answer_of, events_of
from trouper.actors.runtime.answer import Answer
from trouper.actors.scheduling.answer_output import TextStream
from trouper.protocol.output_formats import FUNCTIONARY_32, HARMONY
from trouper.protocol.replies import Delta, Finished, TokenLogprobs
from trouper.protocol.replies import joined as one_delta
from trouper.web.openai.chat_dialect import ChatDialect
from trouper.web.openai.completion_dialect import CompletionDialect
from trouper.web.openai.openai_dialect import Envelope, Extras
from trouper.web.openai.parameters import StreamOptions
from trouper.web.output.dialect import Choice, Usage
from trouper.web.output.output_parser import OutputParser
from trouper.web.responses.response_events import ResponseDialect

Json = dict[str, Any]
NOBODY = cast(Answer, None)
EXTRAS = Extras(StreamOptions(), False, 1)


@attrs.define
class Pieces(FormatTokenizer):
    """Its tokens are the pieces of one answer."""

    pieces: tuple[bytes, ...] = ()

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def token_text(self, token: int) -> str:
        return self.pieces[token].decode(errors="backslashreplace")


@attrs.frozen
class ScriptedAnswer:
    tokenizer: Pieces
    deltas: tuple[Delta, ...]
    finished: Finished
    parses: bool

    @classmethod
    def of(
        cls,
        name: str,
        pieces: Sequence[str | bytes],
        stop: tuple[str, ...] = (),
        *,
        parses: bool = True,
    ) -> ScriptedAnswer:
        """As the scheduler sends an answer that ends after the last piece, or at a stop string."""
        data = tuple(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
        base = FormatTokenizer.of(name)
        fields = {field.name: getattr(base, field.name) for field in attrs.fields(FormatTokenizer)}
        text, deltas = TextStream(stop), list[Delta]()
        for token, piece in enumerate(data):
            shown = text.push(piece)
            if text.stop is None and token == len(data) - 1:
                shown += text.flush()
            deltas.append(Delta(shown, (token,), (TokenLogprobs(token, -1.0),)))
            if text.stop is not None:
                break
        finished = Finished("stop" if text.stop else "length", len(deltas), text.stop)
        return cls(Pieces(**fields, pieces=data), tuple(deltas), finished, parses)

    @property
    def choice(self) -> Choice:
        text = "".join(delta.text for delta in self.deltas)
        tokens = tuple(token for delta in self.deltas for token in delta.tokens)
        logprobs = tuple(at for delta in self.deltas for at in delta.logprobs)
        return Choice(
            text, tokens, logprobs, self.finished, Usage(1, len(tokens), 0), (0,), (), self.deltas
        )

    @property
    def envelope(self) -> Envelope:
        return Envelope(id="i", created=1, model="m", fingerprint="f", tokenizer=self.tokenizer)

    def parser(self) -> OutputParser:
        return OutputParser(TOOLS, self.tokenizer, thinks=False)

    def chat(self) -> ChatDialect:
        return ChatDialect(self.envelope, EXTRAS, self.parser if self.parses else None)

    def complete(self) -> Json:
        [choice] = self.chat().body([self.choice])["choices"]
        return dict(choice)

    def streamed(self, sizes: Sequence[int] = (1,)) -> tuple[Json, list[Json]]:
        """The answer, and the chunks; `sizes` of joined deltas, in turns."""
        dialect, chunks, rest, turn = self.chat(), b"", list(self.deltas), 0
        while rest:
            size = sizes[turn % len(sizes)]
            chunks += dialect.text(0, one_delta(rest[:size]), NOBODY)
            rest, turn = rest[size:], turn + 1
        chunks += dialect.ending(0, self.finished, NOBODY)
        choices = [
            json.loads(event[6:])["choices"] for event in chunks.decode().split("\n\n") if event
        ]
        [answer] = joined_chat([{"choices": choice} for choice in choices])
        return answer, [choice for [choice] in choices]

    def response(self) -> tuple[Json, list[Json]]:
        answer = answer_of(len(self.deltas))
        dialect = ResponseDialect(
            HEAD, self.tokenizer, self.parser() if self.parses else None, answer
        )
        scripted = b"".join(dialect.text(0, delta, answer) for delta in self.deltas)
        scripted += dialect.ending(0, self.finished, answer)
        return dialect.response(), events_of(scripted)


def entries(logprobs: Json | None) -> list[str]:
    return [at["token"] for at in (logprobs or {}).get("content") or ()]


CALL = CALLS["hermes"]
ANSWERS: dict[str, tuple[ScriptedAnswer, list[str]]] = {
    "reasoning": (
        ScriptedAnswer.of(
            "hermes", ["<think>", "Let me", " think.", "</think>", "\n\n", "Yes,", " it", " is."]
        ),
        ["Yes,", " it", " is."],
    ),
    "markers in pieces": (
        ScriptedAnswer.of("hermes", ["<th", "ink>a", "b</", "think", ">\n", "\nYes", "."]),
        ["\nYes", "."],
    ),
    "reasoning alone": (ScriptedAnswer.of("hermes", ["<think>", "Let me", " think."]), []),
    "a call alone": (ScriptedAnswer.of("hermes", [CALL[:20], CALL[20:30], CALL[30:]]), []),
    "text and a call": (
        ScriptedAnswer.of("hermes", ["So", ":", "\n", "<", "tool", CALL[5:], "\n"]),
        ["So", ":"],
    ),
    "no marker after all": (
        ScriptedAnswer.of("hermes", ["a ", "<", "tool", "_", "b", ">", " c"]),
        ["a ", "<", "tool", "_", "b", ">", " c"],
    ),
    "no call after all": (
        ScriptedAnswer.of("hermes", ["a", "<tool_call>", "not", " JSON", "</tool_call>"]),
        ["a", "<tool_call>", "not", " JSON", "</tool_call>"],
    ),
    "a stop string": (
        ScriptedAnswer.of("hermes", ["Hello", " wor", "ld", ", E", "ND", " more"], ("END",)),
        ["Hello", " wor", "ld", ", E"],
    ),
    "a stop string of its own": (
        ScriptedAnswer.of("hermes", ["Hello", "EN", "D"], ("END",)),
        ["Hello"],
    ),
    "no stop string after all": (
        ScriptedAnswer.of("hermes", ["Hello", "EN", "T"], ("END",)),
        ["Hello", "EN", "T"],
    ),
    "a stop string in reasoning": (
        ScriptedAnswer.of("hermes", ["<think>", "Hm", "END", "</think>"], ("END",)),
        [],
    ),
    "a stop string in a call": (
        ScriptedAnswer.of(
            "hermes",
            ["So", " ", "<tool_call>", '{"name": "edit", "arguments": {"path": "END'],
            ("END",),
        ),
        ["So"],
    ),
    "parts of a character": (
        ScriptedAnswer.of(
            "hermes", ["<think>", "🫖", "</think>", b"a\xf0\x9f", b"\xab", b"\x96b", "."]
        ),
        ["a\\xf0\\x9f", "\\xab", "\\x96b", "."],
    ),
    "a torn character": (ScriptedAnswer.of("hermes", ["a", b"\xf0\x9f"]), ["a", "\\xf0\\x9f"]),
    "blanks at the end": (ScriptedAnswer.of("hermes", ["a", "\n", "\n"]), ["a", "\n", "\n"]),
    "harmony": (
        ScriptedAnswer.of(
            HARMONY,
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                "Hm",
                "<|end|>",
                "<|start|>",
                "assistant",
                "<|channel|>",
                "final",
                "<|message|>",
                "Yes",
                ".",
            ],
        ),
        ["Yes", "."],
    ),
    "blanks in Functionary's text": (
        ScriptedAnswer.of(FUNCTIONARY_32, ["all\n", "Yes", " ", "it", "\n", " ", "is", "\n"]),
        ["Yes", " ", "it", "\n", " ", "is", "\n"],
    ),
    "blanks before a call of Functionary": (
        ScriptedAnswer.of(FUNCTIONARY_32, ["all\n", "So:", "\n", ">>>", "edit\n", "{}"]),
        ["So:"],
    ),
    "without a parser": (
        ScriptedAnswer.of("hermes", ["<think>", "END", "a"], ("END",), parses=False),
        ["<think>"],
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_entries_are_those_of_the_content(name: str) -> None:
    scripted, expected = ANSWERS[name]
    complete = scripted.complete()
    assert entries(complete["logprobs"]) == expected
    assert complete["logprobs"] is not None, "they were asked for"
    for sizes in ((1,), (2,), (99,), (1, 3)):
        streamed, chunks = scripted.streamed(sizes)
        assert entries(streamed["logprobs"]) == expected, sizes
        assert (streamed["message"]["content"] or "") == (complete["message"]["content"] or "")
        for choice in chunks:
            assert choice["logprobs"] is None or "content" in choice["delta"]


@pytest.mark.parametrize("name", ANSWERS)
def test_entries_of_a_response_are_those_of_its_messages(name: str) -> None:
    scripted, expected = ANSWERS[name]
    response, events = scripted.response()
    texts = [
        part for item in response["output"] if item["type"] == "message" for part in item["content"]
    ]
    assert [at["token"] for part in texts for at in part["logprobs"]] == expected
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [at["token"] for event in deltas for at in event["logprobs"]] == expected


TEXTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "a",
    "<",
    "\n",
    " ",
    "b c",
    "🫖",
    "END",
]


@given(
    st.lists(st.sampled_from(TEXTS), max_size=8),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 5),
)
def test_streamed_equals_complete_and_covers_the_content(
    texts: list[str], size: int, stops: bool, joined_size: int
) -> None:
    data = "".join(texts).encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    scripted = ScriptedAnswer.of("hermes", pieces, ("END",) if stops else ())
    if not scripted.deltas:
        return
    complete, (streamed, _) = scripted.complete(), scripted.streamed((joined_size,))
    tokens = [at["bytes"] for at in complete["logprobs"]["content"]]
    assert tokens == [at["bytes"] for at in (streamed["logprobs"] or {}).get("content") or ()]
    content = complete["message"]["content"] or ""
    covered = b"".join(map(bytes, tokens))
    if size == 1:
        assert covered.decode(errors="replace") == content
    assert len(covered) >= len(content.encode()) or not content


@pytest.mark.parametrize("stop", [("END",), ()])
def test_completions_have_entries_of_their_text(stop: tuple[str, ...]) -> None:
    scripted = ScriptedAnswer.of(
        "hermes", ["Hello", " 🫖", b"\xe6\x97", b"\xa5", ".E", "ND", "!"], stop
    )

    def dialect() -> CompletionDialect:
        return CompletionDialect(
            scripted.envelope,
            EXTRAS,
            echo=None,
            scores=False,
            silent=False,
            pick=lambda choices: choices,
        )

    [complete] = dialect().body([scripted.choice])["choices"]
    made = dialect()
    chunks = b"".join(made.text(0, delta, NOBODY) for delta in scripted.deltas) + made.ending(
        0, scripted.finished, NOBODY
    )
    [streamed] = joined([json.loads(event[6:]) for event in chunks.decode().split("\n\n") if event])
    assert streamed == complete
    offsets = complete["logprobs"]["text_offset"]
    assert offsets == [0, 5, 7, 7, 8] if stop else [0, 5, 7, 7, 8, 10, 12]
    assert offsets[-1] < len(complete["text"])
