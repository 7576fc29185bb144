"""Files of LoRA adapters (--adapter NAME=DIR), written by PEFT or mlx-lm."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.adaptations.adaptation_registry import original_paths
from trouper.engine.loading.layer_patterns import LayerPatterns
from trouper.engine.lora.lora_layers import LowRank, may_have_adapters, padded_rank, sizes_of
from trouper.engine.platform.error_text import line_of
from trouper.protocol.paths import is_file
from trouper.protocol.problems import AdapterFilesMissing, ModelUnusable
from trouper.storage.checkpoint_files import header_of, read_json, section, tensors_of

CONFIG = "adapter_config.json"
PEFT_WEIGHTS, MLX_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"
PEFT_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
MLX_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[ab])")

# PEFT's `init_lora_weights` for plain LoRA; other initializations, such as PiSSA, change the
# model's own weights.
PLAIN_INITS = {"True", "False", "None", "gaussian", "eva", "orthogonal", "mica", "lora_ga"}
EXPERT = re.compile(r"\.experts\b")  # mlx-lm joins the experts of a layer.

# Names around an image encoder in checkpoints of transformers and mlx-vlm. Some have layers of the
# text model's names behind them.
TOWERS = {"visual", "multi_modal_projector", "mm_projector", "connector", "embed_vision"}
"""Names of modules of image encoders, beside those that begin with `vision_`."""
OF_TOWER = "is of the image encoder, which has no adapters"
TRAIN_TEXT = "train the adapter on the layers of the language model alone"

# Products other than x A B for each token and layer.
NOT_PLAIN = (
    "alora_invocation_tokens",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
)
FUSE = (
    "merge it into a model of its own; one that mlx-lm wrote can also be served with --adapter-path"
)
LONGEST_CONFIG_BYTES = 2**20
LONGEST_HEADER_BYTES = 2**22  # Some 20,000 matrices, whose header is read while rows decode.
MATRICES_A_LAYER = 4  # More than two: some models share layers.
LONGEST_NAME = 512


@attrs.frozen(eq=False)
class FoundAdapter:
    """A checked adapter. `alphas`: PEFT's `alpha_pattern`. `matrices`: count."""

    name: str
    directory: Path
    config: Mapping[str, Any]
    weights: Path
    alphas: LayerPatterns
    matrices: int

    @property
    def is_peft(self) -> bool:
        return self.weights.name == PEFT_WEIGHTS

    @property
    def files(self) -> tuple[Path, Path]:
        return self.directory / CONFIG, self.weights

    def unusable(self, what: str, remedy: str = "") -> ModelUnusable:
        text = f"--adapter {self.name}={self.directory}: {what}"
        return ModelUnusable(text, remedy) if remedy else ModelUnusable(text)


def is_of_tower(name: str) -> bool:
    """Whether a layer, or a weight, is one of an image encoder."""
    *modules, _ = name.split(".")
    return any(part in TOWERS or part.startswith("vision_") for part in modules)


def find_adapter(name: str, path: str) -> FoundAdapter:
    """Check the files before the model is loaded. Raises `ModelUnusable`."""
    directory = Path(path)
    weights = next(
        (directory / file for file in (PEFT_WEIGHTS, MLX_WEIGHTS) if is_file(directory / file)),
        None,
    )
    if weights is None or not is_file(directory / CONFIG):
        raise AdapterFilesMissing(
            f"--adapter {name}={path} has no adapter",
            f"give the directory that holds {CONFIG} and {PEFT_WEIGHTS} (PEFT) or {MLX_WEIGHTS} "
            "(mlx-lm)",
        )
    flag = f"--adapter {name}={path}"
    try:
        config = read_json(directory / CONFIG, LONGEST_CONFIG_BYTES)
        header = header_of(weights, LONGEST_HEADER_BYTES)
    except ModelUnusable as error:
        raise ModelUnusable(f"{flag}: {error.message}", error.remedy) from error
    if long := next((tensor for tensor in header if len(tensor) > LONGEST_NAME), None):
        text = f"{flag}: {weights.name} has a name of {len(long)} characters: {long[:40]} ..."
        raise ModelUnusable(text, FUSE)
    try:
        alphas = LayerPatterns(config.get("alpha_pattern"))
    except ValueError as error:
        raise ModelUnusable(f"{flag}: {CONFIG} gives no scale: alpha_pattern: {error}") from error
    found = FoundAdapter(name, directory, config, weights, alphas=alphas, matrices=len(header))
    for what in _not_plain(found):
        raise found.unusable(what, FUSE)
    return found


