"""Models that the servers share, written once."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3, qwen3_moe

from trouper.engine.architectures import vlm_models
from trouper.engine.encoders import bert
from trouper.engine.loading.model_loading import load
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.qwen_tower import QwenTower
from trouper.protocol.settings import Settings


def save_float32(source: str, target: str) -> None:
    model = load(Settings(model=source), lambda _: None).model
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    _save(model, config, Path(source), Path(target))


def save_tiny(source: str, target: str) -> None:
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    config |= {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "layer_types": None,
    }
    mx.random.seed(0)
    _save(llama.Model(llama.ModelArgs.from_dict(config)), config, Path(source), Path(target))


def save_truncated(source: str, target: str, layers: int) -> None:
    """The first layers of a model: a smaller one with the same vocabulary, right now and then."""
    model = load(Settings(model=source, no_ssd=True), lambda _: None).model
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    model.model.layers = model.model.layers[:layers]
    _save(
        model,
        config | {"num_hidden_layers": layers, "layer_types": None},
        Path(source),
        Path(target),
    )


SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 16, "float32"),
    "30m": (256, 768, 24, 8, 4, 32, "float32"),
    "0.1b": (512, 1536, 30, 8, 4, 64, "float32"),
    "0.6b": (1024, 3072, 28, 16, 8, 128, "bfloat16"),
    "4b": (2560, 9728, 36, 32, 8, 128, "bfloat16"),
    "8b": (4096, 12288, 36, 32, 8, 128, "bfloat16"),
    "32b": (5120, 25600, 64, 64, 8, 128, "bfloat16"),
    "30b-a3b": (2048, 6144, 48, 32, 4, 128, "bfloat16"),
}
"""Of Qwen3's models, and three for CPUs: hidden, inner, layers, heads, KV heads, their size, type.
30m and 0.1b divide by two and by four, which the embedded model does not."""
EXPERTS = {
    "30b-a3b": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
"""What a shape with experts has besides."""


STEP: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    "sliding_window": 512,
    "rope_theta": [5e6, 1e4, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
    "use_head_wise_attn_gate": True,
    "moe_router_scaling_factor": 3.0,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_layers_enum": [1, 2, 3],
    "vocab_size": 49152,
}
ERNIE: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 14,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_num_experts": [64, 64],
    "moe_intermediate_size": [1536, 512],
    "moe_k": 6,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [29, 28],
    "moe_num_shared_experts": 2,
    "rope_theta": 5e5,
    "mrope_section": [22, 22, 20],
    "vocab_size": 49152,
}
HORIZON: dict[str, Any] = {"model_type": "k2_horizon", "vocab_size": 49152}
VLM_SHAPES: dict[str, dict[str, Any]] = {
    "k2-horizon": HORIZON,
    "step3p7": {"model_type": "step3p7", "text_config": STEP},
    "ernie4.5-vl": {"model_type": "ernie4_5_moe_vl", **ERNIE},
    "k2-horizon-tiny": HORIZON
    | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
    "step3p7-tiny": {
        "model_type": "step3p7",
        "text_config": STEP
        | {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64}
        | {"share_expert_dim": 64, "moe_num_experts": 16},
    },
    "ernie4.5-vl-tiny": {
        "model_type": "ernie4_5_moe_vl",
        **ERNIE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "moe_num_experts": [16, 16],
        "moe_intermediate_size": [128, 64],
    },
}
"""Of text modules of mlx-vlm, by what their configs have: K2 Horizon, whole (15 GB in bfloat16);
the dense layer and three with experts of Step 3.7's 45 (30 GB), half of ERNIE 4.5 VL 28B-A3B's
(29 GB); and small ones of the same kinds, for CPUs."""


def save_random(shape: str, source: str, target: str, bits: int = 16) -> None:
    """Random weights of a shape, with the tokenizer of `source`; quantized in groups of 64, if
    `bits` is 4 or 8. All layers of a kind have the same: drawing and writing 60 GB of different
    ones takes minutes, and speed does not depend on what they are."""
    model, config = _drawn_vlm(shape) if shape in VLM_SHAPES else _drawn(shape)
    if bits < 16:
        nn.quantize(model, 64, bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    scratch = _save_layers(dict(tree_flatten(model.parameters())), Path(target))
    _finish(config, Path(source), scratch, Path(target))


ENCODERS = {"bge-small": (384, 1536, 12, 12), "bge-base": (768, 3072, 12, 12)}
"""BERT's width, inner width, layers and heads."""


def save_random_encoder(shape: str, target: str, *, scores: bool = False) -> None:
    """A BERT with random weights and a tokenizer of words; a cross-encoder, if it `scores`.
    transformers reads it, too."""
    from tests.encoder_tokenizers import save_wordpiece

    width, inner, layers, heads = ENCODERS[shape]
    kind = "BertForSequenceClassification" if scores else "BertModel"
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": [kind],
        "vocab_size": 30522,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "id2label": {"0": "relevance"} if scores else {"0": "no", "1": "yes"},
    }
    mx.random.seed(0)
    weights = dict(tree_flatten(bert.Model(bert.ModelArgs.from_dict(config)).parameters()))
    if scores:
        weights = {
            name if name.startswith("classifier.") else f"bert.{name}": array
            for name, array in weights.items()
        }
    directory = Path(target)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    save_wordpiece(directory, config["vocab_size"])


