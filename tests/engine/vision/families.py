"""Tiny random vision models of the three families, as directories that mlx-vlm's converter would
write; and mlx-vlm's whole prompts as their reference."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from tests.engine import vision_models, vision_references
from tests.families import save_tokenizer, write_json
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.image_loading import connect
from trouper.engine.loading.weights import evaluate, opened
from trouper.engine.vision.encoder import Encoding
from trouper.engine.vision.layouts import Layout, layout_of
from trouper.engine.vision.patches import patches_of
from trouper.engine.vision.tower import Tower
from trouper.engine.vision.towers import load_tower
from trouper.protocol.media import ImageShape, ImageSize, MediaSpan, Pixels
from trouper.protocol.plans import RowId

VOCABULARY = 512
IMAGE, START, END, BREAK = 500, 501, 502, 503
Config = dict[str, Any]
Numbers = NDArray[np.float32]

TEXT: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN_VISION: Config = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
}
TOKENS: Config = {
    "image_token_id": IMAGE,
    "video_token_id": 504,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
MROPE: Config = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
GATED: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 32,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
PIXTRAL_VISION: Config = {
    "model_type": "pixtral",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "num_channels": 3,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
MISTRAL: Config = {
    "model_type": "mistral3",
    "vision_config": PIXTRAL_VISION,
    "image_token_index": IMAGE,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
}
FAMILIES: dict[str, Config] = {
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**TEXT, "model_type": "qwen3_vl_text", "rope_scaling": MROPE},
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 2],
        },
        **TOKENS,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **TEXT,
            **EXPERTS,
            "model_type": "qwen3_vl_moe_text",
            "rope_scaling": MROPE,
        },
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_vl_moe",
            "deepstack_visual_indexes": [1],
        },
        **TOKENS,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {**TEXT, **GATED, "model_type": "qwen3_5_text"},
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_5",
            "deepstack_visual_indexes": [],
        },
        **TOKENS,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **TEXT,
            **GATED,
            **EXPERTS,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
        },
        "vision_config": {
            **QWEN_VISION,
            "model_type": "qwen3_5_moe",
            "deepstack_visual_indexes": [],
        },
        **TOKENS,
    },
    "mistral3": {**MISTRAL, "text_config": {**TEXT, "model_type": "mistral"}},
    "ministral3": {
        **MISTRAL,
        "text_config": {
            **TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    },
    "pixtral": {
        "model_type": "pixtral",
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": PIXTRAL_VISION,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
}
GEMMA: dict[str, Config] = {
    name: {
        **config,
        "vocab_size": VOCABULARY,
        "text_config": {
            **config["text_config"],
            **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
        },
        **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
        **dict.fromkeys(("boi_token_id", "boi_token_index"), START),
        **dict.fromkeys(("eoi_token_id", "eoi_token_index"), END),
    }
    for name, config in vision_models.CONFIGS.items()
    if name.startswith("gemma")
}
"""Their reference is their own pass over a whole prompt, which is that of transformers
(`test_vision_references.py`). mlx-vlm 0.7.10 has other masks for images."""
PREPROCESSOR: Config = {
    "size": {"shortest_edge": 64, "longest_edge": 64},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
QWEN_SIZE: Config = {"shortest_edge": 64, "longest_edge": 4096}
CERTAIN = 1e-3
"""Minimum gap of the best two logits in a reference answer."""
GAIN, GAIN_OF_RECURRENT = 3.0, 1.25
QWEN_NAMES = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
QWEN_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
PIXTRAL_NAMES = {IMAGE: "[IMG]", BREAK: "[IMG_BREAK]", END: "[IMG_END]"}
TEMPLATE = (
    "{{% for m in messages %}}{{{{ m['role'] }}}}: {{% if m['content'] is string %}}"
    "{{{{ m['content'] }}}}{{% else %}}{{% for part in m['content'] %}}"
    "{{% if part['type'] == 'image' %}}{marker}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|end|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}assistant: {{% endif %}}"
)
TOKEN_IDS = {"<|image_pad|>": IMAGE, "[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END}
GEMMA3_NAMES = {
    IMAGE: "<image_soft_token>",
    START: "<start_of_image>",
    END: "<end_of_image>",
}
GEMMA4_NAMES = {IMAGE: "<|image|>", START: "<|image>", END: "<image|>"}
CHAT_NAMES: dict[str, tuple[dict[int, str], str]] = {
    "qwen": (QWEN_NAMES, QWEN_MARKER),
    "gemma3": (GEMMA3_NAMES, "<start_of_image>"),
    "gemma4": (GEMMA4_NAMES, "<|image|>"),
    "": (PIXTRAL_NAMES, "[IMG]"),
}
"""Names of tokens, and what templates write for an image, by the beginning of a family's name."""


def preprocessor_of(name: str) -> Config:
    if name in GEMMA:
        return vision_models.PREPROCESSORS[name]
    return {**PREPROCESSOR, "size": QWEN_SIZE} if name.startswith("qwen") else PREPROCESSOR


