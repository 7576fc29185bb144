"""A rank's layers in a pipeline, without other processes. (What ranks then answer: tests/ranks.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from tests.engine.test_sharding import Pretended
from tests.families import FAMILIES, build
from tests.ranks.models import CONFIGS
from trouper.engine.distributed import pipeline
from trouper.engine.distributed.rank_group import split_settings
from trouper.engine.distributed.sharding import HypotheticalGroup
from trouper.engine.passes.seams import Seams, exchanging
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

TOKENS = mx.array([[5, 7, 9, 11, 2]])
DIRECTORY = Path("model")


class Relay(Seams):
    """Stages of one process: what one sends, the next receives."""

    sent: mx.array | None = None

    def receive(self, like: mx.array) -> mx.array:
        received, Relay.sent = Relay.sent, None
        return like if received is None else received

    def send(self, hidden: mx.array, like: mx.array) -> mx.array:
        assert (hidden.shape, hidden.dtype) == (like.shape, like.dtype)
        Relay.sent = hidden
        return hidden


class Ranked(Pretended):
    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size)
        self.rank = rank


def stages(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The first layers first."""
    monkeypatch.setattr(pipeline, "Seams", Relay)
    models = []
    for rank in reversed(range(size)):
        models.append(build(family))
        pipeline.keep_stage(models[-1], DIRECTORY, Ranked(size, rank))
        Relay.sent = None
    return models


@pytest.mark.parametrize("family", sorted(pipeline.FAMILIES))
def test_stages_compute_what_the_whole_model_computes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    expected = model(TOKENS, cache=make_prompt_cache(model))[:, 3:]
    models = stages(family, len(model.layers), monkeypatch)
    caches = [make_prompt_cache(model) for model in models]
    assert [len(cache) for cache in caches] == [1] * len(models)
    for tokens in (TOKENS[:, :3], TOKENS[:, 3:]):
        for model, cache in zip(models, caches, strict=True):
            logits = model(tokens, cache=cache)
        assert Relay.sent is None
    assert mx.allclose(logits, expected, atol=1e-4)
    first = models[0](TOKENS[:, :3], cache=make_prompt_cache(models[0]))
    assert not mx.allclose(first[:, 1:], expected, atol=1e-2), "the other stages do something"


@pytest.mark.parametrize("wishes", [{"pipeline": True}, {"tp_reduce_dtype": "float32"}])
def test_one_rank_reads_past_what_splits_a_model(
    wishes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Images and MTP heads were off with --pipeline, and nothing was split."""
    wished, usual = Settings(**wishes), Settings()
    assert split_settings(wished, Ranked(2, 0)) == wished
    assert split_settings(usual, Ranked(1, 0)) == usual and not caplog.records
    assert split_settings(wished, Ranked(1, 0)) == usual
    [warning] = caplog.records
    [flag] = wishes
    assert f"--{flag.replace('_', '-')} " in warning.getMessage()
    assert warning.levelname == "WARNING"


def refused(model: nn.Module, size: int) -> str:
    with pytest.raises(ModelUnusable) as caught:
        pipeline.keep_stage(model, DIRECTORY, Ranked(size, 0))
    return str(caught.value)


def test_layers_that_do_not_divide() -> None:
    assert "its 4 layers do not divide by 3; --pipeline runs at 2, 4 ranks" in refused(
        build("llama"), 3
    )


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - pipeline.FAMILIES))
def test_other_families_are_refused(family: str) -> None:
    said = refused(build(family), 2)
    assert "--pipeline is for deepseek_v3, " in said
    assert said.count("\n") == 0


def test_sliding_windows_are_refused() -> None:
    config = CONFIGS["llama"] | {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert "with attention to all tokens in each layer" in refused(build("llama", 0, config), 2)


def test_only_passes_that_are_evaluated_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building one, as for the layout of KV, must not reach the other ranks."""
    started = list[int]()
    mlx_group: Any = HypotheticalGroup(2)
    model = stages("llama", 2, monkeypatch)[0]
    monkeypatch.setattr(mx.distributed, "send", lambda hidden, *_, **__: hidden)
    monkeypatch.setattr(mx, "async_eval", lambda arrays: started.append(len(arrays)))
    model.seams = model.layers[-1].seams = Seams(mlx_group)
    model(TOKENS, cache=make_prompt_cache(model))
    assert started == []
    with exchanging(model):
        model(TOKENS, cache=make_prompt_cache(model))
    assert started == [1], "nor what was only built before"