VISION = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "model_type": "qwen3_vl",
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWERS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 96, "depth": 4, "num_heads": 4, "intermediate_size": 192},
    "wide": {"hidden_size": 1152, "depth": 4, "num_heads": 16, "intermediate_size": 4304},
    "2b": {"hidden_size": 1024, "depth": 24, "num_heads": 16, "intermediate_size": 4096},
    "8b": {"hidden_size": 1152, "depth": 27, "num_heads": 16, "intermediate_size": 4304},
}
"""Qwen3-VL's encoders, by the size of the text model; one of four layers as wide as the 8b's."""


def vision_config(tower: str, text_dim: int, text_layers: int = 3) -> dict[str, Any]:
    """Each layer of the text gets vectors of one inner layer, up to three."""
    depth = TOWERS[tower]["depth"]
    return VISION | {
        **TOWERS[tower],
        "out_hidden_size": text_dim,
        "deepstack_visual_indexes": [depth // 4, depth // 2, 3 * depth // 4][:text_layers],
    }


def save_random_vision(shape: str, tower: str, source: str, target: str) -> None:
    """A Qwen3-VL with random weights: the text of a shape, all layers alike, and an encoder.
    `source`: a Qwen3-VL, of which come tokenizer, template and rules for images."""
    read = json.loads((Path(source) / "config.json").read_text())
    vocabulary = read["text_config"]["vocab_size"]
    model, text = _drawn(shape, vocabulary)
    layers, head_dim = SHAPES[shape][2], text["head_dim"]
    sections = [head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": sections}
    text |= {"model_type": "qwen3_vl_text", "rope_scaling": rope}
    vision = vision_config(tower, text["hidden_size"], layers)
    rules = PatchRules((0.5,) * 3, (0.5,) * 3, 1 / 255, 16, 2, 2)
    encoder = QwenTower({"model_type": "qwen3_vl", "vision_config": vision}, rules)
    encoder.set_dtype(getattr(mx, SHAPES[shape][6]))
    weights = {f"language_model.{name}": array for name, array in tree_flatten(model.parameters())}
    weights |= {f"vision_tower.{name}": array for name, array in tree_flatten(encoder.parameters())}
    scratch = _save_layers(weights, Path(target))
    for name in ("chat_template.jinja", "preprocessor_config.json"):
        shutil.copy(Path(source) / name, scratch)
    config = {**read, "text_config": text, "vision_config": vision}
    _finish(config, Path(source), scratch, Path(target))


def random_model(shape: str) -> tuple[nn.Module, int]:
    """A model of a shape with random weights, in memory, and its vocabulary's size."""
    model, config = _drawn(shape)
    mx.eval(model.parameters())
    return model, int(config["vocab_size"])


def _drawn(shape: str, vocabulary: int = 49152) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights, not evaluated, and its config."""
    hidden, inner, layers, heads, kv_heads, head_dim, dtype = SHAPES[shape]
    experts = EXPERTS.get(shape, {})
    module = qwen3_moe if experts else qwen3
    config = {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **experts,
    }
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    return model, config


def _drawn_vlm(shape: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same of a text module of mlx-vlm."""
    config = {"eos_token_id": 2, **VLM_SHAPES[shape]}
    model_class, args_class = vlm_models.text_classes(config)
    mx.random.seed(0)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return model, config


LAYER = re.compile(r"^(.*\.layers)\.(\d+)\.(.*)$")


def _save_layers(weights: dict[str, Any], target: Path) -> Path:
    """Write the weights; a layer's stand for all those of the same shapes. Returns the directory,
    which is not yet `target`."""
    scratch = target.with_suffix(".part")
    scratch.mkdir(parents=True, exist_ok=True)
    layers: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    rest = {}
    for name, array in weights.items():
        if match := LAYER.match(name):
            stack, layer, inner = match.groups()
            layers[stack, layer][inner] = array
        else:
            rest[name] = array
    mx.save_safetensors(str(scratch / "model-rest.safetensors"), rest, {"format": "mlx"})
    written: dict[Any, Path] = {}
    for number, ((stack, layer), arrays) in enumerate(layers.items()):
        file = scratch / f"model-{number:03}.safetensors"
        shapes = tuple((inner, *array.shape, array.dtype) for inner, array in arrays.items())
        if other := written.get(shapes):
            _copy_layer(other, file, f"{stack}.{layer}.")
            continue
        named = {f"{stack}.{layer}.{inner}": array for inner, array in arrays.items()}
        mx.save_safetensors(str(file), named, {"format": "mlx"})
        written[shapes] = file
    return scratch


def _copy_layer(written: Path, file: Path, prefix: str) -> None:
    """The same bytes under other names."""
    content = written.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(
        {LAYER.sub(rf"{prefix}\3", name): tensor for name, tensor in header.items()}
    ).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.write(memoryview(content)[8 + length :])


def _save(model: llama.Model, config: dict[str, Any], source: Path, target: Path) -> None:
    scratch = target.with_suffix(".part")
    scratch.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(scratch / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        {"format": "mlx"},
    )
    _finish(config, source, scratch, target)


def _finish(config: dict[str, Any], source: Path, scratch: Path, target: Path) -> None:
    (scratch / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, scratch)
    scratch.rename(target)


def save_config(config: dict[str, Any], target: str) -> None:
    """Random weights of a config, with the byte-level tokenizer of the tests' tiny models."""
    from tests.families import save

    save(config["model_type"], Path(target), config)
