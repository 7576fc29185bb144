"""Drafters that read taps, as EAGLE-3, DFlash and DSpark publish them: SafeAILab, SpecForge,
ModelOpt and speculators (https://github.com/vllm-project/speculators), z-lab
(https://github.com/z-lab/dflash), DeepSeek (https://github.com/deepseek-ai/DeepSpec).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from trouper.engine.kv.model_body import body_of
from trouper.engine.loading.checkpoint import StoredWeights
from trouper.engine.loading.draft_loading import (
    Draft,
    DrafterKind,
    FoundDraft,
    require_drafts,
    unsuitable,
)
from trouper.engine.loading.weights import evaluate
from trouper.engine.platform.error_text import line_of
from trouper.engine.products.linear_layers import pack_as_stored
from trouper.engine.self_check.starting import Candidate
from trouper.engine.spec_decode.draft_model import NO_DRAFT_LIMITS, SharedLayers
from trouper.engine.spec_decode.layer_taps import LayerTaps
from trouper.engine.spec_decode.tapped_drafters import (
    DFlash,
    DrafterShape,
    DSpark,
    Eagle3,
    TappedDrafter,
)
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.names import DRAFT_FLAG
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import section, weight_files

Weights = dict[str, mx.array]
CLASSES: dict[DrafterKind, type[TappedDrafter]] = {
    "EAGLE-3": Eagle3,
    "DFlash": DFlash,
    "DSpark": DSpark,
}
IGNORED = ("t2d", "verifier_", "confidence_head.")
"""Tensors that only training reads, and DSpark's own estimate of acceptance, which is measured."""
LAYER = "layers.0."
MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")


class Unfit(ValueError):
    """The drafter does not fit the target."""


def load_tapped(
    draft: FoundDraft,
    target: Candidate,
    capabilities: Capabilities,
    progress: Callable[[int, int], None],
) -> Draft:
    """Load the drafter in the target's precision. Raises `ModelUnusable`."""
    drafter, directory = open_tapped(draft, target, capabilities), draft.checkpoint.directory
    evaluate(drafter, directory, progress)
    return Draft(draft.name, drafter, directory, NO_DRAFT_LIMITS)


def open_tapped(draft: FoundDraft, target: Candidate, capabilities: Capabilities) -> TappedDrafter:
    """Open lazily. Raises `ModelUnusable` if the drafter cannot draft for the target."""
    require_drafts(draft.name, target.directory, capabilities)
    assert draft.kind is not None
    try:
        drafter = _drafter(draft.kind, draft.checkpoint, target)
        reason = unsuitable(drafter, capabilities)
    except KeyError as error:
        reason = f"it has no {error.args[0]}"
    except Exception as error:  # noqa: BLE001
        # Any file's tensors and numbers, and any architecture's code: whatever they raise, it is
        # the answer.
        reason = line_of(error)
    if reason:
        raise ModelUnusable(
            f"{DRAFT_FLAG} {draft.name}, of the kind {draft.kind}, does not fit "
            f"{target.directory}: {reason}",
            f"give the drafter that was trained for this model, or leave {DRAFT_FLAG} out",
        )
    return drafter


def _drafter(kind: DrafterKind, stored: StoredWeights, target: Candidate) -> TappedDrafter:
    layer, own = (
        section(stored.config, part) for part in ("transformer_layer_config", "dflash_config")
    )
    config = {**layer, **stored.config, **own}
    weights = _weights(stored)
    offsets = weights.pop("d2t", None)
    layers = _layers(target.model)
    outputs = (eagle3_taps if kind == "EAGLE-3" else dflash_taps)(config, len(layers))
    if not all(0 <= index < len(layers) for index in outputs):
        raise Unfit(f"it reads layers {list(outputs)}, and the model has {len(layers)}")
    taps = LayerTaps([layers[index] for index in outputs])
    body = body_of(target.model)
    shared = SharedLayers(target.model, target.model if body is None else body)
    _, states = taps.run(target.model, mx.array([[0, 1]]), None)
    shape = _shape(kind, config, weights)
    if states.shape[-1] != shape.tapped:
        raise Unfit(
            f"its taps have {shape.tapped} values a token, and those of layers {list(outputs)} "
            f"{states.shape[-1]}"
        )
    drafter = CLASSES[kind](shape, shared, taps)
    _require_vocabulary(shape, shared, offsets, target.vocabulary)
    pack_as_stored(drafter, weights)
    drafter.load_weights(list(weights.items()), strict=True)
    drafter.eval()
    drafter.set_dtype(states.dtype)
    if offsets is not None:
        drafter.name_tokens(offsets)
    return drafter


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    layers: Any = model.layers
    return list(layers)


def _weights(drafter: StoredWeights) -> Weights:
    weights: Weights = {}
    for path in weight_files(drafter.directory):
        file: Any = mx.load(str(path))
        for name, array in file.items():
            own = name.removeprefix("model.").replace("midlayer.", LAYER)
            if not own.startswith(IGNORED):
                weights[own] = array
    return weights


