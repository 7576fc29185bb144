"""What compiling a grammar may cost, and whom: a process of its own goes first, and the engine's
thread compiles nothing."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Thread
from typing import Any

import pytest

from tests.engine.driver import Request, answers
from tests.engine.test_grammar import HOT, PROMPT, engine, tiny
from tests.families import save
from trouper import RequestFailed, Settings
from trouper.engine.grammars import grammar_compiler, trial_process
from trouper.engine.grammars.grammar_compiler import RECENT_BYTES, Grammars
from trouper.engine.grammars.schema_faults import MAX_OPTIONAL
from trouper.engine.grammars.token_masks import LruCache
from trouper.engine.loading.model_loading import load
from trouper.protocol.grammar import Grammar, GrammarKind


def grammars() -> Grammars:
    found = tiny().tokenizer.grammars
    assert found is not None
    return found


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.at = 10.0

    def monotonic(self) -> float:
        return self.at


def load_grammars() -> Grammars:
    """New ones, which have compiled nothing and have no process."""
    found = grammars()
    return Grammars(found._vocabulary, found._size, found._eos)


def chain(length: int) -> Any:
    """Definitions that refer to one another."""
    made: Any = {
        f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)
    }
    return {"$defs": made | {f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def rules(length: int) -> str:
    return (
        "start: r0\n"
        + "\n".join(f'r{n}: "{n}" | "x" r{n + 1}' for n in range(length))
        + f'\nr{length}: "y"'
    )


@pytest.mark.parametrize(
    ("kind", "source"),
    [("json_schema", json.dumps(chain(1500))), ("lark", rules(6000))],
    ids=["json_schema", "lark"],
)
def test_a_grammar_that_ends_the_process_that_compiles_it_is_refused(
    kind: GrammarKind, source: str
) -> None:
    """llguidance recurses over rules, and a stack that overflows is no exception. The next one is
    compiled all the same."""
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


def test_a_grammar_that_took_too_long_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine may have been busy. Until then it costs nothing, however often it comes."""
    made = grammars()
    monkeypatch.setattr(trial_process, "SLOW_KEPT_S", 1000.0)
    monkeypatch.setattr(grammar_compiler, "time", clock := Clock())
    grammar = Grammar("regex", "|".join(f"{n}[a-z]*{n}" for n in range(2000)), "guided")
    with pytest.raises(RequestFailed):
        made.compile(grammar, 0.0)
    with monkeypatch.context() as untried:
        untried.setattr(made, "_compile", lambda *_: pytest.fail("it was tried again"))
        with pytest.raises(RequestFailed, match="more than 0 s") as refused:
            made.compile(grammar, 60)
    assert refused.value.problem.status == 400
    clock.at += 1000.0
    made.compile(grammar, 60)


def test_properties_that_make_the_second_token_too_dear_are_refused_before_it() -> None:
    """An object takes four items for each property that is not required, and only behind its
    brace."""
    many: Any = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}}
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(Grammar("json_schema", json.dumps({"items": many}), "guided"))
    assert refused.value.problem.param == "guided.items"
    assert "600 of its properties are not required" in refused.value.problem.message
    halves = [{"properties": dict([*many["properties"].items()][start::2])} for start in (0, 1)]
    with pytest.raises(RequestFailed) as refused:
        grammars().compile(
            Grammar("json_schema", json.dumps({"type": "object", "allOf": halves}), "guided")
        )
    assert "items" in refused.value.problem.message, (
        "the process that goes first takes a step more than the first"
    )
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
    assert grammars().compiled_inline == before + 1, (
        "a follower, and a test, have nobody who compiles for them"
    )


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
    assert kept.kept.nbytes > 0  # type: ignore[attr-defined]


def test_a_fault_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Grammar("json_schema", '{"type": "odd"}', "guided")
    for param in ("guided", "tools"):
        with pytest.raises(RequestFailed) as refused:
            grammars().compile(Grammar(wrong.kind, wrong.source, param))
        assert refused.value.problem.param == f"{param}.type"
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
    """A container may forbid it. It is said once, and tried again after a while."""
    monkeypatch.setattr(trial_process, "time", clock := Clock())
    with monkeypatch.context() as without:
        if broken == "script":
            without.setattr(trial_process, "SCRIPT", tmp_path / "gone.py")
        else:
            without.setattr(sys, "executable", str(tmp_path / "gone") if broken == "python" else "")
        loaded = load(Settings(model=str(save("llama", tmp_path / "model"))), lambda _: None)
        assert loaded.tokenizer.grammars is not None
        for source in ("ab", "cd"):
            loaded.tokenizer.grammars.compile(Grammar("regex", source))
        [line] = caplog.messages
        assert "compiled without a trial" in line
        with pytest.raises(RequestFailed, match="need a process of their own"):
            loaded.tokenizer.grammars.compile(FLAT)
    clock.at += trial_process.AGAIN_S
    loaded.tokenizer.grammars.compile(FLAT)


