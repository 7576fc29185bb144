"""Loads a checkpoint's image encoder beside its text model, where images can be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from trouper.engine.adaptations.image_passes import (
    MropeSections,
    adapt_to_images,
    measure_embedding_scale,
)
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.loading.precision import to_float32
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.engine.loading.weights import bytes_of
from trouper.engine.platform import device
from trouper.engine.self_check.encoder_check import encoder_fault
from trouper.engine.self_check.image_check import ImageCheck
from trouper.engine.self_check.starting import Candidate, check_images
from trouper.engine.vision.gemma_layouts import Gemma3Layout
from trouper.engine.vision.layouts import Layout, layout_of, read_preprocessor
from trouper.engine.vision.step_memory import encoder_step_bytes
from trouper.engine.vision.tower import Tower, patches_at_once
from trouper.engine.vision.towers import AnyTower, load_tower
from trouper.engine.vision.vector_sharing import DistantTower
from trouper.protocol.capabilities import Capabilities, Feature
from trouper.protocol.installing import command_for
from trouper.protocol.model import ModelCard
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

NO_ENCODER = "the model is for text alone"


@attrs.frozen(eq=False)
class LoadedImages:
    """Only rank 0 has an encoder and a layout."""

    tower: AnyTower | DistantTower | None = None
    layout: Layout | None = None
    reason: str = NO_ENCODER
    """Why there is none, for a person; "" for an encoder."""
    step_bytes: int = 0
    """Most bytes of a step that encodes, beside the weights."""
    off: Mapping[Feature, str] = attrs.field(factory=dict)
    """Reasons of the self-check, by feature."""

    @property
    def nbytes(self) -> int:
        return bytes_of(self.tower) if isinstance(self.tower, nn.Module) else 0

    @property
    def identity(self) -> dict[str, str]:
        """Code that makes vectors of a file, for caches of KV; {} without images."""
        if self.layout is None:
            return {}
        return {"images": f"{self.layout.name} pillow {version('pillow')}"}

    @property
    def image_text(self) -> tuple[str, str]:
        """See `HubTokenizer`."""
        if not isinstance(self.layout, Gemma3Layout):
            return "", ""
        marker, around = self.layout.marker, self.layout.around
        return marker, f"{around}{marker}{around}"

    def on(self, card: ModelCard) -> ModelCard:
        return attrs.evolve(
            card,
            capabilities=card.capabilities.without_all(self.off),
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
    group: RankGroup,
) -> LoadedImages:
    """Load the encoder on rank 0, and adapt the model to its vectors. A model whose images cannot
    be served serves text. Several ranks decide together."""
    if not isinstance(candidate.config.get("vision_config"), Mapping):
        return NO_IMAGES
    try:
        images, layout = _loaded(candidate, tokenizer, capabilities, settings, group)
        tower = images.tower
        assert tower is not None
        connect(candidate.model, tower, candidate.config)
        off: Mapping[Feature, str] = {}
        if settings.self_check != "off":
            of_model = partial(_check, candidate, tower, layout)
            check = partial(of_model, capabilities=capabilities, group=group)
            off = check_images(candidate, settings, group, check)
    except ValueError as error:
        report(f"the model takes no images: {error}")
        return LoadedImages(reason=str(error))
    for feature, reason in off.items():
        report(f"{feature} off: {reason}")
    if "images" in off:
        return LoadedImages(reason=off["images"], off=off)
    images = attrs.evolve(images, off=off)
    if isinstance(tower, DistantTower):
        report("images: rank 0 encodes")
    else:
        size = images.nbytes / 2**20
        report(f"images: an encoder of {tower.num_layers} layers, {size:.0f} MiB")
    return images


def _loaded(
    candidate: Candidate,
    tokenizer: HubTokenizer,
    capabilities: Capabilities,
    settings: Settings,
    group: RankGroup,
) -> tuple[LoadedImages, Layout]:
    """The encoder, on rank 0, and the layout. Raises `ValueError` on all ranks."""
    images, layout, reason = NO_IMAGES, None, ""
    try:
        if settings.pipeline:
            raise ValueError("--pipeline")
        if not capabilities.allows("batch"):
            raise ValueError("rows of this model run alone, without what images need")
        layout = _layout(candidate, tokenizer)
        images = _encoder(candidate, layout, settings) if group.leads else NO_IMAGES
    except (ValueError, ModelUnusable) as error:
        reason = str(error)
    if reason := reason_anywhere(group, reason):
        raise ValueError(reason)
    assert layout is not None
    deepstack = 0 if images.tower is None else images.tower.num_deepstack
    deepstack = group.gather(deepstack)[0]
    return images if group.leads else LoadedImages(DistantTower(deepstack), reason=""), layout


def _encoder(candidate: Candidate, layout: Layout, settings: Settings) -> LoadedImages:
    """Raises `ValueError` and `ModelUnusable`."""
    if find_spec("PIL") is None:
        raise ValueError(f"images need Pillow: {command_for('images')}")
    tower = load_tower(candidate.directory, candidate.config, layout)
    if device.is_cpu():
        to_float32(tower)
    mx.eval(tower.parameters())
    vision, limit = candidate.config["vision_config"], settings.max_image_tokens
    step_bytes = encoder_step_bytes(vision, layout, limit, _number_bytes(tower))
    return LoadedImages(tower, layout, "", step_bytes)


def _layout(candidate: Candidate, tokenizer: HubTokenizer) -> Layout:
    """Raises `ValueError` and `ModelUnusable`."""
    preprocessor = read_preprocessor(candidate.directory)
    layout = layout_of(candidate.config, preprocessor, tokenizer.vocabulary)
    return attrs.evolve(layout, piece_patches=patches_at_once())


def reason_anywhere(group: RankGroup, reason: str) -> str:
    """This rank's reason, or a hint to the first rank that has one; "" if no rank has any."""
    for rank, has_reason in enumerate(group.gather(bool(reason))):
        if has_reason:
            return reason or f"rank {rank} says why in its log"
    return ""


