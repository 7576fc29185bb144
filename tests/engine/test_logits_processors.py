"""Logits processors of an embedding program, named by requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.engine.driver import Driver, Request
from tests.engine.oracle import Foretelling
from tests.engine.test_exactness import PROMPTS, model_of
from tests.engine.test_resuming import assert_same, interrupted, whole
from tests.families import save
from tests.family_configs import VOCABULARY
from tests.real.serving import hear, running
from trouper import Generate, RequestFailed, Sampling, TokenPrompt, run_runtime
from trouper.engine.sampling.logits_processors import ProcessedRows
from trouper.engine.sampling.token_rows import RowTokens
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar

Calls = list[tuple[list[int], tuple[int, ...]]]


def even_only(tokens: mx.array, logits: mx.array) -> mx.array:
    """Only even tokens."""
    return mx.where(mx.arange(logits.shape[-1]) % 2 == 0, logits, -mx.inf)


def not_the_last_three(tokens: mx.array, logits: mx.array) -> mx.array:
    """In the form of mlx-lm's: changes its argument."""
    logits[:, tokens[-3:]] = -1e9
    return logits


def broken(tokens: mx.array, logits: mx.array) -> mx.array:
    raise ValueError("no such table")


def leaving(tokens: mx.array, logits: mx.array) -> mx.array:
    """What it raises is no `Exception`, as a panic of Rust code is none."""
    raise SystemExit("no licence")


PROCESSORS: dict[str, Callable[[mx.array, mx.array], Any]] = {
    "even": even_only,
    "apart": not_the_last_three,
    "broken": broken,
    "leaving": leaving,
    "narrow": lambda tokens, logits: logits[:, :5],
    "numpy": lambda tokens, logits: np.array(logits),
    "nothing": lambda tokens, logits: None,
    "numberless": lambda tokens, logits: logits * mx.nan,
    "one too many": lambda tokens, logits: mx.where(
        mx.arange(logits.shape[-1]) == 7, mx.nan, logits
    ),
    "forbidding": lambda tokens, logits: logits - mx.inf,
}
HOT = Sampling(temperature=1.0, seed=5, frequency_penalty=0.1)
REQUESTS = [
    Request(PROMPTS[0], 12, HOT, processors=("even",)),
    Request(PROMPTS[1], 12, Sampling(temperature=0), processors=("even", "apart")),
    Request(PROMPTS[2], 12, HOT),
    Request(PROMPTS[3], 12, Sampling(temperature=0, dry_multiplier=1.0), processors=("apart",)),
]


def engine(**more: Any) -> StepEngine:
    return StepEngine(model_of("llama"), VOCABULARY, processors=PROCESSORS, **more)


def alone(request: Request) -> list[int]:
    return Driver(engine()).play([request])[0].tokens


def test_they_change_their_rows_only() -> None:
    rows = Driver(engine()).play(
        [attrs.evolve(request, join=2 * place) for place, request in enumerate(REQUESTS)]
    )
    assert [row.tokens for row in rows] == [alone(request) for request in REQUESTS]
    assert not any(token % 2 for row in rows[:2] for token in row.tokens)
    assert any(token % 2 for token in rows[2].tokens)
    for row in (rows[1], rows[3]):
        said = [*row.request.prompt, *row.tokens]
        assert all(
            said[place] not in said[place - 3 : place]
            for place in range(len(row.request.prompt), len(said))
        )


def test_they_see_prompt_and_output() -> None:
    calls: Calls = []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append((tokens.tolist(), logits.shape))  # type: ignore[arg-type]
        return logits

    looked = StepEngine(model_of("llama"), VOCABULARY, processors={"look": look})
    [row] = Driver(looked).play([attrs.evolve(REQUESTS[2], processors=("look",))])
    assert calls[:12] == [
        ([*PROMPTS[2], *row.tokens[:place]], (1, VOCABULARY)) for place in range(12)
    ]
    assert row.tokens == alone(REQUESTS[2])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.long(but=("0",))
def test_rows_leave_and_resume(seed: int) -> None:
    wanted = whole(engine(), REQUESTS)
    assert_same(interrupted(engine(), REQUESTS, str(seed)), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_verified_with_them(seed: int) -> None:
    wanted = whole(engine(), REQUESTS)
    answers = {
        tuple(request.prompt): tokens for request, (tokens, _) in zip(REQUESTS, wanted, strict=True)
    }
    drafting = Foretelling(tokens=4, answers=answers, dice=random.Random(seed))
    driver = Driver(engine(drafting=drafting), allow=lambda step: 4 if step % 3 else 0)
    rows = driver.play([attrs.evolve(request, drafts=True) for request in REQUESTS])
    assert [row.tokens[:12] for row in rows] == [tokens for tokens, _ in wanted]
    assert sum(right for _, _, right in driver.drafted) > 10


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "ValueError: no such table"),
        ("leaving", "SystemExit: no licence"),
        ("narrow", "it returned (1, 5)"),
        ("numpy", "it returned ndarray, not mlx.core.array"),
        ("nothing", "it returned NoneType, not mlx.core.array"),
    ],
)
def test_a_fault_ends_its_own_row(name: str, reason: str) -> None:
    driver = Driver(engine())
    rows = driver.play([attrs.evolve(REQUESTS[0], processors=(name,)), REQUESTS[1]])
    assert {row for row, _ in driver.failed} == {rows[0].id}
    assert all(reason in told.reason and repr(name) in told.reason for _, told in driver.failed)
    assert rows[1].tokens == alone(REQUESTS[1])


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("name", ["numberless", "one too many", "forbidding"])
def test_logits_that_allow_no_choice_end_their_own_row(name: str, place: int) -> None:
    """Greedy and drawn. Such a row had token 0 for ever, and its client an answer of that."""
    driver = Driver(engine())
    rows = driver.play([attrs.evolve(REQUESTS[place], processors=("even", name)), REQUESTS[2]])
    assert {row for row, _ in driver.failed} == {rows[0].id}
    reasons = [told.reason for _, told in driver.failed]
    assert all(
        "allow no choice" in reason and repr(name) in reason and "even" not in reason
        for reason in reasons
    )
    assert rows[1].tokens == alone(REQUESTS[2])


