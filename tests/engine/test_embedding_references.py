"""Vectors of tiny embedders are those of transformers and torch: `embedding_references.py` made
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.arithmetic import TF32
from tests.engine.embedding_references import (
    CONFIGS,
    FILE,
    PROMPTS,
    VOCABULARY,
    digest_of,
    save_embedder,
)
from tests.families import save_tokenizer
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

REFERENCES = Path(__file__).with_name(FILE)
ROW = RowId(0)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    if not REFERENCES.exists():
        pytest.skip(f"{FILE} is not here; embedding_references.py makes it where torch is")
    models: dict[str, Any] = json.loads(REFERENCES.read_text("utf-8"))["models"]
    return models


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_are_those_of_transformers(
    name: str, references: dict[str, Any], tmp_path: Path
) -> None:
    reference = references[name]
    assert reference["weights"] == digest_of(name), "the references are of other weights"
    vectors = vectors_of(name, tmp_path)
    for vector, expected in zip(vectors, reference["vectors"], strict=True):
        np.testing.assert_allclose(vector, expected, atol=2e-2 if TF32 else 1e-4)


def vectors_of(name: str, directory: Path) -> list[list[float]]:
    """By the engine, of a directory that was loaded as `serve` loads it."""
    save_embedder(name, directory)
    save_tokenizer(directory)
    loaded = load(Settings(model=str(directory)), lambda _: None)
    layout = loaded.embedder.layout
    assert layout is not None, loaded.embedder.reason
    engine = StepEngine(loaded.model, VOCABULARY, modules=loaded.embedder.modules)
    vectors = []
    for prompt in PROMPTS:
        tokens = np.array(prompt, "<i4").tobytes()
        admitted = Admit(ROW, tokens, Sampling(temperature=0), embed=layout.pooling)
        plan = Plan(0, admit=(admitted,), prefill=(Chunk(ROW, len(prompt)),))
        [(_, data)] = engine.collect(engine.launch(plan)).embedded
        engine.collect(engine.launch(Plan(1, drop=(ROW,))))
        vectors.append(np.frombuffer(data, "<f4").tolist())
    return vectors


@pytest.mark.parametrize("name", ["embeddinggemma", "qwen3 embedding"])
def test_configs_of_transformers_5_are_read_like_those_of_4(name: str, tmp_path: Path) -> None:
    """Gemma's periods of windows are in `layer_types` alone."""
    vectors = vectors_of(name, tmp_path / "4")
    assert vectors_of(f"{name} of transformers 5", tmp_path / "5") == vectors
