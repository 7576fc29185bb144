"""Requests of which no two ask for the same: every parameter that changes an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from tests.family_configs import LONG
from trouper import ChatPrompt, Generate, Sampling, TokenPrompt
from trouper.protocol.grammar import Grammar
from trouper.protocol.model import Tokenizer
from trouper.web.openai.parameters import choices_of
from trouper.web.output.tool_calls import Tools

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "legs": {"type": "integer", "minimum": 0, "maximum": 100},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "legs", "kind"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weigh",
        "parameters": {
            "type": "object",
            "properties": {"grams": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["grams"],
            "additionalProperties": False,
        },
    },
}
GREEDY = Sampling(temperature=0)


def hot(seed: int, **more: object) -> Sampling:
    return Sampling(temperature=0.9, seed=seed, **more)  # type: ignore[arg-type]


def wishes(
    words: Tokenizer, prompts: Sequence[tuple[int, ...]], tokens: int
) -> dict[str, Generate]:
    """By what each asks for. `tokens`: how long an answer may be; twice as long if it follows a
    grammar."""
    end = max(words.eos_token_ids)
    letters = tuple(token for letter in "aeinost" for token in words.encode(letter)[:1])
    blanks = tuple((token, -100.0) for blank in " \t\r\n" for token in words.encode(blank)[:1])
    plain = {
        "greedy": ask(GREEDY),
        "temperature": ask(hot(1)),
        "top_k": ask(hot(2, top_k=5)),
        "wide top_k": ask(hot(3, top_k=200)),
        "top_p": ask(hot(4, top_p=0.5)),
        "min_p": ask(hot(5, min_p=0.4)),
        "repetition_penalty": ask(hot(6, repetition_penalty=1.3)),
        "presence_penalty": ask(hot(7, presence_penalty=2.0), ignore_eos=True),
        "frequency_penalty": ask(hot(8, frequency_penalty=2.0), ignore_eos=True),
        "all penalties, greedy": ask(
            attrs.evolve(
                GREEDY, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
            )
        ),
        "logit_bias": ask(hot(9, logit_bias=((letters[0], 8.0), (letters[1], -100.0)))),
        "schema": ask(
            hot(10, logit_bias=blanks), grammar=Grammar("json_schema", json.dumps(SCHEMA))
        ),
        "greedy schema": ask(
            GREEDY, grammar=Grammar("json_schema", json.dumps(SCHEMA)), logprobs=1
        ),
        "regex": ask(hot(11, top_p=0.9), grammar=Grammar("regex", r"[a-f]{3}-[0-9]{2,4}")),
        "choice": ask(hot(12), grammar=Grammar("choice", '["yes", "no", "maybe not"]')),
        "lark": ask(hot(13, top_k=50), grammar=Grammar("lark", 'start: "<" /[a-z]{1,5}/ ">"')),
        "json_object": ask(hot(14, logit_bias=((end, 3.0),)), grammar=Grammar("json_object")),
        "tool": attrs.evolve(
            ask(hot(15, logit_bias=blanks), grammar=Tools((TOOL,), (TOOL,)).grammar),
            prompt=ChatPrompt(({"role": "user", "content": "How much?"},)),
        ),
        "logprobs": ask(hot(16), logprobs=20),
        "stop": ask(hot(17), stop=("e", "an", "x y", " ")),
        "stop_token_ids": ask(
            hot(18, logit_bias=tuple((letter, 6.0) for letter in letters)), stop_token_ids=letters
        ),
        "min_tokens": ask(hot(19, logit_bias=((end, 9.0),)), min_tokens=tokens // 2),
        "min_tokens and stops": ask(
            hot(20), min_tokens=tokens // 3, stop=("e", "a", " "), stop_token_ids=letters
        ),
        "eos": ask(hot(21, logit_bias=((end, 7.0),)), logprobs=0),
        "ignore_eos": ask(hot(22, logit_bias=((end, 7.0),)), ignore_eos=True, logprobs=2),
        "echo": ask(hot(23), prompt_logprobs=5, logprobs=3),
        "greedy echo": ask(GREEDY, prompt_logprobs=0),
    }
    choices = choices_of(ask(hot(24), logprobs=1), 3)
    every = plain | {f"choice {place} of 3": choice for place, choice in enumerate(choices)}
    every |= {
        "typical_p": ask(hot(50, typical_p=0.4)),
        "xtc": ask(hot(51, xtc_probability=0.8, xtc_threshold=0.004)),
        "dry": ask(
            hot(52, dry_multiplier=3.0, logit_bias=tuple((token, 20.0) for token in letters)),
            ignore_eos=True,
        ),
    }
    own = {
        name: attrs.evolve(
            wish,
            request_id=name,
            max_tokens=tokens if wish.grammar is None else 2 * tokens,
            prompt=wish.prompt
            if isinstance(wish.prompt, ChatPrompt)
            else TokenPrompt(prompts[place % len(prompts)]),
        )
        for place, (name, wish) in enumerate(every.items())
    }
    shared = own["choice 0 of 3"].prompt
    return own | {
        name: attrs.evolve(wish, prompt=shared)
        for name, wish in own.items()
        if name.endswith("of 3")
    }


def some_of(asked: dict[str, Generate], turn: int) -> dict[str, Generate]:
    """Every second one from the first or the second on (`turn` 0 or 1), as the tests take turns
    with them; all in the long version."""
    return asked if LONG else {name: asked[name] for name in [*asked][turn::2]}


def ask(sampling: Sampling, **more: object) -> Generate:
    return Generate(request_id="", prompt=TokenPrompt(()), sampling=sampling, **more)  # type: ignore[arg-type]
