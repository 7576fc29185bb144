"""Vectors and scores of tiny encoders are those of transformers and torch:
`encoder_references.py` made them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.arithmetic import TF32
from tests.engine.encoder_references import (
    CONFIGS,
    FILE,
    PAIRS,
    POOLINGS,
    PROMPTS,
    VOCABULARY,
    Config,
    Weights,
    digest_of,
    is_scoring,
    save_encoder,
    weights_of,
)
from tests.families import save_tokenizer
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

REFERENCES: dict[str, Any] = json.loads(Path(__file__).with_name(FILE).read_text("utf-8"))["models"]
EMBEDDERS = [name for name, config in CONFIGS.items() if not is_scoring(config)]
SCORERS = [name for name in CONFIGS if name not in EMBEDDERS]
TOLERANCE = 2e-2 if TF32 else 1e-4
Inputs = Sequence[tuple[list[int], int]]
TEXTS: Inputs = [(prompt, 0) for prompt in PROMPTS]


def engine_results(directory: Path, inputs: Inputs, *, together: bool) -> list[list[float]]:
    """By the engine, of a directory that was loaded as `serve` loads it."""
    save_tokenizer(directory)
    loaded = load(Settings(model=str(directory)), lambda _: None)
    layout, encode = loaded.embedder.layout, loaded.embedder.modules.encode
    assert encode is not None and (layout is not None or loaded.card.scores)
    engine = StepEngine(
        loaded.model,
        VOCABULARY,
        modules=loaded.embedder.modules,
        capabilities=loaded.card.capabilities,
    )
    admits = [
        Admit(
            RowId(row),
            np.array(tokens, "<i4").tobytes(),
            Sampling(temperature=0),
            embed="first" if layout is None else layout.pooling,
            second_at=second_at,
        )
        for row, (tokens, second_at) in enumerate(inputs)
    ]
    results: dict[RowId, list[float]] = {}
    step = 0
    for group in [admits] if together else [[admit] for admit in admits]:
        chunks = tuple(Chunk(admit.row, admit.num_tokens) for admit in group)
        stepped = engine.collect(engine.launch(Plan(step, admit=tuple(group), prefill=chunks)))
        results |= {row: np.frombuffer(data, "<f4").tolist() for row, data in stepped.embedded}
        drop = tuple(admit.row for admit in group)
        engine.collect(engine.launch(Plan(step + 1, drop=drop)))
        step += 2
    return [results[admit.row] for admit in admits]


def require_vectors(directory: Path, expected: Any, *, together: bool = True) -> None:
    vectors = engine_results(directory, TEXTS, together=together)
    for vector, reference in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(vector, reference, atol=TOLERANCE)


def require_scores(directory: Path, expected: Any, *, together: bool = True) -> None:
    scores = engine_results(directory, PAIRS, together=together)
    np.testing.assert_allclose([score for [score] in scores], expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_references_are_of_these_weights(name: str) -> None:
    assert REFERENCES[name]["weights"] == digest_of(name)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_transformers(
    name: str, pooling: str, together: bool, tmp_path: Path
) -> None:
    save_encoder(tmp_path, CONFIGS[name], weights_of(name), pooling)
    require_vectors(tmp_path, REFERENCES[name]["results"][pooling], together=together)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_transformers(name: str, together: bool, tmp_path: Path) -> None:
    save_encoder(tmp_path, CONFIGS[name], weights_of(name))
    require_scores(tmp_path, REFERENCES[name]["results"], together=together)


def test_scores_depend_on_which_text_is_second(tmp_path: Path) -> None:
    save_encoder(tmp_path, CONFIGS["bert scores"], weights_of("bert scores"))
    one_text = [(tokens, 0) for tokens, _ in PAIRS]
    [score], *_ = engine_results(tmp_path, one_text, together=True)
    assert abs(score - REFERENCES["bert scores"]["results"][0]) > 1e-3


@pytest.mark.parametrize("name", EMBEDDERS)
def test_without_files_of_sentence_transformers_vectors_are_the_mean(
    name: str, tmp_path: Path
) -> None:
    save_encoder(tmp_path, CONFIGS[name], weights_of(name))
    require_vectors(tmp_path, REFERENCES[name]["results"]["mean"])


def old_names(weights: Weights) -> Weights:
    """Of BERT's first checkpoints, with the heads of its training."""
    renamed = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): each
        for name, each in weights.items()
    }
    head = {"cls.predictions.bias": np.zeros(VOCABULARY, np.float32)}
    buffer = {"bert.embeddings.position_ids": np.arange(48, dtype=np.float32)[None]}
    return renamed | head | buffer


FLASH = (
    (r"embeddings\.LayerNorm", "emb_ln"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.output\.LayerNorm", "norm1"),
    (r"attention\.output\.dense", "mixer.out_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(\d)\.output\.dense", r"\1.mlp.fc2"),
    (r"(\d)\.output\.LayerNorm", r"\1.norm2"),
)


def flash_names(weights: Weights) -> Weights:
    """Of Jina's XLM-RoBERTa with flash attention."""
    renamed: Weights = {}
    for stored_name, weight in weights.items():
        name = stored_name
        for pattern, replacement in FLASH:
            name = re.sub(pattern, replacement, name)
        if ".self.query." in name:
            others = [stored_name.replace("query", other) for other in ("query", "key", "value")]
            joined = np.concatenate([weights[each] for each in others])
            renamed[name.replace("attention.self.query", "mixer.Wqkv")] = joined
        elif ".self." not in name:
            renamed[name] = weight
    return renamed


def test_old_names_of_bert(tmp_path: Path) -> None:
    weights = old_names(weights_of("bert"))
    save_encoder(tmp_path, CONFIGS["bert"], weights, "cls")
    require_vectors(tmp_path, REFERENCES["bert"]["results"]["cls"])


def test_a_language_models_prefix_and_heads_of_modernbert(tmp_path: Path) -> None:
    weights = {f"model.{name}": each for name, each in weights_of("modernbert").items()}
    weights |= {
        "head.dense.weight": np.zeros((32, 32), np.float32),
        "head.norm.weight": np.zeros(32, np.float32),
        "decoder.bias": np.zeros(VOCABULARY, np.float32),
    }
    save_encoder(tmp_path, CONFIGS["modernbert"], weights, "cls")
    require_vectors(tmp_path, REFERENCES["modernbert"]["results"]["cls"])


def test_names_of_jinas_xlm_roberta(tmp_path: Path) -> None:
    name = "xlm-roberta scores"
    weights = flash_names(weights_of(name))
    assert "roberta.encoder.layers.0.mixer.Wqkv.weight" in weights
    assert "roberta.emb_ln.weight" in weights and "roberta.encoder.layers.2.mlp.fc2.bias" in weights
    config: Config = CONFIGS[name] | {"use_flash_attn": True, "emb_pooler": None}
    save_encoder(tmp_path, config, weights)
    require_scores(tmp_path, REFERENCES[name]["results"])
