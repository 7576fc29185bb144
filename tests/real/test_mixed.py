"""Rows of which no two have the same parameters, in one batch: each answers what it answers alone.

Tokens and log-probabilities, whoever joins, leaves or is cancelled. Through the whole graph, with
the prefix cache on; alone is without it. A token that rounding alone could change may be another:
see `Shaken`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio

from tests.families import save
from tests.model.test_smollm import smollm
from tests.real.alone import Wishes, alone_of
from tests.real.serving import (
    CLOSE,
    Heard,
    Shaken,
    ShakenKv,
    apart,
    ask,
    assert_close,
    common,
    hear,
    running,
)
from tests.real.wishes import wishes
from tests.reuse.serving import text
from trouper import Answer, Generate, RequestFailed, Runtime
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.grammar import Grammar
from trouper.protocol.plans import Plan

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
TOKENS = 24
SHAKES = 8
LEAVES = "ignore_eos"
"""Leaves in the middle of its answer, whatever becomes of the others."""
PROMPTS = [text(length, length) for length in (3, 40, 17, 1, 70, 33, 100, 8)]


async def may_depart(
    path: str | None, wish: Generate, wanted: Heard, place: int, **settings: Any
) -> bool:
    """Whether rounding can make this row say something else from here on. Quantized KV needs more
    tries: most of them write the code that decides as it was."""
    async with running(path, Shaken, cache_memory=0, **settings) as runtime:
        for _ in range(SHAKES * (8 if settings.get("kv_bits") else 1)):
            [shaken] = await ask(runtime, wish)
            if common(shaken.tokens, wanted.tokens) == place < len(wanted.tokens):
                return True
    return False


async def closeness(
    path: str | None, wish: Generate, heard: Heard, wanted: Heard, **settings: Any
) -> float:
    """How close log-probabilities must be. Where rounding moves a value over the edge of its step,
    quantized KV makes more of it than plain KV does; how much, the row itself shows: by what it
    says alone with KV that is off by a little."""
    own = max(
        apart(heard.logprobs, wanted.logprobs), apart(heard.prompt_logprobs, wanted.prompt_logprobs)
    )
    if own < CLOSE or not settings.get("kv_bits"):
        return CLOSE
    before = ShakenKv.shakes
    async with running(path, ShakenKv, cache_memory=0, **settings) as runtime:
        shaken = 0.0
        # As in `may_depart`: a code that decides is seldom written otherwise.
        for _ in range(SHAKES * 8):
            [one] = await ask(runtime, wish)
            its = (
                apart(one.logprobs, wanted.logprobs),
                apart(one.prompt_logprobs, wanted.prompt_logprobs),
            )
            shaken = max(shaken, *its)
            if own < CLOSE + shaken:
                break
    assert ShakenKv.shakes > before, "nothing was off"
    return CLOSE + shaken


async def assert_as_alone(
    path: str | None, wish: Generate, heard: Heard, wanted: Heard, **settings: Any
) -> None:
    told = f"{wish.request_id}: {heard} where {wanted} is right"
    same = common(heard.tokens, wanted.tokens)
    close = await closeness(path, wish, heard, wanted, **settings)
    assert_close(
        heard.logprobs[:same], wanted.logprobs[: min(same, len(heard.logprobs))], told, close
    )
    if heard.tokens or heard.reason:
        assert_close(heard.prompt_logprobs, wanted.prompt_logprobs, told, close)
    if same < len(heard.tokens):
        assert await may_depart(path, wish, wanted, same, **settings), told
    elif heard.reason is None:
        assert wanted.text.startswith(heard.text), told
    else:
        assert (heard.text, heard.tokens) == (wanted.text, wanted.tokens), told
        assert (heard.reason, heard.matched) == (wanted.reason, wanted.matched), told


Moments = Mapping[int, list[Callable[[], None]]]


def watched(moments: Moments) -> type[StepEngine]:
    """Lets things happen on Trio's thread while the engine is about to launch these of the plans
    with work."""
    numbers, token = count(), trio.lowlevel.current_trio_token()

    class Watched(StepEngine):
        def launch(self, plan: Plan) -> Launched:
            for moment in moments.get(next(numbers), ()) if plan.has_work else ():
                trio.from_thread.run_sync(moment, trio_token=token)
            return super().launch(plan)

    return Watched


class Clients:
    """Each joins at a moment, and some leave at another, whatever has become of their request by
    then."""

    def __init__(self, asked: Wishes, dice: random.Random, steps: int) -> None:
        self.asked = asked
        self.heard: dict[str, Heard] = {}
        self.moments: dict[int, list[Callable[[], None]]] = {}
        self._joins = {name: trio.Event() for name in asked}
        self._answers: dict[str, Answer] = {}
        self._running = 0
        for name in dice.sample(sorted(asked), len(asked)):
            join = dice.randrange(steps)
            self.moments.setdefault(join, []).append(self._joins[name].set)
            if dice.random() < 1 / 3:
                leave = join + dice.randrange(1, steps)
                self.moments.setdefault(leave, []).append(lambda name=name: self._leave(name))  # type: ignore[misc]

    def _leave(self, name: str) -> None:
        if name in self._answers:
            self._answers[name].close()

    async def play(self, runtime: Runtime) -> None:
        async with trio.open_nursery() as nursery:
            for name in self.asked:
                nursery.start_soon(self._client, runtime, name)
            self._wake()

    async def _client(self, runtime: Runtime, name: str) -> None:
        await self._joins[name].wait()
        self._running += 1
        self._answers[name] = await runtime.submit(self.asked[name])
        self.heard[name] = await hear(self._answers[name], 5 if name == LEAVES else None)
        self._running -= 1
        if not self._running:
            self._wake()

    def _wake(self) -> None:
        """Without plans there are no moments, so somebody begins."""
        waiting = [event for event in self._joins.values() if not event.is_set()]
        if waiting:
            waiting[0].set()


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(request.param, tmp_path_factory.mktemp(request.param)))


async def tiny_wishes(path: str) -> tuple[Wishes, dict[str, Heard]]:
    async with running(path) as runtime:
        asked = wishes(runtime.tokenizer, PROMPTS, TOKENS)
    return asked, await alone_of(path, asked)


async def assert_all_as_alone(
    path: str | None, asked: Wishes, heard: Mapping[str, Heard], alone: Mapping[str, Heard]
) -> None:
    for name, mine in heard.items():
        await assert_as_alone(path, asked[name], mine, alone[name])


tinies = pytest.mark.parametrize("tiny", ["llama", "gpt_oss", "jamba"], indirect=True)


@tinies
@pytest.mark.long(but=("llama",))
async def test_all_together(tiny: str) -> None:
    asked, alone = await tiny_wishes(tiny)
    async with running(tiny) as runtime:
        together = dict(zip(asked, await ask(runtime, *asked.values()), strict=True))
    await assert_all_as_alone(tiny, asked, together, alone)


@tinies
@pytest.mark.long(but=("llama", "jamba"))
async def test_the_wishes_are_what_they_say(tiny: str) -> None:
    """Else the comparison would show little: what ends by a stop does, and no parameter is without
    effect."""
    asked, heard = await tiny_wishes(tiny)
    assert isinstance(heard["stop"].matched, str) and isinstance(
        heard["stop_token_ids"].matched, int
    )
    assert heard["eos"].reason == "stop" and heard["eos"].matched is None
    assert heard["ignore_eos"].reason == "length" and set(heard["eos"].tokens[-1:]) & set(
        heard["ignore_eos"].tokens
    )
    assert TOKENS > len(heard["min_tokens"].tokens) > TOKENS // 2
    assert {len(at.top) for at in heard["logprobs"].logprobs} == {20}
    assert len(heard["echo"].prompt_logprobs) == len(heard["echo"].prompt) - 1
    assert heard["regex"].reason == heard["choice"].reason == heard["lark"].reason == "stop"
    async with running(tiny) as runtime:
        for name in (
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "xtc",
            "dry",
            "logit_bias",
            "repetition_penalty",
        ):
            plain = attrs.evolve(asked["temperature"].sampling, seed=asked[name].sampling.seed)
            [without] = await ask(runtime, attrs.evolve(asked[name], sampling=plain))
            assert without.tokens != heard[name].tokens, name


@tinies
@pytest.mark.parametrize("seed", range(40 if LONG else 2))
@pytest.mark.long(but=("0-llama", "0-jamba"))
async def test_d3_d5_joining_and_leaving(tiny: str, seed: int) -> None:
    asked, alone = await tiny_wishes(tiny)
    clients = Clients(asked, random.Random(f"{Path(tiny).name} {seed}"), 2 * TOKENS)
    async with running(tiny, watched(clients.moments), prefill_step_size=32) as runtime:
        await clients.play(runtime)
    await assert_all_as_alone(tiny, asked, clients.heard, alone)
    assert clients.heard[LEAVES].reason is None


AMBIGUOUS = Grammar("lark", 'start: x\nx: "a" | x x | x x x | "a" x "b" | x "b" x')


async def test_a_row_whose_grammar_gives_up_fails_alone(tmp_path: Path) -> None:
    """What the parser's limits end is an error, never an answer that looks complete."""
    path = str(save("llama", tmp_path))
    async with running(path, cache_memory=0) as runtime:
        asked = wishes(runtime.tokenizer, PROMPTS, TOKENS)
        [wanted] = await ask(runtime, asked["schema"])
        doomed = attrs.evolve(
            asked["logit_bias"], grammar=AMBIGUOUS, max_tokens=400, ignore_eos=True
        )
        end = max(runtime.tokenizer.eos_token_ids)
        sampling = attrs.evolve(doomed.sampling, logit_bias=((end, -100.0),))
        answer = await runtime.submit(attrs.evolve(doomed, sampling=sampling))
        neighbour = await ask(runtime, asked["schema"])
        with pytest.raises(RequestFailed) as failed:
            await hear(answer)
    assert neighbour == [wanted]
    assert (failed.value.problem.status, failed.value.problem.code) == (400, "grammar_failed")