def eagle3_taps(config: Mapping[str, Any], layers: int) -> list[int]:
    """The layers whose outputs are read, of a target with so many."""
    # The first key counts hidden states, of which the embeddings are the first; ModelOpt's, within
    # eagle_config, counts layers.
    if states := config.get("eagle_aux_hidden_state_layer_ids"):
        return [index - 1 for index in states]
    if outputs := section(config, "eagle_config").get("eagle_aux_hidden_state_layer_ids"):
        return [*outputs]
    return [1, layers // 2 - 1, layers - 4]


def dflash_taps(config: Mapping[str, Any], layers: int) -> list[int]:
    """As `eagle3_taps`."""
    if outputs := config.get("target_layer_ids"):
        return [*outputs]
    if states := config.get("aux_hidden_state_layer_ids"):
        return [index - 1 for index in states]
    own = int(config["num_hidden_layers"])
    if own == 1:
        return [layers // 2]
    return [round(1 + index * (layers - 4) / (own - 1)) for index in range(own)]


def _shape(kind: DrafterKind, config: Mapping[str, Any], weights: Weights) -> DrafterShape:
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise Unfit(f"its activation is {act}, and silu is read")
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    size = int(config["hidden_size"])
    scaled = weights.get("fc.scales")
    tapped = weights["fc.weight"].shape[-1] if scaled is None else _tapped(kind, config, size)
    if (markov := config.get("markov_head_type", "vanilla")) != "vanilla":
        raise Unfit(f"its Markov head is {markov}, and vanilla is read")
    windows, causal = _attention(kind, config, layers)
    return DrafterShape(
        size=size,
        tapped=tapped,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or size // heads),
        inner=int(config["intermediate_size"]),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(kind, config),
        windows=windows,
        causal=causal,
        own_rows={
            layer: weights[f"{layer}.weight"].shape[0]
            for layer in ("embed_tokens", "lm_head", *MARKOV)
            if f"{layer}.weight" in weights
        },
        normed_heads=f"{LAYER}self_attn.q_norm.weight" in weights,
        biased=f"{LAYER}self_attn.q_proj.bias" in weights,
        biased_output=f"{LAYER}self_attn.o_proj.bias" in weights,
        norms_taps="input_norm.weight" in weights,
        normed_residual=bool(
            config.get("norm_before_residual", "speculators_model_type" in config)
        ),
        block=0 if kind == "EAGLE-3" else int(config["block_size"]),
        mask_token=0 if kind == "EAGLE-3" else _mask_token(config),
        anchored=kind == "DSpark" and _is_anchored(config),
        markov_rank=int(config["markov_rank"]) if kind == "DSpark" else 0,
    )


def _mask_token(config: Mapping[str, Any]) -> int:
    token = config.get("mask_token_id")
    if token is None:
        raise Unfit("its config.json names no mask_token_id")
    return int(token)


def _is_anchored(config: Mapping[str, Any]) -> bool:
    """As vLLM: the second key is that of older checkpoints."""
    anchored = config.get("sample_from_anchor")
    return not config.get("dspark_bonus_anchor", False) if anchored is None else bool(anchored)


def _tapped(kind: DrafterKind, config: Mapping[str, Any], size: int) -> int:
    """Values of all taps, where packed weights do not show them."""
    count = 3 if kind == "EAGLE-3" else len(dflash_taps(config, 0))
    return count * int(config.get("target_hidden_size") or size)


def _attention(
    kind: DrafterKind, config: Mapping[str, Any], layers: int
) -> tuple[list[int | None], list[bool]]:
    """Each layer's window, and whether a block's tokens see only earlier ones: as vLLM, in layers
    with windows unless the config says otherwise."""
    if kind == "EAGLE-3":
        return [None] * layers, [True] * layers
    types = config.get("layer_types") or ["full_attention"] * layers
    sliding = [each == "sliding_attention" for each in types]
    window = config.get("swa_window_size", config.get("sliding_window"))
    own = config.get("is_causal", config.get("causal"))
    causal = sliding if own is None else [bool(own)] * layers
    if config.get("use_swa") and not any(sliding):
        sliding = [True] * layers
    return [int(window) if each else None for each in sliding], causal


def _rope(kind: DrafterKind, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = scaling.get("rope_theta") or config.get("rope_theta")
    scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    return {
        "base": float(base or (1e4 if kind == "EAGLE-3" else 1e6)),
        "traditional": False,
        "scaling_config": dict(scaling) if scaled else None,
        "max_position_embeddings": config.get("max_position_embeddings"),
    }


def _require_vocabulary(
    shape: DrafterShape,
    shared: SharedLayers,
    offsets: mx.array | None,
    vocabulary: int,
) -> None:
    """Raises `Unfit` if tokens of drafter and target differ in number."""
    rows = shape.own_rows
    if rows.get("embed_tokens", vocabulary) < vocabulary:
        raise Unfit(f"it embeds {rows['embed_tokens']} tokens, and the model has {vocabulary}")
    if (
        "embed_tokens" not in rows
        and (size := shared.embedded(mx.array([[0]])).shape[-1]) != shape.size
    ):
        raise Unfit(f"it has no embeddings, and the model's have {size} values, not {shape.size}")
    own = rows.get("lm_head")
    before, after = (rows.get(layer) for layer in MARKOV)
    if before is not None and (before < vocabulary or after != (own or vocabulary)):
        raise Unfit(f"its Markov head is of {before} and {after} tokens")
    if own is None:
        logits = shared.logits_of(mx.zeros((1, 1, shape.size))).shape[-1]
        if logits != vocabulary:
            raise Unfit(f"the model's output layer gives {logits} logits, not {vocabulary}")
    elif offsets is None and own > vocabulary:
        raise Unfit(f"it drafts {own} tokens, and the model has {vocabulary}")
    elif offsets is not None:
        tokens = offsets + mx.arange(own)
        if offsets.size != own or mx.any(tokens >= vocabulary).item():
            raise Unfit(f"its d2t names tokens that the model's {vocabulary} are not")
