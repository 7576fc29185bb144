"""Directories as people download them: what mlx-lm or transformers loads is loaded, and the rest is
refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.engine.test_loading import edit_config
from tests.families import save, write_json
from trouper.engine.embeddings.embedding_modules import EncoderInput
from trouper.engine.embeddings.pooling import Pool, embedder_of
from trouper.engine.loading.checkpoint import inspect
from trouper.engine.loading.model_loading import load
from trouper.engine.loading.tokenizer import load as load_tokenizer
from trouper.engine.loading.weights import opened
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.storage.context import context_length

TOKENS = [3, 17, 99, 4, 250, 8, 61, 30]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def directory(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def logits_of(directory: Path) -> np.ndarray:
    model, _ = opened(directory)
    return np.array(model(mx.array([TOKENS])).astype(mx.float32))


def rewrite(directory: Path, rename: Callable[[str], str | None]) -> None:
    path = directory / "model.safetensors"
    weights = mx.load(str(path))
    mx.eval(weights)
    named = {rename(name): weight for name, weight in weights.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(path), {name: weight for name, weight in named.items() if name})


def test_rope_in_the_form_of_transformers_5_is_that_of_4(directory: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    edit_config(directory, rope_theta=500000.0, rope_scaling=scaling)
    expected = logits_of(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = scaling | {"rope_theta": 500000.0}
    write_json(directory / "config.json", config)
    assert (logits_of(directory) == expected).all()
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    write_json(directory / "config.json", config)
    assert (logits_of(directory) != expected).any()


def test_an_index_of_the_source_is_read_past(directory: Path) -> None:
    expected = logits_of(directory)
    files = {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    write_json(directory / "model.safetensors.index.json", {"weight_map": files})
    assert inspect(directory).stored_bytes
    assert (logits_of(directory) == expected).all()


@pytest.mark.parametrize("name", ["br[a-c]kets", "st*r", "sp ace é"])
def test_a_path_is_no_pattern(name: str, directory: Path) -> None:
    expected = logits_of(directory)
    assert (logits_of(directory.rename(directory.parent / name)) == expected).all()


def test_names_without_their_prefix_and_without_a_head(directory: Path) -> None:
    expected = logits_of(directory)
    rewrite(directory, lambda name: name.removeprefix("model."))
    assert (logits_of(directory) == expected).all()


def test_a_body_without_a_head_makes_embeddings_alone(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=False)
    rewrite(directory, lambda name: None if name.startswith("lm_head") else name)
    loaded = load(Settings(model=str(directory)), lambda _: None)
    assert loaded.card.embedding is not None and "lm_head" in loaded.card.no_generation


@pytest.mark.parametrize("whose", ["model", "openai"])
def test_sampling_of_the_generation_config_is_the_default(directory: Path, whose: str) -> None:
    advised = {"temperature": 0.6, "top_k": 20, "top_p": "all", "min_p": 7, "min_length": 3}
    (directory / "generation_config.json").write_text(json.dumps(advised))
    lines: list[str] = []
    settings = Settings(model=str(directory), no_ssd=True, sampling_defaults=whose)
    card = load(settings, lines.append).card
    defaults = (("temperature", 0.6), ("top_k", 20)) if whose == "model" else ()
    assert card.sampling_defaults == defaults
    [left] = (line for line in lines if "left to requests" in line)
    assert ("temperature" in left) == (whose == "openai") and "min_length (3)" in left


def test_a_generation_config_that_is_broken_is_read_past(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos')
    lines: list[str] = []
    load(Settings(model=str(directory)), lines.append)
    assert any("generation_config.json" in line and "read past" in line for line in lines)


@pytest.mark.parametrize("key", ["chat_template_type", "tool_parser_type"])
def test_a_hint_at_a_module_that_is_not_there_is_read_past(key: str, directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text()) | {key: "of_tomorrow"})
    assert load_tokenizer(directory).encode("a b")


def test_a_key_that_nobody_reads_is_refused_or_named(directory: Path) -> None:
    edit_config(directory, final_logit_softcapping=30.0)
    with pytest.raises(ModelUnusable, match="final_logit_softcapping") as unusable:
        load(Settings(model=str(directory)), lambda _: None)
    assert "--unread-config" in str(unusable.value.remedy)
    lines: list[str] = []
    load(Settings(model=str(directory), unread_config="name"), lines.append)
    assert any("final_logit_softcapping" in line for line in lines)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096.0}, 4096),
        ({"max_position_embeddings": 1e30}, 32768),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 131072),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_the_context_is_that_of_the_makers(config: dict[str, Any], tokens: int) -> None:
    assert context_length(config) == tokens


def test_the_context_may_be_set(directory: Path) -> None:
    assert load(Settings(model=str(directory), context_length=77), print).card.context_length == 77


def test_an_architecture_that_ends_the_process_is_refused(directory: Path) -> None:
    """mlx-lm's OLMo calls `exit` where ai2-olmo is not installed: other models go on."""
    edit_config(directory, model_type="olmo")
    with pytest.raises(ModelUnusable, match="do not make a model"):
        load(Settings(model=str(directory)), lambda _: None)


