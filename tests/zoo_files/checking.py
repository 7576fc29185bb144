"""Plays a family's directory: load, template, parser and two conversations, compared with mlx-lm's
greedy tokens and transformers' own rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from transformers import PreTrainedTokenizerFast

from tests.engine.driver import Driver, Request
from tests.families import reference
from tests.output.samples import joined
from tests.zoo_files.families import Family
from tests.zoo_files.saving import save_family
from tests.zoo_files.templates import CALLS, TURNS
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.engine.step import StepEngine
from trouper.protocol.output_formats import HARMONY, NONE, THINKING
from trouper.protocol.settings import Settings
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools

Message = dict[str, Any]
TOKENS = 8
CLOSE = 1e-3
"""Two logits so near may change their order with the order of a sum."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Zürich"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
    ],
}
ASK: Message = {"role": "user", "content": "What is the weather in Zürich?"}
CONVERSATIONS: tuple[list[Message], ...] = (
    [{"role": "system", "content": "Be brief."}, ASK],
    [
        ASK,
        CALL,
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "Rain, 9."},
    ],
)


@attrs.frozen
class Outcome:
    """`faults`: in words; none where all is right."""

    family: Family
    tool_parser: str
    reasoning_parser: str
    default: str
    """Whether it thinks where a request does not say."""
    context: int
    missing: tuple[str, ...]
    faults: tuple[str, ...]


def play(family: Family, directory: Path) -> Outcome:
    model = save_family(family, directory)
    settings = Settings(model=str(directory), self_check="off", no_ssd=True)
    loaded = load(settings, lambda _: None)
    card, words = loaded.card, loaded.tokenizer
    faults = [*_prompt_faults(words, directory), *_token_faults(loaded, model)]
    faults += _parser_faults(family, words)
    if card.tool_parser != (family.calls or NONE):
        faults.append(f"calls are {card.tool_parser}, not {family.calls or NONE}")
    if family.context and card.context_length != _context(family):
        faults.append(f"the context is {card.context_length}, not {_context(family)}")
    if words.template.fault is not None:
        faults.append(f"the template: {words.template.fault}")
    return Outcome(
        family,
        card.tool_parser,
        card.reasoning_parser,
        default_of(words),
        card.context_length,
        tuple(text for _, text in words.template.lines),
        tuple(faults),
    )


def _context(family: Family) -> int:
    scaling = family.changes.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        extended = int(scaling["original_max_position_embeddings"] * scaling["factor"])
        return max(family.context, extended)
    return family.context


def _adapted(words: HubTokenizer, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    return list(words.template.adaptation.adapted(messages))


def _prompt_faults(words: HubTokenizer, directory: Path) -> list[str]:
    """Prompts that differ from transformers'."""
    own = PreTrainedTokenizerFast.from_pretrained(str(directory))
    if own.chat_template is None:  # In a processor's file.
        file = json.loads((directory / "chat_template.json").read_text("utf-8"))
        own.chat_template = file["chat_template"]
    faults = []
    for number, messages in enumerate(CONVERSATIONS):
        expected = own.apply_chat_template(
            _adapted(words, messages),
            tools=[TOOL],
            add_generation_prompt=True,
            return_dict=False,
        )
        if list(words.encode_chat(messages, tools=[TOOL])) != list(expected):
            faults.append(f"the prompt of conversation {number} is not transformers'")
    return faults


def _token_faults(loaded: EvaluatedModel, model: nn.Module) -> list[str]:
    """Greedy tokens that differ from mlx-lm's, other than by rounding."""
    words = loaded.tokenizer
    prompts = [list(words.encode_chat(messages, tools=[TOOL])) for messages in CONVERSATIONS]
    engine = StepEngine(loaded.model, loaded.card.vocab_size, capabilities=loaded.card.capabilities)
    rows = Driver(engine, 64).play([Request(prompt, TOKENS) for prompt in prompts])
    faults = []
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        expected = reference(model, prompt, TOKENS, step=64)
        at = next((at for at in range(TOKENS) if row.tokens[at] != expected[at]), None)
        if at is not None and _gap(model, prompt + expected[:at]) > CLOSE:
            faults.append(f"token {at} of conversation {number} is not mlx-lm's")
    return faults


def _gap(model: nn.Module, tokens: list[int]) -> float:
    """Between the two best logits behind `tokens`."""
    best = mx.sort(model(mx.array([tokens]))[0, -1])
    return float(np.array(best[-1] - best[-2], np.float32))


def default_of(words: HubTokenizer) -> str:
    """Whether a model thinks where a request does not say: "on", "off", "always" or "no"."""
    prompts = [
        words.encode_chat([ASK], **kwargs)
        for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    if prompts[1] != prompts[2]:
        return "on" if prompts[0] == prompts[1] else "off"
    return "always" if words.reasoning_parser else "no"


def _parser_faults(family: Family, words: HubTokenizer) -> list[str]:
    """The family's own text of a call behind a thought, read by the parser of the model."""
    reasoning, expected = "", []
    text = "Hello!"
    if family.calls:
        text, expected = written_call(family, words), [("get_weather", ARGUMENTS)]
    opened = False
    if words.reasoning_parser:
        start, end = THINKING[words.reasoning_parser]
        reasoning = "I look it up."
        prompt = words.render_chat([ASK], {"tools": [TOOL], "enable_thinking": True}) or ""
        opened = prompt.rstrip().endswith(start)
        joint = "<|start|>assistant" if words.reasoning_parser == HARMONY else "\n\n"
        text = f"{'' if opened else start}{reasoning}{end}{joint}{text}"
    parser = OutputParser(Tools((TOOL,)), words, thinks=opened)
    read = joined([*parser.push(text), *parser.end()])
    names = [value for kind, value in read if kind == "CallStarted"]
    arguments = [json.loads(value) for kind, value in read if kind == "CallArguments"]
    thought = "".join(value for kind, value in read if kind == "Reasoning").strip()
    content = "".join(value for kind, value in read if kind == "Content").strip()
    wrong = [*zip(names, arguments, strict=False)] != expected
    if wrong or thought != reasoning or content != ("" if expected else "Hello!"):
        return [f"{text!r} is read as {read}"]
    return []


def written_call(family: Family, words: HubTokenizer) -> str:
    """As the template writes a call of an earlier turn."""
    turns = TURNS[family.turns]
    rendered = words.render_chat(
        [ASK, CALL], {"tools": [TOOL], "add_generation_prompt": False, "tokenize": False}
    )
    assert rendered is not None and family.calls in CALLS
    begin, end = turns.frames["assistant"]
    text = (
        rendered.rpartition(begin)[2] if begin else rendered.rpartition(turns.frames["user"][1])[2]
    )
    return text.removesuffix(end)