def test_a_token_may_be_forced_without_bound() -> None:
    forced = {
        "forced": lambda tokens, logits: mx.where(
            mx.arange(logits.shape[-1]) == 7, mx.inf, -mx.inf
        )[None]
    }
    driver = Driver(StepEngine(model_of("llama"), VOCABULARY, processors=forced))
    rows = driver.play([attrs.evolve(request, processors=("forced",)) for request in REQUESTS[1:3]])
    assert [row.tokens for row in rows] == [[7] * 12] * 2 and not driver.failed


def test_logits_of_drafts_that_allow_no_choice_end_their_own_row() -> None:
    wanted = whole(engine(), REQUESTS)
    answers = {
        tuple(request.prompt): tokens for request, (tokens, _) in zip(REQUESTS, wanted, strict=True)
    }
    driver = Driver(
        engine(drafting=Foretelling(tokens=4, answers=answers, dice=random.Random(1))),
        allow=lambda _: 4,
    )
    requests = [attrs.evolve(request, drafts=True) for request in REQUESTS]
    requests[1] = attrs.evolve(requests[1], processors=("even", "forbidding"))
    rows = driver.play(requests)
    assert driver.drafted and {row for row, _ in driver.failed} == {rows[1].id}
    assert [row.tokens[:12] for row in (*rows[:1], *rows[2:])] == [
        wanted[place][0] for place in (0, 2, 3)
    ]


def test_what_fails_at_rejected_drafts_fails_nothing() -> None:
    """Drafts change the duration of an answer, never whether there is one."""
    wanted = whole(engine(), REQUESTS[:1])[0][0]
    wrong = next(token for token in range(0, VOCABULARY, 2) if token not in (*wanted, *PROMPTS[0]))

    def missing(tokens: mx.array, logits: mx.array) -> mx.array:
        if wrong in np.array(tokens):
            raise KeyError(wrong)
        return even_only(tokens, logits)

    drafted = {tuple(PROMPTS[0]): [*wanted[:6], wrong, *wanted[7:]]}
    drafting = Foretelling(tokens=4, answers=drafted, dice=random.Random(0))
    names = {"even": missing}
    model = StepEngine(model_of("llama"), VOCABULARY, processors=names, drafting=drafting)
    driver = Driver(model, allow=lambda _: 4)
    [row] = driver.play([attrs.evolve(REQUESTS[0], drafts=True)])
    assert driver.drafted and (row.tokens[:12], driver.failed) == (wanted[:12], [])


def test_what_the_model_breaks_is_not_blamed_on_a_processor() -> None:
    """The row is found broken, with what it leaves in buffers."""
    states = ProcessedRows([("even",)], [RowTokens.of(np.array([1], np.int32))], PROCESSORS)
    _, unusable = states(mx.full((1, 8), mx.nan))
    assert unusable is not None and unusable.faults() == {}


class TestRuntime:
    async def test_by_name(self, tmp_path: Path) -> None:
        path = str(save("llama", tmp_path))
        start = partial(run_runtime, logits_processors=PROCESSORS)
        request = Generate(
            request_id="1",
            prompt=TokenPrompt(tuple(PROMPTS[0])),
            sampling=HOT,
            max_tokens=12,
            ignore_eos=True,
        )
        async with running(path, start=start) as runtime:
            assert runtime.model.logits_processors == tuple(sorted(PROCESSORS))
            with await runtime.submit(attrs.evolve(request, logits_processors=("even",))) as answer:
                heard = await hear(answer)
            assert len(heard.tokens) == 12 and not any(token % 2 for token in heard.tokens)
            with pytest.raises(RequestFailed) as failed:
                await runtime.submit(attrs.evolve(request, logits_processors=("odd",)))
            assert (failed.value.problem.status, failed.value.problem.code) == (
                400,
                "unknown_logits_processor",
            )
            broken_answer = await runtime.submit(
                attrs.evolve(request, logits_processors=("broken",))
            )
            with broken_answer as answer, pytest.raises(RequestFailed) as failed:
                await hear(answer)
            assert (failed.value.problem.status, failed.value.problem.code) == (
                500,
                "logits_processor_failed",
            )

    @pytest.mark.parametrize("name", ["broken", "forbidding"])
    async def test_a_fault_beside_a_grammar_is_the_processors(
        self, tmp_path: Path, name: str
    ) -> None:
        path = str(save("llama", tmp_path))
        request = Generate(
            request_id="1",
            prompt=TokenPrompt(tuple(PROMPTS[0])),
            sampling=HOT,
            grammar=Grammar("regex", "a+"),
            logits_processors=(name,),
            max_tokens=12,
        )
        async with running(
            path, start=partial(run_runtime, logits_processors=PROCESSORS)
        ) as runtime:
            with await runtime.submit(request) as answer, pytest.raises(RequestFailed) as failed:
                await hear(answer)
        problem = failed.value.problem
        assert (problem.status, problem.code, problem.param) == (
            500,
            "logits_processor_failed",
            "logits_processors",
        )
        assert repr(name) in problem.message
