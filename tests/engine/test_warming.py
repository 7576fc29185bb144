"""Warming up leaves nothing behind."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

import trouper.engine.warm_up
from tests.engine.driver import Driver, Request
from tests.families import build, reference
from tests.family_configs import VOCABULARY
from trouper.engine.kv import attention_seam
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.engine.products import blocked_attention
from trouper.engine.step import Launched, StepEngine
from trouper.engine.warm_up import IdleWork, warm_up
from trouper.protocol.plans import Plan, Stepped


@pytest.mark.parametrize("shapes", [EXACT, attrs.evolve(ROUNDED, mask_elements=2**16)])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba", "deepseek_v3"])
@pytest.mark.long(but=("llama-*", "gpt_oss-*"))
def test_a_model_that_was_warmed_up_answers_as_ever(name: str, shapes: Shapes) -> None:
    model = build(name)
    engine = StepEngine(model, VOCABULARY, shapes=shapes)
    warm_up(engine, VOCABULARY, context=1024, chunk=256, step=64)
    assert engine.lengths() == {}
    assert engine.nbytes == 0
    prompt = [5, 6, 7, 8]
    assert [
        row.tokens
        for row in Driver(StepEngine(model, VOCABULARY, shapes=shapes)).play([Request(prompt, 6)])
    ] == [reference(model, prompt, 6)]


class WatchedEngine(StepEngine):
    longest = 0
    steps = 0

    def collect(self, launched: Launched) -> Stepped:
        self.steps += 1
        stepped = super().collect(launched)
        self.longest = max(self.longest, *self.lengths().values(), 0)
        return stepped


@pytest.mark.parametrize("context", [128, 600])
def test_no_row_is_longer_than_the_context(context: int) -> None:
    """A table of learned positions ends there, and MLX reads beyond it without an error."""
    engine = WatchedEngine(build("llama"), VOCABULARY, shapes=ROUNDED)
    warm_up(engine, VOCABULARY, context)
    assert engine.longest <= context
    assert (engine.longest > 512) == (context > 512)


def test_the_first_long_prompt_meets_nothing_new() -> None:
    """Each full chunk's attention has run, on a device that prepares each length."""
    lengths = []

    def counted(queries: mx.array, keys: mx.array, *rest: Any, **options: Any) -> mx.array:
        lengths.append((queries.shape[2], keys.shape[2]))
        return scaled_dot_product_attention(queries, keys, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_seam, trouper.engine.warm_up):
            patch.setattr(module, "plain", counted)
        patch.setattr(blocked_attention, "pays", lambda *_: False)  # A CPU's own.
        engine = StepEngine(
            build("llama"), VOCABULARY, shapes=attrs.evolve(ROUNDED, mask_elements=2**16)
        )
        idle = warm_up(engine, VOCABULARY, context=1200, chunk=256, step=64)
        assert (256, 1024) not in lengths, "that is for idle moments"
        while idle.run_next():
            pass
    assert {(256, end) for end in range(512, 1200, 256)} <= set(lengths)
    beside_streams = {end for width, end in lengths if width == 64}
    assert beside_streams >= {engine.shapes.keys(end) for end in range(128, 1025, 64)}, (
        "with masks as arrays"
    )
    assert beside_streams >= set(range(1024 + 64, 1200, 64)), (
        "a chunk of 64 has a mask as an array until then"
    )


def test_kernels_of_an_earlier_start_cost_no_second_one() -> None:
    """It takes 5.5 s on an H200 with 8B, and 10 on two: what is left takes a request a moment."""
    steps = dict[bool, int]()
    for compiled in (False, True):
        engine = WatchedEngine(build("llama"), VOCABULARY, shapes=ROUNDED)
        warm_up(engine, VOCABULARY, 1024, 256, 64, compiled=compiled)
        steps[compiled] = engine.steps
    assert steps[True] * 4 < steps[False]


@pytest.mark.parametrize("at", [0, 3, 20])
def test_too_little_memory_for_all_of_it_is_said_and_no_failure(
    at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process has the device's memory: the model was loaded, and short requests can be
    served."""
    model = build("llama")
    engine, launched = StepEngine(model, VOCABULARY), list[Plan]()

    def launch(plan: Plan) -> Launched:
        launched.append(plan)
        if len(launched) > at:
            raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")
        return StepEngine.launch(engine, plan)

    monkeypatch.setattr(engine, "launch", launch)
    warm_up(engine, VOCABULARY, context=1024)
    assert len(launched) == at + 1
    [record] = [
        record for record in caplog.records if record.name == trouper.engine.warm_up.__name__
    ]
    assert "out of memory" in record.getMessage() and record.levelname == "WARNING"


def test_too_little_memory_in_an_idle_moment_ends_the_preparation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("[malloc] Unable to allocate 7 bytes.")

    idle = IdleWork([fail, lambda: None])
    assert [idle.run_next(), idle.run_next()] == [True, False]
    assert "Unable to allocate" in caplog.text


def test_another_failure_of_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepEngine(build("llama"), VOCABULARY)

    def launch(_: Plan) -> Launched:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine, "launch", launch)
    with pytest.raises(RuntimeError, match="illegal"):
        warm_up(engine, VOCABULARY)
