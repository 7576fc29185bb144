"""Logits and positions of tiny vision models by transformers and torch, which owe nothing to MLX.

`python3 tests/engine/vision_references.py OUTDIR` needs numpy, torch and transformers, on any
machine, and writes OUTDIR/vision_references.json, whose home is beside this file. Each weight is
drawn by NumPy from its name, and each image from its number: both machines have the same. The file
keeps the names and shapes of the weights, so that `save_checkpoint` needs no torch.
"""

# ruff: noqa: T201
from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Picture = NDArray[np.uint8]
Shapes = Mapping[str, Sequence[int]]
FILE = "vision_references.json"
VOCABULARY = 256
IMAGE, START, END, BREAK = 250, 251, 252, 253
"""Ids of the image's token, of the marks around it, and of Pixtral's row break."""
PATCH = 4
FACTOR = 8
"""Side of a token in pixels: 2 x 2 patches are merged."""
DECIMALS = 5

QWEN_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 254,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
GEMMA4_TEXT: dict[str, Any] = GEMMA_TEXT | {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "sliding_window": 48,
    "pad_token_id": 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
        },
    },
}
GEMMA4_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling_kernel_size": 2,
    "patch_size": PATCH,
    "position_embedding_size": 40,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "video_token_id": 254,
    "audio_token_id": 253,
    "audio_config": None,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN_IDS
    | {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": QWEN_TEXT
        | {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        "vision_config": QWEN_VISION
        | {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_5": QWEN_IDS
    | {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": QWEN_TEXT
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "attn_output_gate": True,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": QWEN_VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
    },
    "mistral3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": QWEN_TEXT
        | {
            "model_type": "mistral",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "sliding_window": None,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "hidden_act": "silu",
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 16,
            "num_channels": 3,
            "image_size": 64,
            "patch_size": PATCH,
            "rope_theta": 10000.0,
            "attention_dropout": 0.0,
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": START,
        "eoi_token_index": END,
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 16,
        "vocab_size": VOCABULARY,
        "text_config": GEMMA_TEXT
        | {
            "model_type": "gemma3_text",
            "rope_theta": 10000.0,
            "rope_local_base_freq": 1000.0,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": 32,
            "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "vision_use_head": False,
        },
    },
    "gemma4": GEMMA4
    | {
        "text_config": GEMMA4_TEXT
        | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True},
        "vision_config": GEMMA4_VISION | {"standardize": True},
    },
    "gemma4_small": GEMMA4
    | {
        "text_config": GEMMA4_TEXT
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": GEMMA4_VISION | {"use_clipped_linears": True},
    },
    "gemma4_unified": GEMMA4
    | {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": GEMMA4_TEXT
        | {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "mm_posemb_size": 32,
            "output_proj_dims": 48,
        },
    },
}
QWEN_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": FACTOR**2, "longest_edge": 64 * FACTOR**2},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA4_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "do_normalize": False,
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN_PREPROCESSOR,
    "qwen3_5": QWEN_PREPROCESSOR,
    "mistral3": {
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": 64},
        "patch_size": PATCH,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "gemma4": GEMMA4_PREPROCESSOR,
    "gemma4_small": GEMMA4_PREPROCESSOR,
    "gemma4_unified": GEMMA4_PREPROCESSOR | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
}
SIZES = ((24, 40), (16, 16), (32, 24), (24, 40))
"""(height, width) of each image: 15, 4, 12 and 15 tokens. None needs to be resized."""
GEMMA3_SIZES = ((32, 32),) * 4
GEMMA4_SIZES = ((56, 80), (64, 64), (40, 112), (56, 80))
"""Gemma 3 has one size. Gemma 4 fills its bound: 70, 64, 70 and 70 tokens."""
Part = int | str
PROMPTS: dict[str, tuple[Part, ...]] = {
    "no image": ("a text of some words",),
    "an image first": (0, "what is it"),
    "two images": ("left", 0, "and right", 3, "which one"),
    "two images, swapped": ("left", 3, "and right", 0, "which one"),
    "three images": ("see", 1, 2, "then this", 0, "."),
}
"""Texts, and numbers of images."""


def sizes_of(name: str) -> Sequence[tuple[int, int]]:
    """(height, width) of each image for this model."""
    if name == "gemma3":
        return GEMMA3_SIZES
    return GEMMA4_SIZES if name.startswith("gemma4") else SIZES


def picture(name: str, number: int) -> Picture:
    """The image: uint8 (height, width, 3)."""
    height, width = sizes_of(name)[number]
    drawn = np.random.RandomState(100 + number)  # Its numbers are the same in all NumPy versions.
    return drawn.randint(0, 256, (height, width, 3)).astype(np.uint8)


def images_of(prompt: str) -> list[int]:
    return [part for part in PROMPTS[prompt] if isinstance(part, int)]


def span_tokens(name: str, number: int) -> list[int]:
    """The image's tokens, without the marks around it."""
    rows, columns = (side // FACTOR for side in sizes_of(name)[number])
    if name != "mistral3":
        return [IMAGE] * (rows * columns)
    lines = ([IMAGE] * columns + [BREAK]) * rows
    return [*lines[:-1], END]


def tokens_of(name: str, prompt: str) -> list[int]:
    tokens: list[int] = []
    for part in PROMPTS[prompt]:
        if isinstance(part, str):
            tokens += part.encode()
        elif name == "mistral3":
            tokens += span_tokens(name, part)
        else:
            tokens += [START, *span_tokens(name, part), END]
    return tokens


def draw_weight(model: str, name: str, shape: Sequence[int]) -> Array:
    """A weight from the CRC-32 of its name. Norms are about 1, or about 0 where 1 is added."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith((".bias", "A_log", "dt_bias", "std_bias")):
        return (0.1 * values).astype(np.float32)
    if name.endswith(("_min", "_max")):
        bound = 1.5 + np.abs(values)
        return np.array(-bound if name.endswith("_min") else bound, np.float32)
    if name.endswith(("position_embedding_table", "pos_embedding")):
        return (0.5 * values).astype(np.float32)
    if model.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
        # Its scores are not scaled. With sharper ones torch itself differs by 3e-4 between float32
        # and float64.
        return (0.5 + 0.1 * values).astype(np.float32)
    if len(shape) == 1:
        return (0.1 * values + (0.0 if _is_offset(model, name) else 1.0)).astype(np.float32)
    return (1.5 * np.prod(shape[1:]) ** -0.5 * values).astype(np.float32)


def _is_offset(model: str, name: str) -> bool:
    """Whether the norm adds 1 to its weight."""
    if model == "gemma3":
        return ".vision_tower." not in name
    return model == "qwen3_5" and ".visual." not in name and "linear_attn" not in name


def draw_weights(model: str, shapes: Shapes) -> dict[str, Array]:
    weights = {name: draw_weight(model, name, shape) for name, shape in shapes.items()}
    if model.startswith("gemma"):  # One matrix by two names.
        weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"]
    return weights


def digest_of(weights: Mapping[str, Array]) -> str:
    content = b"".join(weights[name].tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()


def read_references() -> dict[str, Any]:
    path = Path(__file__).with_name(FILE)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["models"]
    return content


def save_checkpoint(name: str, directory: Path) -> Path:
    """A checkpoint without a tokenizer, with the names of weights of published ones."""
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(name, read_references()[name]["shapes"], directory)
    _write(directory / "config.json", CONFIGS[name])
    _write(directory / "preprocessor_config.json", PREPROCESSORS[name])
    return directory


def save_weights(name: str, shapes: Shapes, directory: Path) -> None:
    from safetensors.numpy import save_file

    weights = draw_weights(name, shapes)
    if name in ("mistral3", "gemma3"):
        weights = {_published(key): value for key, value in weights.items()}
    if name.startswith("gemma"):
        del weights["language_model.lm_head.weight" if name == "gemma3" else "lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _published(name: str) -> str:
    if name.startswith("lm_head."):
        return "language_model." + name
    name = name.removeprefix("model.")
    # Of the two, Gemma 3's SigLIP alone has this part of the name.
    name = re.sub(
        r"^vision_tower\.(?=embeddings|encoder|post_)", "vision_tower.vision_model.", name
    )
    return name.replace("language_model.", "language_model.model.", 1)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def normalized(name: str, number: int) -> Array:
    """float32 (3, height, width), as the encoder wants it."""
    preprocessor = PREPROCESSORS[name]
    values = picture(name, number).astype(np.float32) / 255
    mean = np.array(preprocessor.get("image_mean", 0.0), np.float32)
    std = np.array(preprocessor.get("image_std", 1.0), np.float32)
    return np.ascontiguousarray(((values - mean) / std).transpose(2, 0, 1))


def patches_of(name: str, number: int) -> Array:
    """Qwen's rows of pixels, (patches, channels x frames x height x width): the four patches of a
    token behind each other, the image as two equal frames."""
    values = normalized(name, number)
    rows, columns = (side // FACTOR for side in values.shape[1:])
    split = values.reshape(3, rows, 2, PATCH, columns, 2, PATCH)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    split = np.repeat(split, 2, axis=5)
    return split.reshape(rows * columns * 4, -1)


def gemma4_patches(name: str, number: int) -> tuple[Array, NDArray[np.int64]]:
    """Gemma 4's rows of pixels (patches, rows x columns x channels), and each one's column and
    row. The unified model's patches are whole tokens."""
    values = normalized(name, number)
    size = FACTOR if name == "gemma4_unified" else PATCH
    _, height, width = values.shape
    split = values.reshape(3, height // size, size, width // size, size)
    rows = split.transpose(1, 3, 2, 4, 0).reshape(-1, 3 * size * size)
    down, along = np.indices((height // size, width // size)).reshape(2, -1)
    return np.ascontiguousarray(rows), np.stack([along, down], axis=1)


def chosen(name: str, tokens: Sequence[int]) -> list[int]:
    """Positions whose logits are kept: around and inside each image, and every eighth; of long
    prompts every 48th."""
    marks = {at for at, token in enumerate(tokens) if token in (START, END, BREAK)}
    step = 48 if name.startswith("gemma4") else 8
    return sorted({0, len(tokens) - 1} | marks | set(range(0, len(tokens), step)))


def _inputs(name: str, prompt: str) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]

    tokens = np.array([tokens_of(name, prompt)])
    inputs = {"input_ids": torch.from_numpy(tokens)}
    images = images_of(prompt)
    if not images:
        return inputs
    kinds = torch.from_numpy((tokens == IMAGE).astype(np.int64))
    if name == "gemma3":
        pixels = np.stack([normalized(name, number) for number in images])
        return inputs | {"pixel_values": torch.from_numpy(pixels), "token_type_ids": kinds}
    if name.startswith("gemma4"):
        return inputs | {"mm_token_type_ids": kinds} | _gemma4_pixels(name, images)
    if name == "mistral3":
        height = max(SIZES[number][0] for number in images)
        width = max(SIZES[number][1] for number in images)
        pixels = np.zeros((len(images), 3, height, width), np.float32)
        for at, number in enumerate(images):
            pixels[at, :, : SIZES[number][0], : SIZES[number][1]] = normalized(name, number)
        sizes = torch.tensor([SIZES[number] for number in images])
        return inputs | {"pixel_values": torch.from_numpy(pixels), "image_sizes": sizes}
    pixels = np.concatenate([patches_of(name, number) for number in images])
    grids = [(1, SIZES[number][0] // PATCH, SIZES[number][1] // PATCH) for number in images]
    return inputs | {
        "pixel_values": torch.from_numpy(pixels),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": torch.from_numpy((tokens == IMAGE).astype(np.int32)),
    }


def _gemma4_pixels(name: str, images: Sequence[int]) -> dict[str, Any]:
    """Patches and places, filled up as transformers' image processor does."""
    import torch

    limit = 70 if name == "gemma4_unified" else 70 * (FACTOR // PATCH) ** 2
    pixels, positions = list[Array](), list[NDArray[np.int64]]()
    for number in images:
        patches, at = gemma4_patches(name, number)
        missing = [(0, limit - len(patches)), (0, 0)]
        pixels.append(np.pad(patches, missing))
        positions.append(np.pad(at, missing, constant_values=-1))
    return {
        "pixel_values": torch.from_numpy(np.stack(pixels)),
        "image_position_ids": torch.from_numpy(np.stack(positions)),
    }


def _mask_as_generate(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """With the masks of `generate`, as Google's own code has them: images attend to later tokens
    in layers with a window. `forward` of the unified model alone has it in all layers
    (huggingface/transformers#46711)."""
    import torch

    length = inputs["input_ids"].shape[1]
    masks = model.create_masks_for_generate(
        model.config,
        model.get_input_embeddings()(inputs["input_ids"]),
        None,
        None,
        torch.arange(length)[None],
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
    )
    return inputs | {"attention_mask": masks}


def _check_pixels(name: str) -> None:
    """Compare the pixels of this file with those of transformers' image processor."""
    import transformers

    config = PREPROCESSORS[name]
    kinds = {"mistral3": "PixtralImageProcessor", "qwen3_vl": "Qwen2VLImageProcessor"}
    kind = kinds.get(name, config["image_processor_type"].removesuffix("Fast"))
    settings = {key: value for key, value in config.items() if key != "image_processor_type"}
    if name == "mistral3":
        settings["patch_size"] = {"height": FACTOR, "width": FACTOR}
    processor = getattr(transformers, kind)(**settings)
    for number in range(len(SIZES)):
        values = processor(images=[picture(name, number)], return_tensors="pt")["pixel_values"]
        if name.startswith("gemma4"):
            mine = _gemma4_pixels(name, [number])["pixel_values"].numpy()
        elif name in ("mistral3", "gemma3"):
            mine = normalized(name, number)
        else:
            mine = patches_of(name, number)
        np.testing.assert_allclose(values.reshape(mine.shape).numpy(), mine, atol=1e-5)


def _positions(name: str, model: Any, inputs: Mapping[str, Any], length: int) -> tuple[Any, int]:
    """The three positions of each token, and what a later token's position is ahead of its
    index."""
    if "image_grid_thw" not in inputs:
        return [list(range(length))] * 3, 0
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, delta = model.model.get_rope_index(**{key: inputs[key] for key in keys})
    return positions[:, 0].tolist(), int(delta.reshape(-1)[0])


def references_of(name: str) -> dict[str, Any]:
    """What is kept of a model, by transformers and torch in float32 on the CPU."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(CONFIGS[name])))
    kind = getattr(transformers, CONFIGS[name]["architectures"][0])
    config._attn_implementation = "eager"
    model = kind(config).float().eval()
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    weights = draw_weights(name, shapes)
    model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    prompts: dict[str, Any] = {}
    for prompt in PROMPTS:
        tokens = tokens_of(name, prompt)
        inputs = _inputs(name, prompt)
        positions, delta = _positions(name, model, inputs, len(tokens))
        if name == "gemma4_unified":
            inputs = _mask_as_generate(model, inputs)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0]
        prompts[prompt] = {
            "tokens": tokens,
            "positions": positions,
            "delta": delta,
            "argmax": logits.argmax(-1).tolist(),
            "logsumexp": [round(value, DECIMALS) for value in logits.logsumexp(-1).tolist()],
            "logits": {
                at: [round(value, DECIMALS) for value in logits[at].tolist()]
                for at in chosen(name, tokens)
            },
        }
        print(f"{name}: {prompt}: {len(tokens)} tokens, largest logit {logits.abs().max():.2f}")
    return {"weights": digest_of(weights), "shapes": shapes, "prompts": prompts}


def main(out: Path) -> None:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    models = {}
    for name in CONFIGS:
        models[name] = references_of(name)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / FILE, {"versions": versions, "models": models})
    for name in CONFIGS:
        if name != "gemma4_unified":  # Its image processor needs torchvision.
            _check_pixels(name)
    print(f"{out / FILE}: copy it into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 tests/engine/vision_references.py OUTDIR")
    main(Path(sys.argv[1]))
