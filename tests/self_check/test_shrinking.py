"""Small configs of published models: every kind of layer stays, relations hold, and the tiny model
answers to its context.

The short version takes one of each kind; TROUPER_LONG_TESTS=1 in the environment takes all, and
plays every scenario on each.
"""

from __future__ import annotations

from typing import Any

import pytest
from mlx.utils import tree_flatten

from tests.family_configs import EVERY, LONG
from tests.self_check.full_size import FULL_SIZE, LATENT, decoder
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.self_check import tiny
from trouper.engine.self_check.checking import Check
from trouper.engine.self_check.shrinking import WINDOW, Factors, factors, shrunk

CHOSEN = (
    "SmolLM2-135M",
    "Qwen3-4B",
    "Phi-3.5-mini",
    "MiniCPM3-4B",
    "GPT-2",
    "Gemma-3-1B",
    "Gemma-3n-E4B",
    "gpt-oss-20b",
    "Mixtral-8x7B",
    "DeepSeek-V3",
    "LongCat-Flash-Lite",
    "Llama-4-Scout",
    "Mamba2-2.7B",
    "Falcon-H1-7B",
    "LFM2-1.2B",
    "Qwen3-Next-80B-A3B",
    "Kimi-Linear-48B-A3B",
    "RecurrentGemma-2B",
    "RWKV7-1.5B",
    "Nemotron-H-8B",
)
"""Ropes, latent attention, other names of sizes; windows, shared caches, sinks; experts, layers of
several kinds by a list, a period or a pattern; states. Of the others test_faults_of_mlx_lm.py takes
three."""


def test_there_are_more_than_twenty_families() -> None:
    assert len({config["model_type"] for config in FULL_SIZE.values()}) > 20


@pytest.mark.parametrize("name", FULL_SIZE if EVERY else CHOSEN)
@pytest.mark.long(
    but=(
        "gpt-oss-20b",
        "Gemma-3-1B",
        "RecurrentGemma-2B",
        "Qwen3-4B",
        "LFM2-1.2B",
        "Phi-3.5-mini",
        "Falcon-H1-7B",
        "MiniCPM3-4B",
    )
)
def test_a_published_config_has_a_tiny_model(name: str) -> None:
    config = FULL_SIZE[name]
    model = tiny.empty(config)
    matrix = Check(model, config, 512, PLAIN, "fast").tiny_matrix()
    subject = matrix.subject()
    assert subject.reference.consistent
    assert (
        sum(array.size for _, array in tree_flatten(subject.model.parameters())) < tiny.MAX_VALUES
    )
    assert set(tiny.signatures(subject.model)) == set(tiny.signatures(model))
    if LONG:
        assert matrix.capabilities(by_caches(model)) == by_caches(model)


def smallest(config: dict[str, Any], layers: int) -> dict[str, Any]:
    return shrunk(config, next(factors(config, layers)))


def test_heads_keep_their_ratio_and_their_size() -> None:
    small = smallest(decoder("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128), 4)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (
        8,
        2,
        16,
    )
    small = smallest(decoder("llama", 4096, 32, 32, 8, 14336, 128256), 4)
    assert small["hidden_size"] == small["num_attention_heads"] * 16


def test_what_each_layer_is_stays_with_its_layer() -> None:
    config = decoder(
        "x",
        512,
        12,
        8,
        8,
        1024,
        1000,
        layer_types=[*"abcabcabcabc"],
        full_attn_idxs=[1, 3, 9],
        pattern="M*-M*-M*-M*-",
        sliding_window=4096,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    small = smallest(config, 4)
    assert small["layer_types"] == [*"abca"]
    assert small["full_attn_idxs"] == [1, 3]
    assert small["pattern"] == "M*-M"
    assert (small["num_hidden_layers"], small["sliding_window"]) == (4, WINDOW)
    assert (small["rope_theta"], small["tie_word_embeddings"]) == (1e6, False)


def test_layers_that_are_counted_from_one() -> None:
    config = decoder(
        "x",
        512,
        8,
        8,
        8,
        1024,
        1000,
        linear={"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
    )
    assert smallest(config, 4)["linear"] == {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}


def test_latent_attention_and_experts() -> None:
    config = decoder(
        "x",
        7168,
        61,
        128,
        128,
        18432,
        129280,
        **LATENT,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
    )
    small = smallest(config, 4)
    assert (small["n_routed_experts"], small["num_experts_per_tok"]) == (8, 2)
    assert (small["n_group"], small["topk_group"]) == (2, 1)
    assert small["qk_nope_head_dim"] == 2 * small["qk_rope_head_dim"]


def test_pictures_and_packed_weights_are_left_out() -> None:
    config = {
        "model_type": "x",
        "text_config": decoder("y", 512, 8, 8, 8, 1024, 1000),
        "vision_config": {"hidden_size": 1},
    }
    small = shrunk(config | {"quantization": {"bits": 4}}, Factors(1, 1, 2))
    assert small.keys() == {"model_type", "text_config"}
    assert small["text_config"]["num_hidden_layers"] == 2