def _not_plain(found: FoundAdapter) -> Iterator[str]:
    """Yield what an adapter does beyond low-rank products of linear layers, by option."""
    config = found.config
    if not found.is_peft:
        if (kind := config.get("fine_tune_type", "lora")) != "lora":
            yield f"fine_tune_type {kind} is no LoRA"
        return
    if (kind := str(config.get("peft_type", "LORA")).upper()) != "LORA":
        yield f"peft_type {kind} is no LoRA"
    if config.get("use_dora"):
        yield "DoRA (use_dora) scales whole weights"
    if config.get("bias", "none") != "none":
        yield f"bias {config['bias']} changes biases"
    if modules := config.get("modules_to_save"):
        yield (f"modules_to_save replaces {_names(modules)}")
    if targets := config.get("target_parameters"):
        yield (
            f"target_parameters ({_names(targets)}) adapts parameters, such as those of experts, "
            "and only linear layers may be adapted by request"
        )
    if config.get("fan_in_fan_out"):
        yield "fan_in_fan_out is of layers that mlx-lm's models do not have"
    if (kind := str(config.get("init_lora_weights"))) not in PLAIN_INITS:
        yield f"init_lora_weights {kind} changes the model's own weights"
    yield from (
        f"{option} is more than low-rank products" for option in NOT_PLAIN if config.get(option)
    )


