"""RequestIntake alone: what it refuses, and that the request in hand is always answered."""

from __future__ import annotations

from functools import partial
from threading import Event, get_ident
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.actors.bench import Opened, Replies, code, generate, heard, running
from tests.fakes import EOS, ByteTokenizer, FakeEngine, card
from tests.web.serving import eventually
from trouper import (
    ChatPrompt,
    Generate,
    RequestFailed,
    Sampling,
    Settings,
    TextPrompt,
    TokenPrompt,
)
from trouper.actors.request_intake import prepare, take_in_requests
from trouper.actors.runtime.prompt_tokenizing import LONG_LANE, LONG_TEXT
from trouper.actors.runtime.submission import Submission
from trouper.actors.runtime.worker_threads import SIZES
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.grammar import MAX_SOURCE, FollowedGrammar, Grammar
from trouper.protocol.model import LoadedModel
from trouper.protocol.problems import Problem

MODEL = LoadedModel(card(context_length=100), ByteTokenizer())
HELLO = ({"role": "user", "content": "hello"},)


class WithoutTemplate(ByteTokenizer):
    has_chat_template = False


async def prepared(
    opened: Opened, request: Generate, model: LoadedModel = MODEL, settings: Settings | None = None
) -> Submission:
    submission, _ = opened.submission(request)
    try:
        return prepare(submission, model, settings or Settings(max_prompt_tokens=80))
    finally:
        submission.close()


async def refused(opened: Opened, request: Generate, model: LoadedModel = MODEL) -> Problem:
    with pytest.raises(RequestFailed) as failed:
        await prepared(opened, request, model)
    assert failed.value.problem.status == 400
    return failed.value.problem


async def test_f1_a_chats_tokens_are_the_templates_own(opened: Opened) -> None:
    admitted = await prepared(opened, generate(prompt=ChatPrompt(HELLO)))
    assert bytes(admitted.prompt) == b"<user>hello<assistant>"


