"""Tiny vision models with images, prompts, weights and checkpoints; and what transformers and torch
made of them, which owe nothing to MLX: files of `vision_torch.py`.

Each weight is drawn by NumPy from its name, and each image from its number: all machines have the
same. The files keep the names and shapes of the weights, so that `save_checkpoint` needs no torch.
Images of families with tiles are their tiles and overview: transformers' processors have no part
in this.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.vision_models import (
    BREAK,
    CONFIGS,
    END,
    FACTOR,
    FILLED_SIZES,
    FIRST,
    IMAGE,
    PREPROCESSORS,
    SIZES,
    START,
    TILE,
    TILED,
    TOKEN_IDS,
)

Array = NDArray[np.float32]
Picture = NDArray[np.uint8]
Shapes = Mapping[str, Sequence[int]]
FILES = {"vision_references.json": FIRST, "family_references.json": tuple(CONFIGS)[len(FIRST) :]}
"""Each with its models."""
Part = int | str
PROMPTS: dict[str, tuple[Part, ...]] = {
    "no image": ("a text of some words",),
    "an image first": (0, "what is it"),
    "two images": ("left", 0, "and right", 3, "which one"),
    "two images, swapped": ("left", 3, "and right", 0, "which one"),
    "three images": ("see", 1, 2, "then this", 0, "."),
}
"""Texts, and numbers of images."""


def size_of(name: str, number: int) -> tuple[int, int]:
    """(height, width) of the image for this model."""
    return SIZES.get(name, FILLED_SIZES)[number]


def _drawn(size: tuple[int, int], seed: int) -> Picture:
    return np.random.RandomState(seed).randint(0, 256, (*size, 3)).astype(np.uint8)


def picture(name: str, number: int) -> Picture:
    """The image: uint8 (height, width, 3)."""
    return _drawn(size_of(name, number), 100 + number)


def overview(name: str, number: int) -> Picture | None:
    """Random as the image itself."""
    height, width = size_of(name, number)
    if name not in TILED or (name not in ("idefics3", "smolvlm") and height == width):
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


def images_of(prompt: str) -> list[int]:
    return [part for part in PROMPTS[prompt] if isinstance(part, int)]


def span_tokens(name: str, number: int) -> list[int]:
    """The image's tokens, without what chat templates write around it."""
    ids, (height, width) = TOKEN_IDS[name], size_of(name, number)
    if name == "mistral3":
        lines = ([IMAGE] * (width // FACTOR) + [BREAK]) * (height // FACTOR)
        return [*lines[:-1], END]
    if name not in TILED:
        return [IMAGE] * (height // FACTOR * (width // FACTOR))
    side = FACTOR if name != "smolvlm" else 2 * FACTOR
    runs = [[IMAGE] * (len(view) // side * (view.shape[1] // side)) for view in views(name, number)]
    if name.startswith("internvl"):
        return [START, *(token for run in runs for token in run), END]
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
        elif name.startswith(("qwen", "gemma", "glm")):
            tokens += [START, *span_tokens(name, part), END]
        else:
            tokens += span_tokens(name, part)
    return tokens


def draw_weight(model: str, name: str, shape: Sequence[int]) -> Array:
    """A weight from the CRC-32 of its name. Norms are about 1, or about 0 where 1 is added."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith((".bias", "_bias", "A_log")):
        return (0.1 * values).astype(np.float32)
    if name.endswith(("_min", "_max")):
        bound = 1.5 + np.abs(values)
        return np.array(-bound if name.endswith("_min") else bound, np.float32)
    places = "position_embedding_table", "pos_embedding", "embeddings.position_embeddings"
    if name.endswith((*places, "cls_token")):
        return (0.5 * values).astype(np.float32)
    if model.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
        # Its scores are not scaled. With sharper ones torch itself differs by 3e-4 between float32
        # and float64.
        return (0.5 + 0.1 * values).astype(np.float32)
    if len(shape) == 1:
        return (0.1 * values + (0.0 if _is_offset(model, name) else 1.0)).astype(np.float32)
    if model not in FIRST and name.endswith(("lm_head.weight", "embed_tokens.weight")):
        values[IMAGE] = 0  # Never an answer: transformers would look for its image.
    inputs = shape[-1] if "experts." in name else np.prod(shape[1:])
    return (1.5 * inputs**-0.5 * values).astype(np.float32)


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


@cache
def read_references(name: str) -> dict[str, Any]:
    [file] = [file for file, names in FILES.items() if name in names]
    path = Path(__file__).with_name(file)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["models"][name]
    return content


# -- checkpoints with the names of published ones ------------------------------------------------


def save_checkpoint(name: str, directory: Path) -> Path:
    """A checkpoint without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    save_weights(name, read_references(name)["shapes"], directory)
    write(directory / "config.json", CONFIGS[name])
    write(directory / "preprocessor_config.json", PREPROCESSORS[name])
    return directory


def save_weights(name: str, shapes: Shapes, directory: Path) -> None:
    from safetensors.numpy import save_file

    weights = published(name, draw_weights(name, shapes))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def published(name: str, weights: Mapping[str, Array]) -> dict[str, Array]:
    if name.startswith("kimi"):
        return _published_kimi(name, weights)
    if name == "internvl_chat":
        return _published_intern(weights)
    if name in ("mistral3", "gemma3"):
        weights = {_published(key): each for key, each in weights.items()}
    if name.startswith("qwen2"):
        renamed = {key.replace("model.visual.", "visual."): each for key, each in weights.items()}
        return {key.replace(".language_model.", "."): each for key, each in renamed.items()}
    if name == "glm4v_moe":
        each = [_published_experts(key, weight) for key, weight in weights.items()]
        return {key: weight for part in each for key, weight in part.items()}
    if name.startswith("gemma") or name == "lfm2_vl":
        return {key: each for key, each in weights.items() if "lm_head." not in key}
    return dict(weights)


def _published(name: str) -> str:
    if name.startswith("lm_head."):
        return "language_model." + name
    name = name.removeprefix("model.")
    # Of the two, Gemma 3's SigLIP alone has this part of the name.
    name = re.sub(
        r"^vision_tower\.(?=embeddings|encoder|post_)", "vision_tower.vision_model.", name
    )
    return name.replace("language_model.", "language_model.model.", 1)


INTERN_NAMES = (
    ("vision_tower.encoder.layer.", "vision_model.encoder.layers."),
    ("vision_tower.", "vision_model."),
    ("cls_token", "class_embedding"),
    ("patch_embeddings.projection", "patch_embedding"),
    ("position_embeddings", "position_embedding"),
    (".attention.", ".attn."),
    ("projection_layer", "proj"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("lambda_", "ls"),
    ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)


def _published_intern(weights: Mapping[str, Array]) -> dict[str, Array]:
    renamed: dict[str, Array] = {}
    for full, weight in weights.items():
        key = full.removeprefix("model.")
        if key.startswith(("language_model.", "lm_head.")):
            text = key.replace("language_model.", "model.", 1)
            renamed[f"language_model.{text}"] = weight
        elif ".q_proj." in key:
            matrices = [weights[full.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            renamed[_intern_name(key.replace("q_proj", "qkv"))] = np.concatenate(matrices)
        elif ".k_proj." not in key and ".v_proj." not in key:
            renamed[_intern_name(key)] = weight
    return renamed


def _intern_name(key: str) -> str:
    for theirs, ours in INTERN_NAMES:
        key = key.replace(theirs, ours)
    return key


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


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
