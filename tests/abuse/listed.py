"""The abuses, as data: what is sent, and what may be answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs

from tests.abuse.asking import (
    COMPLETIONS,
    COUNT,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    Ask,
    chat,
    of,
)

Kind = Literal["body", "prompt", "structure", "scores", "many", "odd"]
Json = dict[str, Any]
MB = 10**6
WORDS = "The quick brown fox jumps over the lazy dog. "
REFUSED = (400, 413, 431)


@attrs.frozen
class Abuse:
    """`param`: what a refusal names; None where the body as a whole is at fault. `answered`: it may
    be served as well."""

    name: str
    kind: Kind
    asks: tuple[Ask, ...]
    param: str | None = None
    answered: bool = False
    refused: bool = True


def refused(kind: Kind, name: str, param: str | None, *asks: Ask) -> Abuse:
    """It must not be served."""
    return Abuse(name, kind, asks, param)


def served(kind: Kind, name: str, *asks: Ask) -> Abuse:
    """It is unusual, but nothing is wrong with it."""
    return Abuse(name, kind, asks, answered=True, refused=False)


def either(kind: Kind, name: str, param: str | None, *asks: Ask) -> Abuse:
    """Served or refused, as the limits of the model at hand have it."""
    return Abuse(name, kind, asks, param, answered=True)


# -- bodies --------------------------------------------------------------------------------------

MESSAGE = b'{"messages":[{"role":"user","content":"Say hello."}],"max_tokens":4'


def raw(before: bytes = b"", unit: bytes = b"", times: int = 0, after: bytes = b"") -> Ask:
    """A body in which `unit` stands so many times."""
    return Ask(lambda: before + unit * times + after)


def field(name: str, value: bytes, times: int = 1, after: bytes = b"") -> Ask:
    """An ordinary chat with one more field, as bytes."""
    return raw(MESSAGE + b',"' + name.encode() + b'":', value, times, after + b"}")


def keys(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % place for place in range(count)) + b"}"


BODIES = (
    served("body", "16 MB of blanks around a chat", raw(MESSAGE + b"}", b" ", 16 * MB)),
    refused(
        "body",
        "34 MB: more than --max-body-bytes",
        None,
        raw(MESSAGE + b',"user":"', b"x", 34 * MB, b'"}'),
    ),
    refused(
        "body",
        "34 MB in chunks, without a length",
        None,
        attrs.evolve(raw(b"", b"x", 34 * MB), chunk=2**16),
    ),
    refused("body", "arrays 7,000,000 deep", None, raw(b"", b"[", 7 * MB)),
    refused(
        "body",
        "arrays 500 deep in a field",
        "logit_bias",
        field("logit_bias", b"[" * 500 + b"]" * 500),
    ),
    refused("body", "objects 2,000,000 deep", None, raw(b"", b'{"a":', 2 * MB)),
    refused(
        "body",
        "5,000,000 empty arrays in a field",
        None,
        field("stop", b"[" + b"[]," * (5 * MB) + b"[]]"),
    ),
    refused(
        "body",
        "5,000,000 empty objects in metadata",
        None,
        field("metadata", b'{"a":[' + b"{}," * (5 * MB) + b"{}]}"),
    ),
    refused(
        "body",
        "7,000,000 numbers in metadata",
        None,
        field("metadata", b'{"a":[' + b"1," * (7 * MB) + b"1]}"),
    ),
    refused(
        "body", "1,000,000 keys in metadata", None, Ask(lambda: field("metadata", keys(MB)).body())
    ),
    refused("body", "1,000,000 unknown parameters", None, Ask(partial(keys, MB))),
    # Unknown names are read past, and there is no prompt.
    refused("body", "100,000 unknown parameters", "messages", Ask(partial(keys, 100_000))),
    refused(
        "body",
        "one parameter 500,000 times, then a wrong one",
        "top_k",
        raw(MESSAGE, b',"model":null', 500_000, b',"top_k":"a"}'),
    ),
    served("body", "15 MB in user", raw(MESSAGE + b',"user":"', b"x", 15 * MB, b'"}')),
    served(
        "body", "12 MB of escapes in user", raw(MESSAGE + b',"user":"', rb"\u0041", 2 * MB, b'"}')
    ),
    either(
        "body",
        "15 MB in one value of metadata",
        "metadata",
        raw(MESSAGE + b',"metadata":{"a":"', b"x", 15 * MB, b'"}}'),
    ),
    # A single model answers to any name.
    either("body", "15 MB in model", "model", raw(MESSAGE + b',"model":"', b"x", 15 * MB, b'"}')),
    refused(
        "body",
        "15 MB of invalid UTF-8",
        None,
        raw(MESSAGE + b',"user":"', b"\xff\xfe", 7 * MB, b'"}'),
    ),
    refused("body", "an integer of 4,000,000 digits", None, field("max_tokens", b"9", 4 * MB)),
    refused("body", "a number of 1e999999999", None, field("temperature", b"1e999999999")),
    served(
        "body",
        "a body in 20,000 chunks of a byte",
        attrs.evolve(Ask(chat(user="x" * 20_000)), chunk=1),
    ),
    refused(
        "body", "an array of 7,000,000 numbers as the body", None, raw(b"[1", b",1", 7 * MB, b"]")
    ),
)

# -- prompts --------------------------------------------------------------------------------------


def says(text: str, times: int) -> Ask:
    """A chat in which the user says this so many times."""
    return Ask(
        lambda: json.dumps(
            {"messages": [{"role": "user", "content": text * times}], "max_tokens": 4},
            ensure_ascii=False,
        ).encode()
    )


def prompt(
    text: str, times: int, path: str = COMPLETIONS, name: str = "prompt", **fields: Any
) -> Ask:
    return Ask(lambda: json.dumps({name: text * times} | fields, ensure_ascii=False).encode(), path)


def tokens(token: int, count: int, path: str = COMPLETIONS, name: str = "prompt") -> Ask:
    return Ask(
        lambda: b'{"%s":[%d%s]}' % (name.encode(), token, b",%d" % token * (count - 1)), path
    )


def conversation(count: int, text: str) -> Ask:
    turns = [
        {"role": "assistant" if place % 2 else "user", "content": text} for place in range(count)
    ]
    return Ask(of(messages=turns, max_tokens=4))


HELLO: Json = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
ANTHROPIC: Json = {"max_tokens": 4}


def tool(name: str, parameters: Json, description: str = "") -> Json:
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "description": description},
    }


PROMPTS = (
    refused("prompt", "15 MB of words", "prompt", prompt(WORDS, 15 * MB // len(WORDS))),
    refused("prompt", "15 MB of words in a chat", "messages", says(WORDS, 15 * MB // len(WORDS))),
    refused("prompt", "15 MB of one letter", "prompt", prompt("a", 15 * MB)),
    refused("prompt", "15 MB of blanks", "prompt", prompt(" ", 15 * MB)),
    refused("prompt", "15 MB of digits", "prompt", prompt("1234567890", 15 * MB // 10)),
    refused(
        "prompt", "12 MB of emoji that are joined", "prompt", prompt("\U0001f469‍", 12 * MB // 7)
    ),
    refused("prompt", "12 MB of combining marks", "prompt", prompt("éͤ̀", 12 * MB // 7)),
    refused(
        "prompt", "2 MB of a word without an end", "prompt", prompt("abcdefghij", 2 * MB // 10)
    ),
    refused("prompt", "2 MB of special tokens", "prompt", prompt("<|im_start|>", 2 * MB // 12)),
    refused(
        "prompt", "eight times 15 MB at once", "prompt", *[prompt(WORDS, 15 * MB // len(WORDS))] * 8
    ),
    refused("prompt", "a million tokens", "prompt", tokens(5, MB)),
    refused("prompt", "seven million tokens", None, tokens(5, 7 * MB)),
    refused("prompt", "a token of 10^18", "prompt", tokens(10**18, 1000)),
    refused(
        "prompt",
        "10,000 messages of 1,400 characters",
        "messages",
        conversation(10_000, "x" * 1400),
    ),
    refused("prompt", "10,000 short messages", "messages", conversation(10_000, "Hi.")),
    refused("prompt", "100,000 messages", "messages", conversation(100_000, "Hi.")),
    refused(
        "prompt",
        "a message of 300,000 parts",
        None,
        Ask(of(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 300_000}])),
    ),
    refused("prompt", "129 prompts", "prompt", Ask(of(prompt=["Hi."] * 129), COMPLETIONS)),
    refused("prompt", "1,000,000 prompts", "prompt", Ask(of(prompt=["x"] * MB), COMPLETIONS)),
    refused(
        "prompt",
        "128 prompts of 110,000 characters",
        "prompt",
        Ask(of(prompt=[WORDS * 2444] * 128), COMPLETIONS),
    ),
    refused(
        "prompt",
        "15 MB to embed",
        "input",
        prompt(WORDS, 15 * MB // len(WORDS), EMBEDDINGS, "input"),
    ),
    refused("prompt", "2,049 texts to embed", "input", Ask(of(input=["Hi."] * 2049), EMBEDDINGS)),
    refused(
        "prompt",
        "2,048 texts of 7,000 characters, the last too long, to embed",
        "input",
        Ask(of(input=[WORDS] * 3 + [WORDS * 20_000]), EMBEDDINGS),
    ),
    refused(
        "prompt", "15 MB to /tokenize", "prompt", prompt(WORDS, 15 * MB // len(WORDS), "/tokenize")
    ),
    refused(
        "prompt",
        "1,100,000 tokens to /detokenize",
        "tokens",
        tokens(5, 1_100_000, "/detokenize", "tokens"),
    ),
    refused(
        "prompt",
        "15 MB in a response's input",
        "input",
        prompt(WORDS, 15 * MB // len(WORDS), RESPONSES, "input"),
    ),
    refused(
        "prompt",
        "15 MB in a response's instructions",
        "input",
        prompt(WORDS, 15 * MB // len(WORDS), RESPONSES, "instructions", input="Hi."),
    ),
    refused(
        "prompt",
        "15 MB to /v1/messages",
        "prompt",
        Ask(
            lambda: json.dumps(
                ANTHROPIC | {"messages": [{"role": "user", "content": WORDS * 330_000}]}
            ).encode(),
            MESSAGES,
        ),
    ),
    refused(
        "prompt",
        "15 MB to /v1/messages/count_tokens",
        "prompt",
        Ask(
            lambda: json.dumps(
                {"messages": [{"role": "user", "content": WORDS * 330_000}]}
            ).encode(),
            COUNT,
        ),
    ),
    either(
        "prompt",
        "a tool's description of 10 MB",
        "messages",
        Ask(
            lambda: json.dumps(
                HELLO
                | {
                    "tool_choice": "required",
                    "tools": [tool("a", {"type": "object"}, WORDS * 222_222)],
                }
            ).encode()
        ),
    ),
    either(
        "prompt",
        "10 MB in chat_template_kwargs",
        "messages",
        Ask(lambda: json.dumps(HELLO | {"chat_template_kwargs": {"a": WORDS * 222_222}}).encode()),
    ),
    either(
        "prompt",
        "an argument of an earlier call nested 400 deep",
        "messages",
        Ask(
            of(
                messages=[
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "type": "function",
                                "function": {
                                    "name": "a",
                                    "arguments": '{"a":' * 400 + "1" + "}" * 400,
                                },
                            }
                        ],
                    },
                    {"role": "user", "content": "Hi."},
                ],
                max_tokens=4,
            )
        ),
    ),
)

# -- structure ------------------------------------------------------------------------------------


def schema(value: Any, strict: bool = False, **fields: Any) -> Ask:
    """A chat whose answer follows it."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": strict}}
    return Ask(chat(**({"response_format": form, "max_tokens": 10} | fields)))


