"""POST /infill in llama.cpp's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import attrs
import msgspec
from msgspec import Meta

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Finished
from trouper.protocol.requests import Generate, InfillPrompt
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.http.field_types import Count, Text
from trouper.web.http.json_response import error_body
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    TEXT,
    Json,
    Unsupported,
    array,
    full,
    titled,
)
from trouper.web.openai.other_servers import NOT_SKIPPED, SAMPLING, length_aliases, sampling_adapted
from trouper.web.openai.parameters import SamplingParameters, generate_of
from trouper.web.output.dialect import COMMENT, Choice, Usage, event, usage_of

MAX_FILES = 1024
ALIASES = {**length_aliases("max_tokens", "max_completion_tokens"), **SAMPLING}


def _adapted(value: Json, skip: Skip) -> Json:
    return sampling_adapted(value, ALIASES, ("max_tokens",), skip)


class OtherFile(Body, frozen=True):
    text: Text
    filename: Text = "tmp"


class InfillRequest(SamplingParameters, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {"grammar": ("",), "json_schema": (), "n_probs": (0,)}
    essential: ClassVar[frozenset[str]] = NOT_SKIPPED | frozenset(unsupported)
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    adapt: ClassVar[Adapt | None] = _adapted
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[OtherFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: Text = ""
    max_tokens: Count | None = None


def infill_to_generate(
    request: InfillRequest, request_id: str, defaults: SamplingDefaults
) -> Generate:
    """`prompt` is the beginning of the answer, behind the prefix, as in llama.cpp."""
    prompt = InfillPrompt(
        request.input_prefix + request.prompt,
        request.input_suffix,
        tuple((file.filename, file.text) for file in request.input_extra or ()),
    )
    # Editors send a length of 0 to have a context computed early.
    generate = generate_of(request, request_id, prompt, defaults, request.max_tokens)
    return attrs.evolve(generate, as_room_allows=True)


class InfillDialect:
    """The last event has the counts; no `[DONE]` follows. `silent`: only the prompt was
    requested."""

    def __init__(self, model: str, *, silent: bool) -> None:
        self._model, self._silent = model, silent

    def body(self, choices: Sequence[Choice]) -> Json:
        [choice] = choices
        return self._last(choice.text, choice.finished, choice.usage)

    def _last(self, text: str, finished: Finished, usage: Usage) -> Json:
        if self._silent:
            text = ""
            finished = Finished("length", 0)
            usage = attrs.evolve(usage, completion_tokens=0)
        matched = finished.matched_stop
        ended = (
            "limit"
            if finished.reason == "length"
            else "word"
            if isinstance(matched, str)
            else "eos"
        )
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": matched if isinstance(matched, str) else "",
        }

    def opening(self, _index: int, _answer: Answer) -> bytes:
        return b""

    def text(self, _index: int, delta: Delta, _answer: Answer) -> bytes:
        if self._silent or not (delta.text or delta.tokens):
            return b""
        return _event({"index": 0, "content": delta.text, "tokens": delta.tokens, "stop": False})

    def ending(self, _index: int, finished: Finished, answer: Answer) -> bytes:
        return _event(self._last("", finished, usage_of(answer)))

    def closing(self, _usages: Sequence[Usage]) -> bytes:
        return b""

    def failure(self, problem: Problem) -> bytes:
        return _event(error_body(problem))

    def heartbeat(self, _index: int, _answer: Answer) -> bytes:
        return COMMENT


def _event(body: dict[str, Any]) -> bytes:
    return event(msgspec.json.encode(body))


FILLED = titled(
    "Infill",
    full(
        {
            "index": COUNT,
            "content": TEXT,
            "stop": FLAG,
            "model": TEXT,
            "tokens_predicted": COUNT,
            "tokens_evaluated": COUNT,
            "tokens_cached": COUNT,
            "truncated": FLAG,
            "stop_type": {"type": "string", "enum": ["limit", "word", "eos"]},
            "stopping_word": TEXT,
        }
    ),
)
FILLED_PART = titled(
    "InfillChunk",
    full({"index": COUNT, "content": TEXT, "tokens": array(COUNT), "stop": FLAG}),
)
