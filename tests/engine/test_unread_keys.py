"""Keys of config.json that nobody reads: planted ones are seen, and none of a sound config is
refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.family_configs import EVERY, FAMILIES
from tests.zoo.catalogue import CONFIGS
from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.loading.unread_keys import list_unapplied, list_unread

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "head_dim": 16,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}
STARCODER: dict[str, Any] = LLAMA | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"}
WRONG = {
    "partial_rotary_factor": 0.25,
    "rotary_pct": 0.25,
    "rope_interleave": True,
    "no_rope_layers": [1, 1, 0, 1],
    "no_rope_layer_interval": 3,
    "alibi": True,
    "use_alibi": True,
    "hidden_act": "gelu",
    "activation_function": "relu2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "query_pre_attn_scalar": 224,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "lm_head_multiplier": 0.4,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "swiglu_limit": 7.0,
    "use_parallel_residual": True,
}
"""Planted in a config of llama, whose code reads none of them: rope, attention, activation and
scaling."""
NAMED = {
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": 4,
    "router_bias_rate": 0.5,
    "prefix_mask_type": "bidirectional_prefix",
    "norm_position": "post",
    # Words that the code has for something else:
    "rope_type": "yarn",
    "window_size": 256,
    "activation": "gelu",
    # Further spellings:
    "use_dynamic_ntk": True,
    "num_sink_tokens": 4,
    "act_fn": "relu2",
    "clip_qkv": 8.0,
    "swiglu_alpha": 1.702,
    "parallel_residual": True,
    "zero_centered_gamma": True,
    "llama_4_scaling": {"beta": 0.1},
    "final_logit_soft_cap": 30.0,
    "moe_score_func": "sigmoid",
    "bidirectional": True,
}


def unread(config: dict[str, Any]) -> dict[str, bool]:
    classes = find_architecture(config).get_classes()
    return {each.key: each.wrong for each in list_unread(config, classes)}


@pytest.mark.parametrize("key", WRONG)
def test_what_changes_tokens_and_is_not_read_is_wrong(key: str) -> None:
    assert unread(LLAMA) == {}
    assert unread(LLAMA | {key: WRONG[key]})[key]


@pytest.mark.parametrize("key", NAMED)
def test_what_may_matter_is_named(key: str) -> None:
    assert unread(LLAMA | {key: NAMED[key]}) == {key: False}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling",
        ),
        ({"hidden_act": "silu"}, "hidden_act"),
    ],
)
def test_scaling_of_rope_needs_somebody_who_scales(change: dict[str, Any], key: str) -> None:
    assert unread(STARCODER) == {}
    assert unread(STARCODER | change)[key]


def test_keys_for_text_count_and_keys_for_images_do_not() -> None:
    planted = {"final_logit_softcapping": 30.0}
    assert unread(LLAMA | {"vision_config": planted}) == {}
    assert unread(LLAMA | {"text_config": planted}) == {"final_logit_softcapping": True}


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 9.0}}, ""),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.7}},
            "rope_scaling.attention_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 10000.0, "logn": True}}},
            "rope_parameters.logn",
        ),
        ({"quantization_config": {"bits": 4, "group_size": 64, "mode": "affine"}}, ""),
        (
            {"quantization_config": {"bits": 4, "activation_scheme": "static"}},
            "quantization_config.activation_scheme",
        ),
        (
            {"quantization_config": {"bits": 4, "rotation": "hadamard"}},
            "quantization_config.rotation",
        ),
    ],
)
def test_parts_that_nobody_reads_are_named(part: dict[str, Any], key: str) -> None:
    assert unread(LLAMA | part) == ({key: False} if key else {})


def test_what_requests_do_not_get_is_named() -> None:
    applied = {"eos_token_id": [2], "do_sample": True, "temperature": 1.0, "max_length": 20}
    ignored = {"suppress_tokens": [5], "repetition_penalty": 1.05, "top_k": 20}
    assert list_unapplied(applied) == []
    assert list_unapplied(applied | ignored) == [
        "suppress_tokens ([5])",
        "repetition_penalty (1.05)",
        "top_k (20)",
    ]


@pytest.mark.parametrize("name", CONFIGS | FAMILIES)
@pytest.mark.long(but=FAMILIES)
def test_no_config_of_a_tiny_model_is_refused(name: str) -> None:
    assert not any(unread((CONFIGS | FAMILIES)[name]).values())


MISSING_HERE = {"glm", "hy_v4"}
"""mlx-lm rotates whole heads of GLM-4, and their makers half of each. mlx-vlm, where it is
installed, has no limit for the activation of Hunyuan 4."""


@pytest.mark.skipif(not EVERY, reason="all configs: just test-long")
def test_no_default_config_of_transformers_is_refused() -> None:
    refused, compared = set(), 0
    for kind in CONFIG_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind).to_dict() | {"model_type": kind}
            keys = unread(config)
        except (Exception, SystemExit):  # noqa: BLE001 - no architecture of mlx-lm, or no sound defaults
            continue
        if not {"vocab_size", "text_config"} & config.keys():
            continue  # A tower for images.
        compared += 1
        refused |= {kind} if any(keys.values()) else set()
    assert refused <= MISSING_HERE and "glm" in refused
    assert compared > 80