def properties(count: int, kind: Json | None = None, required: bool = False) -> Json:
    names = [f"property_{place}" for place in range(count)]
    plain: Json = {"type": "object", "properties": dict.fromkeys(names, kind or {"type": "string"})}
    return plain | {"required": names, "additionalProperties": False} if required else plain


def nested(depth: int) -> Json:
    inside: Json = {"type": "string"}
    for _ in range(depth):
        inside = {"type": "object", "properties": {"a": inside}, "required": ["a"]}
    return inside


def wide(width: int, depth: int) -> Json:
    """So many properties at each of so many levels: width ** depth leaves."""
    return properties(width, wide(width, depth - 1)) if depth else {"type": "string"}


TREE: Json = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "name": {"type": "string"},
            },
        }
    },
    "$ref": "#/$defs/node",
}
CYCLE: Json = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a",
}


def doubling(times: int) -> Json:
    """Each definition names the next twice: 2 ** times parts if they are written out."""
    made: Json = {
        f"d{n}": {
            "type": "object",
            "properties": {"l": {"$ref": f"#/$defs/d{n + 1}"}, "r": {"$ref": f"#/$defs/d{n + 1}"}},
        }
        for n in range(times)
    }
    return {"$defs": made | {f"d{times}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chain(length: int) -> Json:
    """Definitions each of which refers to the next."""
    made: Json = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(length)
    }
    return {"$defs": made | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def text(**limits: Any) -> Json:
    return {"type": "object", "properties": {"a": {"type": "string"} | limits}, "required": ["a"]}


def items(**limits: Any) -> Json:
    return {"type": "array", "items": {"type": "integer"}} | limits


def guided(**fields: Any) -> Ask:
    return Ask(chat(**({"max_tokens": 10} | fields)))


FORM = "response_format"
STRUCTURES = (
    either("structure", "a schema of 500 properties", FORM, schema(properties(500))),
    either("structure", "a schema of 2,000 properties", FORM, schema(properties(2000))),
    either("structure", "a schema of 3,000 properties", FORM, schema(properties(3000))),
    either("structure", "a schema of 6,500 properties", FORM, schema(properties(6500))),
    either("structure", "2,000 required properties", FORM, schema(properties(2000, required=True))),
    either(
        "structure",
        "ten schemas of 1,000 properties at once",
        FORM,
        *[schema(properties(1000) | {"title": str(place)}) for place in range(10)],
    ),
    either("structure", "objects nested 60 deep", FORM, schema(nested(60))),
    either("structure", "objects nested 400 deep", FORM, schema(nested(400))),
    either("structure", "ten properties at each of three levels", FORM, schema(wide(10, 3))),
    either("structure", "seven properties at each of four levels", FORM, schema(wide(7, 4))),
    either("structure", "a recursive schema", FORM, schema(TREE)),
    either("structure", "references in a circle", FORM, schema(CYCLE)),
    either("structure", "references that double 20 times", FORM, schema(doubling(20))),
    refused(
        "structure",
        "a chain of 1,500 references, which overflows a stack",
        FORM,
        schema(chain(1500), strict=True),
    ),
    served(
        "structure",
        "a chain of 1,500 references, of which all but the type may be dropped",
        schema(chain(1501)),
    ),
    refused(
        "structure",
        "a grammar that repeats what may be left out 50,000 times",
        "guided_regex",
        guided(guided_regex="a?" * 50_000),
    ),
    either(
        "structure",
        "an enum of 10,000 strings",
        FORM,
        schema({"enum": [f"option {n}" for n in range(10_000)]}),
    ),
    either(
        "structure",
        "an enum with a string of 200,000 characters",
        FORM,
        schema({"enum": ["a" * 200_000, "b"]}),
    ),
    either("structure", "maxLength of 10^9", FORM, schema(text(maxLength=10**9))),
    either("structure", "minLength of 10^9", FORM, schema(text(minLength=10**9))),
    either(
        "structure",
        "minLength and maxLength of 50,000",
        FORM,
        schema(text(minLength=50_000, maxLength=60_000)),
    ),
    either("structure", "minItems of 10^6", FORM, schema(items(minItems=10**6))),
    either("structure", "maxItems of 10^9", FORM, schema(items(maxItems=10**9))),
    either(
        "structure",
        "minItems of 3,000 objects",
        FORM,
        schema({"type": "array", "items": properties(20), "minItems": 3000}),
    ),
    either(
        "structure",
        "a minimum of -10^300",
        FORM,
        schema({"type": "number", "minimum": -1e300, "maximum": 1e300}),
    ),
    either(
        "structure", "a multiple of 10^-12", FORM, schema({"type": "number", "multipleOf": 1e-12})
    ),
    either(
        "structure",
        "anyOf of 1,000 objects",
        FORM,
        schema({"anyOf": [text(const=str(n)) for n in range(1000)]}),
    ),
    either(
        "structure",
        "oneOf of 1,000 strings of any kind",
        FORM,
        schema({"oneOf": [{"type": "string", "pattern": f"^a*{n}$"} for n in range(1000)]}),
    ),
    either(
        "structure",
        "allOf of 500",
        FORM,
        schema({"allOf": [text(minLength=n) for n in range(500)]}),
    ),
    either(
        "structure",
        "300 patternProperties",
        FORM,
        schema(
            {
                "type": "object",
                "patternProperties": {f"^a.*{n}$": {"type": "string"} for n in range(300)},
            }
        ),
    ),
    either(
        "structure",
        "a pattern that backtracks for ever elsewhere",
        FORM,
        schema(text(pattern="^(a+)+$")),
    ),
    either(
        "structure", "a pattern with a repeat of 10^6", FORM, schema(text(pattern="^a{1,1000000}$"))
    ),
    either(
        "structure",
        "repeats in repeats in repeats",
        "guided_regex",
        guided(guided_regex="(((a{1,100}){1,100}){1,100}){1,100}"),
    ),
    either(
        "structure",
        "an expression with look-behind in disguise",
        "guided_regex",
        guided(guided_regex="(.*a){30}.{30}b"),
    ),
    either(
        "structure",
        "5,000 alternatives",
        "guided_regex",
        guided(guided_regex="|".join(f"{n}[a-z]*{n}" for n in range(5000))),
    ),
    either(
        "structure",
        "a grammar that is ambiguous",
        "guided_grammar",
        guided(
            guided_grammar='start: x\nx: "a" | x x | x x x | "a" x "b" | x "b" x', max_tokens=100
        ),
    ),
    either(
        "structure",
        "a grammar of 6,000 rules, which overflows a stack",
        "guided_grammar",
        guided(
            guided_grammar="start: r0\n"
            + "\n".join(f'r{n}: "{n}" | "x" r{n + 1}' for n in range(6000))
            + '\nr6000: "y"'
        ),
    ),
    either(
        "structure",
        "1,024 choices of 200 characters",
        "guided_choice",
        guided(guided_choice=[f"{n} " + "a" * 200 for n in range(1024)]),
    ),
    refused("structure", "100,000 choices", "guided_choice", guided(guided_choice=["a"] * 100_000)),
    refused("structure", "a schema of 2 MB", FORM, schema(properties(50_000))),
    either(
        "structure",
        "128 tools of 30 properties, one of which must be called",
        "tools",
        Ask(
            chat(
                tools=[tool(f"tool_{n}", properties(30)) for n in range(128)],
                tool_choice="required",
            )
        ),
    ),
    refused(
        "structure",
        "10,000 tools",
        "tools",
        Ask(
            chat(
                tools=[tool(f"tool_{n}", properties(1)) for n in range(10_000)],
                tool_choice="required",
            )
        ),
    ),
    either(
        "structure",
        "a tool of 5,000 properties",
        "tools",
        Ask(chat(tools=[tool("a", properties(5000))], tool_choice="required")),
    ),
    either(
        "structure",
        "a client that leaves while its schema is compiled",
        FORM,
        attrs.evolve(schema(properties(2500, required=True)), leaves_after_s=0.3),
    ),
)

# -- what is computed -----------------------------------------------------------------------------

LONG = WORDS * 690
"""7,000 tokens of a usual vocabulary."""


def scored(**fields: Any) -> Ask:
    return Ask(
        of(**({"prompt": LONG, "echo": True, "logprobs": 20, "max_tokens": 1} | fields)),
        COMPLETIONS,
    )


SCORES = (
    served("scores", "echo of 7,000 tokens with 20 logprobs each", scored()),
    served("scores", "echo of 1,800 tokens, streamed", scored(stream=True, prompt=WORDS * 180)),
    served(
        "scores", "echo of four times 600 tokens with 20 logprobs", scored(prompt=[WORDS * 60] * 4)
    ),
    served(
        "scores",
        "echo of 1,800 tokens with their own logprobs",
        scored(prompt=WORDS * 180, logprobs=0, max_tokens=0),
    ),
    served("scores", "a prompt of 7,000 tokens to embed", Ask(of(input=LONG), EMBEDDINGS)),
    served(
        "scores",
        "sixteen prompts of 500 tokens to embed",
        Ask(of(input=[WORDS * 50] * 16), EMBEDDINGS),
    ),
    served(
        "scores",
        "30 answers with 20 logprobs",
        Ask(chat(n=30, logprobs=True, top_logprobs=20, max_tokens=16)),
    ),
    served(
        "scores",
        "30 answers, the best of them",
        Ask(of(prompt="Hi.", best_of=30, max_tokens=16), COMPLETIONS),
    ),
    served(
        "scores",
        "512 biases and all penalties",
        Ask(
            chat(
                logit_bias={str(n): -5 for n in range(512)},
                repetition_penalty=1.2,
                presence_penalty=1,
                max_tokens=16,
            )
        ),
    ),
)

# -- many -----------------------------------------------------------------------------------------


def times(count: int, one: Ask) -> tuple[Ask, ...]:
    return (one,) * count


MANY = (
    served("many", "60 clients at once", *times(60, Ask(chat(temperature=1)))),
    either(
        "many", "300 clients at once: more than the queue holds", None, *times(300, Ask(chat()))
    ),
    served(
        "many",
        "200 clients that leave",
        *times(200, Ask(chat(max_tokens=400), leaves_after_s=0.05)),
    ),
    refused("many", "300 bodies that are no JSON", None, *times(300, Ask(lambda: b"{"))),
    served(
        "many",
        "100 connections that stop in the middle of a body",
        *times(100, Ask(chat(), cut=20, leaves_after_s=2.0)),
    ),
    either("many", "n of 128", None, Ask(chat(n=128))),
)

# -- odd ------------------------------------------------------------------------------------------


def odd(name: str, param: str | None, **fields: Any) -> Abuse:
    return refused("odd", name, param, Ask(chat(**fields)))


ODD = (
    odd("100,000 biases", "logit_bias", logit_bias={str(n): 1 for n in range(100_000)}),
    odd("100,000 stop strings", "stop", stop=["a"] * 100_000),
    odd("1,000,000 stop tokens", "stop_token_ids", stop_token_ids=[1] * MB),
    either(
        "odd",
        "16 stop strings of 100,000 characters",
        "stop",
        Ask(chat(stop=[f"{n}" * 50_000 for n in range(10, 26)])),
    ),
    odd("n of 10^9", "n", n=10**9),
    odd("a salt of 10 MB", "cache_salt", cache_salt="x" * (10 * MB)),
    served(
        "odd",
        "an answer of 10^18 tokens",
        Ask(chat(max_tokens=10**18, stop=["a", "e", "i", "o", " "])),
    ),
    odd("an answer of 10^30 tokens", "max_tokens", max_tokens=10**30),
    odd("a temperature of 10^308", "temperature", temperature=1e308),
    either("odd", "a seed of 10^100", "seed", Ask(chat(seed=10**100))),
    either("odd", "top_k of 2^62", "top_k", Ask(chat(top_k=2**62))),
    refused(
        "odd", "a header of 200,000 bytes", None, Ask(chat(), headers=(("X-A", "a" * 200_000),))
    ),
    either("odd", "10,000 headers", None, Ask(chat(), headers=(("X-A", "a"),) * 10_000)),
    refused("odd", "a path of 200,000 bytes", None, Ask(chat(), "/v1/" + "a" * 200_000)),
    either(
        "odd",
        "half of a surrogate pair",
        None,
        raw(b'{"messages":[{"role":"user","content":"', rb"\ud800", 100_000, b'"}]}'),
    ),
)

ABUSES: tuple[Abuse, ...] = (*BODIES, *PROMPTS, *STRUCTURES, *SCORES, *MANY, *ODD)

HONEST: Mapping[Kind, tuple[Ask, ...]] = {
    "body": (Ask(chat()),),
    "prompt": (prompt(WORDS, 100, max_tokens=4),),
    "structure": (schema(properties(5, required=True)),),
    "scores": (prompt(WORDS, 700, max_tokens=1),),
    "many": times(20, Ask(chat(max_tokens=4))),
    "odd": (Ask(chat()),),
}
"""What a decent client would send in the place of an abuse of that kind."""


def named(
    names: Sequence[str], key: Callable[[Abuse], str] = lambda abuse: abuse.name
) -> tuple[Abuse, ...]:
    """Those whose name or kind has one of these in it; all if there is none."""
    return tuple(
        one
        for one in ABUSES
        if not names or any(part in key(one) or part == one.kind for part in names)
    )
