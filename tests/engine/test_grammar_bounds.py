"""What compiling a grammar may cost, and whom: a process of its own goes first, and the engine's thread compiles nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.engine.driver import Request, answers
from tests.engine.test_grammar import HOT, PROMPT, engine, tiny
from tests.families import save
from trouper import RequestFailed, Settings
from trouper.engine.grammars import trial_process
from trouper.engine.grammars.grammar_compiler import RECENT_BYTES, Grammars
from trouper.engine.grammars.lru_cache import LruCache
from trouper.engine.grammars.schema_faults import MAX_OPTIONAL
from trouper.engine.loading.model_loading import load
from trouper.protocol.grammar import Grammar, GrammarKind


def grammars() -> Grammars:
    found = tiny().tokenizer.grammars
    assert found is not None
    return found


def chain(length: int) -> Any:
    """Definitions that refer to one another."""
    made: Any = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$defs": made | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def rules(length: int) -> str:
    return "start: r0\n" + "\n".join(f'r{n}: "{n}" | "x" r{n + 1}' for n in range(length)) + f'\nr{length}: "y"'


@pytest.mark.parametrize(
    ("kind", "source"),
    [("json_schema", json.dumps(chain(1500))), ("lark", rules(6000))],
    ids=["json_schema", "lark"],
)
def test_a_grammar_that_ends_the_process_that_compiles_it_is_refused(kind: GrammarKind, source: str) -> None:
    """llguidance recurses over rules, and a stack that overflows is no exception. The next one is compiled all the same."""
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(Grammar(kind, source, "guided"))
    assert refused.value.problem.status == 400
    assert refused.value.problem.param == "guided"
    assert "too deeply" in refused.value.problem.message
    grammars().compile(Grammar("regex", "[ab]{3}", "guided"))


def test_a_grammar_that_takes_too_long_is_refused_with_the_bound() -> None:
    """More than a minute of native code that nothing else could interrupt."""
    endless = Grammar("regex", "a?" * 50_000, "guided")
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(endless, 0.2)
    assert "more than 0.2 s" in refused.value.problem.message
    assert "--grammar-timeout-s" in refused.value.problem.message


def test_a_grammar_that_took_too_long_may_be_tried_again() -> None:
    """The machine may have been busy."""
    grammar = Grammar("regex", "|".join(f"{n}[a-z]*{n}" for n in range(2000)), "guided")
    with pytest.raises(RequestFailed):
        grammars().compile(grammar, 0.0)
    grammars().compile(grammar, 60)


def test_properties_that_make_the_second_token_too_dear_are_refused_before_it() -> None:
    """An object takes four items for each property that is not required, and only behind its brace."""
    many: Any = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}}
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(Grammar("json_schema", json.dumps({"items": many}), "guided"))
    assert refused.value.problem.param == "guided.items"
    assert "600 of its properties are not required" in refused.value.problem.message
    halves = [{"properties": dict([*many["properties"].items()][start::2])} for start in (0, 1)]
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(Grammar("json_schema", json.dumps({"type": "object", "allOf": halves}), "guided"))
    assert "items" in refused.value.problem.message, "the process that goes first takes a step more than the first"
    required = many | {"required": [*many["properties"]]}
    grammars().compile(Grammar("json_schema", json.dumps(required), "guided"))


@pytest.mark.parametrize("least", [MAX_OPTIONAL])
def test_as_many_as_may_be_can_be_followed(least: int) -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(least)}}
    grammar = Grammar("json_schema", json.dumps(many), "guided")
    grammars().compile(grammar)
    constraint = grammars().constraint(grammar)
    for token in tiny().tokenizer.encode('{"p7":"x","p9":"'):
        assert constraint.accept(token) == ""
        constraint.allowed(1)
        assert constraint.fault == ""


def test_the_engines_thread_compiles_nothing_that_was_compiled_before() -> None:
    grammar = Grammar("regex", "[a-f]{3}-[0-9]{2}", "guided")
    kept: list[object] = []
    thread = Thread(target=lambda: kept.append(grammars().compile(grammar)))
    thread.start()
    thread.join()
    before = grammars().compiled_inline
    [answer] = answers(engine(), [Request(PROMPT, 10, HOT, grammar=grammar)])
    assert len(answer) > 5
    assert grammars().compiled_inline == before
    answers(engine(), [Request(PROMPT, 10, HOT, grammar=Grammar("regex", "[a-e]{3}", "guided"))])
    assert grammars().compiled_inline == before + 1, "a follower, and a test, have nobody who compiles for them"


def test_what_is_in_use_is_found_however_much_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars(), "_recent", LruCache(0))
    grammar = Grammar("regex", "x{2,4}", "guided")
    kept, before = grammars().compile(grammar), grammars().compiled_inline
    grammars().constraint(grammar)
    assert grammars().compiled_inline == before
    del kept
    grammars().constraint(grammar)
    assert grammars().compiled_inline == before + 1


def test_rows_of_one_grammar_do_not_move_each_other() -> None:
    grammar = Grammar("regex", "ab", "guided")
    kept = grammars().compile(grammar)
    first, second = (grammars().constraint(grammar) for _ in range(2))
    a, b = (tiny().tokenizer.encode(letter)[0] for letter in "ab")
    assert first.accept(a) == second.accept(a) == first.accept(b) == second.accept(b) == ""
    assert kept.nbytes > 0


def test_a_fault_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Grammar("json_schema", '{"type": "odd"}', "guided")
    for param in ("guided", "tools"):
        with pytest.raises(RequestFailed) as refused:
            grammars().compile(Grammar(wrong.kind, wrong.source, param))
        assert refused.value.problem.param == param
        monkeypatch.setattr(grammars(), "_compile", lambda *_: pytest.fail("it was tried again"))


def test_recent_forgets_the_oldest() -> None:
    recent: LruCache[str] = LruCache(10)
    recent.put("a", "A", 4)
    recent.put("b", "B", 4)
    assert recent.get("a") == "A"
    recent.put("c", "C", 4)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), recent.nbytes) == ("A", None, "C", 8)
    recent.put("a", "A", 11)
    assert (recent.get("a"), recent.nbytes) == (None, 0)


@pytest.mark.parametrize("broken", ["script", "python", "nothing"])
def test_where_no_process_can_be_started_grammars_are_compiled_without_it(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may forbid it. It is tried once, and said once."""
    if broken == "script":
        monkeypatch.setattr(trial_process, "SCRIPT", tmp_path / "gone.py")
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "gone") if broken == "python" else "")
    loaded = load(Settings(model=str(save("llama", tmp_path / "model"))), lambda _: None)
    assert loaded.tokenizer.grammars is not None
    for source in ("ab", "cd"):
        loaded.tokenizer.grammars.compile(Grammar("regex", source))
    [line] = caplog.messages
    assert "compiled without a trial" in line
    with pytest.raises(RequestFailed, match="need a process of their own"):
        loaded.tokenizer.grammars.compile(Grammar("lark", rules(6000), "guided"))


