"""Makes the files of `vision_references.py` by transformers and torch.

`python3 tests/engine/vision_torch.py OUTDIR [MODEL ...]` needs numpy, torch and transformers, on
any machine, and writes the files into OUTDIR; with names of models only these are made anew.
Kimi-VL is not in transformers: its encoder is the code of Kimi-K2.5's, with other names of weights.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.vision_models import (
    BREAK,
    CONFIGS,
    END,
    FACTOR,
    FIRST,
    IMAGE,
    MOONVIT,
    PATCH,
    PREPROCESSORS,
    START,
)
from tests.engine.vision_references import (
    FILES,
    PROMPTS,
    Array,
    Picture,
    digest_of,
    draw_weights,
    images_of,
    picture,
    size_of,
    tokens_of,
    views,
    write,
)

DECIMALS = 5
ANSWERED = 6
CERTAIN = 2e-3
"""Minimum gap of the best two logits in an answer."""


def normalized(name: str, image: Picture) -> Array:
    """float32 (3, height, width), as the encoder wants it."""
    parameters = PREPROCESSORS[name]
    parameters = parameters.get("media_proc_cfg", parameters)
    mean = np.array(parameters.get("image_mean", 0.0), np.float32)
    std = np.array(parameters.get("image_std", 1.0), np.float32)
    values = image.astype(np.float32) / 255
    return np.ascontiguousarray(((values - mean) / std).transpose(2, 0, 1))


def patches_of(name: str, number: int) -> Array:
    """Qwen's rows of pixels, (patches, channels x frames x height x width): the four patches of a
    token behind each other, the image as two equal frames."""
    values = normalized(name, picture(name, number))
    rows, columns = (side // FACTOR for side in values.shape[1:])
    split = values.reshape(3, rows, 2, PATCH, columns, 2, PATCH)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    split = np.repeat(split, 2, axis=5)
    return split.reshape(rows * columns * 4, -1)


def gemma4_patches(name: str, number: int) -> tuple[Array, NDArray[np.int64]]:
    """Gemma 4's rows of pixels (patches, rows x columns x channels), and each one's column and
    row. The unified model's patches are whole tokens."""
    values = normalized(name, picture(name, number))
    size = FACTOR if name == "gemma4_unified" else PATCH
    _, height, width = values.shape
    split = values.reshape(3, height // size, size, width // size, size)
    rows = split.transpose(1, 3, 2, 4, 0).reshape(-1, 3 * size * size)
    down, along = np.indices((height // size, width // size)).reshape(2, -1)
    return np.ascontiguousarray(rows), np.stack([along, down], axis=1)


def _row_patches(name: str, image: Picture) -> Array:
    """(patches, 3, PATCH, PATCH), row by row."""
    values = normalized(name, image)
    rows, columns = (side // PATCH for side in values.shape[1:])
    split = values.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(split.reshape(rows * columns, 3, PATCH, PATCH))


def chosen(name: str, tokens: Sequence[int]) -> list[int]:
    """Positions whose logits are kept: every twelfth. Of the first models around and inside each
    image, and every eighth; of long prompts every 48th."""
    marks = {at for at, token in enumerate(tokens) if token in (START, END, BREAK)}
    marks, step = (marks, 8) if name in FIRST else (set[int](), 12)
    step = 48 if name.startswith("gemma4") else step
    return sorted({0, len(tokens) - 1} | marks | set(range(0, len(tokens), step)))


def _inputs(name: str, tokens: Sequence[int], images: Sequence[int]) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]

    inputs = {"input_ids": torch.tensor([tokens])}
    if not images:
        return inputs
    kinds = inputs["input_ids"] == IMAGE
    if name.startswith(("qwen", "glm")):
        inputs["mm_token_type_ids"] = kinds.int()
    elif name.startswith("gemma"):
        key = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
        inputs[key] = kinds.long()
    if name.startswith(("qwen", "glm", "kimi")):
        sizes = [size_of(name, number) for number in images]
        grids = [(1, height // PATCH, width // PATCH) for height, width in sizes]
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs | _pixels(name, images)


def _pixels(name: str, images: Sequence[int]) -> dict[str, Any]:
    import torch

    if name == "mistral3":
        return _padded_pixels(name, images)
    if name.startswith("gemma4"):
        return _gemma4_pixels(name, images)
    if name == "lfm2_vl":
        return _naflex(name, [view for number in images for view in views(name, number)])
    if name.startswith(("qwen", "glm")):
        pixels = np.concatenate([patches_of(name, number) for number in images])
    elif name.startswith("kimi"):
        each = [_row_patches(name, picture(name, number)) for number in images]
        pixels = np.concatenate(each)
    else:
        all_views = [view for number in images for view in views(name, number)]
        pixels = np.stack([normalized(name, view) for view in all_views])
    if name in ("idefics3", "smolvlm"):
        pixels = pixels[None]
    return {"pixel_values": torch.from_numpy(pixels)}


def _padded_pixels(name: str, images: Sequence[int]) -> dict[str, Any]:
    """Pixtral's images, filled up to the largest."""
    import torch

    sizes = [size_of(name, number) for number in images]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    pixels = np.zeros((len(images), 3, height, width), np.float32)
    for at, number in enumerate(images):
        pixels[at, :, : sizes[at][0], : sizes[at][1]] = normalized(name, picture(name, number))
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.tensor(sizes)}


def _naflex(name: str, all_views: Sequence[Picture]) -> dict[str, Any]:
    """LFM2-VL's patches, with the channel last, padded to the most."""
    import torch

    patches = [_row_patches(name, view).transpose(0, 2, 3, 1) for view in all_views]
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
    for number in range(4):
        values = processor(images=[picture(name, number)], return_tensors="pt")["pixel_values"]
        if name.startswith("gemma4"):
            mine = _gemma4_pixels(name, [number])["pixel_values"].numpy()
        elif name in ("mistral3", "gemma3"):
            mine = normalized(name, picture(name, number))
        else:
            mine = patches_of(name, number)
        np.testing.assert_allclose(values.reshape(mine.shape).numpy(), mine, atol=1e-5)


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
    if kind == "internvl_chat":
        kind = "internvl"
        vision = content["vision_config"]
        vision["model_type"] = "internvl_vision"
        vision["use_qk_norm"] = vision.pop("qk_normalization")
        vision["attention_bias"] = vision.pop("qkv_bias")
        content["text_config"] = content.pop("llm_config")
        content["image_token_id"] = IMAGE
    return transformers.AutoConfig.for_model(kind, **content)


def _model(name: str) -> Any:
    import transformers

    # transformers 5.24 reads an attribute that its own class lacks.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    kind = CONFIGS[name]["architectures"][0].replace("KimiVL", "Kimi_K25")
    kind = kind.replace("InternVLChatModel", "InternVLForConditionalGeneration")
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


def _positions(name: str, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, int]:
    """The three positions of each token, and what a later token's position is ahead of its
    index."""
    length = inputs["input_ids"].shape[1]
    if not name.startswith(("qwen", "glm")) or "mm_token_type_ids" not in inputs:
        return ([list(range(length))] * 3 if name in FIRST else None), 0
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, delta = model.model.get_rope_index(**{key: inputs[key] for key in keys})
    assert positions.shape[-1] == length
    return positions[:, 0].tolist(), int(delta.reshape(-1)[0])


def references_of(name: str) -> dict[str, Any]:
    """What is kept of a model, by transformers and torch in float32 on the CPU."""
    import torch

    model = _model(name)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    if name == "lfm2_vl":
        shapes.pop("lm_head.weight")
    weights = draw_weights(name, shapes)
    loaded = {key: torch.from_numpy(value) for key, value in weights.items()}
    missing = model.load_state_dict(loaded, strict=name != "lfm2_vl")
    assert missing.missing_keys in ([], ["lm_head.weight"])
    prompts = {prompt: _prompt_references(name, model, prompt) for prompt in PROMPTS}
    return {"weights": digest_of(weights), "shapes": shapes, "prompts": prompts}


def _prompt_references(name: str, model: Any, prompt: str) -> dict[str, Any]:
    import torch

    tokens, images = tokens_of(name, prompt), images_of(prompt)
    inputs = _inputs(name, tokens, images)
    positions, delta = _positions(name, model, inputs)
    if name == "gemma4_unified":
        inputs = _mask_as_generate(model, inputs)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[0]
    print(f"{name}: {prompt}: {len(tokens)} tokens, largest logit {logits.abs().max():.2f}")
    best = {"argmax": logits.argmax(-1).tolist()}
    return {
        "tokens": tokens,
        "positions": positions,
        "delta": delta,
        **(best if name in FIRST else {"answer": _answer(name, model, tokens, images)}),
        "logsumexp": [round(value, DECIMALS) for value in logits.logsumexp(-1).tolist()],
        "logits": {
            at: [round(value, DECIMALS) for value in logits[at].tolist()]
            for at in chosen(name, tokens)
        },
    }


def main(out: Path, chosen_names: Sequence[str]) -> None:
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    out.mkdir(parents=True, exist_ok=True)
    for file, names in FILES.items():
        kept = {}
        if chosen_names:
            content = Path(__file__).with_name(file).read_text(encoding="utf-8")
            kept = json.loads(content)["models"]
        models = {
            name: references_of(name) if name in chosen_names or not chosen_names else kept[name]
            for name in names
        }
        write(out / file, {"versions": versions, "models": models})
    for name in FIRST:
        # The unified model's image processor needs torchvision.
        if name != "gemma4_unified" and (name in chosen_names or not chosen_names):
            _check_pixels(name)
    print(f"{out}: copy its files into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python3 tests/engine/vision_torch.py OUTDIR [MODEL ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
