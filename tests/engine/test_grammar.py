"""Grammars in the engine: what a mask leaves, and what else wants to say something about the next
token."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import jsonschema
import numpy as np
import pytest

from tests.engine.driver import GREEDY, Driver, Request, answers
from tests.families import END, save
from trouper import RequestFailed, Sampling, Settings
from trouper.engine.grammars.token_masks import Mask
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar, GrammarKind

HOT = Sampling(temperature=1.0, seed=7)
PROMPT = (10, 20, 30)


@cache
def tiny() -> EvaluatedModel:
    with TemporaryDirectory() as scratch:
        return load(Settings(model=str(save("llama", Path(scratch)))), lambda _: None)


def engine() -> StepEngine:
    loaded = tiny()
    return StepEngine(loaded.model, loaded.card.vocab_size, grammars=loaded.tokenizer.grammars)


def said(
    grammar: Grammar, tokens: int = 40, sampling: Sampling = HOT, **more: Any
) -> tuple[bytes, bool]:
    """The text up to the end, and whether it ended."""
    [answer] = answers(engine(), [Request(PROMPT, tokens, sampling, grammar=grammar, **more)])
    text = answer[: answer.index(END)] if END in answer else answer
    return b"".join(map(tiny().tokenizer.token_bytes, text)), END in answer


@pytest.mark.parametrize(
    "sampling", [GREEDY, HOT, Sampling(temperature=1, top_k=5), Sampling(temperature=1, top_p=0.5)]
)
def test_min_tokens_makes_no_grammar_say_more(sampling: Sampling) -> None:
    """A complete answer can only end, however short it is: anything else would not follow the
    grammar."""
    assert said(Grammar("regex", "abc"), 10, sampling, min_tokens=8, ends=(END,)) == (b"abc", True)


def test_min_tokens_keeps_the_end_away_while_there_is_more_to_say() -> None:
    grammar = Grammar("regex", "[a-z]*")
    early = Sampling(temperature=1, seed=3, logit_bias=((END, 100.0),))
    assert said(grammar, 10, early) == (b"", True)
    [answer] = answers(
        engine(), [Request(PROMPT, 10, early, grammar=grammar, min_tokens=6, ends=(END,))]
    )
    assert answer.index(END) == 6


def test_bias_opens_no_way_out_of_a_grammar() -> None:
    """The strongest bias there is, on what may not be said, and against all that may."""
    away = tuple((token, -100.0) for token in tiny().tokenizer.encode("abc"))
    wanted = tuple((token, 100.0) for token in tiny().tokenizer.encode("xyz"))
    assert said(
        Grammar("regex", "[abc]{5}"), 10, Sampling(temperature=1, logit_bias=(*away, *wanted))
    )[1]


ODD = [
    'a"b',
    "a\\b",
    "line\nbreak",
    "tab\t",
    "é",
    "🫖",
    "{x}",
    "a|b",
    "/",
    "\u0001",
    "yes",
    "yes!",
    "  ",
    "%",
    "\u2028",
]


@pytest.mark.parametrize("seed", range(4))
def test_choices_of_any_characters(seed: int) -> None:
    seeded = Sampling(temperature=2, seed=seed)
    text, ended = said(Grammar("choice", json.dumps(ODD)), 40, seeded)
    assert ended
    assert text.decode() in ODD


@pytest.mark.parametrize(
    ("source", "reason"),
    [("[]", "no option"), ('{"a": 1}', "array of strings"), ("[1]", "array of strings")],
)
def test_a_choice_of_nothing_is_refused(source: str, reason: str) -> None:
    """A program that embeds the runtime makes its grammars itself. The answer to no option was an
    empty one, as if that were what was wanted."""
    grammars = tiny().tokenizer.grammars
    assert grammars is not None
    with pytest.raises(RequestFailed) as failed:
        grammars.compile(Grammar("choice", source, param="choice"))
    problem = failed.value.problem
    assert (problem.code, problem.param) == (
        "invalid_grammar",
        "choice",
    ) and reason in problem.message


@pytest.mark.parametrize("option", ODD)
def test_each_choice_can_be_said(option: str) -> None:
    assert said(Grammar("choice", json.dumps([option]))) == (option.encode(), True)


def test_masks_along_a_draft_are_those_before_each_token_and_after_the_last() -> None:
    """Looking ahead moves nothing; a token that may not come ends the look."""
    grammars, word = tiny().tokenizer.grammars, tiny().tokenizer.encode
    assert grammars is not None
    constraint = grammars.constraint(Grammar("regex", "[ab]{3}"))
    a, b, c = (word(letter)[-1] for letter in "abc")

    def allowed(masks: list[Mask]) -> list[set[int]]:
        return [
            {int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))}
            for mask in masks
        ]

    for _ in range(2):
        before, *rest = allowed(constraint.along([a, b, a], 0))
        assert {a, b} <= before and c not in before
        assert [{a, b} & one for one in rest] == [{a, b}, {a, b}, set()] and rest[-1] == {END}
        assert len(constraint.along([a, c, a], 0)) == 2
        assert [constraint.fitting(draft) for draft in ([a, b, a], [a, c, a], [c])] == [3, 1, 0]
    for token in (a, b, a):
        assert constraint.accept(token) == ""
    assert allowed(constraint.along([], 0)) == [{END}], "what is complete can only end"
    assert constraint.fitting([a]) == 0


def test_blanks_end() -> None:
    """Some models write them for ever, at temperature 0 too."""
    blank = tuple((tiny().tokenizer.encode(blank)[0], 50.0) for blank in " \t\r\n")
    closing = tuple((token, 5.0) for token in tiny().tokenizer.encode('"}],'))
    schema = (
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    text, ended = said(
        Grammar("json_schema", schema), 400, attrs.evolve(GREEDY, logit_bias=(*blank, *closing))
    )
    assert ended
    assert text[1:2].isspace() and len(text) <= 40, "they came, as many as the depth allows"
    assert isinstance(json.loads(text)["a"], bool)


def test_indentation_is_no_endless_blank() -> None:
    constraint = tiny().tokenizer.grammars.constraint(Grammar("json_schema", "{}"))  # type: ignore[union-attr]
    deep: Any = 1
    for _ in range(8):
        deep = {"deeper": [deep]}
    assert not any(map(constraint.accept, tiny().tokenizer.encode(json.dumps(deep, indent=2))))


@pytest.mark.parametrize("properties", [100, 400])
def test_large_objects_can_be_followed(properties: int) -> None:
    schema = {"properties": {f"k{n}": {"type": "integer"} for n in range(properties)}}
    constraint = tiny().tokenizer.grammars.constraint(Grammar("json_schema", json.dumps(schema)))  # type: ignore[union-attr]
    assert not any(map(constraint.accept, tiny().tokenizer.encode(f'{{"k{properties - 1}": 1}}')))


AMBIGUOUS = 'start: x\nx: "a" | x x | x x x | "a" x "b" | x "b" x'


def test_a_grammar_that_gives_up_is_told() -> None:
    """What the parser's limits end is not complete, and must not look as if it were."""
    on = Sampling(temperature=1, logit_bias=((END, -100.0),))
    driver = Driver(engine())
    [row] = driver.play([Request(PROMPT, 200, on, grammar=Grammar("lark", AMBIGUOUS))])
    assert {said for at, said in driver.failed if at == row.id}
    assert all("items" in said.reason for _, said in driver.failed)


