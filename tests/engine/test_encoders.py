"""Encoders: what is refused by name, quantized checkpoints, groups of like length, long texts."""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from tests.arithmetic import TF32
from tests.engine.encoder_references import (
    CONFIGS,
    PROMPTS,
    Config,
    save_encoder,
    weights_of,
)
from tests.engine.test_encoder_references import TEXTS, engine_results
from tests.families import save, save_tokenizer
from trouper.engine.embeddings.embedding_modules import EncoderInput
from trouper.engine.embeddings.padded_pass import like_lengths, run_padded
from trouper.engine.encoders import bert, encoder
from trouper.engine.loading.model_loading import check, load
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.storage.context import context_length
from trouper.storage.model_files import read_model_files
from trouper.storage.sentence_files import context_of, read_sentence_files

PLAIN_TOLERANCE = 2e-2 if TF32 else 1e-5


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        (
            "xlm-roberta",
            {"position_embedding_type": "rotary"},
            "position_embedding_type rotary .*docs/models",
        ),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"hidden_act": "mish"}, "activation mish"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "classifier of 2 classes"),
        ("nomic bert", {"num_experts": 8, "moe_every_n_layers": 2}, "num_experts 8"),
        ("nomic bert", {"rotary_scaling_factor": 2}, "rotary_scaling_factor 2"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling max"),
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets 16"),
        ("gte", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "type dynamic"),
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 1}}, "type ntk"),
        ("gte", {"position_embedding_type": "absolute"}, "position_embedding_type absolute"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changed: Config, named: str, tmp_path: Path
) -> None:
    save_encoder(tmp_path, CONFIGS[name] | changed, weights_of(name))
    save_tokenizer(tmp_path)
    for read in (load_plainly, check):
        with pytest.raises(ModelUnusable, match=named):
            read(Settings(model=str(tmp_path)))


def test_buckets_of_relative_positions() -> None:
    """T5's, of both sides: single distances, then ever wider ranges, up to 128 tokens."""
    layers = bert.Layers(bert.ModelArgs.from_dict(CONFIGS["mpnet"]))
    numbers = mx.repeat(mx.arange(bert.BUCKETS)[:, None], 4, axis=1)
    layers.relative_attention_bias.weight = numbers.astype(mx.float32)
    padding = mx.arange(300)[None, None, None] < 290
    mask = layers.mask(300, padding)
    assert mask is not None and mask.shape == (1, 4, 300, 300)
    distances = [-200, -128, -127, -64, -45, -16, -15, -8, -7, 0, 1, 8, 64]
    buckets = [mask[0, 3, 220, 220 + distance].item() for distance in distances]
    assert buckets == [15, 15, 15, 14, 12, 10, 9, 8, 7, 0, 17, 24, 30]
    assert mask[0, 0, 220, 290:].max().item() == -math.inf


def load_plainly(settings: Settings) -> Any:
    return load(settings, lambda _: None)


def test_weights_of_another_architecture_are_named(tmp_path: Path) -> None:
    weights = weights_of("bert") | {"encoder.layer.0.lora_A.weight": np.zeros((2, 2), np.float32)}
    save_encoder(tmp_path, CONFIGS["bert"], weights)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelUnusable, match=r"encoder.layer.0.lora_A.weight not in the model"):
        load_plainly(Settings(model=str(tmp_path)))


def test_adapters_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"))
    save_tokenizer(tmp_path)
    settings = Settings(model=str(tmp_path), adapter=("a=elsewhere",))
    with pytest.raises(ModelUnusable, match="an encoder, with which an adapter cannot be used"):
        load_plainly(settings)


def quantize(directory: Path, bits: int) -> None:
    """Write the checkpoint as mlx-lm's and mlx-embeddings' conversions do, and beside it `plain`:
    the same numbers in float32."""
    name = "bert"
    model = load(Settings(model=str(directory)), lambda _: None).model
    nn.quantize(model, group_size=32, bits=bits, class_predicate=is_quantized)
    stored = dict(tree_flatten(model.parameters()))
    plain = weights_of(name)
    for path, layer in model.named_modules():
        if "scales" in layer:
            weight = mx.dequantize(layer.weight, layer.scales, layer.biases, 32, bits)
            plain[f"{path}.weight"] = np.array(weight)
    save_encoder(directory / "plain", CONFIGS[name], plain, "mean")
    save_file(
        {key: np.array(each) for key, each in stored.items()}, directory / "model.safetensors"
    )
    quantization = {"group_size": 32, "bits": bits, "mode": "affine"}
    config = CONFIGS[name] | {"quantization": quantization, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))