def _names(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_adapter(found: FoundAdapter, model: nn.Module) -> dict[str, LowRank]:
    """Read matrices lazily, by path of the model's layers. Raises `ModelUnusable`."""
    modules = dict(model.named_modules())
    if found.matrices > MATRICES_A_LAYER * len(modules):
        raise found.unusable(f"{found.matrices} matrices are more than this model has layers for")
    try:
        weights = mx.load(str(found.weights))
    except Exception as error:
        # MLX may raise any exception over any bytes.
        raise found.unusable(f"{found.weights.name} cannot be read: {line_of(error)}") from error
    assert isinstance(weights, dict)
    sides: dict[str, dict[str, mx.array]] = defaultdict(dict)
    for name, array in weights.items():
        match = (PEFT_NAME if found.is_peft else MLX_NAME).fullmatch(name)
        if match is None:
            raise found.unusable(f"{name} is no LoRA of a linear layer", FUSE)
        side = match["side"].lower()
        sides[match["layer"]][side] = array.T if found.is_peft and array.ndim == 2 else array
    paths = {path: present for path, present in original_paths(model).items() if path}
    tails = _tails(paths)
    read = {}
    for layer, pair in sides.items():
        of_text = not is_of_tower(layer)
        path = (paths.get(layer) or tails.get(_tail(layer))) if of_text else None
        if path is None and "b" in pair and not mx.any(pair["b"]).item():
            # A layer that a family shares with another one: training has left the initial zeros.
            continue
        if path is None:
            raise _misfit(found, layer)
        if len(pair) != 2:
            raise found.unusable(f"{layer} has one of its two matrices only")
        if path in read:
            raise found.unusable(f"{found.weights.name} has the layer {path} twice")
        read[path] = _low_rank(found, layer, modules[path], pair["a"], pair["b"])
    if not read:
        raise found.unusable(f"{found.weights.name} is empty")
    return read


def _misfit(found: FoundAdapter, layer: str) -> ModelUnusable:
    if is_of_tower(layer):
        return found.unusable(f"{layer} {OF_TOWER}", TRAIN_TEXT)
    if EXPERT.search(layer):
        return found.unusable(f"{layer} is of experts, which are not adapted by request", FUSE)
    return found.unusable(f"the model has no layer {layer}", "give an adapter of this very model")


def require_finite(found: FoundAdapter, path: str, part: LowRank) -> None:
    """Attention multiplies masked KV by 0: NaN would spread to other rows. Raises
    `ModelUnusable`."""
    if not (mx.isfinite(part.a).all() & mx.isfinite(part.b).all()).item():
        raise found.unusable(
            f"{path} has values that are not finite: its training has diverged",
            "give an earlier checkpoint of it",
        )


def bytes_together(adapters: Sequence[FoundAdapter], item_bytes: int) -> int:
    """Bytes of stacked adapters from file headers. Raises `ModelUnusable`."""
    sizes, ranks = defaultdict[str, dict[str, int]](dict), defaultdict[str, int](int)
    for found in adapters:
        for name, tensor in tensors_of([header_of(found.weights)]).items():
            match = (PEFT_NAME if found.is_peft else MLX_NAME).fullmatch(name)
            if match is None or len(shape := tensor["shape"]) != 2:
                raise found.unusable(f"{name} is no LoRA of a linear layer", FUSE)
            # The part before `layers.` may differ between forms.
            layer = match["layer"].rpartition("layers.")[2]
            side = match["side"].lower()
            rank_axis = 0 if (side == "a") == found.is_peft else 1
            sizes[layer][side] = shape[1 - rank_axis]
            ranks[layer] = max(ranks[layer], shape[rank_axis])
    numbers = (padded_rank(ranks[layer]) * sum(sides.values()) for layer, sides in sizes.items())
    return item_bytes * (1 + len(adapters)) * sum(numbers)


def _tails(paths: Mapping[str, str]) -> dict[str, str | None]:
    """Index paths by the part after `layers`. None: ambiguous."""
    found: dict[str, str | None] = {}
    for path, present in paths.items():
        _, *parts = path.split(".layers.")
        for first in range(len(parts)):
            tail = ".layers.".join(parts[first:])
            found[tail] = None if tail in found else present
    return found


def _tail(layer: str) -> str:
    return layer.partition("layers.")[2]


def _low_rank(
    found: FoundAdapter, layer: str, module: nn.Module, a: mx.array, b: mx.array
) -> LowRank:
    if not may_have_adapters(module):
        raise found.unusable(
            f"{layer} is a {type(module).__name__}, and only linear layers may be adapted by "
            "request",
            FUSE,
        )
    inputs, outputs = sizes_of(module)
    are_matrices = a.ndim == 2 and b.ndim == 2
    if not are_matrices or (a.shape[0], b.shape) != (inputs, (a.shape[1], outputs)):
        raise found.unusable(
            f"{layer} has {outputs} outputs of {inputs} inputs, and the adapter's matrices are "
            f"{a.shape} and {b.shape}",
            "give an adapter of this very model",
        )
    return LowRank(a, b.astype(mx.float32) * _scale(found, layer, a.shape[1]))


def _scale(found: FoundAdapter, layer: str, rank: int) -> float:
    """Raises `ModelUnusable`."""
    if found.is_peft:
        name, value = "lora_alpha", found.config.get("lora_alpha", 8)
        value = found.alphas.value_for(layer, value)
        divisor = math.sqrt(rank) if found.config.get("use_rslora") else rank
    else:
        name, value = "scale", section(found.config, "lora_parameters").get("scale")
        divisor = 1
    try:
        return float(value) / divisor
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise found.unusable(
            f"{CONFIG} gives no scale: {name} of {layer} is {json.dumps(value)[:40]}",
            f"write the number there that {name} had in its training",
        ) from error
