"""A row's tokens are its own: alone, in any company, in any chunks. Every architecture, against
mlx-lm's loop for one row.

The short version plays one random script of each family, and one of each kind of cache in half of
the ways; TROUPER_LONG_TESTS=1 in the environment plays all ways of each family, and more scripts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import attrs
import numpy as np
import pytest
from mlx import nn

from tests.arithmetic import TF32, assert_tokens
from tests.engine.driver import GREEDY, ChunkSize, Driver, Request, Row, answers, only_bank
from tests.engine.naive import certain_answer
from tests.families import FAMILIES, build, prompts, reference
from tests.family_configs import LONG, ONE_HALF, OTHER_HALF, VOCABULARY
from trouper.engine.kv.banks import Bank
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

TOKENS = 40 if LONG else 16
PROMPTS = [*prompts(), *prompts((1, 1, 2), seed=8)]
"""Two of them are one token: nothing to prefill."""
SAMPLINGS = (
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, seed=100, top_k=20, top_p=0.9),
    Sampling(temperature=0.8, seed=200, top_k=100),
    Sampling(temperature=0.8, seed=300, top_p=0.8, repetition_penalty=1.2),
    Sampling(
        temperature=0.8, seed=400, top_k=8, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3
    ),
    Sampling(temperature=0.8, seed=500, min_p=0.1, logit_bias=((7, 1.5), (9, -100.0))),
    Sampling(temperature=0, repetition_penalty=1.3),
    Sampling(temperature=0.5, seed=600, top_k=64, top_p=0.95, min_p=0.02, frequency_penalty=0.2),
    GREEDY,
)

every_family = pytest.mark.parametrize("name", FAMILIES)
one_half = pytest.mark.parametrize("name", ONE_HALF)
other_half = pytest.mark.parametrize("name", OTHER_HALF)


@cache
def model_of(name: str) -> nn.Module:
    return build(name)


@cache
def greedy_requests(name: str) -> list[tuple[Request, list[int]]]:
    model = model_of(name)
    return [(Request(prompt, TOKENS), reference(model, prompt, TOKENS)) for prompt in PROMPTS]


@cache
def seeded_requests(name: str) -> list[tuple[Request, list[int]]]:
    """Each with its own parameters, and what the model alone and a naive sampler answer."""
    model, requests = model_of(name), []
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True):
        seeded, answer = certain_answer(model, prompt, sampling, TOKENS)
        requests.append((Request(prompt, TOKENS, seeded), answer))
    return requests


SMALL_BANKS = attrs.evolve(EXACT, first_bank=8, shared_tokens=32)
"""Rows of a few tokens have different banks, and outgrow them."""


def engine_of(name: str, shapes: Shapes | None = None) -> StepEngine:
    return StepEngine(model_of(name), VOCABULARY, shapes=shapes)


def random_script(
    requests: Sequence[Request], dice: random.Random
) -> tuple[list[int], list[Request], ChunkSize]:
    """An order, joins over some steps, a third of the rows leaving early in whatever state, chunks
    of any size."""
    order = dice.sample(range(len(requests)), len(requests))
    script = []
    for place in order:
        join = dice.randrange(TOKENS)
        leave = join + dice.randrange(1, TOKENS) if dice.random() < 1 / 3 else None
        script.append(attrs.evolve(requests[place], join=join, leave=leave))
    sizes = [dice.choice((1, 5, 16, 32, 50, 200)) for _ in range(64)]
    return order, script, lambda step: sizes[step % len(sizes)]


def assert_equal_as_far(
    name: str, requests: Sequence[Request], got: Sequence[list[int]], wanted: Sequence[list[int]]
) -> None:
    """Whole answers of rows that stayed, beginnings of those that left."""
    for place, (request, mine, alone) in enumerate(zip(requests, got, wanted, strict=True)):
        told = f"request {place}: {len(request.prompt)} tokens, {request}"
        assert len(mine) == len(alone) or (request.leave is not None and len(mine) < len(alone)), (
            told
        )
        assert_tokens(model_of(name), request.prompt, request.sampling, mine, alone, told)


def play_randomly(
    name: str, cases: Sequence[tuple[Request, list[int]]], seed: int, shapes: Shapes | None = None
) -> None:
    dice = random.Random(f"{name} {seed}")
    order, script, chunk = random_script([request for request, _ in cases], dice)
    releases = {step: {"release_memory": True} for step in range(200) if dice.random() < 0.1}
    got = [
        row.tokens for row in Driver(engine_of(name, shapes), chunk, orders=releases).play(script)
    ]
    assert_equal_as_far(name, script, got, [cases[place][1] for place in order])


class TestGreedy:
    @one_half
    def test_r1_alone(self, name: str) -> None:
        driver = Driver(engine_of(name))
        for request, wanted in greedy_requests(name):
            assert_equal_as_far(
                name, [request], [row.tokens for row in driver.play([request])], [wanted]
            )

    @other_half
    def test_r1_a_lone_prompt_in_one_pass(self, name: str) -> None:
        driver = Driver(engine_of(name, attrs.evolve(EXACT, lone_tokens=1000)), chunk=1000)
        for request, wanted in greedy_requests(name):
            assert_equal_as_far(
                name, [request], [row.tokens for row in driver.play([request])], [wanted]
            )

    @one_half
    @pytest.mark.parametrize("chunk", [7, 32, 512] if LONG else [7, 512])
    def test_r1_together(self, name: str, chunk: int) -> None:
        requests, wanted = zip(*greedy_requests(name), strict=True)
        assert_equal_as_far(name, requests, answers(engine_of(name), requests, chunk), wanted)

    @every_family
    @pytest.mark.parametrize("seed", range(20 if LONG else 1))
    @pytest.mark.long(
        but=(
            "*-llama",
            "*-deepseek_v3",
            "*-gemma3_text",
            "*-gemma3n",
            "*-gpt_oss",
            "*-falcon_h1",
            "*-lfm2",
            "*-mamba2",
            "*-qwen3_next",
            "*-recurrent_gemma",
        )
    )
    def test_r1_d3_d4_d5_joining_and_leaving(self, name: str, seed: int) -> None:
        play_randomly(name, greedy_requests(name), seed)

    @other_half
    def test_r1_passes_that_are_rounded_up(self, name: str) -> None:
        """As on devices that prepare each new shape anew."""
        play_randomly(name, greedy_requests(name), 0, ROUNDED)

    @other_half
    @pytest.mark.parametrize("seed", range(10 if LONG else 1))
    @pytest.mark.parametrize(
        "shapes",
        [SMALL_BANKS, attrs.evolve(ROUNDED, first_bank=8, shared_tokens=32)],
        ids=["exact", "rounded"],
    )
    def test_r1_rows_that_move_between_banks(self, name: str, seed: int, shapes: Shapes) -> None:
        play_randomly(name, greedy_requests(name), seed, shapes)


@one_half
class TestSeeded:
    def test_d1_each_row_has_its_own_parameters(self, name: str) -> None:
        requests, wanted = zip(*seeded_requests(name), strict=True)
        assert_equal_as_far(name, requests, answers(engine_of(name), requests), wanted)

    @pytest.mark.parametrize("seed", range(10 if LONG else 1))
    def test_d2_d5_joining_and_leaving(self, name: str, seed: int) -> None:
        play_randomly(name, seeded_requests(name), seed)

    def test_d2_rows_that_move_between_banks(self, name: str) -> None:
        play_randomly(name, seeded_requests(name), 0, SMALL_BANKS)


def test_only_a_short_prompt_that_nothing_runs_with_takes_one_pass() -> None:
    engine = engine_of("llama", attrs.evolve(EXACT, lone_tokens=8))

    def alone(step: int, *lengths: int, decode: tuple[RowId, ...] = ()) -> dict[RowId, list[int]]:
        """Of prompts of these lengths, which are all admitted and prefilled in one step."""
        rows = [RowId(10 * step + index) for index in range(len(lengths))]
        admits = [
            Admit(row, np.arange(1, n + 1, dtype="<i4").tobytes(), GREEDY)
            for row, n in zip(rows, lengths, strict=True)
        ]
        chunks = tuple(map(Chunk, rows, lengths))
        launched = engine.launch(Plan(step, admit=tuple(admits), prefill=chunks, decode=decode))
        engine.collect(launched)
        assert launched.has_first_tokens_alone is not bool(decode)
        engine.launch(
            Plan(step, drop=(*rows, *decode))
            if decode or step < 3
            else Plan(step, decode=tuple(rows))
        )
        return launched.prefilled.alone

    assert alone(0, 8) == {RowId(0): list(range(1, 9))}
    assert alone(1, 9) == {}
    assert alone(2, 5, 6) == {}
    assert alone(3, 8) == {RowId(30): list(range(1, 9))}
    assert alone(4, 5, decode=(RowId(30),)) == {}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba"])
@pytest.mark.long(but=("llama", "jamba"))
def test_one_engine_for_many_generations_of_rows(name: str) -> None:
    """Nothing of a row that left shows in one that comes later: slots, buffers and rings are used
    again."""
    cases = [*greedy_requests(name), *seeded_requests(name)]
    dice = random.Random(name)
    driver = Driver(engine_of(name))
    for _ in range(3):
        some = dice.sample(cases, 8)
        order, script, _ = random_script([request for request, _ in some], dice)
        got = [row.tokens for row in driver.play(script)]
        assert_equal_as_far(name, script, got, [some[place][1] for place in order])


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_d1_logprobs_only_for_rows_that_asked(name: str) -> None:
    requests = [
        attrs.evolve(request, logprobs=ask)
        for (request, _), ask in zip(greedy_requests(name), [None, 0, 3] * 3, strict=True)
    ]
    rows = Driver(engine_of(name)).play(requests)
    for row, (_, wanted) in zip(rows, greedy_requests(name), strict=True):
        assert_equal_as_far(name, [row.request], [row.tokens], [wanted])
        asked = row.request.logprobs
        assert [said.token for said in row.logprobs] == ([] if asked is None else row.tokens)
        assert all(len(said.top) == asked for said in row.logprobs)
        assert all(said.top[0] == (said.token, said.logprob) for said in row.logprobs if asked), (
            "greedy takes the best"
        )


def exchange_kv(bank: Bank) -> None:
    bank.buffers.move([(0, 1), (1, 0)], bank.slots.lengths)


class Meddling(Driver):
    """Does something wrong once, before the sixth step."""

    def __init__(self, engine: StepEngine, meddle: Callable[[], object]) -> None:
        super().__init__(engine)
        self._meddle = meddle

    def _take(self, plan: Plan, rows: dict[RowId, Row]) -> None:
        if plan.step == 6:
            self._meddle()
        super()._take(plan, rows)


class TestTheComparisonCanFail:
    """Negative controls: what the tests above would say of a wrong engine."""

    def test_a_row_whose_offset_is_one_too_many(self) -> None:
        engine, cases = engine_of("llama"), greedy_requests("llama")
        driver = Meddling(engine, lambda: np.add.at(only_bank(engine).slots.lengths, 0, 1))
        with pytest.raises(AssertionError):
            driver.play([request for request, _ in cases])

    def test_a_row_whose_kv_is_a_neighbours(self) -> None:
        engine, cases = engine_of("llama"), greedy_requests("llama")
        driver = Meddling(engine, lambda: exchange_kv(only_bank(engine)))
        same = [
            row.tokens == wanted
            for row, (_, wanted) in zip(
                driver.play([request for request, _ in cases]), cases, strict=True
            )
        ]
        assert same[:2] == [False, False] and (all(same[2:]) or TF32)

    def test_another_seed(self) -> None:
        cases = seeded_requests("llama")
        others = [
            attrs.evolve(
                request, sampling=attrs.evolve(request.sampling, seed=request.sampling.seed + 1)
            )
            for request, _ in cases
        ]
        got = answers(engine_of("llama"), others)
        same = [mine == wanted for mine, (_, wanted) in zip(got, cases, strict=True)]
        assert same == [request.sampling.greedy for request, _ in cases], (
            "greedy rows have no use for a seed"
        )

    def test_a_neighbours_parameters(self) -> None:
        """D1: rows that sample with somebody else's temperature."""
        cases = seeded_requests("llama")
        shifted = np.roll(np.arange(len(cases)), 1)
        others = [
            attrs.evolve(request, sampling=cases[at][0].sampling)
            for at, (request, _) in zip(shifted, cases, strict=True)
        ]
        got = answers(engine_of("llama"), others)
        assert not any(mine == wanted for mine, (_, wanted) in zip(got, cases, strict=True))