def spelled(text: str) -> tuple[int, ...]:
    """The tokens of a text, in which `<|end|>` is text: here it is the name of the token that ends
    a turn."""
    first, *others = text.split("<|end|>")
    encode = tiny().tokenizer.encode
    return sum(
        ((*encode("<|en"), *encode("d|>"), *encode(other)) for other in others if other),
        encode(first),
    )


def allowed(grammar: Grammar, text: str) -> bool:
    """Whether the whole text may be said, and the answer may end behind it."""
    grammars = tiny().tokenizer.grammars
    assert grammars is not None
    kept = grammars.compile(grammar)
    constraint = grammars.constraint(grammar)
    for token in (*spelled(text), END):
        if not np.unpackbits(constraint.allowed(0), bitorder="little")[token]:
            return False
        assert not constraint.accept(token)
    del kept
    return True


@pytest.mark.parametrize(
    ("kind", "source", "answer", "other"),
    [
        (
            "json_schema",
            (
                '{"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], '
                '"additionalProperties": false, "$defs": {"n": {"type": "integer"}}}'
            ),
            '{"a": 1}',
            '{"a": "x"}',
        ),
        ("json_object", "", '{"b": [1]}', "[1]"),
        ("choice", '["yes", "no"]', "no", "maybe"),
    ],
)
def test_an_answer_follows_the_grammar_or_is_a_call(
    kind: GrammarKind, source: str, answer: str, other: str
) -> None:
    grammar = Grammar(kind, source, calls=("<call>",), call_names=("look", 'f"'))
    assert allowed(grammar, answer) and not allowed(grammar, other)
    assert allowed(grammar, "<call>\n<function=look>anything at all</call>\n<call>\u00e9")
    assert allowed(grammar, '<call>f"')
    assert (
        not allowed(grammar, "<cal")
        and not allowed(grammar, "<call>lo")
        and not allowed(grammar, f"<call>{'x' * 65}look")
    )
    objects = attrs.evolve(grammar, calls=("<call>", ""), call_key="arguments")
    call = '{"name": "look", "arguments": {"at": [1]}}'
    assert allowed(objects, answer) and not allowed(objects, other)
    assert allowed(objects, f"<call>\n{call}</call> and more") and allowed(objects, f"{call}; {{")
    assert not allowed(objects, "<call>Paris")
    assert kind == "json_object" or not allowed(objects, call.replace("look", "see"))
    alone = Grammar(kind, source)
    assert allowed(alone, answer) and not allowed(alone, "<call>x"), "each has its own in the cache"