@attrs.frozen(eq=False)
class VisionModel:
    """Both halves as a server loads them, and mlx-vlm's model of the same weights."""

    name: str
    directory: Path
    model: nn.Module
    tower: Tower
    layout: Layout
    reference: nn.Module | None

    def prompt(
        self, texts_and_images: Sequence[Sequence[int] | Pixels]
    ) -> tuple[list[int], tuple[MediaSpan, ...], list[Pixels]]:
        """Tokens, spans and pixels of texts and images in turns."""
        tokens, spans, images = list[int](), list[MediaSpan](), list[Pixels]()
        for part in texts_and_images:
            if not isinstance(part, Pixels):
                tokens += part
                continue
            has_marks = self.name.startswith("qwen")  # The template's, around the span.
            tokens += [START] if has_marks else []
            images.append(self._fitted(part))
            spans.append(self._span(len(tokens), images[-1], len(spans)))
            tokens += spans[-1].tokens
            tokens += [END] if has_marks else []
        return tokens, tuple(spans), images

    def _fitted(self, image: Pixels) -> Pixels:
        """The image in a size of the layout."""
        resized = self._shape(image).resized
        assert resized == (image.height, image.width), "test images need no resizing"
        return image

    def _span(self, start: int, image: Pixels, number: int) -> MediaSpan:
        return self.layout.span(start, self._shape(image), bytes([number]) * 32)

    def _shape(self, image: Pixels) -> ImageShape:
        return self.layout.shape(ImageSize(image.width, image.height, "png"), "auto", 4096)

    def logits(self, tokens: Sequence[int], images: Sequence[Pixels]) -> Numbers:
        """(tokens, vocabulary) by mlx-vlm, the whole prompt at once."""
        options: dict[str, Any] = {}
        pixels = None
        if images and self.name.startswith("qwen"):
            rules = self.layout.patches
            patches = [np.array(patches_of(image, rules)) for image in images]
            framed = [part.reshape(len(part), 3, 1, -1).repeat(2, axis=2) for part in patches]
            pixels = mx.array(np.concatenate([part.reshape(len(part), -1) for part in framed]))
            options["image_grid_thw"] = mx.array(
                [
                    [1, image.height // rules.patch_size, image.width // rules.patch_size]
                    for image in images
                ]
            )
        elif images:
            pixels, options["image_sizes"] = self._batch(images)
        assert self.reference is not None
        out = self.reference(mx.array([tokens]), pixels, mask=None, **options)
        return np.array(out.logits[0].astype(mx.float32))

    def answer(self, tokens: Sequence[int], images: Sequence[Pixels], count: int) -> list[int]:
        """Greedy tokens, each by the whole prompt."""
        answered = list[int]()
        for _ in range(count):
            logits = self.logits([*tokens, *answered], images)[-1]
            second, best = np.sort(logits)[-2:]
            assert best - second > CERTAIN, "rounding may decide: take another seed"
            answered.append(int(logits.argmax()))
        return answered

    def _batch(self, images: Sequence[Pixels]) -> tuple[mx.array, list[tuple[int, int]]]:
        """(images, 3, height, width), padded to the largest, as mlx-vlm takes them."""
        height = max(image.height for image in images)
        width = max(image.width for image in images)
        batch = np.zeros((len(images), 3, height, width), np.float32)
        mean, std = np.array(self.layout.patches.mean), np.array(self.layout.patches.std)
        for index, image in enumerate(images):
            rgb = np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)
            normalised = (rgb / 255 - mean) / std
            batch[index, :, : image.height, : image.width] = normalised.transpose(2, 0, 1)
        return mx.array(batch), [(image.height, image.width) for image in images]


@attrs.frozen(eq=False)
class GemmaModel(VisionModel):
    def logits(self, tokens: Sequence[int], images: Sequence[Pixels]) -> Numbers:
        """(tokens, vocabulary), in one pass of a row alone."""
        rows, _ = rows_for(self.model, PLAIN)
        assert isinstance(rows, SlotRows)
        row, starts = RowId(0), [at for at, token in enumerate(tokens) if token == START]
        rows.open(row, len(tokens))
        spans = [self._span(*pair, number=0) for pair in zip(starts, images, strict=True)]
        rows.images.open(row, tuple(spans))
        encodings = [Encoding(self.tower, image) for image in images]
        vectors = [encoding.advance(999) for encoding in encodings]
        rows.images.show(row, 0, len(tokens), [each for each in vectors if each is not None])
        return np.array(rows.score(row, list(tokens)))

    def _fitted(self, image: Pixels) -> Pixels:
        """Repeated, or cut."""
        height, width = self._shape(image).resized
        rgb = np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)
        rows, columns = np.arange(height) % image.height, np.arange(width) % image.width
        return Pixels(height, width, rgb[rows][:, columns].tobytes())