def connect(model: nn.Module, tower: AnyTower | DistantTower, config: Mapping[str, Any]) -> None:
    """Let the text model take the encoder's vectors. Raises `ValueError`."""
    if not isinstance(tower, DistantTower):
        tower.embedding_scale = measure_embedding_scale(model)
    # transformers' masks: in Gemma 4 the full layers are causal, in Gemma 3 no layers are.
    adapt_to_images(
        model,
        mrope_sections(config),
        tower.num_deepstack,
        reach_in_full_layers=not str(config["model_type"]).startswith("gemma4"),
    )


def _number_bytes(tower: nn.Module) -> int:
    """Bytes of an activation: those of the widest weight that is no quantized one."""
    arrays = [array for _, array in tree_flatten(tower.parameters())]
    return max(array.dtype.size for array in arrays if mx.issubdtype(array.dtype, mx.floating))


def _check(
    candidate: Candidate,
    tower: Tower | DistantTower,
    layout: Layout,
    *,
    capabilities: Capabilities,
    group: RankGroup,
) -> Mapping[Feature, str]:
    """Features of images that are wrong on any rank, with reasons."""
    fault = "" if isinstance(tower, DistantTower) else encoder_fault(tower, layout)
    if fault := reason_anywhere(group, fault):
        return {"images": fault}
    return ImageCheck(
        model=candidate.model,
        layout=layout,
        deepstack=tower.num_deepstack,
        vocabulary=candidate.vocabulary,
        kv=candidate.kv,
        capabilities=capabilities,
        agree=lambda reason: reason_anywhere(group, reason),
    ).off()


def mrope_sections(config: Mapping[str, Any]) -> MropeSections | None:
    """None without M-RoPE. Raises `ValueError`."""
    text = config.get("text_config") or config
    for key in ("rope_parameters", "rope_scaling"):
        parameters = text.get(key)
        sizes = parameters.get("mrope_section") if isinstance(parameters, Mapping) else None
        if sizes:
            if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
                raise ValueError("mrope_section of config.json is no list of integers")
            interleaved = str(config.get("model_type")).startswith("qwen3")
            return MropeSections(sizes, interleaved=interleaved)
    return None