def is_quantized(_path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_checkpoints(bits: int, tmp_path: Path) -> None:
    save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"), "mean")
    save_tokenizer(tmp_path)
    before = engine_results(tmp_path, TEXTS, together=True)
    quantize(tmp_path, bits)
    vectors = engine_results(tmp_path, TEXTS, together=True)
    expected = engine_results(tmp_path / "plain", TEXTS, together=True)
    for vector, right, first in zip(vectors, expected, before, strict=True):
        np.testing.assert_allclose(vector, right, atol=PLAIN_TOLERANCE)
        assert not np.allclose(vector, first, atol=1e-4), "it was quantized"
    assert read_model_files("name", tmp_path).quantization == f"{bits}-bit"


def test_groups_of_like_length() -> None:
    lengths = [100, 3, 60, 50, 49, 6, 1]
    groups = [*like_lengths(lengths)]
    assert sorted(chain(*groups)) == [*range(len(lengths))]
    for group in groups:
        of_group = [lengths[index] for index in group]
        assert 2 * min(of_group) >= max(of_group)
    assert len(groups) == 4
    assert [*like_lengths([])] == []


def test_one_pass_for_texts_of_like_length() -> None:
    shapes = []

    def forward(tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        shapes.append((tokens.shape, mask is None))
        return tokens[..., None] + types[..., None]

    inputs = [EncoderInput([1, 2, 3], 2), EncoderInput([4, 5]), EncoderInput([6] * 9)]
    hidden = run_padded(inputs, forward)
    assert [each.tolist() for each in hidden] == [[[1], [2], [4]], [[4], [5]], [[6]] * 9]
    assert shapes == [((1, 9), True), ((2, 3), False)]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_queries_of_a_long_text_in_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU would else hold all scores at once."""
    save_encoder(tmp_path, CONFIGS[name], weights_of(name), "mean")
    expected_vectors = engine_results(tmp_path, TEXTS, together=True)
    monkeypatch.setattr(encoder, "is_cpu", lambda: True)
    monkeypatch.setattr(encoder, "CPU_SCORES", 7 * 4 * 40)
    cut_vectors = engine_results(tmp_path, TEXTS, together=True)
    for vector, right in zip(cut_vectors, expected_vectors, strict=True):
        np.testing.assert_allclose(vector, right, atol=PLAIN_TOLERANCE)


def test_padding_of_windows_gives_numbers(tmp_path: Path) -> None:
    """Rows of padding far from any token see themselves: MLX gives no numbers without a key."""
    save_encoder(tmp_path, CONFIGS["modernbert"], weights_of("modernbert"))
    save_tokenizer(tmp_path)
    model = load_plainly(Settings(model=str(tmp_path))).model
    tokens = mx.array([PROMPTS[2], PROMPTS[2]])
    mask = mx.array([[True] * 40, [True] * 20 + [False] * 20])
    assert not mx.isnan(model(tokens, mx.zeros_like(tokens), mask)).any().item()


class TestFilesOfSentenceTransformers:
    def test_the_longest_text(self, tmp_path: Path) -> None:
        config = CONFIGS["xlm-roberta"]
        assert context_length(config) == 48 == config["max_position_embeddings"] - 2
        assert context_of(tmp_path, config, "embedder") == 48
        (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 30}')
        assert context_of(tmp_path, config, "reranker") == 30
        assert context_of(tmp_path, config, "generator") == 48
        (tmp_path / "sentence_xlm-roberta_config.json").write_text('{"max_seq_length": 20}')
        assert context_of(tmp_path, config, "embedder") == 20
        (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')
        assert context_of(tmp_path, config, "embedder") == 48

    def test_more_positions_than_the_table_has_are_no_setting(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"))
        save_tokenizer(tmp_path)
        (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
        for length, expected in ((None, 20), (40, 40), (100, 48)):
            loaded = load_plainly(Settings(model=str(tmp_path), context_length=length))
            assert loaded.card.context_length == expected

    def test_prompts(self, tmp_path: Path) -> None:
        assert read_sentence_files(tmp_path).prompts == ()
        content: Config = {"prompts": {"query": "q: ", "document": None}}
        file = tmp_path / "config_sentence_transformers.json"
        file.write_text(json.dumps(content | {"default_prompt_name": "query"}))
        files = read_sentence_files(tmp_path)
        assert files.prompts == (("query", "q: "), ("document", ""))
        assert files.default_prompt == "query"
        names: tuple[Any, ...] = ("passage", ["query"])
        for name in names:
            file.write_text(json.dumps(content | {"default_prompt_name": name}))
            with pytest.raises(ModelUnusable, match=re.escape(repr(name))):
                read_sentence_files(tmp_path)

    def test_prompts_that_the_pooling_leaves_out_are_refused(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"), "mean")
        save_tokenizer(tmp_path)
        pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        file = tmp_path / "config_sentence_transformers.json"
        file.write_text(json.dumps({"prompts": {"query": "q: "}}))
        card = load_plainly(Settings(model=str(tmp_path))).card
        assert card.embedding is None and "leaves prompts out" in card.no_embedding
        file.write_text(json.dumps({"prompts": {"query": ""}}))
        assert load_plainly(Settings(model=str(tmp_path))).card.embedding is not None

    def test_modules_that_make_no_vectors_are_refused(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"), "mean")
        save_tokenizer(tmp_path)
        file = tmp_path / "config_sentence_transformers.json"
        for kind, gives in (("CrossEncoder", False), ("SentenceTransformer", True)):
            file.write_text(json.dumps({"model_type": kind}))
            card = load_plainly(Settings(model=str(tmp_path))).card
            assert (card.embedding is not None) is gives
            assert (kind in card.no_embedding) is not gives

    def test_a_pooling_that_is_not_known(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, CONFIGS["bert"], weights_of("bert"), "mean")
        save_tokenizer(tmp_path)
        for content in ('{"pooling_mode": "attention"}', "{"):
            (tmp_path / "1_Pooling" / "config.json").write_text(content)
            card = load_plainly(Settings(model=str(tmp_path))).card
            assert card.embedding is None and "1_Pooling/config.json" in card.no_embedding

    def test_a_decoder_that_scores_pairs_is_refused(self, tmp_path: Path) -> None:
        save("qwen3", tmp_path)
        file = tmp_path / "config.json"
        scores = {"architectures": ["Qwen3ForSequenceClassification"]}
        file.write_text(json.dumps(json.loads(file.read_text()) | scores))
        with pytest.raises(ModelUnusable, match=r"Qwen3ForSequenceClassification .*causal"):
            load_plainly(Settings(model=str(tmp_path)))

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("bert", "embedder"), ("nomic bert", "embedder"), ("bert scores", "reranker")],
    )
    def test_the_kind_of_a_directory(self, name: str, kind: str, tmp_path: Path) -> None:
        save_encoder(tmp_path, CONFIGS[name], weights_of(name))
        assert read_model_files("name", tmp_path).kind == kind
