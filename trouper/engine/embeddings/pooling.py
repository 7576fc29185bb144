"""Embeddings: pooled hidden states of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from trouper.engine.embeddings.centred_convolution import centre_convolutions
from trouper.engine.embeddings.embedding_modules import (
    MODULES_FILE,
    NO_MODULES,
    EmbeddingModules,
    Encode,
    EncoderInput,
    NotSupported,
    modules_of,
    normalized,
)
from trouper.engine.embeddings.padded_pass import run_padded
from trouper.engine.encoders.encoder import Encoder, padding_mask
from trouper.engine.kv import attention_seam
from trouper.engine.kv.model_body import body_of
from trouper.protocol.model import EmbeddingLayout
from trouper.protocol.plans import Pooling
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import read_json
from trouper.storage.sentence_files import EMBEDDER, PROMPTS_FILE, read_sentence_files

WINDOWED = "window_size"  # Attribute of a body with windowed layers.
NO_GENERATION = "each of its tokens attends to those behind it"
ENCODES = "it is an encoder"


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """False for images alone (`"vision"`)."""
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return (
        config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
        or any("Bidirectional" in str(name) for name in named)
    )


def bidirectional_encode(model: nn.Module, body: nn.Module, config: Mapping[str, Any]) -> Encode:
    """`body`: a `model` of mlx-lm without the head. Raises `NotSupported` for layers that pass
    state from token to token."""
    convolutions = centre_convolutions(body) if config["model_type"] == "lfm2" else []
    keep_keys = [isinstance(cache, KVCache | RotatingKVCache) for cache in make_prompt_cache(model)]
    if not convolutions and not all(keep_keys):
        raise NotSupported(
            f"layers of a {config['model_type']} pass state from token to token, so no token sees "
            "those behind it, as this model's must"
        )
    attention_seam.install(body)
    reach, rescale = None, False
    if hasattr(body, WINDOWED):
        rescale = "float32" in (config.get("dtype"), config.get("torch_dtype"))
        # transformers halves the window, which is that of both sides
        # (configuration_gemma3.py, masking_utils.py).
        reach = int(config["sliding_window"]) // 2
        # A mask as an array then says that a layer has a window, whatever the length.
        setattr(body, WINDOWED, 1)

    def forward(tokens: mx.array, _types: mx.array, mask: mx.array | None) -> mx.array:
        for convolution in convolutions:
            convolution.is_token = mask
        inputs = _exactly_scaled(body, tokens) if rescale else None
        with attention_seam.bidirectional(reach, padding_mask(mask)):
            hidden: mx.array = (
                body(tokens) if inputs is None else body(tokens, input_embeddings=inputs)
            )
        return hidden

    return lambda prompts: run_padded(prompts, forward)


def _exactly_scaled(body: nn.Module, tokens: mx.array) -> mx.array | None:
    """Embeddings that mlx-lm's Gemma, whose scale is rounded to bfloat16, scales as transformers
    does in float32. None: the weights are not in float32."""
    embeddings: mx.array = body.embed_tokens(tokens)
    if embeddings.dtype != mx.float32:
        return None
    exact = sqrt(embeddings.shape[-1])
    return embeddings * (exact / mx.array(exact, mx.bfloat16).item())


def encoder_encode(encoder: Encoder) -> Encode:
    """The result for a cross-encoder is the score, (1, 1)."""

    def encode(prompts: Sequence[EncoderInput]) -> list[mx.array]:
        states = run_padded(prompts, encoder)
        return [encoder.score(each)[None] for each in states] if encoder.scores else states

    return encode


POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "lasttoken": "last",
    "cls": "first",
    "max": "max",
    "weightedmean": "weighted",
}

# Boolean switches of older files.
SWITCHES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@attrs.frozen
class Embedder:
    """The form of embeddings, or None with a reason from the files, and the modules behind
    pooling."""

    layout: EmbeddingLayout | None = None
    reason: str = ""
    modules: EmbeddingModules = NO_MODULES


def embedder_of(
    model: nn.Module,
    directory: Path,
    report: Callable[[str], None] = lambda _: None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Embedder:
    """`report` gets a line if the files rule embeddings out."""
    body = body_of(model)
    found = Embedder() if body is None else _embedder(model, body, directory, config)
    if body is not None and found.layout is not None and is_bidirectional(config):
        try:
            encode = bidirectional_encode(model, body, config)
            found = attrs.evolve(found, modules=attrs.evolve(found.modules, encode=encode))
        except NotSupported as error:
            found = Embedder(reason=str(error))
    if found.reason:
        report(f"no embeddings: {found.reason}")
    return found


def encoder_embedder(encoder: Encoder, directory: Path, report: Callable[[str], None]) -> Embedder:
    """As `embedder_of`, for a model of `trouper.engine.encoders`."""
    encode = encoder_encode(encoder)
    if encoder.scores:
        return Embedder(
            reason="it is a cross-encoder, for /v1/rerank and /v1/score",
            modules=EmbeddingModules(encode=encode, normalizes=False),
        )
    zero = mx.zeros((1, 1), mx.int32)
    width = encoder(zero, zero, None).shape[-1]
    embedder = _from_files(directory, width, "mean")
    embedder = attrs.evolve(embedder, modules=attrs.evolve(embedder.modules, encode=encode))
    if embedder.reason:
        report(f"no embeddings: {embedder.reason}")
    elif not (directory / embedder.modules.pooling / "config.json").exists():
        report("embeddings are the mean of hidden states: no 1_Pooling/config.json says otherwise")
    return embedder


def _embedder(
    model: nn.Module, body: nn.Module, directory: Path, config: Mapping[str, Any]
) -> Embedder:
    is_causal = not is_bidirectional(config)
    # Conversions often lose the directory of the pooling, but not modules.json. In a causal model
    # only the last token has seen all others.
    default: Pooling = "last" if is_causal and (directory / MODULES_FILE).exists() else "mean"
    hidden = body(mx.array([[0]]), cache=make_prompt_cache(model))
    return _from_files(directory, hidden.shape[-1], default)


def _from_files(directory: Path, width: int, default: Pooling) -> Embedder:
    """`width`: of hidden states. `default`: pooling without a file that says another."""
    try:
        modules = modules_of(directory)
        pooling_directory = directory / modules.pooling
        if (pooling := pooling_of(pooling_directory, default)) is None:
            return Embedder(
                reason=(
                    f"{modules.pooling}/config.json joins several vectors, or pools in a way that "
                    "is not known"
                )
            )
        files = read_sentence_files(directory)
        if files.model_class != EMBEDDER:
            raise NotSupported(f"{PROMPTS_FILE} says that it is a {files.model_class}")
        if not files.takes_texts:
            raise NotSupported("modality_config makes messages of texts")
        if files.dimensions is not None:
            modules = modules.cut(files.dimensions)
        leaves_out = _config_of(pooling_directory).get("include_prompt") is False
        if leaves_out and any(text for _, text in files.prompts):
            raise NotSupported(f"{modules.pooling}/config.json leaves prompts out of the pooling")
        dimensions = modules.applied(mx.zeros(width)).shape
    except ModelUnusable as error:
        return Embedder(reason=error.message)
    except (NotSupported, ValueError) as error:  # ValueError: a product of shapes that do not fit.
        return Embedder(reason=str(error))
    layout = EmbeddingLayout(int(dimensions[0]), pooling, files.prompts, files.default_prompt)
    return Embedder(layout, modules=modules)


def pooling_of(directory: Path, default: Pooling = "mean") -> Pooling | None:
    """`default`: without a file. None: joined or unknown poolings."""
    names = _names_of(config) if (config := _config_of(directory)) else []
    if not names:
        return "mean" if config else default
    return POOLINGS.get(names[0]) if len(names) == 1 else None


def _config_of(directory: Path) -> dict[str, Any]:
    """Raises `ModelUnusable` for a file that cannot be read."""
    path = directory / "config.json"
    return read_json(path) if path.exists() else {}


def _names_of(config: dict[str, Any]) -> list[str]:
    # One name or a list since 2026, before that a switch for each.
    named = config.get("pooling_mode")
    if isinstance(named, str | list):
        return [named] if isinstance(named, str) else [str(name) for name in named]
    return [name for switch, name in SWITCHES.items() if config.get(switch)]


@attrs.define(eq=False)
class Pool:
    pooling: Pooling
    kept: mx.array | None = None
    tokens: int = 0

    def add(self, hidden: mx.array) -> None:
        """Add hidden states (tokens, dim)."""
        states = hidden.astype(mx.float32)
        first, self.tokens = self.tokens, self.tokens + states.shape[0]
        match self.pooling:
            case "mean" | "mean_sqrt":
                self.kept = states.sum(0) if self.kept is None else self.kept + states.sum(0)
            case "last":
                self.kept = states[-1]
            case "first":
                self.kept = states[0] if self.kept is None else self.kept
            case "max":
                self.kept = (
                    states.max(0) if self.kept is None else mx.maximum(self.kept, states.max(0))
                )
            case "weighted":
                weighted = (states * mx.arange(first + 1, self.tokens + 1)[:, None]).sum(0)
                self.kept = weighted if self.kept is None else self.kept + weighted

    def pooled(self) -> mx.array:
        """Return (dim,) float32, as sentence-transformers does."""
        assert self.kept is not None
        match self.pooling:
            case "mean":
                return self.kept / self.tokens
            case "mean_sqrt":
                return self.kept / sqrt(self.tokens)
            case "weighted":
                return self.kept / (self.tokens * (self.tokens + 1) / 2)
            case _:
                return self.kept

    def vector(self, modules: EmbeddingModules = NO_MODULES) -> mx.array:
        """Return the vector behind `modules`, (dim,) float32, of length one unless it is a
        score."""
        vector = modules.applied(self.pooled())
        return normalized(vector) if modules.normalizes else vector
