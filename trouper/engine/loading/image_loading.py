"""Loads a checkpoint's image encoder beside its text model, where images can be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from trouper.engine.adaptations.image_passes import MropeSections, adapt_to_images
from trouper.engine.loading.precision import to_float32
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.engine.loading.weights import bytes_of
from trouper.engine.platform import device
from trouper.engine.self_check.image_check import ImageCheck
from trouper.engine.self_check.starting import Candidate
from trouper.engine.vision.layouts import Layout, layout_of, read_preprocessor
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import patches_at_once
from trouper.engine.vision.towers import AnyTower, load_tower
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.installing import command_for
from trouper.protocol.model import ModelCard
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

NO_ENCODER = "the model is for text alone"


@attrs.frozen(eq=False)
class LoadedImages:
    tower: AnyTower | None = None
    layout: Layout | None = None
    reason: str = NO_ENCODER
    """Why there is none, for a person; "" for an encoder."""
    step_bytes: int = 0
    """Most bytes of a step that encodes, beside the weights."""

    @property
    def nbytes(self) -> int:
        return 0 if self.tower is None else bytes_of(self.tower)

    @property
    def identity(self) -> dict[str, str]:
        """Code that makes vectors of a file, for caches of KV; {} without images."""
        if self.layout is None:
            return {}
        return {"images": f"{self.layout.name} pillow {version('pillow')}"}

    def on(self, card: ModelCard) -> ModelCard:
        """The card of the model with this encoder."""
        return attrs.evolve(
            card,
            images=self.layout,
            no_images=self.reason,
            weights_bytes=card.weights_bytes + self.nbytes,
            encoder_step_bytes=self.step_bytes,
        )


NO_IMAGES = LoadedImages()


def load_images(
    candidate: Candidate,
    tokenizer: HubTokenizer,
    capabilities: Capabilities,
    settings: Settings,
    report: Callable[[str], None],
    *,
    ranks: int,
) -> LoadedImages:
    """Load the encoder and adapt the model to its vectors. A model whose images cannot be served
    serves text."""
    if not isinstance(candidate.config.get("vision_config"), Mapping):
        return NO_IMAGES
    try:
        _require_means(capabilities, ranks)
        preprocessor = read_preprocessor(candidate.directory)
        layout = layout_of(candidate.config, preprocessor, tokenizer.vocabulary)
        layout = attrs.evolve(layout, piece_patches=patches_at_once())
        tower = load_tower(candidate.directory, candidate.config, layout)
        if device.is_cpu():
            to_float32(tower)
        mx.eval(tower.parameters())
        adapt_to_images(candidate.model, mrope_sections(candidate.config), tower.num_deepstack)
        if settings.self_check != "off":
            _check(candidate, layout, tower.num_deepstack, capabilities)
        vision = candidate.config["vision_config"]
        number_bytes = _number_bytes(tower)
        step_bytes = encoder_step_bytes(vision, layout, settings.max_image_tokens, number_bytes)
    except (ValueError, ModelUnusable) as error:
        report(f"the model takes no images: {error}")
        return LoadedImages(reason=str(error))
    images = LoadedImages(tower, layout, "", step_bytes)
    report(f"images: an encoder of {tower.num_layers} layers, {images.nbytes / 2**20:.0f} MiB")
    return images


def _number_bytes(tower: nn.Module) -> int:
    """Bytes of an activation: those of the widest weight that is no quantized one."""
    arrays = [array for _, array in tree_flatten(tower.parameters())]
    return max(array.dtype.size for array in arrays if mx.issubdtype(array.dtype, mx.floating))


def _check(
    candidate: Candidate, layout: Layout, deepstack: int, capabilities: Capabilities
) -> None:
    """Raises `ValueError`."""
    fault = ImageCheck(
        model=candidate.model,
        layout=layout,
        deepstack=deepstack,
        vocabulary=candidate.vocabulary,
        kv=candidate.kv,
        capabilities=capabilities,
    ).fault()
    if fault:
        raise ValueError(fault)


def _require_means(capabilities: Capabilities, ranks: int) -> None:
    """Raises `ValueError`."""
    if find_spec("PIL") is None:
        raise ValueError(f"images need Pillow: {command_for('images')}")
    if ranks > 1:
        raise ValueError(f"images are for one rank, and the model runs on {ranks}")
    if not capabilities.allows("batch"):
        raise ValueError("rows of this model run alone, without what images need")


def mrope_sections(config: Mapping[str, Any]) -> MropeSections | None:
    """None without M-RoPE."""
    text = config.get("text_config") or config
    for key in ("rope_parameters", "rope_scaling"):
        parameters = text.get(key)
        if isinstance(parameters, Mapping) and parameters.get("mrope_section"):
            interleaved = str(config.get("model_type")).startswith("qwen3")
            return MropeSections(parameters["mrope_section"], interleaved=interleaved)
    return None
