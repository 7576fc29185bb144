"""Layers behind the pooling, as sentence-transformers names them in `modules.json`: vectors are
those of a numpy reference, and what is not known is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import erf
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import save_file

from tests.arithmetic import TF32
from tests.engine.test_embedding import PROMPT, vector
from tests.fakes import card
from tests.families import build, save
from tests.family_configs import VOCABULARY
from trouper import RequestFailed, Settings
from trouper.engine.embeddings.embedding_modules import ACTIVATIONS
from trouper.engine.embeddings.pooling import embedder_of
from trouper.engine.kv.model_body import body_of
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.web.openai.embeddings import EmbeddingRequest, embedding_to_generate

Json = dict[str, Any]
Array = np.ndarray[Any, np.dtype[np.float32]]
OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules."
OUT = 48


def hidden_of(model: Any) -> Array:
    body = body_of(model)
    assert body is not None
    return np.array(body(mx.array([PROMPT]), cache=make_prompt_cache(model))[0].astype(mx.float32))


def modules(directory: Path, *named: tuple[str, str], package: str = OLD) -> None:
    """The model's own two modules, and these: their directories and types."""
    every = [("", f"{package}Transformer"), ("1_Pooling", f"{package}Pooling"), *named]
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": kind}
        for at, (path, kind) in enumerate(every)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))


def module(directory: Path, name: str, config: Json, **weights: Array) -> None:
    (directory / name).mkdir()
    (directory / name / "config.json").write_text(json.dumps(config))
    if weights:
        save_file(
            {key.replace("__", "."): value for key, value in weights.items()},
            directory / name / "model.safetensors",
        )


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(scale=0.25, size=shape).astype(np.float32)


def torch_name(activation: str) -> str:
    return f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"


REFERENCES: dict[str, Callable[[Array], Any]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * np.array([1 + erf(one / 2**0.5) for one in x]) / 2,
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
POOLED: dict[str, Callable[[Array], Any]] = {
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": lambda states: np.average(
        states, axis=0, weights=np.arange(1, len(states) + 1)
    ),
    "lasttoken": lambda states: states[-1],
}


def test_all_activations_have_a_reference() -> None:
    assert REFERENCES.keys() == ACTIVATIONS.keys()


def engine_vector(model: Any, directory: Path) -> Array:
    embedder = embedder_of(model, directory)
    assert embedder.layout is not None, embedder.reason
    engine = StepEngine(model, VOCABULARY, modules=embedder.modules)
    got = np.array(vector(engine, embedder.layout.pooling, (1, 16, 23)), np.float32)
    assert embedder.layout.dimensions == len(got)
    return got


@pytest.mark.parametrize(
    ("activation", "pooling"),
    [*((name, "mean") for name in REFERENCES), *(("Tanh", name) for name in POOLED)],
)
def test_a_dense_layer_is_applied(activation: str, pooling: str, tmp_path: Path) -> None:
    model = build("llama")
    states = hidden_of(model)
    weight, bias = drawn(OUT, states.shape[1]), drawn(OUT, seed=1)
    modules(tmp_path, ("2_Dense", f"{OLD}Dense"))
    module(tmp_path, "1_Pooling", {"pooling_mode": pooling})
    config = {
        "in_features": states.shape[1],
        "out_features": OUT,
        "bias": True,
        "activation_function": torch_name(activation),
    }
    module(tmp_path, "2_Dense", config, linear__weight=weight, linear__bias=bias)
    expected = REFERENCES[activation](weight @ POOLED[pooling](states) + bias)
    got = engine_vector(model, tmp_path)
    np.testing.assert_allclose(
        got, expected / np.linalg.norm(expected), atol=2e-2 if TF32 else 2e-5
    )
    plain = POOLED[pooling](states)
    assert len(got) == OUT != len(plain)


@pytest.mark.parametrize("out", [OUT, None])
def test_a_dense_layer_adds_its_input(out: int | None, tmp_path: Path) -> None:
    """Projected, where the widths differ."""
    model = build("llama")
    pooled = hidden_of(model).mean(0)
    width = out or len(pooled)
    weight, projection = drawn(width, len(pooled)), drawn(width, len(pooled), seed=1)
    modules(tmp_path, ("2_Dense", f"{NEW}Dense"), package=NEW)
    module(tmp_path, "1_Pooling", {"pooling_mode": "mean"})
    weights = {"linear__weight": weight} | ({"residual__weight": projection} if out else {})
    module(tmp_path, "2_Dense", DENSE | {"use_residual": True}, **weights)
    expected = np.tanh(weight @ pooled) + (projection @ pooled if out else pooled)
    got = engine_vector(model, tmp_path)
    np.testing.assert_allclose(
        got, expected / np.linalg.norm(expected), atol=2e-2 if TF32 else 2e-5
    )


def test_the_layers_of_embeddinggemma_and_a_norm(tmp_path: Path) -> None:
    """Two layers without bias; the directories may have any names."""
    model = build("llama")
    states = hidden_of(model)
    wide, back, scale, shift = (
        drawn(96, states.shape[1]),
        drawn(OUT, 96, seed=1),
        drawn(96, seed=2),
        drawn(96, seed=3),
    )
    kinds = ("Dense", "LayerNorm", "Normalize", "Dropout", "Dense", "Normalize")
    modules(
        tmp_path, *((f"{at}_{kind}", NEW + kind) for at, kind in enumerate(kinds, 2)), package=NEW
    )
    module(tmp_path, "1_Pooling", {"pooling_mode_mean_tokens": True})
    identity = {
        "bias": False,
        "activation_function": torch_name("Identity"),
        "module_input_name": "sentence_embedding",
    }
    module(tmp_path, "2_Dense", identity, linear__weight=wide)
    module(tmp_path, "3_LayerNorm", {"dimension": 96}, norm__weight=scale, norm__bias=shift)
    module(tmp_path, "6_Dense", identity, linear__weight=back)
    expected = wide @ states.mean(0)
    expected = (expected - expected.mean()) / np.sqrt(expected.var() + 1e-5) * scale + shift
    expected = back @ (expected / np.linalg.norm(expected))
    np.testing.assert_allclose(
        engine_vector(model, tmp_path),
        expected / np.linalg.norm(expected),
        atol=2e-2 if TF32 else 5e-5,
    )