# -- an encoder ------------------------------------------------------------------------------------

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "use_bidirectional_attention": True,
}


def reference(
    weights: dict[str, np.ndarray], tokens: list[int], config: dict[str, Any]
) -> np.ndarray:
    """EmbeddingGemma in NumPy, written from the description in transformers' modeling_gemma3.py:
    the mean of the hidden states, of length one."""
    heads, dim, window = config["num_attention_heads"], config["head_dim"], config["sliding_window"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return scaled * (1 + weights[f"{name}.weight"])

    def rotate(x: np.ndarray, base: float) -> np.ndarray:
        angles = np.arange(len(tokens))[:, None] / base ** (np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    at = np.arange(len(tokens))
    near = np.abs(at[:, None] - at[None]) < window // 2 + 1
    x = weights["model.embed_tokens.weight"][tokens] * np.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        is_full = layer % config["sliding_window_pattern"] == config["sliding_window_pattern"] - 1
        base = config["rope_theta"] if is_full else config["rope_local_base_freq"]
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            (h @ weights[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(tokens), -1, dim)
            for part in "qkv"
        )
        q = rotate(norm(q, f"{name}.self_attn.q_norm"), base)
        k = rotate(norm(k, f"{name}.self_attn.k_norm"), base)
        scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) * config["query_pre_attn_scalar"] ** -0.5
        scores = np.where(is_full | near, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed_values = np.einsum("hqk,kd->qhd", shares, v[:, 0]).reshape(len(tokens), heads * dim)
        mixed_values = mixed_values @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = x + norm(mixed_values, f"{name}.post_attention_layernorm")
        h = norm(x, f"{name}.pre_feedforward_layernorm")
        gate = h @ weights[f"{name}.mlp.gate_proj.weight"].T
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        h = (gate * (h @ weights[f"{name}.mlp.up_proj.weight"].T)) @ weights[
            f"{name}.mlp.down_proj.weight"
        ].T
        x = x + norm(h, f"{name}.post_feedforward_layernorm")
    pooled = norm(x, "model.norm").mean(0)
    return pooled / np.linalg.norm(pooled)


def test_an_encoder_attends_to_both_sides(llama: Path, tmp_path: Path) -> None:
    from mlx_lm.models import gemma3_text

    config = GEMMA | {"vocab_size": 512}
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))
    drawn = np.random.default_rng(3)
    weights = {
        name: drawn.normal(0, 0.3, value.shape).astype(np.float32)
        for name, value in tree_flatten(model.parameters())
        if not name.startswith("lm_head")
    }
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, tmp_path)
    arrays = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    write_json(tmp_path / "config.json", config)
    loaded = load(Settings(model=str(tmp_path)), lambda _: None)
    assert loaded.card.no_generation and not loaded.card.kv.cached
    encode = loaded.embedder.modules.encode
    assert encode is not None
    for tokens in (TOKENS, TOKENS * 3, [5]):
        pool = Pool("mean")
        pool.add(encode([EncoderInput(tokens)])[0])
        found = np.array(pool.vector(loaded.embedder.modules))
        assert np.abs(found - reference(weights, tokens, config)).max() < 1e-4


def test_embedder_without_the_key_is_causal(directory: Path) -> None:
    model, config = opened(directory)
    assert embedder_of(model, directory, print, config).modules.encode is None
