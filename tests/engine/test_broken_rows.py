"""Rows of which the model computes no numbers: they are named, and nobody else has anything of
them."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from tests.engine.driver import Driver, Request
from tests.families import FAMILIES, build, prompts, reference
from tests.family_configs import VOCABULARY, wide
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.lora.lora_layers import LowRank, install
from trouper.engine.step import StepEngine
from trouper.protocol.plans import NOT_A_NUMBER, Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

LONG, LONGER, SHORT, MIDDLE = prompts((100, 101, 5, 90))
TOKENS = 30
KV8 = KvFormat(8, 32)


def broken(name: str, config: Any = None) -> nn.Module:
    """A model with an adapter that makes what a text overflows to: no row without it knows of
    it."""
    model = build(name, None, config)
    modules = dict(model.named_modules())
    path = next(path for path in modules if path.endswith("layers.0.self_attn.v_proj"))
    outputs, inputs = modules[path].weight.shape
    install(model, [{path: LowRank(mx.full((inputs, 2), math.nan), mx.zeros((2, outputs)))}])
    return model


@pytest.mark.parametrize("leave", [3, 9])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.long(but=("llama-3", "gpt_oss-9"))
def test_a_row_in_a_broken_ones_slot_says_what_it_says_alone(name: str, leave: int) -> None:
    """Its bank has longer rows, up to which attention reads its slot."""
    engine = StepEngine(broken(name), VOCABULARY, adapters=["bad"])
    requests = [
        Request(LONG, TOKENS),
        Request(LONGER, TOKENS),
        Request(MIDDLE, leave, adapter="bad"),
        Request(SHORT, 12, join=leave + 5),
    ]
    driver = Driver(engine, 128)
    rows = driver.play(requests)
    plain = build(name)
    for row in (rows[0], rows[1], rows[3]):
        assert row.tokens == reference(plain, [*row.request.prompt], row.request.tokens)
    assert {*driver.failed} == {(rows[2].id, NOT_A_NUMBER)}


def test_quantized_kv_is_cleaned_too() -> None:
    config = wide(FAMILIES["llama"])
    requests = [Request(LONG, TOKENS), Request(LONGER, TOKENS), Request(SHORT, 12, join=8)]
    bad = Request(MIDDLE, 3, adapter="bad")
    with_it, without = (
        Driver(StepEngine(broken("llama", config), VOCABULARY, KV8, adapters=["bad"]), 128).play(
            [*requests, *more]
        )
        for more in ([bad], [])
    )
    assert [row.tokens for row in with_it[:3]] == [row.tokens for row in without]


def test_a_vector_that_is_none_is_named() -> None:
    engine = StepEngine(broken("llama"), VOCABULARY, adapters=["bad"])
    row, prompt = RowId(7), np.array(SHORT, "<i4").tobytes()
    admit = Admit(row, prompt, Sampling(temperature=0), embed="mean", adapter="bad")
    stepped = engine.collect(
        engine.launch(Plan(0, admit=(admit,), prefill=(Chunk(row, len(SHORT)),)))
    )
    assert stepped.failed == ((row, NOT_A_NUMBER),)
    engine.collect(engine.launch(Plan(1, drop=(row,))))
