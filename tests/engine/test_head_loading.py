"""Heads of checkpoints: from the names of their publishers and of conversions, quantized or not;
and why one is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from tests.families import END, FAMILIES, save, save_tokenizer, write_json
from tests.family_configs import EVERY, VOCABULARY, Config
from tests.heads import HEADS, Weights, head_weights, published, save_with_head
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.loading.head_loading import load_head
from trouper.engine.loading.head_weights import read_head_weights
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.loading.weights import bytes_of, opened
from trouper.engine.platform import device
from trouper.engine.self_check.starting import Candidate
from trouper.engine.step import StepEngine
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.loading import nobody_watches
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

WAYS = [
    (name, original)
    for place, name in enumerate(HEADS)
    for original in (True, False)
    if EVERY or original == bool(place % 2)
]
"""Of each head the names of its publisher or those of conversions, in turns."""


pytestmark = pytest.mark.usefixtures("own_cache")


def loaded(path: Path, **settings: Any) -> EvaluatedModel:
    return load(Settings(model=str(path), **settings), lambda _: None)


def parameters(module: nn.Module | None) -> dict[str, Any]:
    assert module is not None
    return {name: np.array(array) for name, array in tree_flatten(module.parameters())}


@pytest.mark.parametrize(("name", "original"), WAYS)
@pytest.mark.long(but=("qwen3_next-True", "deepseek_v3-False", "mimo-True", "qwen3_5-False"))
def test_all_of_a_head_is_loaded(name: str, original: bool, tmp_path: Path) -> None:
    """Experts are stacked, norms shifted and projections split as the model's are."""
    one = loaded(save_with_head(name, tmp_path / name, original=original))
    head, wanted = parameters(one.head), head_weights(name, "random")
    assert head.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_allclose(head[path], np.array(array), atol=1e-6, err_msg=path)
    assert one.card.no_mtp == ""


MOE: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


ORIGINAL = "model.language_model.layers.0.linear_attn.conv1d"
"""Layer whose shape says that a checkpoint of Qwen3.5 was not converted."""


@pytest.mark.parametrize("fused", [True, False])
def test_experts_of_qwen3_5_moe(fused: bool, tmp_path: Path) -> None:
    """Publishers store those of a layer in one, or each alone."""
    text = {**FAMILIES["qwen3_5"]["text_config"], **MOE, "model_type": "qwen3_5_moe_text"}
    config: Config = {"model_type": "qwen3_5_moe", "text_config": text}
    weights = head_weights("qwen3_5", "random", config=config)
    named = published("qwen3_5", weights, config=config)
    directory = save("qwen3_5", tmp_path / "moe", config)
    added = (_fused(named) if fused else named) | {f"{ORIGINAL}.weight": mx.zeros((8, 1, 4))}
    model, _ = opened(directory)
    mx.save_safetensors(str(directory / "model_head.safetensors"), added)
    candidate = Candidate(
        model=model, config=config, directory=directory, digest=0, vocabulary=VOCABULARY, kv=PLAIN
    )
    head = load_head(
        candidate, Capabilities(), Settings(), report=lambda _: None, watch=nobody_watches
    )
    for path, array in parameters(head.module).items():
        np.testing.assert_allclose(array, np.array(weights[path]), atol=1e-6, err_msg=path)


def _fused(weights: Weights) -> Weights:
    prefix = "mtp.layers.0.mlp.experts"
    parts = {
        part: mx.stack(
            [weights[f"{prefix}.{index}.{part}.weight"] for index in range(MOE["num_experts"])]
        )
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    others = {path: weight for path, weight in weights.items() if not path.startswith(prefix)}
    both = mx.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
    return others | {f"{prefix}.gate_up_proj": both, f"{prefix}.down_proj": parts["down_proj"]}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.long(but=("deepseek_v3", "qwen3_5", "mimo"))
def test_a_quantized_head(name: str, tmp_path: Path) -> None:
    """As converters leave it: packed weights with scales and biases, under the names that the
    model's class has."""
    path, wanted = quantized(name, tmp_path / name), head_weights(name, "random")
    try:
        one = loaded(path)
    except ModelUnusable as unusable:
        if device.is_cpu() or "No implementation for problem shape" not in str(unusable):
            raise
        pytest.skip(f"MLX has no kernel for matrices so small here: {unusable}")
    head = one.head
    assert head is not None and one.card.no_mtp == ""
    if device.is_cpu():
        for part, array in parameters(head).items():
            np.testing.assert_allclose(array, np.array(wanted[part]), atol=0.05, err_msg=part)
    engine = StepEngine(one.model, VOCABULARY, head=head, capabilities=one.card.capabilities)
    assert head(mx.array([[1, 2]]), head.target_states(mx.array([[3, 1]]), None)).shape == (
        1,
        2,
        64,
    )
    assert engine.nbytes == 0


def quantized(name: str, directory: Path) -> Path:
    model, config = opened(save_with_head(name, directory, original=False))
    model, config = quantize_model(model, config, group_size=32, bits=8)
    weights = dict(tree_flatten(model.parameters()))
    for path, weight in published(name, head_weights(name, "random"), original=False).items():
        if (
            weight.ndim > 1
            and weight.shape[-1] % 32 == 0
            and not any(part in path for part in (".mlp.gate.", "shared_", "embed_tok"))
        ):
            packed, scales, biases = mx.quantize(weight, group_size=32, bits=8)
            base = path.removesuffix("weight")
            weights |= {path: packed, f"{base}scales": scales, f"{base}biases": biases}
        else:
            weights[path] = weight
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", {**config, "eos_token_id": END})
    save_tokenizer(directory)
    return directory


def test_memory_kv_and_fingerprint_count_the_head(tmp_path: Path) -> None:
    path = save_with_head("qwen3_5", tmp_path / "model")
    both, alone, settings = (
        loaded(path),
        loaded(path, speculation="ngram"),
        Settings(model=str(path)),
    )
    assert both.head is not None and alone.head is None
    assert both.card.weights_bytes == alone.card.weights_bytes + bytes_of(both.head)
    assert both.card.kv.token_bytes == alone.card.kv.token_bytes * 3 // 2, (
        "of the model's layers two have full attention"
    )
    assert cache_namespace(both.card, settings) != cache_namespace(alone.card, settings)


