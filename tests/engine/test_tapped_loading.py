"""Drafters that read taps, as they are published: recognised by config.json, loaded with all that
they have, or refused in one line with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.engine.tapped_references import Arrays, Config, weights_of
from tests.families import save
from tests.tapped import MASK, config_of, save_drafter
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.engine import probe
from trouper.engine.loading.draft_loading import kind_of_drafter
from trouper.engine.loading.model_loading import EvaluatedModel, load, measured
from trouper.engine.loading.tapped_loading import dflash_taps, eagle3_taps
from trouper.engine.loading.weights import bytes_of
from trouper.engine.spec_decode.tapped_drafters import DFlash, DSpark, Eagle3
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

pytestmark = pytest.mark.usefixtures("own_cache")

EAGLE3, DFLASH = config_of("eagle3", "llama"), config_of("dflash", "llama")
DSPARK = config_of("dspark", "llama")


def loaded(target: str, drafter: Path | None, **settings: Any) -> EvaluatedModel:
    draft = None if drafter is None else str(drafter)
    settings = {"self_check": "off"} | settings
    return load(Settings(model=target, draft_model=draft, **settings), lambda _: None)


def refused(target: str, drafter: Path, **settings: Any) -> str:
    with pytest.raises(ModelUnusable) as problem:
        loaded(target, drafter, **settings)
    text = str(problem.value)
    assert "\n" not in text and "--draft-model" in text
    return text


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE-3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "EAGLE-3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "EAGLE-3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "DFlash"),
        ({"model_type": "qwen3", "dflash_config": {}, "draft_vocab_size": 9}, "DFlash"),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "DSpark"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 8}}, "DSpark"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_a_kind_shows_in_the_config(config: Config, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of_drafter("it", tmp_path) == kind


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("DFlash2DraftModel", "DFlash2"),
        ("DominoDraftModel", "Domino"),
        ("LlamaForCausalLMEagle", "EAGLE or EAGLE-2"),
    ],
)
def test_kinds_without_a_reader_are_named(
    architecture: str, kind: str, target: str, tmp_path: Path
) -> None:
    config = {"architectures": [architecture], "model_type": "llama"}
    drafter = save_drafter(tmp_path / "it", config, {})
    assert f"is a drafter of the kind {kind}, which has no reader here" in refused(target, drafter)


def test_taps_are_outputs_of_layers() -> None:
    assert eagle3_taps({}, 32) == [1, 15, 28]
    assert eagle3_taps({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, 32) == [1, 15, 28]
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    assert eagle3_taps(nested, 36) == [1, 17, 32]
    assert dflash_taps({"target_layer_ids": [1, 9, 17]}, 36) == [1, 9, 17]
    assert dflash_taps({"num_hidden_layers": 5}, 36) == [1, 9, 17, 25, 33]
    assert dflash_taps({"aux_hidden_state_layer_ids": [2, 10]}, 36) == [1, 9]


def test_all_of_a_drafter_is_loaded(target: str, tmp_path: Path) -> None:
    for kind, config, made in (
        ("eagle3", EAGLE3, Eagle3),
        ("dflash", DFLASH, DFlash),
        ("dspark", DSPARK, DSpark),
    ):
        weights = weights_of(kind, config)
        one = loaded(target, save_drafter(tmp_path / kind, config, weights))
        assert isinstance(one.drafters.reader, made)
        stored = {
            name.replace("midlayer.", "layers.0."): array
            for name, array in weights.items()
            if name not in ("d2t", "t2d") and not name.startswith("confidence_head.")
        }
        held = dict(tree_flatten(one.drafters.reader.parameters()))
        assert held.keys() == stored.keys()
        assert all(np.array_equal(np.array(held[name]), stored[name]) for name in held)
        if kind == "eagle3":
            tokens = one.drafters.reader._target_tokens
            assert tokens is not None
            assert tokens.tolist() == np.flatnonzero(weights["t2d"]).tolist()
        else:
            assert one.drafters.reader.mask_token == MASK


def test_a_config_of_speculators(target: str, tmp_path: Path) -> None:
    """The layer's shape is a section, and there is no model_type."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    layer = {key: value for key, value in EAGLE3.items() if key not in (*own, "architectures")}
    config = {key: EAGLE3[key] for key in own} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
    }
    weights = {
        name.replace("midlayer.", "layers.0."): array
        for name, array in weights_of("eagle3", EAGLE3).items()
    }
    one = loaded(target, save_drafter(tmp_path / "it", config, weights))
    assert isinstance(one.drafters.reader, Eagle3)
    assert one.drafters.reader._shape.normed_residual, "as speculators do unless they say otherwise"