def save_gemma(name: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shapes = dict(vision_references.read_references(name)["shapes"])
    for name_of_table in ("embed_tokens", "embed_tokens_per_layer"):
        key = f"model.language_model.{name_of_table}.weight"
        if key in shapes:
            shapes[key] = [VOCABULARY, *shapes[key][1:]]
    vision_references.save_weights(name, shapes, directory)
    write_json(directory / "config.json", GEMMA[name])
    write_json(directory / "preprocessor_config.json", preprocessor_of(name))


def save(name: str, directory: Path, seed: int = 0, *, quantized: str = "") -> nn.Module:
    """Write the checkpoint, and return mlx-vlm's model of it. `quantized`: name of the quantized
    part; "" for none."""
    directory.mkdir(parents=True, exist_ok=True)
    model, config = reference_model(FAMILIES[name], seed), FAMILIES[name]
    if quantized:

        def chosen(path: str, module: nn.Module) -> bool:
            whole = hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
            return whole and path.startswith(quantized)

        nn.quantize(model, 32, 8, class_predicate=chosen)
        config = config | {"quantization": {"group_size": 32, "bits": 8}}
    write_checkpoint(directory, config, dict(tree_flatten(model.parameters())))
    return model


def checkpoint(name: str, directory: Path) -> Path:
    """With a tokenizer that knows the family's tokens, and a template that writes them."""
    if name in GEMMA:
        save_gemma(name, directory)
    else:
        save(name, directory)
    save_tokenizer(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    names, marker = next(each for begin, each in CHAT_NAMES.items() if name.startswith(begin))
    for token, text in names.items():
        piece = next(piece for piece, i in content["model"]["vocab"].items() if i == token)
        content["added_tokens"].append(_special(token, text))
        content["model"]["vocab"] = {
            text if other == piece else other: i for other, i in content["model"]["vocab"].items()
        }
    content["model"]["merges"] = []
    write_json(path, content)
    path = directory / "tokenizer_config.json"
    write_json(
        path, json.loads(path.read_text()) | {"chat_template": TEMPLATE.format(marker=marker)}
    )
    return directory


def _special(token: int, text: str) -> Config:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": True, **flags}


def write_checkpoint(directory: Path, config: Config, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", config)
    write_json(directory / "preprocessor_config.json", preprocessor_of(config["model_type"]))


def reference_model(config: Mapping[str, Any], seed: int) -> nn.Module:
    # A recurrence magnifies roundings: with larger matrices mlx-lm and mlx-vlm differ by 4e-4.
    gain = GAIN_OF_RECURRENT if config["model_type"].startswith("qwen3_5") else GAIN
    utils = importlib.import_module("mlx_vlm.utils")
    config = json.loads(json.dumps(config))
    module, _ = utils.get_model_and_args(dict(config))
    made = module.ModelConfig.from_dict(config)
    made = utils.update_module_configs(made, module, config, ["text", "vision"])
    mx.random.seed(seed)
    model: nn.Module = module.Model(made)
    # Larger matrices, so that attention and images matter next to the residual stream.
    model.update(
        tree_unflatten(
            [
                (
                    path,
                    array * gain if array.ndim > 1 else array + 0.1 * mx.random.normal(array.shape),
                )
                for path, array in tree_flatten(model.parameters())
                if not path.endswith(("A_log", "dt_bias"))
            ]
        )
    )
    if config["model_type"] == "qwen3_vl_moe":
        _mend_activations(model.vision_tower)
    model.eval()
    mx.eval(model.parameters())
    return model


def _mend_activations(tower: nn.Module) -> None:
    """mlx-vlm 0.7.10 swaps the exact and the approximate GELU of layers and mergers, for this
    family alone; transformers' tower is the same code as Qwen3-VL's."""
    for block in tower.blocks:
        block.mlp.act_fn = nn.GELU(approx="tanh")
    for merger in (tower.merger, *tower.deepstack_merger_list):
        merger.act_fn = nn.GELU()


def load(name: str, directory: Path, seed: int = 0) -> VisionModel:
    if name in GEMMA:
        save_gemma(name, directory)
        reference = None
    else:
        reference = save(name, directory, seed)
    model, config = text_model(directory)
    layout = layout_of(config, preprocessor_of(name), TOKEN_IDS)
    tower = load_tower(directory, config, layout)
    connect(model, tower, config)
    kind = GemmaModel if name in GEMMA else VisionModel
    return kind(name, directory, model, tower, layout, reference)


def text_model(directory: Path) -> tuple[nn.Module, Config]:
    """The text model alone, as mlx-lm makes it, and the config."""
    model, config = opened(directory)
    evaluate(model, directory, lambda _done, _total: None)
    return model, config


Models = Callable[[str], VisionModel]
"""The fixture `vision_model`."""


def picture(height: int, width: int, seed: int) -> Pixels:
    rgb = np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)
    return Pixels(height, width, rgb.tobytes())


def text(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.RandomState(seed).randint(1, IMAGE, length).tolist()
    return tokens
