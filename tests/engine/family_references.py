"""Logits, positions and answers of tiny models of further vision families by transformers and
torch, as `vision_references.py` makes them.

`python3 tests/engine/family_references.py OUTDIR` writes OUTDIR/family_references.json, whose home
is beside this file. Images of families with tiles are their tiles and overview: transformers'
processors have no part in this. Kimi-VL is not in transformers: its encoder is the code of
Kimi-K2.5's, with other names of weights.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.vision_references import (
    DECIMALS,
    FACTOR,
    PATCH,
    PROMPTS,
    QWEN_TEXT,
    VOCABULARY,
    digest_of,
    images_of,
)

Array = NDArray[np.float32]
Picture = NDArray[np.uint8]
Shapes = Mapping[str, Sequence[int]]
FILE = "family_references.json"
ANSWERED = 6
CERTAIN = 2e-3
"""Minimum gap of the best two logits in an answer."""
TILE = 16
IMAGE, START, END = 250, 251, 252
MEAN, STD = np.float32(0.5), np.float32(0.5)

FLAT_VISION: dict[str, Any] = {
    "depth": 4,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2: dict[str, Any] = QWEN_TEXT | {
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": IMAGE,
    "video_token_id": 254,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MOONVIT: dict[str, Any] = {
    "patch_size": PATCH,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "merge_kernel_size": [2, 2],
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": TILE,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN2
    | {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "vision_config": FLAT_VISION
        | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "hidden_act": "quick_gelu"},
    },
    "qwen2_5_vl": QWEN2
    | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": FLAT_VISION
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "hidden_act": "silu",
            "window_size": 2 * FACTOR,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "kimi_vl": {
        "model_type": "kimi_vl",
        "architectures": ["KimiVLForConditionalGeneration"],
        "media_placeholder_token_id": IMAGE,
        "vision_config": MOONVIT
        | {"model_type": "moonvit", "init_pos_emb_height": 4, "init_pos_emb_width": 4},
        "text_config": DEEPSEEK | {"q_lora_rank": None},
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "media_placeholder_token_id": IMAGE,
        "vision_config": {
            "patch_size": PATCH,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [2, 2],
            "vt_hidden_size": 32,
            "vt_intermediate_size": 48,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 3,
        },
        "text_config": DEEPSEEK | {"model_type": "kimi_k2"},
    },
    "idefics3": {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "vision_config": SIGLIP | {"model_type": "idefics3_vision"},
        "text_config": LLAMA,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 4,
        "vision_config": SIGLIP | {"model_type": "smolvlm_vision"},
        "text_config": LLAMA,
        "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 48,
        "projector_hidden_act": "gelu",
        "projector_bias": True,
        "projector_use_layernorm": True,
        "tie_word_embeddings": True,
        "vision_config": {
            **{key: value for key, value in SIGLIP.items() if key != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 9,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "lfm2",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "block_dim": 64,
            "intermediate_size": 96,
            "block_ff_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
    },
    "llama4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": TILE,
            "patch_size": PATCH,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "vision_output_dim": 48,
            "rope_theta": 10000.0,
        },
        "text_config": LLAMA
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "attention_bias": False,
            "use_qk_norm": True,
            "rope_scaling": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    },
}
HALVES: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN2_PROCESSOR = HALVES | {"min_pixels": FACTOR**2, "max_pixels": 64 * FACTOR**2}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN2_PROCESSOR,
    "qwen2_5_vl": QWEN2_PROCESSOR,
    "kimi_vl": HALVES | {"in_token_limit": 256, "pad_input": True},
    "kimi_k25": {"media_proc_cfg": HALVES | {"in_patch_limit": 256}},
    "idefics3": HALVES
    | {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
    "smolvlm": HALVES
    | {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
    "lfm2_vl": HALVES
    | {
        "tile_size": TILE,
        "min_image_tokens": 1,
        "max_image_tokens": 4,
        "max_tiles": 4,
        "max_pixels_tolerance": 1.5,
    },
    "llama4": HALVES | {"size": {"height": TILE, "width": TILE}, "max_patches": 4},
}
FILLED = ("qwen2_vl", "qwen2_5_vl", "kimi_vl", "kimi_k25")
"""Families without tiles."""
FILLED_SIZES = ((24, 40), (16, 16), (32, 24), (24, 40))
TILED_SIZES = {
    "idefics3": ((16, 32), (32, 32), (32, 16), (16, 32)),
    "smolvlm": ((16, 32), (32, 32), (32, 16), (16, 32)),
    "lfm2_vl": ((16, 32), (16, 16), (32, 16), (16, 32)),
    "llama4": ((16, 32), (16, 16), (32, 16), (16, 32)),
}
"""(height, width) of each image, which no family resizes."""
PAIRS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, 4), (3, 1), (4, 1))
IDEFICS_IDS: dict[str, int] = {
    "<image>": IMAGE,
    "<fake_token_around_image>": START,
    "<global-img>": END,
    "Ċ": 10,
    "ĊĊ": 220,
    **{f"<row_{row}_col_{column}>": 200 + 4 * row + column for row, column in PAIRS},
}
TOKEN_IDS: dict[str, dict[str, int]] = {
    "qwen2_vl": {"<|image_pad|>": IMAGE},
    "qwen2_5_vl": {"<|image_pad|>": IMAGE},
    "kimi_vl": {"<|media_pad|>": IMAGE},
    "kimi_k25": {"<|media_pad|>": IMAGE},
    "idefics3": IDEFICS_IDS,
    "smolvlm": IDEFICS_IDS,
    "lfm2_vl": {
        "<image>": IMAGE,
        "<|image_start|>": START,
        "<|image_end|>": END,
        "<|img_thumbnail|>": 253,
        **{f"<|img_row_{row}_col_{column}|>": 200 + 4 * row + column for row, column in PAIRS},
    },
    "llama4": {
        "<|patch|>": IMAGE,
        "<|image_start|>": START,
        "<|image_end|>": END,
        "<|image|>": 253,
        "<|tile_x_separator|>": 200,
        "<|tile_y_separator|>": 201,
    },
}


def size_of(name: str, number: int) -> tuple[int, int]:
    return FILLED_SIZES[number] if name in FILLED else TILED_SIZES[name][number]


def _drawn(size: tuple[int, int], seed: int) -> Picture:
    return np.random.RandomState(seed).randint(0, 256, (*size, 3)).astype(np.uint8)


def picture(name: str, number: int) -> Picture:
    """The image: uint8 (height, width, 3)."""
    return _drawn(size_of(name, number), 100 + number)


def overview(name: str, number: int) -> Picture | None:
    """Random as the image itself."""
    height, width = size_of(name, number)
    if name in FILLED or (name not in ("idefics3", "smolvlm") and height == width):
        return None
    size = (TILE, TILE) if name != "lfm2_vl" else (height // 2, width // 2)
    return _drawn(size, 150 + number)


def views(name: str, number: int) -> list[Picture]:
    """Tiles, row by row, and the overview."""
    image, smaller = picture(name, number), overview(name, number)
    if smaller is None:
        return [image]
    height, width = size_of(name, number)
    tiles = [
        image[top : top + TILE, left : left + TILE]
        for top in range(0, height, TILE)
        for left in range(0, width, TILE)
    ]
    return [*tiles, smaller]


def span_tokens(name: str, number: int) -> list[int]:
    """The image's tokens, without what chat templates write around it."""
    ids, (height, width) = TOKEN_IDS[name], size_of(name, number)
    if name in FILLED:
        return [IMAGE] * (height // FACTOR * (width // FACTOR))
    side = FACTOR if name != "smolvlm" else 2 * FACTOR
    runs = [[IMAGE] * (len(view) // side * (view.shape[1] // side)) for view in views(name, number)]
    columns, tokens = width // TILE, list[int]()
    for at, run in enumerate(runs[:-1]):
        row, column = at // columns, at % columns
        is_last = column == columns - 1
        if name == "lfm2_vl":
            tokens += [ids[f"<|img_row_{row + 1}_col_{column + 1}|>"], *run]
        elif name == "llama4":
            tokens += [*run, ids["<|tile_y_separator|>" if is_last else "<|tile_x_separator|>"]]
        else:
            tokens += [START, ids[f"<row_{row + 1}_col_{column + 1}>"], *run]
            if is_last:
                tokens.append(220 if at == len(runs) - 2 else 10)
    if name in ("idefics3", "smolvlm"):
        return [*tokens, START, END, *runs[-1], START]
    if name == "llama4" or len(runs) > 1:
        tokens.append(253)
    return [START, *tokens, *runs[-1], END]


def tokens_of(name: str, prompt: str) -> list[int]:
    tokens: list[int] = []
    for part in PROMPTS[prompt]:
        if isinstance(part, str):
            tokens += part.encode()
        elif name.startswith("qwen2"):
            tokens += [START, *span_tokens(name, part), END]
        else:
            tokens += span_tokens(name, part)
    return tokens


def draw_weight(name: str, shape: Sequence[int]) -> Array:
    """A weight from the CRC-32 of its name. Norms are about 1."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith((".bias", "correction_bias")):
        return (0.1 * values).astype(np.float32)
    if len(shape) == 1:
        return (0.1 * values + 1).astype(np.float32)
    if name.endswith(("lm_head.weight", "embed_tokens.weight")):
        values[IMAGE] = 0  # Never an answer: transformers would look for its image.
    inputs = shape[-1] if "experts." in name else np.prod(shape[1:])
    return (1.5 * inputs**-0.5 * values).astype(np.float32)


def draw_weights(shapes: Shapes) -> dict[str, Array]:
    return {name: draw_weight(name, shape) for name, shape in shapes.items()}


def read_references() -> dict[str, Any]:
    path = Path(__file__).with_name(FILE)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["models"]
    return content


# -- checkpoints with the names of published ones ------------------------------------------------


def save_checkpoint(name: str, directory: Path) -> Path:
    """A checkpoint without a tokenizer."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    weights = draw_weights(read_references()[name]["shapes"])
    save_file(published(name, weights), directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", CONFIGS[name])
    _write(directory / "preprocessor_config.json", PREPROCESSORS[name])
    return directory


def published(name: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    if name.startswith("kimi"):
        return _published_kimi(name, weights)
    if name.startswith("qwen2"):
        renamed = {key.replace("model.visual.", "visual."): each for key, each in weights.items()}
        return {key.replace(".language_model.", "."): each for key, each in renamed.items()}
    if name == "lfm2_vl":
        return {key: each for key, each in weights.items() if key != "lm_head.weight"}
    return dict(weights)


def _published_kimi(name: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    renamed: dict[str, Array] = {}
    for full, weight in weights.items():
        key = full.removeprefix("model.")
        if key.startswith("language_model."):
            text = key.replace("language_model.", "language_model.model.", 1)
            renamed |= _published_experts(text, weight)
        elif key.startswith("lm_head."):
            renamed[f"language_model.{key}"] = weight
        elif ".attn.q_proj." in key:
            keys, values = (weights[full.replace("q_proj", each)] for each in ("k_proj", "v_proj"))
            fused = np.concatenate([_pairs(weight), _pairs(keys), values])
            renamed[_kimi_name(name, key.replace("attn.q_proj", "wqkv"))] = fused
        elif ".attn.k_proj." not in key and ".attn.v_proj." not in key:
            renamed[_kimi_name(name, key)] = weight
    return renamed


def _pairs(weight: Array) -> Array:
    """Rows of two heads, from halves that turn together to pairs of neighbours."""
    halves = weight.reshape(2, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2)).reshape(weight.shape)


def _kimi_name(name: str, key: str) -> str:
    for theirs, ours in (
        ("vision_tower.layers.", "vision_tower.encoder.blocks."),
        ("vision_tower.final_layernorm", "vision_tower.encoder.final_layernorm"),
        ("pos_emb.position_embeddings", "pos_emb.weight"),
        (".attn.proj.", ".wo."),
        (".norm1.", ".norm0."),
        (".norm2.", ".norm1."),
        (".mlp.fc1.", ".mlp.fc0."),
        (".mlp.fc2.", ".mlp.fc1."),
    ):
        key = key.replace(theirs, ours)
    if name == "kimi_k25":
        return key.replace("in_proj", "proj.0").replace("out_proj", "proj.2")
    key = key.replace("mm_projector.", "multi_modal_projector.")
    return key.replace("in_proj", "linear_1").replace("out_proj", "linear_2")


def _published_experts(key: str, weight: Array) -> dict[str, Array]:
    """A checkpoint has the matrices of each expert."""
    stem = key.rpartition(".")[0]
    if key.endswith("experts.gate_up_proj"):
        gate, up = np.split(weight, 2, axis=1)
        matrices = {"gate_proj": gate, "up_proj": up}
    elif key.endswith("experts.down_proj"):
        matrices = {"down_proj": weight}
    else:
        return {key: weight}
    return {
        f"{stem}.{expert}.{part}.weight": np.ascontiguousarray(matrix)
        for part, stacked in matrices.items()
        for expert, matrix in enumerate(stacked)
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


# -- by transformers -----------------------------------------------------------------------------


def normalized(image: Picture) -> Array:
    """float32 (3, height, width), as the encoder wants it."""
    return np.ascontiguousarray(((image.astype(np.float32) / 255 - MEAN) / STD).transpose(2, 0, 1))


def _qwen_patches(name: str, number: int) -> Array:
    values = normalized(picture(name, number))
    rows, columns = (side // FACTOR for side in values.shape[1:])
    split = values.reshape(3, rows, 2, PATCH, columns, 2, PATCH)
    split = np.repeat(split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None], 2, axis=5)
    return split.reshape(rows * columns * 4, -1)


def _row_patches(image: Picture) -> Array:
    """(patches, 3, PATCH, PATCH), row by row."""
    values = normalized(image)
    rows, columns = (side // PATCH for side in values.shape[1:])
    split = values.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(rows * columns, 3, PATCH, PATCH))


def _grids(name: str, images: Sequence[int]) -> list[tuple[int, int, int]]:
    sizes = [size_of(name, number) for number in images]
    return [(1, height // PATCH, width // PATCH) for height, width in sizes]


def _inputs(name: str, tokens: Sequence[int], images: Sequence[int]) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]

    inputs = {"input_ids": torch.tensor([tokens])}
    if not images:
        return inputs
    if name.startswith("qwen2"):
        patches = np.concatenate([_qwen_patches(name, number) for number in images])
        types = (np.array([tokens]) == IMAGE).astype(np.int32)
        return inputs | {
            "pixel_values": torch.from_numpy(patches),
            "image_grid_thw": torch.tensor(_grids(name, images)),
            "mm_token_type_ids": torch.from_numpy(types),
        }
    if name.startswith("kimi"):
        patches = np.concatenate([_row_patches(picture(name, number)) for number in images])
        return inputs | {
            "pixel_values": torch.from_numpy(patches),
            "image_grid_thw": torch.tensor(_grids(name, images)),
        }
    all_views = [view for number in images for view in views(name, number)]
    if name == "lfm2_vl":
        return inputs | _naflex(all_views)
    pixels = torch.from_numpy(np.stack([normalized(view) for view in all_views]))
    return inputs | {"pixel_values": pixels if name == "llama4" else pixels[None]}


def _naflex(all_views: Sequence[Picture]) -> dict[str, Any]:
    """LFM2-VL's patches, with the channel last, padded to the most."""
    import torch

    patches = [_row_patches(view).transpose(0, 2, 3, 1) for view in all_views]
    longest = max(map(len, patches))
    pixels = np.zeros((len(patches), longest, 3 * PATCH**2), np.float32)
    mask = np.zeros((len(patches), longest), np.int64)
    for at, own in enumerate(patches):
        pixels[at, : len(own)] = own.reshape(len(own), -1)
        mask[at, : len(own)] = 1
    shapes = [(view.shape[0] // PATCH, view.shape[1] // PATCH) for view in all_views]
    return {
        "pixel_values": torch.from_numpy(pixels),
        "pixel_attention_mask": torch.from_numpy(mask),
        "spatial_shapes": torch.tensor(shapes),
    }


def _config(name: str) -> Any:
    import transformers

    content = json.loads(json.dumps(CONFIGS[name]))
    kind = content.pop("model_type")
    if kind.startswith("kimi"):
        kind = "kimi_k25"
        side = content["vision_config"]["init_pos_emb_height"]
        content["vision_config"] = MOONVIT | {"pos_emb_height": side, "pos_emb_width": side}
        content |= {"image_token_id": IMAGE, "projection_hidden_size": 32}
        content["text_config"]["model_type"] = "deepseek_v3"
        content["tie_word_embeddings"] = False
    return transformers.AutoConfig.for_model(kind, **content)


def _model(name: str) -> Any:
    import transformers

    # transformers 5.24 reads an attribute that its own class lacks.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    kind = CONFIGS[name]["architectures"][0].replace("KimiVL", "Kimi_K25")
    config = _config(name)
    config._attn_implementation = "eager"
    return getattr(transformers, kind)(config).float().eval()


def _answer(name: str, model: Any, tokens: Sequence[int], images: Sequence[int]) -> list[int]:
    """Greedy tokens, each by the whole prompt; as many as are certain."""
    import torch

    answered = list[int]()
    for _ in range(ANSWERED):
        with torch.no_grad():
            logits = model(**_inputs(name, [*tokens, *answered], images), use_cache=False).logits
        best = logits[0, -1].topk(2)
        gap = float(best.values[0] - best.values[1])
        if gap < CERTAIN:
            raise SystemExit(f"{name}: rounding may decide an answer (a gap of {gap:.4f})")
        answered.append(int(best.indices[0]))
    return answered


def _positions(model: Any, inputs: Mapping[str, Any], length: int) -> tuple[Any, int]:
    if "mm_token_type_ids" not in inputs:
        return None, 0
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, delta = model.model.get_rope_index(**{key: inputs[key] for key in keys})
    assert positions.shape[-1] == length
    return positions[:, 0].tolist(), int(delta.reshape(-1)[0])


def chosen(tokens: Sequence[int]) -> list[int]:
    """Positions whose logits are kept."""
    return sorted({0, len(tokens) - 1, *range(0, len(tokens), 12)})


def references_of(name: str) -> dict[str, Any]:
    """What is kept of a model, by transformers and torch in float32 on the CPU."""
    import torch

    model = _model(name)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    if name == "lfm2_vl":
        shapes.pop("lm_head.weight")
    weights = draw_weights(shapes)
    loaded = {key: torch.from_numpy(value) for key, value in weights.items()}
    missing = model.load_state_dict(loaded, strict=name != "lfm2_vl")
    assert missing.missing_keys in ([], ["lm_head.weight"])
    prompts: dict[str, Any] = {}
    for prompt in PROMPTS:
        tokens, images = tokens_of(name, prompt), images_of(prompt)
        inputs = _inputs(name, tokens, images)
        positions, delta = _positions(model, inputs, len(tokens))
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0]
        prompts[prompt] = {
            "tokens": tokens,
            "positions": positions,
            "delta": delta,
            "answer": _answer(name, model, tokens, images),
            "logsumexp": [round(value, DECIMALS) for value in logits.logsumexp(-1).tolist()],
            "logits": {
                at: [round(value, DECIMALS) for value in logits[at].tolist()]
                for at in chosen(tokens)
            },
        }
        print(f"{name}: {prompt}: {len(tokens)} tokens, largest logit {logits.abs().max():.2f}")
    return {"weights": digest_of(weights), "shapes": shapes, "prompts": prompts}


def main(out: Path, names: Sequence[str]) -> None:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    models = {name: references_of(name) for name in names}
    out.mkdir(parents=True, exist_ok=True)
    _write(out / FILE, {"versions": versions, "models": models})
    print(f"{out / FILE}: copy it into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python3 tests/engine/family_references.py OUTDIR [FAMILY ...]")
    main(Path(sys.argv[1]), sys.argv[2:] or list(CONFIGS))
