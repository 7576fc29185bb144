"""Vectors of tiny embedders by transformers and torch, for a comparison that owes nothing to MLX.

`python3 tests/engine/embedding_references.py OUTDIR` needs numpy, safetensors, torch and
transformers, on any machine, and writes OUTDIR/embedding_references.json, whose home is beside this
file. Models are drawn by NumPy from a seed: both machines have the same weights.
"""

# ruff: noqa: T201
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]
Weights = dict[str, Array]
FILE = "embedding_references.json"
VOCABULARY = 512
HIDDEN, ODD_HIDDEN = 64, 92
"""The root of the second is no number of bfloat16."""
PROMPTS = [
    [5],
    [3, 17, 99, 4, 250, 8, 61, 30],
    [(37 * at + 11) % 500 + 1 for at in range(40)],
]
"""Longer than the windows, too."""
PACKAGE = "sentence_transformers.models."

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = SIZES | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 200000.0,
    "rope_local_base_freq": 5000.0,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
}
QWEN: dict[str, Any] = SIZES | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "attention_bias": False,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 200000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
MISTRAL: dict[str, Any] = SIZES | {
    "model_type": "mistral",
    "architectures": ["MistralModel"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "sliding_window": None,
}
LFM2: dict[str, Any] = SIZES | {
    "model_type": "lfm2",
    "architectures": ["Lfm2BidirectionalModel"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_ff_dim": 96,
    "block_dim": HIDDEN,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "rope_theta": 1000000.0,
    "layer_types": ["conv", "full_attention", "conv"],
    "full_attn_idxs": [1],
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = SIZES | {
    "model_type": "llama_bidirec",
    "architectures": ["LlamaBidirectionalModel"],
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "pooling": "avg",
    "tie_word_embeddings": False,
}
MINISTRAL: dict[str, Any] = SIZES | {
    "model_type": "ministral3",
    "architectures": ["Ministral3Model"],
    "hidden_act": "silu",
    "is_causal": False,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "tie_word_embeddings": False,
}
ROPE_KEYS = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")


def renewed(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 saves it."""
    kept = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    return kept | {"rope_parameters": dict(rope)}


LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "embeddinggemma": GEMMA | {"use_bidirectional_attention": True},
    "embeddinggemma of transformers 5": renewed(GEMMA, GEMMA_ROPE)
    | {"use_bidirectional_attention": True, "layer_types": LAYER_TYPES},
    "embeddinggemma in float32": GEMMA
    | {"use_bidirectional_attention": True, "hidden_size": ODD_HIDDEN, "dtype": "float32"},
    "gemma3 causal": GEMMA,
    "qwen3 embedding": QWEN,
    "qwen3 embedding of transformers 5": renewed(
        QWEN, {"rope_type": "default", "rope_theta": 1000000.0}
    ),
    "qwen3 embedding without a head": QWEN | {"tie_word_embeddings": False},
    "e5 mistral": MISTRAL,
    "lfm2 of both sides": LFM2,
    "llama of both sides": LLAMA,
    "ministral3 of both sides": MINISTRAL,
}
POOLINGS = {name: "mean" if "embeddinggemma" in name else "lasttoken" for name in CONFIGS} | {
    "lfm2 of both sides": "cls",
    "llama of both sides": "mean",
    "ministral3 of both sides": "mean",
}
DENSE = {"embeddinggemma": (96, 48), "embeddinggemma of transformers 5": (96, 48)}
"""Widths of the layers behind the pooling, by model."""


def weights_of(config: Mapping[str, Any]) -> Weights:
    """Draw the body's weights; names are those of a model without a head."""
    drawn = np.random.RandomState(52)  # Its numbers are the same in all versions of NumPy.
    is_gemma = config["model_type"] == "gemma3_text"
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def norm(width: int) -> Array:
        values = 0.1 * drawn.standard_normal(width) + (0.0 if is_gemma else 1.0)
        return values.astype(np.float32)

    def matrix(rows: int, columns: int) -> Array:
        return (1.5 * columns**-0.5 * drawn.standard_normal((rows, columns))).astype(np.float32)

    weights = {"embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    if config["model_type"] == "lfm2":
        for layer, kind in enumerate(config["layer_types"]):
            part = f"layers.{layer}"
            if kind == "conv":
                weights[f"{part}.conv.conv.weight"] = matrix(hidden, 3).reshape(hidden, 1, 3)
                weights[f"{part}.conv.in_proj.weight"] = matrix(3 * hidden, hidden)
                weights[f"{part}.conv.out_proj.weight"] = matrix(hidden, hidden)
            else:
                weights[f"{part}.self_attn.q_proj.weight"] = matrix(heads * dim, hidden)
                weights[f"{part}.self_attn.k_proj.weight"] = matrix(kv_heads * dim, hidden)
                weights[f"{part}.self_attn.v_proj.weight"] = matrix(kv_heads * dim, hidden)
                weights[f"{part}.self_attn.out_proj.weight"] = matrix(hidden, heads * dim)
                for name in ("q_layernorm", "k_layernorm"):
                    weights[f"{part}.self_attn.{name}.weight"] = norm(dim)
            weights |= {
                f"{part}.{name}.weight": norm(hidden) for name in ("operator_norm", "ffn_norm")
            }
            weights[f"{part}.feed_forward.w1.weight"] = matrix(inner, hidden)
            weights[f"{part}.feed_forward.w3.weight"] = matrix(inner, hidden)
            weights[f"{part}.feed_forward.w2.weight"] = matrix(hidden, inner)
        return weights | {"embedding_norm.weight": norm(hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        part = f"layers.{layer}"
        attention, mlp = f"{part}.self_attn", f"{part}.mlp"
        weights |= {f"{part}.{name}.weight": norm(hidden) for name in norms}
        weights[f"{attention}.q_proj.weight"] = matrix(heads * dim, hidden)
        weights[f"{attention}.k_proj.weight"] = matrix(kv_heads * dim, hidden)
        weights[f"{attention}.v_proj.weight"] = matrix(kv_heads * dim, hidden)
        weights[f"{attention}.o_proj.weight"] = matrix(hidden, heads * dim)
        if config["model_type"] in ("gemma3_text", "qwen3"):
            weights |= {f"{attention}.{name}_norm.weight": norm(dim) for name in "qk"}
        weights[f"{mlp}.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{mlp}.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{mlp}.down_proj.weight"] = matrix(hidden, inner)
    return weights | {"norm.weight": norm(hidden)}


def dense_of(name: str) -> list[Array]:
    """Matrices (out, in) of the layers behind the pooling."""
    drawn, width, matrices = np.random.RandomState(7), HIDDEN, list[Array]()
    for out in DENSE.get(name, ()):
        values = width**-0.5 * drawn.standard_normal((out, width))
        matrices.append(values.astype(np.float32))
        width = out
    return matrices


def digest_of(name: str) -> str:
    arrays = [*weights_of(CONFIGS[name]).values(), *dense_of(name)]
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()


def save_embedder(name: str, directory: Path) -> Path:
    """A directory of sentence-transformers without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(CONFIGS[name]), directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", CONFIGS[name])
    pooling = {
        "word_embedding_dimension": CONFIGS[name]["hidden_size"],
        "pooling_mode": POOLINGS[name],
    }
    _write_module(directory / "1_Pooling", pooling)
    kinds = ["Transformer", "Pooling"]
    for matrix in dense_of(name):
        path = directory / f"{len(kinds)}_Dense"
        kinds.append("Dense")
        config = {
            "in_features": matrix.shape[1],
            "out_features": matrix.shape[0],
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        _write_module(path, config)
        save_file({"linear.weight": matrix}, path / "model.safetensors")
    kinds.append("Normalize")
    modules = [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": PACKAGE + kind}
        for at, kind in enumerate(kinds)
    ]
    _write(directory / "modules.json", modules)
    return directory


def _write_module(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    _write(directory / "config.json", config)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def vectors_of(name: str, directory: Path) -> list[list[float]]:
    """The vector of each prompt, by transformers and torch in float32 on the CPU."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModel

    let_see_both_sides(directory, CONFIGS[name])
    model, info = AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys") if info[key]}
    if wrong:
        raise SystemExit(f"{name}: the weights are not those of transformers' model: {wrong}")
    model.eval()
    vectors = []
    for prompt in PROMPTS:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}
        vector = pooled[POOLINGS[name]]
        for matrix in dense_of(name):
            vector = torch.from_numpy(matrix) @ vector
        vector = vector / vector.norm()
        vectors.append([round(value, 7) for value in vector.tolist()])
    return vectors


def let_see_both_sides(directory: Path, config: Mapping[str, Any]) -> None:
    """As the makers' own code does: transformers masks by `is_causal`, and convolutions of LFM2 are
    centred."""
    import torch
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    if "Bidirectional" not in config["architectures"][0]:
        return
    kind = config["model_type"].replace("_bidirec", "")
    _write(directory / "config.json", {**config, "model_type": kind, "is_causal": False})

    def forward(self: Any, hidden_states: Any, **_options: Any) -> Any:
        before, after, inner = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        convolved = torch.nn.functional.conv1d(
            before * inner,
            self.conv.weight,
            padding=(self.conv_kernel_size - 1) // 2,
            groups=inner.shape[1],
        )
        return self.out_proj((after * convolved).transpose(-1, -2))

    Lfm2ShortConv.forward = forward


def main(out: Path) -> None:
    import torch
    import transformers

    models = {}
    for name in CONFIGS:
        directory = save_embedder(name, out / name.replace(" ", "_"))
        models[name] = {"weights": digest_of(name), "vectors": vectors_of(name, directory)}
        print(f"{name}: {len(PROMPTS)} vectors")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    _write(out / FILE, {"versions": versions, "models": models})
    print(f"{out / FILE}: copy it into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 tests/engine/embedding_references.py OUTDIR")
    main(Path(sys.argv[1]))
