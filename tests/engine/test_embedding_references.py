"""Vectors of tiny embedders are those of transformers and torch: `embedding_references.py` made
them."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from tests.families import save, save_tokenizer
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

REFERENCES = Path(__file__).with_name(FILE)
GREEDY = Sampling(temperature=0)


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


@pytest.mark.parametrize("name", ["embeddinggemma", "qwen3 embedding", "lfm2 of both sides"])
def test_vectors_are_the_same_in_company_of_other_lengths(
    name: str, references: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts of like length share a padded pass of a model whose tokens attend to both sides."""
    like = [prompt[:-2] for prompt in PROMPTS[1:]]
    vectors = vectors_of(name, tmp_path, (*PROMPTS, *like))
    for vector, expected in zip(vectors, references[name]["vectors"], strict=False):
        np.testing.assert_allclose(vector, expected, atol=2e-2 if TF32 else 1e-4)
    for vector, prompt in zip(vectors[len(PROMPTS) :], like, strict=True):
        [alone] = vectors_of(name, tmp_path, (prompt,))
        np.testing.assert_allclose(vector, alone, atol=2e-2 if TF32 else 1e-5)


def vectors_of(
    name: str, directory: Path, prompts: Sequence[Sequence[int]] = ()
) -> list[list[float]]:
    """By the engine, of a directory that was loaded as `serve` loads it. `prompts` are embedded in
    one step; without any, each of PROMPTS in a step of its own."""
    save_embedder(name, directory)
    save_tokenizer(directory)
    loaded = load(Settings(model=str(directory)), lambda _: None)
    layout = loaded.embedder.layout
    assert layout is not None, loaded.embedder.reason
    engine = StepEngine(loaded.model, VOCABULARY, modules=loaded.embedder.modules)
    vectors = []
    for group in [prompts] if prompts else [[prompt] for prompt in PROMPTS]:
        rows = [RowId(row) for row in range(len(group))]
        admits = [
            Admit(row, np.array(prompt, "<i4").tobytes(), GREEDY, embed=layout.pooling)
            for row, prompt in zip(rows, group, strict=True)
        ]
        chunks = [Chunk(row, len(prompt)) for row, prompt in zip(rows, group, strict=True)]
        plan = Plan(0, admit=tuple(admits), prefill=tuple(chunks))
        embedded = dict(engine.collect(engine.launch(plan)).embedded)
        engine.collect(engine.launch(Plan(1, drop=tuple(rows))))
        vectors += [np.frombuffer(embedded[row], "<f4").tolist() for row in rows]
    return vectors


@pytest.mark.parametrize("name", ["embeddinggemma", "qwen3 embedding"])
def test_configs_of_transformers_5_are_read_like_those_of_4(name: str, tmp_path: Path) -> None:
    """Gemma's periods of windows are in `layer_types` alone."""
    vectors = vectors_of(name, tmp_path / "4")
    assert vectors_of(f"{name} of transformers 5", tmp_path / "5") == vectors


def test_states_that_pass_from_token_to_token_rule_both_sides_out(tmp_path: Path) -> None:
    """A model with them would give vectors, in which no token sees those behind it."""
    save("qwen3_5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    embedder = load(Settings(model=str(tmp_path)), lambda _: None).embedder
    assert embedder.layout is None and "pass state from token to token" in embedder.reason