@pytest.mark.parametrize(
    ("more", "param", "error"),
    [
        ({"prompt": TokenPrompt(())}, "prompt", "empty_prompt"),
        ({"prompt": TextPrompt("")}, "prompt", "empty_prompt"),
        ({"prompt": TokenPrompt((1, -1))}, "prompt", "invalid_token"),
        ({"prompt": TokenPrompt((1, EOS + 1))}, "prompt", "invalid_token"),
        ({"prompt": TokenPrompt((1, 2**70))}, "prompt", "invalid_token"),
        ({"sampling": Sampling(logit_bias=((EOS + 1, 1.0),))}, "logit_bias", "invalid_token"),
        ({"prompt": TokenPrompt((1,) * 81)}, "prompt", "context_length_exceeded"),
        (
            {"prompt": ChatPrompt(({"role": "user", "content": "x" * 81},))},
            "messages",
            "context_length_exceeded",
        ),
        ({"max_tokens": 98}, "max_tokens", "context_length_exceeded"),
        ({"prompt": TextPrompt("lone \ud800 surrogate")}, "prompt", "invalid_text"),
        (
            {"prompt": ChatPrompt(({"role": "user", "content": "\udfff"},))},
            "messages",
            "invalid_text",
        ),
        (
            {"prompt": ChatPrompt(({"role": "user", "content": [{"text": "\udfff"}]},))},
            "messages",
            "invalid_text",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    opened: Opened, more: dict[str, Any], param: str, error: str
) -> None:
    problem = await refused(opened, generate(**more))
    assert (problem.param, problem.code) == (param, error)


async def test_a_prompt_that_fills_the_context_is_refused_by_name(opened: Opened) -> None:
    settings = Settings()
    for prompt, param in (
        (TokenPrompt((1,) * 100), "prompt"),
        (ChatPrompt(HELLO * 10), "messages"),
    ):
        with pytest.raises(RequestFailed) as failed:
            await prepared(opened, generate(prompt=prompt), settings=settings)
        assert failed.value.problem.param == param


async def test_a_model_without_a_chat_template_refuses_chats(opened: Opened) -> None:
    problem = await refused(
        opened, generate(prompt=ChatPrompt(HELLO)), LoadedModel(card(), WithoutTemplate())
    )
    assert (problem.param, problem.code) == ("messages", "no_chat_template")


@pytest.mark.parametrize(("asked", "most"), [(None, 40), (7, 7), (97, 97)])
async def test_how_long_an_answer_may_be(opened: Opened, asked: int | None, most: int) -> None:
    settings = Settings(default_max_tokens=40)
    admitted = await prepared(opened, generate(max_tokens=asked), settings=settings)
    assert admitted.max_tokens == most


async def test_the_default_length_ends_where_the_context_does(opened: Opened) -> None:
    settings = Settings(default_max_tokens=500, max_kv_size=50)
    assert (await prepared(opened, generate(tokens=10), settings=settings)).max_tokens == 40


@pytest.mark.parametrize(("context", "most"), [(4096, 4086), (131_072, 32_768)])
async def test_a_length_that_nobody_names(opened: Opened, context: int, most: int) -> None:
    model = LoadedModel(card(context), ByteTokenizer())
    assert (await prepared(opened, generate(tokens=10), model, Settings())).max_tokens == most


async def test_as_much_as_there_is_room_for(opened: Opened) -> None:
    """Instead of a refusal, if the request says so; a prompt without any room behind it is refused
    all the same."""
    settings = Settings(max_kv_size=50)
    wish = attrs.evolve(generate(tokens=10, max_tokens=500), as_room_allows=True)
    assert (await prepared(opened, wish, settings=settings)).max_tokens == 40
    with pytest.raises(RequestFailed):
        await prepared(opened, attrs.evolve(wish, as_room_allows=False), settings=settings)
    with pytest.raises(RequestFailed):
        await prepared(opened, attrs.evolve(wish, prompt=TokenPrompt((1,) * 50)), settings=settings)


async def intake_with(
    opened: Opened, nursery: trio.Nursery, room: int, tokenizer: ByteTokenizer, *requests: Generate
) -> tuple[list[Replies], trio.MemoryReceiveChannel[Submission]]:
    outside, inbox = trio.open_memory_channel[Any](len(requests))
    admitted, admitted_in = trio.open_memory_channel[Submission](room)
    answers = []
    for request in requests:
        submission, answer = opened.submission(request)
        outside.send_nowait(submission)
        answers.append(answer)
    outside.close()
    model = LoadedModel(card(), tokenizer)
    nursery.start_soon(partial(take_in_requests, inbox, admitted, model, Settings()))
    return answers, admitted_in


async def test_a_refusal_costs_nobody_else_anything(opened: Opened) -> None:
    async with trio.open_nursery() as nursery:
        requests = (generate("bad", tokens=0), generate("good"))
        [bad, _], admitted = await intake_with(opened, nursery, 2, ByteTokenizer(), *requests)
        good = await admitted.receive()
        assert good.request.request_id == "good"
        assert code(heard(bad)) == "empty_prompt"
        good.close()


class Panic(BaseException):
    """As PyO3 raises what was a panic in Rust: no `Exception`."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
async def test_a_request_that_cannot_be_prepared_costs_nobody_else_anything(
    opened: Opened, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
            if text == "secret":
                raise error(f"cannot encode {text}")
            return super().encode(text)

    async with trio.open_nursery() as nursery:
        requests = (
            generate("bad", prompt=TextPrompt("secret")),
            generate("good", prompt=TextPrompt("hello")),
        )
        [bad, _], admitted = await intake_with(opened, nursery, 2, Breaking(), *requests)
        good = await admitted.receive()
        good.close()
        assert code(heard(bad)) == "intake_failed"
    [line] = caplog.messages
    assert line.startswith(
        f"request bad could not be prepared: {error.__name__} at test_intake.py:"
    )


async def test_the_request_in_hand_is_answered_when_intake_is_cancelled(opened: Opened) -> None:
    """It waits for the scheduler then, whose inbox is full; undelivered, it is still intake's."""
    async with trio.open_nursery() as nursery:
        [answer], _ = await intake_with(opened, nursery, 0, ByteTokenizer(), generate())
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="the test")
    assert code(heard(answer)) == "draining"


@pytest.mark.parametrize(
    ("logits", "limited"), [(EOS + 1, True), (ord("t") + 1, True), (ord("t"), False)]
)
async def test_a_model_that_cannot_write_the_end_of_its_reasoning_has_no_limit_on_it(
    opened: Opened, logits: int, limited: bool
) -> None:
    """Its tokenizer has a token more than it has logits. To force that token would end the
    engine."""
    model = LoadedModel(attrs.evolve(card(context_length=100), vocab_size=logits), ByteTokenizer())
    admitted = await prepared(
        opened, generate(thinking_token_budget=3, prompt=TokenPrompt((1, 2))), model
    )
    assert (admitted.thinking is not None) == limited


async def test_d13_drafts_that_cannot_be_are_refused(opened: Opened) -> None:
    """A model whose state cannot be taken back: who asks for drafts is told, who does not gets its
    answer without."""
    model = LoadedModel(
        attrs.evolve(card(), capabilities=Capabilities(drafts="recurrent state")), ByteTokenizer()
    )
    problem = await refused(opened, generate(speculation="ngram"), model)
    assert (problem.param, problem.code) == ("speculation", "speculation_not_supported")
    assert "recurrent state" in problem.message
    for how in ("off", None):
        await prepared(opened, generate(speculation=how), model)


LONG = "x" * (LONG_TEXT + 1)
SLOW = SIZES["slow"].threads


class Held(ByteTokenizer):
    """What is long, and every grammar, waits until the test lets it go."""

    def __init__(self) -> None:
        self.free = Event()
        self.texts: list[str] = []
        self.threads: set[int] = set()

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if len(text) > LONG_TEXT:
            self._hold(text)
        return super().encode(text)

    def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
        self._hold(grammar.source)
        return FollowedGrammar(grammar)

    def _hold(self, text: str) -> None:
        self.threads.add(get_ident())
        self.texts.append(text)
        assert self.free.wait(60)


ROOMY = Settings(max_prompt_tokens=200_000)
BESIDE = [
    {"prompt": TextPrompt(LONG)},
    {"prompt": ChatPrompt(({"role": "user", "content": LONG},))},
    {"prompt": TextPrompt("x"), "grammar": Grammar("regex", "a+")},
]


def asked(
    submissions: Opened, *requests: Generate
) -> tuple[trio.MemoryReceiveChannel[Submission], list[Replies]]:
    """All of them in the inbox of an intake, which is closed behind them."""
    outside, inbox = trio.open_memory_channel[Submission](len(requests))
    answers = []
    for request in requests:
        submission, answer = submissions.submission(request)
        outside.send_nowait(submission)
        answers.append(answer)
    outside.close()
    return inbox, answers


@pytest.mark.parametrize("more", BESIDE)
async def test_what_takes_long_is_done_beside_and_is_overtaken(
    opened: Opened, more: dict[str, Any]
) -> None:
    held, short = Held(), [generate(f"short {n}", prompt=TextPrompt("hello")) for n in range(3)]
    model = LoadedModel(card(context_length=200_000), held)
    inbox, _ = asked(opened, generate("long", **more), *short)
    admitted, admitted_in = trio.open_memory_channel[Submission](4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_in_requests, inbox, admitted, model, ROOMY)
        for request in short:
            one = await admitted_in.receive()
            assert one.request == request, "in the order of their arrival"
            one.close()
        held.free.set()
        late = await admitted_in.receive()
        late.close()
    assert late.request.request_id == "long"
    assert held.threads and get_ident() not in held.threads
    assert (late.compiled_grammar is not None) == ("grammar" in more)


async def test_a_quick_one_does_not_wait_for_slow_ones(opened: Opened) -> None:
    held = Held()
    model = LoadedModel(card(context_length=2_000_000), held)
    slow = [generate(f"slow {n}", prompt=TextPrompt("y" * (LONG_LANE + 1 + n))) for n in range(6)]
    inbox, _ = asked(opened, *slow, generate("quick", prompt=TextPrompt(LONG)))
    admitted, admitted_in = trio.open_memory_channel[Submission](8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            take_in_requests, inbox, admitted, model, Settings(max_prompt_tokens=2_000_000)
        )
        await eventually(lambda: LONG in held.texts and len(held.texts) > SLOW)
        assert len(held.texts) == SLOW + 1, "so many threads work at a time"
        held.free.set()
        for _ in range(7):
            (await admitted_in.receive()).close()


async def test_whoever_leaves_while_it_waits_for_its_turn_costs_nothing(opened: Opened) -> None:
    held = Held()
    model = LoadedModel(card(context_length=2_000_000), held)
    slow = [
        generate(f"slow {n}", prompt=TextPrompt("y" * (LONG_LANE + 1 + n))) for n in range(SLOW + 1)
    ]
    inbox, answers = asked(opened, *slow)
    admitted, admitted_in = trio.open_memory_channel[Submission](8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            take_in_requests, inbox, admitted, model, Settings(max_prompt_tokens=2_000_000)
        )
        await eventually(lambda: len(held.texts) == SLOW)
        answers[-1].close()
        held.free.set()
        for _ in range(SLOW):
            (await admitted_in.receive()).close()
    assert len(held.texts) == SLOW


@pytest.mark.parametrize("text", ["hello", LONG])
async def test_whoever_left_before_its_prompt_was_tokenized_is_not_admitted(
    opened: Opened, text: str
) -> None:
    """What the server holds for a request is given back when its client leaves: more would be held
    for ever."""
    held, admits = Held(), list[int]()
    submission, answer = opened.submission(generate(prompt=TextPrompt(text)))

    def admit(prompt_tokens: int, max_tokens: int, named: bool) -> int:
        admits.append(prompt_tokens)
        return max_tokens

    outside, inbox = trio.open_memory_channel[Submission](1)
    outside.send_nowait(attrs.evolve(submission, admit=admit))
    outside.close()
    admitted, admitted_in = trio.open_memory_channel[Submission](1)
    model = LoadedModel(card(context_length=200_000), held)
    async with trio.open_nursery() as nursery:
        if text == LONG:
            nursery.start_soon(take_in_requests, inbox, admitted, model, ROOMY)
            await eventually(lambda: held.texts == [LONG])
        answer.close()
        held.free.set()
        if text != LONG:
            nursery.start_soon(take_in_requests, inbox, admitted, model, ROOMY)
    assert not admits and not admitted_in.statistics().current_buffer_used


@pytest.mark.parametrize("together", [False, True])
async def test_a_thread_keeps_its_turn_when_its_client_leaves(together: bool) -> None:
    """Else one that leaves again and again has all threads, and others have none."""
    held, threads = Held(), SIZES["quick"].threads
    long = [TextPrompt(LONG), TextPrompt("y")]
    async with running(FakeEngine(tokenizer=held)) as runtime, trio.open_nursery() as staying:
        tokenize = partial(runtime.tokenize_together, long) if together else None
        async with trio.open_nursery() as leaving:
            for _ in range(threads):
                leaving.start_soon(tokenize or partial(runtime.tokens, long[0]))
            await eventually(lambda: len(held.texts) == threads)
            leaving.cancel_scope.cancel()
            staying.start_soon(runtime.tokens, long[0])
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
            assert runtime._lanes["quick"].waiting == 1
            held.free.set()


async def test_more_than_may_queue_are_not_taken_in(opened: Opened) -> None:
    held = Held()
    model = LoadedModel(card(context_length=2_000_000), held)
    settings = Settings(max_prompt_tokens=2_000_000, max_queue_size=1)
    slow = [
        generate(f"slow {n}", prompt=TextPrompt("y" * (LONG_LANE + 1))) for n in range(SLOW + 2)
    ]
    outside, inbox = trio.open_memory_channel[Submission](len(slow))
    admitted, admitted_in = trio.open_memory_channel[Submission](8)
    answers = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_in_requests, inbox, admitted, model, settings)
        for request in slow:
            submission, answer = opened.submission(request)
            outside.send_nowait(submission)
            answers.append(answer)
            await wait_all_tasks_blocked()
        assert code(heard(answers.pop())) == "queue_full"
        assert not any(heard(answer) for answer in answers)
        outside.close()
        held.free.set()
        for _ in range(SLOW + 1):
            (await admitted_in.receive()).close()


async def test_what_crashes_on_a_thread_costs_those_beside_it_nothing(opened: Opened) -> None:
    class Breaks(Held):
        def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
            raise Panic("the compiler died")

    held = Breaks()
    model = LoadedModel(card(context_length=200_000), held)
    bad = generate(prompt=TextPrompt("x"), grammar=Grammar("regex", "a+"))
    inbox, [first, _] = asked(opened, bad, generate(prompt=TextPrompt(LONG)))
    admitted, admitted_in = trio.open_memory_channel[Submission](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_in_requests, inbox, admitted, model, ROOMY)
        held.free.set()
        (await admitted_in.receive()).close()
    assert code(heard(first)) == "intake_failed"


async def test_a_grammar_may_not_be_longer_than_any_is_compiled(opened: Opened) -> None:
    problem = await refused(
        opened, generate(grammar=Grammar("lark", "x" * (MAX_SOURCE + 1), "tools"))
    )
    assert (problem.param, problem.code) == ("tools", "invalid_grammar")
    assert str(MAX_SOURCE) in problem.message