FLAT = Grammar("choice", json.dumps([f"option {n}" for n in range(700)]), "guided")
"""Long, and easy to compile."""
VOCABULARY = {"tokens": ["a", "</s>"], "specials": [1], "eos": [1]}


def test_a_process_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling without it is only for machines where there can be none: what it is for would end
    the server."""
    trials = trial_process.TrialPool(lambda: VOCABULARY)
    with monkeypatch.context() as slow:
        slow.setattr(trial_process, "START_S", 0.0)
        with pytest.raises(trial_process.TrialUnavailableError, match="did not start within 0 s"):
            trials.fault("start: A", None, 5.0)
    assert trials.fault('start: "a"', None, 5.0) == ""


def test_a_process_that_reads_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped, for example: a vocabulary is larger than a pipe."""
    script = tmp_path / "script.py"
    script.write_text("import signal; signal.pause()")
    monkeypatch.setattr(trial_process, "SCRIPT", script)
    monkeypatch.setattr(trial_process, "START_S", 0.2)
    trials = trial_process.TrialPool(lambda: VOCABULARY | {"tokens": ["abcdefgh"] * 50_000})
    errors: list[Exception] = []

    def work() -> None:
        try:
            trials.fault("start: A", None, 5.0)
        except trial_process.TrialUnavailableError as error:
            errors.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert "did not start within" in str(errors)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_a_moment_without_processes_or_descriptors_is_no_fault_of_a_grammar(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a 503, small or large; the next one is compiled."""

    def lacking() -> Any:
        raise OSError(number, os.strerror(number))

    for grammar in (Grammar("regex", "[ab]{7}", "guided"), FLAT):
        made = load_grammars()
        with monkeypatch.context() as short:
            short.setattr(trial_process, "_start", lacking)
            with pytest.raises(RequestFailed, match=os.strerror(number)) as refused:
                made.compile(grammar)
        assert (refused.value.problem.status, refused.value.problem.code) == (
            503,
            "system_shortage",
        )
        made.compile(grammar)


def test_a_trial_that_is_killed_from_outside_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where memory is short, Linux ends this process first."""
    made = load_grammars()
    start = trial_process._start

    def killed() -> Any:
        (process := start()).kill()
        process.wait()
        return process

    with monkeypatch.context() as short:
        short.setattr(trial_process, "_start", killed)
        with pytest.raises(RequestFailed, match="from outside") as refused:
            made.compile(Grammar("regex", "[ab]{8}", "guided"))
    assert refused.value.problem.status == 503
    made.compile(Grammar("regex", "[ab]{8}", "guided"))


def test_a_grammar_does_not_wait_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process is started for it."""
    made, outcomes, started = load_grammars(), list[int](), list[Any]()
    start, has_started = trial_process._start, ThreadEvent()

    def noted() -> Any:
        started.append(process := start())
        has_started.set()
        return process

    def slow() -> None:
        with pytest.raises(RequestFailed) as refused:
            made.compile(Grammar("regex", "a?" * 50_000, "guided"), 60.0)
        outcomes.append(refused.value.problem.status)

    monkeypatch.setattr(trial_process, "_start", noted)
    thread = Thread(target=slow)
    thread.start()
    assert has_started.wait(60)
    made.compile(Grammar("regex", "[ab]{9}", "guided"))
    assert (outcomes, len(started)) == ([], 2)
    started[0].kill()
    thread.join()
    assert outcomes == [503]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "a{{{}}}"),
        ("lark", "start: /a{{{}}}/"),
        ("json_schema", '{{"type": "string", "pattern": "a{{{}}}"}}'),
    ],
)
def test_few_regular_expressions_are_kept_since_each_grows(
    kind: GrammarKind, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their length says nothing of what they take: thousands of them, each with another number,
    would take all memory."""
    recent = LruCache[Any](RECENT_BYTES)
    monkeypatch.setattr(grammars(), "_recent", recent)
    for number in range(2, 40):
        grammars().compile(Grammar(kind, source.format(number), "guided"))
    kept = [
        grammars()._recent.get(grammar_compiler._key(Grammar(kind, source.format(number))))
        for number in range(2, 40)
    ]
    assert [found is not None for found in kept] == [False] * 23 + [True] * 15
    grammars().compile(Grammar("json_schema", '{"type": "boolean"}', "guided"))
    assert recent.nbytes <= RECENT_BYTES