SOME = (
    "greedy",
    "top_k",
    "typical_p",
    "dry",
    "schema",
    "tool",
    "stop",
    "all penalties, greedy",
    "logprobs",
    "echo",
    "choice 0 of 3",
    "choice 1 of 3",
)
MORE = (
    (
        "top_p",
        "min_p",
        "xtc",
        "logit_bias",
        "regex",
        "lark",
        "min_tokens and stops",
        "choice 2 of 3",
    )
    if LONG
    else ()
)
"""Each step of the embedded model takes a tenth of a second, for one row or for all."""


@pytest.mark.long
async def test_the_embedded_model() -> None:
    words = smollm().tokenizer
    questions = [
        words.encode(text) for text in ("The sky is", "One, two,", "Tea", "A cat sat on the")
    ]
    every = wishes(words, questions, 3)
    asked = {name: every[name] for name in (*SOME, *MORE)}
    alone = await alone_of(None, asked)
    async with running(None) as runtime:
        together = dict(zip(asked, await ask(runtime, *asked.values()), strict=True))
    await assert_all_as_alone(None, asked, together, alone)


async def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A negative control: a batch whose rows see their neighbour's logits."""

    class Rolled(StepEngine):
        def _sample(self, logits: mx.array, spans: Spans | None = None) -> Any:
            return super()._sample(mx.concatenate([logits[1:], logits[:1]]), spans)

    path = str(save("llama", tmp_path))
    async with running(path) as runtime:
        asked = {
            name: wish
            for name, wish in wishes(runtime.tokenizer, PROMPTS, 6).items()
            if wish.grammar is None
        }
    alone = await alone_of(path, asked)
    async with running(path, Rolled) as runtime:
        together = dict(zip(asked, await ask(runtime, *asked.values()), strict=True))
    for name, wish in [*asked.items()][:3]:
        await assert_as_alone(path, wish, alone[name], alone[name])
        with pytest.raises(AssertionError):
            await assert_as_alone(path, wish, together[name], alone[name])
