"""Warming up leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver, Request
from tests.families import build, reference
from tests.family_configs import VOCABULARY
from trouper.engine.kv.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.engine.step import StepEngine
from trouper.engine.warm_up import warm_up


@pytest.mark.parametrize("shapes", [EXACT, ROUNDED])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "jamba", "deepseek_v3"])
def test_a_model_that_was_warmed_up_answers_as_ever(name: str, shapes: Shapes) -> None:
    model = build(name)
    engine = StepEngine(model, VOCABULARY, shapes=shapes)
    warm_up(engine, VOCABULARY)
    assert engine.lengths() == {}
    assert engine.nbytes == 0
    prompt = [5, 6, 7, 8]
    assert [row.tokens for row in Driver(StepEngine(model, VOCABULARY, shapes=shapes)).play([Request(prompt, 6)])] == [
        reference(model, prompt, 6)
    ]