@pytest.mark.parametrize(
    ("kind", "source", "answer", "other"),
    [
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "integer"}}}',
            '{"a": 1}',
            '{"a": "x"}',
        ),
        ("json_object", "", '{"b": [1]}', "[1]"),
        ("choice", '["yes", "no"]', "no", "maybe"),
        ("regex", "[ab]+", "abba", "c"),
        ("lark", 'start: one | "x"\none: "1"', "1", "2"),
    ],
)
def test_in_harmony_it_holds_for_the_final_channel(
    kind: GrammarKind, source: str, answer: str, other: str
) -> None:
    final, thought = (
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>Is 1 << 2 <b>?<|end|><|start|>assistant",
    )
    grammar = Grammar(kind, source, channels=True)
    for before in (final, thought + final):
        assert allowed(grammar, before + answer) and not allowed(grammar, before + other)
    for wrong in (
        answer,
        thought + answer,
        thought + thought + final + answer,
        "<|channel|>analysis<|message|><|return|>",
    ):
        assert not allowed(grammar, wrong)
    if kind in ("regex", "lark"):  # They cannot stand beside calls.
        return
    beside = attrs.evolve(grammar, calls=("<|channel|>commentary to=",), call_names=("look",))
    call = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"
    for text in (final + answer, thought + final + answer, call, thought + call):
        assert allowed(beside, text)
    for text in (final + other, answer, thought + call.replace("look", "see" * 30)):
        assert not allowed(beside, text)


FOLLOWED: list[tuple[GrammarKind, str]] = [
    ("json_object", ""),
    ("json_schema", '{"type": "array"}'),
]


@pytest.mark.parametrize(("kind", "source"), FOLLOWED)
def test_json_of_noise(kind: GrammarKind, source: str) -> None:
    closing = tuple((token, 5.0) for token in tiny().tokenizer.encode('"}],'))
    text, ended = said(
        Grammar(kind, source), 400, Sampling(temperature=1, seed=1, logit_bias=closing)
    )
    assert ended
    jsonschema.validate(json.loads(text), json.loads(source) if source else {"type": "object"})


@pytest.mark.parametrize(
    ("kind", "source", "place"),
    [
        ("json_schema", '{"type": "strange"}', "strange"),
        (
            "json_schema",
            '{"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}',
            "uniqueItems",
        ),
        (
            "json_schema",
            '{"properties": {"b": {"$ref": "#/$defs/gone"}}, "required": ["b"]}',
            "gone",
        ),
        ("json_schema", '{"type": "string", "pattern": "(((("}', "unclosed group"),
        ("json_schema", "false", ""),
        ("json_schema", '{"items": ' * 300 + "{}" + "}" * 300, "recursion"),
        ("json_schema", '{"items": ' * 50_000 + "{}" + "}" * 50_000, "recursion"),
        ("regex", "a(", ""),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: nothing", "nothing"),
        ("lark", "no", ""),
    ],
)
def test_what_cannot_be_followed_says_where(kind: GrammarKind, source: str, place: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        tiny().tokenizer.compile_grammar(Grammar(kind, source, "guided"))
    problem = refused.value.problem
    assert problem.status == 400 and str(problem.param).startswith("guided")
    assert place in problem.message


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "array", "uniqueItems": True}, "guided.uniqueItems"),
        (
            {"properties": {"a": {"type": "string"}, "b": {"type": "array", "uniqueItems": True}}},
            "guided.properties.b.uniqueItems",
        ),
        (
            {"anyOf": [{"type": "null"}, {"items": {"contains": {}}}]},
            "guided.anyOf.1.items.contains",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "odd"}},
                "$defs": {"x": {"type": "null"}},
            },
            "guided.properties.b.type",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/gone"}}, "required": ["a"]},
            "guided.properties.a.$ref",
        ),
        (
            {"prefixItems": [{}, {"additionalProperties": {"contains": {}}}]},
            "guided.prefixItems.1.additionalProperties.contains",
        ),
    ],
)
def test_a_schemas_fault_has_a_place(schema: Any, param: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        tiny().tokenizer.compile_grammar(Grammar("json_schema", json.dumps(schema), "guided"))
    assert refused.value.problem.param == param
    assert refused.value.problem.message.startswith(f"{param} cannot be followed: ")