def test_the_pooling_is_where_the_modules_say(tmp_path: Path) -> None:
    listed = [{"path": "", "type": f"{OLD}Transformer"}, {"path": "pool", "type": f"{OLD}Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    module(tmp_path, "pool", {"pooling_mode": "cls"})
    module(tmp_path, "1_Pooling", {"pooling_mode": "max"})
    found = embedder_of(build("llama"), tmp_path).layout
    assert found is not None and found.pooling == "first"


def test_a_causal_model_whose_directory_of_the_pooling_is_lost_takes_the_last_token(
    tmp_path: Path,
) -> None:
    """As conversions lose it, which copy the files of the directory itself."""
    modules(tmp_path)
    layout = embedder_of(build("llama"), tmp_path).layout
    assert layout is not None and layout.pooling == "last"
    (tmp_path / "modules.json").unlink()
    layout = embedder_of(build("llama"), tmp_path).layout
    assert layout is not None and layout.pooling == "mean"


DENSE: Json = {"activation_function": "torch.nn.modules.activation.Tanh"}
FAULTS: dict[str, tuple[tuple[str, str], Json, dict[str, Array], str]] = {
    "unknown": (
        ("2_WordWeights", f"{OLD}WordWeights"),
        {},
        {},
        r"2_WordWeights \(sentence_transformers.models.WordWeights\)",
    ),
    "of another package": (
        ("2_Dense", "pylate.models.Dense"),
        DENSE,
        {},
        r"2_Dense \(pylate.models.Dense\) of modules.json is not supp",
    ),
    "activation": (
        ("2_Dense", f"{OLD}Dense"),
        {"activation_function": "torch.nn.modules.activation.Mish"},
        {},
        "activation.Mish",
    ),
    "own code": (("2_Dense", f"{OLD}Dense"), {"activation_function": "mine.Tanh"}, {}, "mine.Tanh"),
    "of tokens": (
        ("2_Dense", f"{OLD}Dense"),
        DENSE | {"module_input_name": "token_embeddings"},
        {},
        "2_Dense .* pooled vector",
    ),
    "norm of tokens": (
        ("2_Normalize", f"{NEW}Normalize"),
        {"module_input_name": "token_embeddings"},
        {},
        "2_Normalize .* pooled vector",
    ),
    "no weights": (("2_Dense", f"{OLD}Dense"), DENSE, {}, "2_Dense .* has no model.safetensors"),
    "other weights": (
        ("2_Dense", f"{OLD}Dense"),
        DENSE,
        {"other__weight": drawn(3, 3)},
        "has no linear.weight",
    ),
    "other shape": (("2_Dense", f"{OLD}Dense"), DENSE, {"linear__weight": drawn(3, 3)}, "."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_applied_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    named, config, weights, expected = FAULTS[fault]
    modules(tmp_path, named)
    module(tmp_path, named[0], config, **weights)
    lines: list[str] = []
    found = embedder_of(build("llama"), tmp_path, lines.append)
    assert found.layout is None
    assert lines == [f"no embeddings: {found.reason}"]
    request = EmbeddingRequest.parse({"input": "x"})
    with pytest.raises(RequestFailed, match=expected) as refused:
        embedding_to_generate(
            request, "id", attrs.evolve(card(), embedding=None, no_embedding=found.reason)
        )
    assert refused.value.problem.code == "embeddings_not_supported"


@pytest.mark.parametrize("content", ["{", '{"a": 1}', '["Dense"]'])
def test_modules_that_are_none_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    found = embedder_of(build("llama"), tmp_path)
    assert found.layout is None and "modules.json" in found.reason


def test_vectors_are_as_long_as_the_model_says(tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 7}')
    model = build("llama")
    expected = hidden_of(model).mean(0)[:7]
    np.testing.assert_allclose(
        engine_vector(model, tmp_path),
        expected / np.linalg.norm(expected),
        atol=2e-2 if TF32 else 2e-5,
    )


def test_texts_that_become_messages_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sentence_bert_config.json"
    for modality, gives in (("message", False), ("text", True)):
        file.write_text(json.dumps({"modality_config": {modality: {"method": "forward"}}}))
        found = embedder_of(build("llama"), tmp_path)
        assert (found.layout is not None) is gives
        assert ("modality_config" in found.reason) is not gives


def test_a_loaded_model_has_its_layers_and_one_with_unknown_ones_still_generates(
    tmp_path: Path,
) -> None:
    directory = save("llama", tmp_path)
    modules(directory, ("2_Dense", f"{OLD}Dense"))
    width = hidden_of(build("llama")).shape[1]
    module(directory, "2_Dense", DENSE, linear__weight=drawn(7, width))
    loaded = load(Settings(model=str(directory)), lambda _: None)
    assert loaded.card.embedding is not None and loaded.card.embedding.dimensions == 7
    assert len(loaded.embedder.modules.steps) == 1
    (directory / "2_Dense" / "model.safetensors").unlink()
    again = load(Settings(model=str(directory)), lambda _: None).card
    assert again.embedding is None and "2_Dense" in again.no_embedding