@pytest.mark.parametrize(
    ("changes", "anchored"),
    [
        ({}, True),
        ({"dspark_bonus_anchor": True}, False),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, True),
        ({"dflash_config": {"sample_from_anchor": False}}, False),
    ],
)
def test_where_a_block_of_dspark_begins(
    changes: Config, anchored: bool, target: str, tmp_path: Path
) -> None:
    path = save_drafter(tmp_path / "it", DSPARK | changes, weights_of("dspark", DSPARK))
    reader = loaded(target, path).drafters.reader
    assert isinstance(reader, DSpark) and reader.anchored == anchored


def test_a_quantized_drafter(target: str, tmp_path: Path) -> None:
    weights: Arrays = {}
    for name, array in weights_of("dflash", DFLASH).items():
        if array.ndim < 2:
            weights[name] = array
            continue
        packed = mx.quantize(mx.array(array), group_size=32, bits=8)
        part = name.removesuffix("weight")
        leaves = ("weight", "scales", "biases")
        weights |= {
            f"{part}{leaf}": np.array(each) for leaf, each in zip(leaves, packed, strict=True)
        }
    one = loaded(target, save_drafter(tmp_path / "it", DFLASH, weights))
    assert one.drafters.reader is not None
    assert isinstance(one.drafters.reader.fc, nn.QuantizedLinear)


def test_memory_kv_and_fingerprint_count_the_drafter(target: str, tmp_path: Path) -> None:
    alone = loaded(target, None)
    path = save_drafter(tmp_path / "it", DFLASH, weights_of("dflash", DFLASH))
    both, settings = loaded(target, path), Settings(model=target, draft_model=str(path))
    reader = both.drafters.reader
    assert reader is not None and both.drafters.model is None
    assert both.card.draft_model == str(path) and both.card.no_mtp
    assert both.card.weights_bytes == alone.card.weights_bytes + bytes_of(reader)
    assert measured(settings).weights_bytes == measured(
        Settings(model=target)
    ).weights_bytes + bytes_of(reader)
    layer_bytes = alone.card.kv.token_bytes // 4
    assert both.card.kv.token_bytes == alone.card.kv.token_bytes + 2 * layer_bytes
    assert both.card.kv.head_state_bytes and not alone.card.kv.head_state_bytes
    assert reader.state_bytes == 4 * 2 * 64, "two taps of 64 values in float32"
    spaces = {cache_namespace(one.card, settings) for one in (alone, both)}
    assert len(spaces) == 2, "blocks have the KV of both"


def test_a_line_at_the_start_names_the_kind(target: str, tmp_path: Path) -> None:
    lines = list[str]()
    path = save_drafter(tmp_path / "it", EAGLE3, weights_of("eagle3", EAGLE3))
    load(Settings(model=target, draft_model=str(path), self_check="off"), lines.append)
    assert any(line.startswith("drafting with EAGLE-3, which reads the") for line in lines)


WRONG: list[tuple[str, Callable[[Config, Arrays], object], str]] = [
    (
        "eagle3",
        lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 9]),
        "[1, 2, 8]",
    ),
    ("eagle3", lambda _, weights: weights.update({"fc.weight": np.ones((64, 96))}), "96 values"),
    ("eagle3", lambda _, weights: weights.pop("midlayer.hidden_norm.weight"), "hidden_norm"),
    ("eagle3", lambda _, weights: weights.update(d2t=weights["d2t"] + 400), "d2t"),
    (
        "eagle3",
        lambda _, weights: weights.update({"embed_tokens.weight": np.ones((99, 64))}),
        "99 tokens",
    ),
    ("dflash", lambda config, _: config["dflash_config"].pop("mask_token_id"), "mask_token_id"),
    ("dflash", lambda config, _: config.update(hidden_act="gelu"), "gelu"),
    ("dflash", lambda config, _: config.pop("num_attention_heads"), "num_attention_heads"),
    ("dspark", lambda config, _: config.update(markov_head_type="rnn"), "Markov head is rnn"),
    (
        "dspark",
        lambda _, weights: weights.update({"markov_head.markov_w2.weight": np.ones((99, 8))}),
        "512 and 99 tokens",
    ),
]


@pytest.mark.parametrize(("kind", "break_it", "why"), WRONG, ids=[why for _, _, why in WRONG])
def test_what_does_not_fit_is_refused_with_the_reason(
    kind: Any, break_it: Callable[[Config, Arrays], None], why: str, target: str, tmp_path: Path
) -> None:
    config = json.loads(json.dumps(config_of(kind, "llama")))
    weights = weights_of(kind, config)
    break_it(config, weights)
    path = save_drafter(tmp_path / "it", config, weights)
    with pytest.raises(ModelUnusable, match="does not fit") as problem:
        probe.require_parts(Settings(model=target, draft_model=str(path)))
    assert why in str(problem.value)


@pytest.mark.parametrize("name", ["gemma3n", "rwkv7"])
def test_models_without_taps_are_named(name: str, tmp_path: Path) -> None:
    config = config_of("eagle3", name)
    path = save_drafter(tmp_path / "it", config, weights_of("eagle3", config))
    said = refused(str(save(name, tmp_path / name)), path)
    assert "layers return no hidden states" in said