def test_a_process_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling without it is only for machines where there can be none: what it is for would end the server."""
    slow = trial_process.TrialProcess(lambda: {"tokens": ["a", "</s>"], "specials": [1], "eos": [1]})
    monkeypatch.setattr(trial_process, "START_S", 0.0)
    with pytest.raises(trial_process.TrialFailedError, match="did not start within 0 s") as failed:
        slow.fault("start: A", None, 5.0)
    assert failed.value.slow
    monkeypatch.setattr(trial_process, "START_S", 60.0)
    assert slow.fault('start: "a"', None, 5.0) == ""


@pytest.mark.parametrize(
    ("kind", "source"),
    [("regex", "a{{{}}}"), ("lark", "start: /a{{{}}}/"), ("json_schema", '{{"type": "string", "pattern": "a{{{}}}"}}')],
)
def test_few_regular_expressions_are_kept_since_each_grows(
    kind: GrammarKind, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their length says nothing of what they take: thousands of them, each with another number, would take all memory."""
    recent = LruCache[Any](RECENT_BYTES)
    monkeypatch.setattr(grammars(), "_recent", recent)
    for number in range(2, 40):
        grammars().compile(Grammar(kind, source.format(number), "guided"))
    kept = [grammars()._recent.get((kind, source.format(number), (), (), "", False)) for number in range(2, 40)]
    assert [found is not None for found in kept] == [False] * 23 + [True] * 15
    grammars().compile(Grammar("json_schema", '{"type": "boolean"}', "guided"))
    assert recent.nbytes <= RECENT_BYTES