@pytest.mark.parametrize("how", ["auto", "off"])
def test_a_head_is_in_nobodys_way(how: str, tmp_path: Path) -> None:
    """mlx-lm's deepseek_v3 drops layer 61 alone, and takes another one behind the last for a
    fault."""
    one = loaded(save_with_head("deepseek_v3", tmp_path / "model"), speculation=how)
    assert type(one.model).__module__ == "mlx_lm.models.deepseek_v3"
    assert type(one.model).sanitize.__module__ == "mlx_lm.models.deepseek_v3"


def without(directory: Path, drop: Callable[[str], bool]) -> Path:
    weights = {
        name: array
        for name, array in mx.load(str(directory / "model.safetensors")).items()  # type: ignore[union-attr]
        if not drop(name)
    }
    mx.eval(weights)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def test_a_head_that_lacks_something_is_left_out(tmp_path: Path) -> None:
    path = without(
        save_with_head("deepseek_v3", tmp_path / "model"), lambda name: "eh_proj" in name
    )
    lines = list[str]()
    one = load(Settings(model=str(path)), lines.append)
    assert one.head is None and "projection.weight" in one.card.no_mtp
    assert any(line.startswith("the checkpoint's MTP head is not loaded: ") for line in lines)
    with pytest.raises(ModelUnusable) as problem:
        loaded(path, speculation="mtp")
    assert str(problem.value).startswith("--speculation mtp: ") and "projection.weight" in str(
        problem.value
    )


def test_a_demanded_head_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable) as problem:
        loaded(save("llama", tmp_path / "llama"), speculation="mtp")
    said = str(problem.value)
    assert "its checkpoint has none" in said and said.endswith("say --speculation auto")


def test_rows_that_cannot_take_drafts_back_have_no_head(tmp_path: Path) -> None:
    """As the self-check may find."""
    directory = save_with_head("qwen3_5", tmp_path / "model")
    model, config = opened(directory)
    candidate = Candidate(
        model=model, config=config, directory=directory, digest=0, vocabulary=VOCABULARY, kv=PLAIN
    )
    capabilities = Capabilities(drafts="they differ")
    head = load_head(
        candidate, capabilities, Settings(), report=lambda _: None, watch=nobody_watches
    )
    assert (
        head.module is None
        and head.reason == "rows of this model cannot take drafts back (they differ)"
    )


def test_only_the_first_of_several_heads_is_kept(tmp_path: Path) -> None:
    names = [
        "model.layers.4.enorm.weight",
        "model.layers.5.hnorm.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict.fromkeys(names, mx.zeros(1)))
    found = read_head_weights(tmp_path, {**FAMILIES["deepseek_v3"], "num_hidden_layers": 4})
    assert [*found.weights] == ["enorm.weight"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.long(but=("qwen3_5", "deepseek_v3", "mimo"))
def test_a_pass_of_the_head_ends_in_the_models_own_output_layer(name: str, tmp_path: Path) -> None:
    one = loaded(save_with_head(name, tmp_path / name))
    assert one.head is not None
    tokens = mx.array([[3, 1, 4]])
    states = one.head.target_states(tokens, None)
    assert mx.array_equal(one.head.logits_of(states), one.model(tokens))


def test_a_head_of_an_unknown_family_is_left_out_and_named_once(tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "llama")
    weights = {"model.mtp.0.eh_proj.weight": mx.zeros((64, 128))}
    mx.save_safetensors(str(directory / "model-mtp.safetensors"), weights)
    model, config = opened(save("llama", tmp_path / "without"))
    candidate = Candidate(
        model=model, config=config, directory=directory, digest=0, vocabulary=VOCABULARY, kv=PLAIN
    )
    lines = list[str]()
    head = load_head(
        candidate, Capabilities(), Settings(), report=lines.append, watch=nobody_watches
    )
    assert head.module is None
    assert lines == ["the checkpoint's MTP head is not loaded: heads of llama are not supported"]
