"""Planted faults are turned off by their names and nothing else is; what is wrong even alone is
refused."""

from __future__ import annotations

from functools import cache

import attrs
import mlx.core as mx
import pytest
from mlx import nn

from tests.families import build
from tests.family_configs import FAMILIES, VOCABULARY
from tests.self_check.faults import (
    FAULTS,
    ByChunk,
    Nonsense,
    OffsetOffByOne,
    raising,
    through,
    unchanged,
)
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.passes.pass_shapes import EXACT
from trouper.engine.self_check.accuracy import WrongAloneError
from trouper.engine.self_check.checking import Check
from trouper.engine.self_check.matrix import Matrix, subject_of
from trouper.protocol.capabilities import Capabilities

HEALTHY = [
    "llama",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "lfm2",
    "jamba",
    "mamba2",
    "rwkv7",
]
"""Of each kind of cache and layer one; the zoo has the others."""


@cache
def right(family: str) -> nn.Module:
    return build(family)


def found(model: nn.Module) -> Capabilities:
    """By every scenario on the model itself."""
    return Matrix(lambda seed: subject_of(model, VOCABULARY, seed, EXACT)).capabilities(
        by_caches(model)
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_off_its_feature(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    model = fault.model(right(fault.family))
    before = by_caches(model).off.keys()
    fault.caches(monkeypatch)
    off = found(model).off
    by_its_name = {*off} - before if fault.feature != "batch" else {"batch"} & {*off}
    assert by_its_name == {fault.feature}, off
    assert "differ" in off[fault.feature] or "shapes that nobody meant" in off[fault.feature]


@pytest.mark.parametrize("family", HEALTHY)
@pytest.mark.long(but=("gpt_oss", "jamba", "deepseek_v3", "llama"))
def test_a_right_model_loses_nothing(family: str) -> None:
    assert attrs.evolve(found(right(family)), banks="") == by_caches(right(family))


def bfloat16(family: str) -> nn.Module:
    model = build(family)
    model.set_dtype(mx.bfloat16)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
@pytest.mark.long(but=("llama", "phi3"))
def test_coarse_rounding_is_no_fault(family: str) -> None:
    """As of models on accelerators. (On a CPU MLX has no experts in bfloat16.)"""
    assert attrs.evolve(found(bfloat16(family)), banks="") == Capabilities()


@pytest.mark.parametrize(
    "name", ["an offset from the width of the keys", "blocks restored one token late"]
)
def test_a_fault_is_found_among_coarse_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    model = fault.model(bfloat16(fault.family))
    fault.caches(monkeypatch)
    assert not found(model).allows(fault.feature)


def check(model: nn.Module, family: str) -> Capabilities:
    return Check(model, FAMILIES[family], VOCABULARY, PLAIN, "fast").run().capabilities


def test_what_only_the_real_model_does_wrong_is_found_by_its_short_pass() -> None:
    """The tiny model of the same config is built by mlx-lm, and right."""
    off = check(through(OffsetOffByOne)(right("llama")), "llama").off
    assert "rows of different lengths" in off["batch"]
    assert check(right("llama"), "llama") == Capabilities()


def test_a_model_of_no_numbers_is_refused() -> None:
    with pytest.raises(WrongAloneError, match="not numbers"):
        check(Nonsense(right("llama"), unchanged), "llama")


def test_a_model_that_is_wrong_in_chunks_is_refused() -> None:
    with pytest.raises(WrongAloneError, match="in chunks than for the whole prompt"):
        check(ByChunk(right("llama"), unchanged), "llama")


def test_a_model_that_fails_alone_is_refused() -> None:
    with pytest.raises(WrongAloneError, match="its own code fails: shapes that nobody meant"):
        check(raising(lambda tokens, _: tokens.shape[1] == 4)(right("llama")), "llama")
