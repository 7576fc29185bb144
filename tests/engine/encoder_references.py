"""Vectors and scores of tiny encoders by transformers and torch.

`python3 tests/engine/encoder_references.py OUTDIR` needs numpy, safetensors, torch and
transformers, and writes OUTDIR/encoder_references.json, whose home is beside this file. Weights are
drawn by NumPy from a seed, under the names of the published checkpoints: transformers reads the
same names.
"""

# ruff: noqa: T201
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[np.float32]
Weights = dict[str, Array]
Config = dict[str, Any]
FILE = "encoder_references.json"
VOCABULARY, WIDTH, INNER, LAYERS, HEADS = 200, 32, 48, 3, 4
PACKAGE = "sentence_transformers.models."
PROMPTS = [
    [5],
    [3, 17, 99, 4, 150, 8, 61, 30],
    [(37 * at + 11) % 190 + 5 for at in range(40)],
    [(53 * at + 7) % 190 + 5 for at in range(25)],
]
"""Longer than the windows, too."""
PAIRS = [(PROMPTS[1], 3), (PROMPTS[2], 12), (PROMPTS[3], 20), (PROMPTS[1][:3], 2)]
"""Tokens, and the index of the second text."""
POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
SCORING = "ForSequenceClassification"

BERT: Config = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
}
XLM_ROBERTA: Config = BERT | {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "max_position_embeddings": 50,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
MODERNBERT: Config = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "classifier_pooling": "mean",
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
MODERNBERT_5: Config = {
    key: value
    for key, value in MODERNBERT.items()
    if key not in ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")
} | {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
NOMIC: Config = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "max_trained_positions": 32,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
}
NOMIC_OF_TRANSFORMERS: Config = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
MPNET: Config = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {
    "model_type": "mpnet",
    "architectures": ["MPNetForMaskedLM"],
    "max_position_embeddings": 50,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
}
DISTILBERT: Config = {
    "model_type": "distilbert",
    "architectures": ["DistilBertModel"],
    "vocab_size": VOCABULARY,
    "dim": WIDTH,
    "hidden_dim": INNER,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_position_embeddings": 48,
    "activation": "gelu",
    "sinusoidal_pos_embds": False,
    "pad_token_id": 0,
}
GTE: Config = BERT | {
    "model_type": "new",
    "architectures": ["NewModel"],
    "position_embedding_type": "rope",
    "type_vocab_size": 1,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "rope_theta": 20000.0,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "pad_token_id": 1,
}
# What NTK scaling of 8 makes of heads of 8 dimensions.
GTE_OF_TRANSFORMERS: Config = GTE | {
    "model_type": "gte",
    "architectures": ["GteModel"],
    "rope_parameters": {
        "rope_type": "linear",
        "factor": 8.0 ** (2 / 8),
        "rope_theta": 160000.0,
    },
    "rope_scaling": None,
}
EMBEDDING_GEMMA2_TEXT: Config = {
    "model_type": "embedding_gemma2_text",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "attention_bias": False,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 24,
    "embedding_dim": WIDTH,
    "per_layer_config": {"02": {"head_dim": 16, "num_key_value_heads": 1}},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
EMBEDDING_GEMMA2: Config = {
    "model_type": "embedding_gemma2",
    "architectures": ["EmbeddingGemma2Model"],
    "text_config": EMBEDDING_GEMMA2_TEXT,
    "vision_config": None,
    "audio_config": None,
    "image_token_id": 196,
    "video_token_id": 197,
    "audio_token_id": 198,
}
ONE_LABEL: Config = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def scoring(config: Config, name: str) -> Config:
    return config | ONE_LABEL | {"architectures": [name + SCORING]}


CONFIGS: dict[str, Config] = {
    "bert": BERT,
    "xlm-roberta": XLM_ROBERTA,
    "modernbert": MODERNBERT,
    "modernbert of transformers 5": MODERNBERT_5,
    "nomic bert": NOMIC,
    "mpnet": MPNET,
    "distilbert": DISTILBERT,
    "gte": GTE,
    "gte of transformers": GTE_OF_TRANSFORMERS,
    "embedding gemma 2": EMBEDDING_GEMMA2,
    "bert scores": scoring(BERT, "Bert"),
    "xlm-roberta scores": scoring(XLM_ROBERTA, "XLMRoberta"),
    "modernbert scores by mean": scoring(MODERNBERT, "ModernBert"),
    "modernbert scores by cls": scoring(MODERNBERT, "ModernBert") | {"classifier_pooling": "cls"},
    "mpnet scores": scoring(MPNET, "MPNet"),
    "distilbert scores": scoring(DISTILBERT, "DistilBert"),
    "gte scores": scoring(GTE, "New"),
}
TORCH_CONFIGS = CONFIGS | {
    "nomic bert": NOMIC_OF_TRANSFORMERS,
    "gte": GTE_OF_TRANSFORMERS,
    "gte scores": scoring(GTE_OF_TRANSFORMERS, "Gte"),
}


class Drawing:
    """Draws weights in the order of their names' first use."""

    def __init__(self) -> None:
        self._drawn = np.random.RandomState(61)  # Its numbers are the same in all of NumPy.
        self.weights: Weights = {}

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = 1.5 * columns**-0.5 * self._drawn.standard_normal((rows, columns))
        self.weights[f"{name}.weight"] = values.astype(np.float32)

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        self.matrix(name, outputs, inputs)
        self.weights[f"{name}.bias"] = self._vector(outputs)

    def norm(self, name: str, *, bias: bool = True) -> None:
        self.weights[f"{name}.weight"] = self._vector(WIDTH) + np.float32(1)
        if bias:
            self.weights[f"{name}.bias"] = self._vector(WIDTH)

    def scales(self, name: str, width: int) -> None:
        self.weights[name] = self._vector(width) + np.float32(1)

    def _vector(self, width: int) -> Array:
        return (0.1 * self._drawn.standard_normal(width)).astype(np.float32)


def draw_bert(config: Config) -> Weights:
    draw, scores = Drawing(), is_scoring(config)
    is_roberta = config["model_type"] != "bert"
    prefix = ("roberta." if is_roberta else "bert.") if scores else ""
    draw.matrix(f"{prefix}embeddings.word_embeddings", VOCABULARY, WIDTH)
    positions = config["max_position_embeddings"]
    draw.matrix(f"{prefix}embeddings.position_embeddings", positions, WIDTH)
    draw.matrix(f"{prefix}embeddings.token_type_embeddings", config["type_vocab_size"], WIDTH)
    draw.norm(f"{prefix}embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"{prefix}encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            draw.linear(f"{layer}.attention.{name}", WIDTH, WIDTH)
        draw.norm(f"{layer}.attention.output.LayerNorm")
        draw.linear(f"{layer}.intermediate.dense", INNER, WIDTH)
        draw.linear(f"{layer}.output.dense", WIDTH, INNER)
        draw.norm(f"{layer}.output.LayerNorm")
    if not is_roberta:
        draw.linear(f"{prefix}pooler.dense", WIDTH, WIDTH)
    if scores and is_roberta:
        draw.linear("classifier.dense", WIDTH, WIDTH)
        draw.linear("classifier.out_proj", 1, WIDTH)
    elif scores:
        draw.linear("classifier", 1, WIDTH)
    return draw.weights


def draw_modernbert(config: Config) -> Weights:
    draw, scores = Drawing(), is_scoring(config)
    prefix = "model." if scores else ""
    draw.matrix(f"{prefix}embeddings.tok_embeddings", VOCABULARY, WIDTH)
    draw.norm(f"{prefix}embeddings.norm", bias=False)
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}layers.{index}"
        if index:
            draw.norm(f"{layer}.attn_norm", bias=False)
        draw.matrix(f"{layer}.attn.Wqkv", 3 * WIDTH, WIDTH)
        draw.matrix(f"{layer}.attn.Wo", WIDTH, WIDTH)
        draw.norm(f"{layer}.mlp_norm", bias=False)
        draw.matrix(f"{layer}.mlp.Wi", 2 * INNER, WIDTH)
        draw.matrix(f"{layer}.mlp.Wo", WIDTH, INNER)
    draw.norm(f"{prefix}final_norm", bias=False)
    if scores:
        draw.matrix("head.dense", WIDTH, WIDTH)
        draw.norm("head.norm", bias=False)
        draw.linear("classifier", 1, WIDTH)
    return draw.weights


def draw_nomic(_config: Config) -> Weights:
    draw = Drawing()
    draw.matrix("embeddings.word_embeddings", VOCABULARY, WIDTH)
    draw.matrix("embeddings.token_type_embeddings", 2, WIDTH)
    draw.norm("emb_ln")
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        draw.matrix(f"{layer}.attn.Wqkv", 3 * WIDTH, WIDTH)
        draw.matrix(f"{layer}.attn.out_proj", WIDTH, WIDTH)
        draw.matrix(f"{layer}.mlp.fc11", INNER, WIDTH)
        draw.matrix(f"{layer}.mlp.fc12", INNER, WIDTH)
        draw.matrix(f"{layer}.mlp.fc2", WIDTH, INNER)
        draw.norm(f"{layer}.norm1")
        draw.norm(f"{layer}.norm2")
    return draw.weights


def draw_mpnet(config: Config) -> Weights:
    draw, scores = Drawing(), is_scoring(config)
    prefix = "mpnet." if scores else ""
    draw.matrix(f"{prefix}embeddings.word_embeddings", VOCABULARY, WIDTH)
    positions = config["max_position_embeddings"]
    draw.matrix(f"{prefix}embeddings.position_embeddings", positions, WIDTH)
    draw.norm(f"{prefix}embeddings.LayerNorm")
    draw.matrix(f"{prefix}encoder.relative_attention_bias", 32, HEADS)
    for index in range(LAYERS):
        layer = f"{prefix}encoder.layer.{index}"
        for name in "qkvo":
            draw.linear(f"{layer}.attention.attn.{name}", WIDTH, WIDTH)
        draw.norm(f"{layer}.attention.LayerNorm")
        draw.linear(f"{layer}.intermediate.dense", INNER, WIDTH)
        draw.linear(f"{layer}.output.dense", WIDTH, INNER)
        draw.norm(f"{layer}.output.LayerNorm")
    if scores:
        draw.linear("classifier.dense", WIDTH, WIDTH)
        draw.linear("classifier.out_proj", 1, WIDTH)
    else:
        draw.linear("pooler.dense", WIDTH, WIDTH)
    return draw.weights


def draw_distilbert(config: Config) -> Weights:
    draw, scores = Drawing(), is_scoring(config)
    prefix = "distilbert." if scores else ""
    draw.matrix(f"{prefix}embeddings.word_embeddings", VOCABULARY, WIDTH)
    positions = config["max_position_embeddings"]
    draw.matrix(f"{prefix}embeddings.position_embeddings", positions, WIDTH)
    draw.norm(f"{prefix}embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"{prefix}transformer.layer.{index}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            draw.linear(f"{layer}.attention.{name}", WIDTH, WIDTH)
        draw.norm(f"{layer}.sa_layer_norm")
        draw.linear(f"{layer}.ffn.lin1", INNER, WIDTH)
        draw.linear(f"{layer}.ffn.lin2", WIDTH, INNER)
        draw.norm(f"{layer}.output_layer_norm")
    if scores:
        draw.linear("pre_classifier", WIDTH, WIDTH)
        draw.linear("classifier", 1, WIDTH)
    return draw.weights


def draw_gte(config: Config) -> Weights:
    draw, scores = Drawing(), is_scoring(config)
    prefix = "new." if scores else ""
    draw.matrix(f"{prefix}embeddings.word_embeddings", VOCABULARY, WIDTH)
    draw.matrix(f"{prefix}embeddings.token_type_embeddings", 1, WIDTH)
    draw.norm(f"{prefix}embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"{prefix}encoder.layer.{index}"
        draw.linear(f"{layer}.attention.qkv_proj", 3 * WIDTH, WIDTH)
        draw.linear(f"{layer}.attention.o_proj", WIDTH, WIDTH)
        draw.matrix(f"{layer}.mlp.up_gate_proj", 2 * INNER, WIDTH)
        draw.linear(f"{layer}.mlp.down_proj", WIDTH, INNER)
        draw.norm(f"{layer}.attn_ln")
        draw.norm(f"{layer}.mlp_ln")
    if scores:
        draw.linear("new.pooler.dense", WIDTH, WIDTH)
        draw.linear("classifier", 1, WIDTH)
    return draw.weights


def draw_gte_of_transformers(config: Config) -> Weights:
    """The same under the names of transformers' modules."""
    named = Weights()
    for drawn_name, weight in draw_gte(config).items():
        name = drawn_name.replace("encoder.layer.", "layers.").replace("attention.", "self_attn.")
        name = name.replace("attn_ln", "post_attention_layernorm")
        name = name.replace("mlp_ln", "post_mlp_layernorm")
        splits: tuple[str, ...] = ("",)
        if "qkv_proj" in name:
            splits = ("q_proj", "k_proj", "v_proj")
        elif "up_gate_proj" in name:
            splits = ("up_proj", "gate_proj")
        for part, piece in zip(splits, np.split(weight, len(splits)), strict=True):
            named[name.replace("qkv_proj", part).replace("up_gate_proj", part)] = piece
    return named


def draw_embedding_gemma2(config: Config) -> Weights:
    draw, text = Drawing(), config["text_config"]
    side, kinds = text["hidden_size_per_layer_input"], text["layer_types"]
    draw.matrix("language_model.embed_tokens", VOCABULARY, WIDTH)
    draw.matrix("language_model.ple.per_layer_model_projection", LAYERS * side, WIDTH)
    draw.scales("language_model.ple.per_layer_projection_norm.weight", side)
    for index, kind in enumerate(kinds):
        layer = f"language_model.layers.{index}"
        dim, kv_heads = (8, 2) if kind == "sliding_attention" else (16, 1)
        draw.matrix(f"{layer}.self_attn.q_proj", HEADS * dim, WIDTH)
        draw.matrix(f"{layer}.self_attn.k_proj", kv_heads * dim, WIDTH)
        draw.matrix(f"{layer}.self_attn.v_proj", kv_heads * dim, WIDTH)
        draw.matrix(f"{layer}.self_attn.o_proj", WIDTH, HEADS * dim)
        draw.scales(f"{layer}.self_attn.q_norm.weight", dim)
        draw.scales(f"{layer}.self_attn.k_norm.weight", dim)
        draw.matrix(f"{layer}.mlp.gate_proj", INNER, WIDTH)
        draw.matrix(f"{layer}.mlp.up_proj", INNER, WIDTH)
        draw.matrix(f"{layer}.mlp.down_proj", WIDTH, INNER)
        for before in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            draw.scales(f"{layer}.{before}_layernorm.weight", WIDTH)
        draw.matrix(f"{layer}.ple_block.per_layer_input_gate", side, WIDTH)
        draw.matrix(f"{layer}.ple_block.per_layer_projection", WIDTH, side)
        draw.scales(f"{layer}.ple_block.post_per_layer_input_norm.weight", WIDTH)
        draw.scales(f"{layer}.layer_scalar", 1)
    draw.scales("language_model.norm.weight", WIDTH)
    draw.matrix("language_model.embedding_projection", text["embedding_dim"], WIDTH)
    return draw.weights


DRAWING: Mapping[str, Callable[[Config], Weights]] = {
    "bert": draw_bert,
    "xlm-roberta": draw_bert,
    "modernbert": draw_modernbert,
    "nomic_bert": draw_nomic,
    "mpnet": draw_mpnet,
    "distilbert": draw_distilbert,
    "new": draw_gte,
    "gte": draw_gte_of_transformers,
    "embedding_gemma2": draw_embedding_gemma2,
}


def is_scoring(config: Config) -> bool:
    return str(config["architectures"][0]).endswith(SCORING)


def weights_of(name: str) -> Weights:
    return DRAWING[CONFIGS[name]["model_type"]](CONFIGS[name])


def digest_of(name: str) -> str:
    return hashlib.sha256(
        b"".join(each.tobytes() for each in weights_of(name).values())
    ).hexdigest()


def save_encoder(directory: Path, config: Config, weights: Weights, pooling: str = "") -> Path:
    """A directory without a tokenizer; `pooling`: with sentence-transformers' files."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    if pooling:
        (directory / "1_Pooling").mkdir(exist_ok=True)
        switch = "cls_token" if pooling == "cls" else pooling
        switch = switch if switch.endswith("tokens") or pooling == "cls" else f"{switch}_tokens"
        switch = "pooling_mode_lasttoken" if pooling == "lasttoken" else f"pooling_mode_{switch}"
        content = json.dumps({"word_embedding_dimension": WIDTH, switch: True})
        (directory / "1_Pooling" / "config.json").write_text(content)
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {
                "idx": at,
                "name": str(at),
                "path": f"{at}_{kind}" if at else "",
                "type": PACKAGE + kind,
            }
            for at, kind in enumerate(kinds)
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
    return directory


def results_of(name: str, directory: Path) -> Any:
    """Scores of the pairs, or the vectors of the prompts by pooling: by torch in float32."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModel, AutoModelForSequenceClassification

    config = TORCH_CONFIGS[name]
    kind = AutoModelForSequenceClassification if is_scoring(config) else AutoModel
    model, info = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys") if info[key]}
    if wrong and wrong != {"missing_keys": ["pooler.dense.bias", "pooler.dense.weight"]}:
        raise SystemExit(f"{name}: the weights are not those of transformers' model: {wrong}")
    model.eval()
    with torch.no_grad():
        if is_scoring(config):
            return [scored(model, config, *pair) for pair in PAIRS]
        states = [model(input_ids=torch.tensor([each])).last_hidden_state[0] for each in PROMPTS]
    return {pooling: [rounded(pooled(pooling, each)) for each in states] for pooling in POOLINGS}


def scored(model: Any, config: Config, tokens: list[int], second_at: int) -> float:
    import torch

    inputs = {"input_ids": torch.tensor([tokens])}
    if config.get("type_vocab_size") == 2:
        types = [int(at >= second_at) for at in range(len(tokens))]
        inputs["token_type_ids"] = torch.tensor([types])
    return round(float(model(**inputs).logits[0, 0]), 6)


def pooled(pooling: str, states: Any) -> Any:
    import torch

    count = len(states)
    at = torch.arange(1, count + 1, dtype=states.dtype)[:, None]
    results = {
        "mean": lambda: states.mean(0),
        "cls": lambda: states[0],
        "max": lambda: states.max(0).values,
        "lasttoken": lambda: states[-1],
        "weightedmean": lambda: (states * at).sum(0) / at.sum(),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / count**0.5,
    }
    return results[pooling]()


def rounded(vector: Any) -> list[float]:
    return [round(value, 6) for value in (vector / vector.norm()).tolist()]


def main(out: Path) -> None:
    import torch
    import transformers

    models = {}
    for name, config in TORCH_CONFIGS.items():
        directory = save_encoder(out / name.replace(" ", "_"), config, weights_of(name))
        models[name] = {"weights": digest_of(name), "results": results_of(name, directory)}
        print(name)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (out / FILE).write_text(json.dumps({"versions": versions, "models": models}))
    print(f"{out / FILE}: copy it into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 tests/engine/encoder_references.py OUTDIR")
    main(Path(sys.argv[1]))
