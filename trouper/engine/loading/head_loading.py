"""Loading a checkpoint's MTP head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.architectures.architecture_lookup import get_classes
from trouper.engine.kv.head_rows import max_held_positions
from trouper.engine.kv.model_body import body_of
from trouper.engine.loading import precision
from trouper.engine.loading.draft_loading import Draft, unsuitable
from trouper.engine.loading.head_weights import (
    CONVOLUTION,
    NAMES,
    HeadFamily,
    HeadWeights,
    Weights,
    family_of,
    read_head_weights,
)
from trouper.engine.loading.weights import bytes_of, evaluate
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.platform import device
from trouper.engine.platform.error_text import line_of
from trouper.engine.products.linear_layers import pack_as_stored
from trouper.engine.self_check.starting import Candidate
from trouper.engine.spec_decode.draft_model import MtpHead, SharedLayers
from trouper.engine.spec_decode.tapped_drafters import TappedDrafter
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import KvLayout
from trouper.protocol.loading import LoadWatch, stage
from trouper.protocol.model import NO_HEAD
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

LAYER, NORM = "model.layers.0.", "model.norm."  # In a model of one layer.
EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)\.(\w+)")


@attrs.frozen(eq=False)
class LoadedHead:
    module: MtpHead | None = None
    reason: str = NO_HEAD


@attrs.frozen(eq=False)
class Drafters:
    draft: Draft | None
    head: LoadedHead

    @property
    def modules(self) -> list[nn.Module]:
        """Drafters with KV in slots, in order of caches."""
        return [module for module in (self.model, self.reader) if module is not None]

    @property
    def model(self) -> nn.Module | None:
        """The draft model, if it is a model of its own."""
        return None if self.draft is None or self.reader is self.draft.model else self.draft.model

    @property
    def reader(self) -> MtpHead | TappedDrafter | None:
        """What reads hidden states of the target."""
        if self.draft is not None and isinstance(self.draft.model, TappedDrafter):
            return self.draft.model
        return self.head.module

    @property
    def nbytes(self) -> int:
        return sum(map(bytes_of, self.modules))

    def with_held_states(self, kv: KvLayout, draft_tokens: int) -> KvLayout:
        """Add a row's states for the reader, with drafts of at most `draft_tokens` tokens."""
        if self.reader is None or not kv.cached:
            return kv
        positions = max_held_positions(of_device().width(draft_tokens + 1))
        return attrs.evolve(kv, head_state_bytes=positions * self.reader.state_bytes)


def load_head(
    target: Candidate,
    capabilities: Capabilities,
    settings: Settings,
    *,
    report: Callable[[str], None],
    watch: LoadWatch,
) -> LoadedHead:
    """Load the head in the target's precision. Raises `ModelUnusable` if the settings demand an
    absent head, or weights cannot be read."""
    head = open_head(target, capabilities, settings)
    if head.module is not None:
        name = settings.model or target.directory.name
        evaluate(head.module, target.directory, stage(watch, name, "loading the MTP head"))
        report("an MTP head was loaded beside the model, and drafts for it")
    elif head.reason != NO_HEAD:
        report(f"the checkpoint's MTP head is not loaded: {head.reason}")
    return head


def open_head(target: Candidate, capabilities: Capabilities, settings: Settings) -> LoadedHead:
    """Make the head, lazily. Raises `ModelUnusable` as `load_head` does."""
    module, reason = _make_head(target, capabilities, settings)
    if module is None and settings.speculation == "mtp":
        raise ModelUnusable(
            f"--speculation mtp: {target.directory} has no usable MTP head: {reason}; say "
            "--speculation auto"
        )
    return LoadedHead(module, reason)


def _make_head(
    target: Candidate, capabilities: Capabilities, settings: Settings
) -> tuple[MtpHead | None, str]:
    found, family = read_head_weights(target.directory, target.config), family_of(target.config)
    if found.unknown:
        return None, f"heads of {target.config['model_type']} are not supported"
    if family is None or not found.weights:
        return None, NO_HEAD
    if settings.speculation not in ("auto", "mtp") or settings.pipeline:
        flag = "--pipeline" if settings.pipeline else f"--speculation {settings.speculation}"
        return None, flag
    if not capabilities.allows("drafts"):
        return None, f"rows of this model cannot take drafts back ({capabilities.drafts})"
    try:
        head = _head(found, target, family)
    except Exception as error:  # noqa: BLE001
        # Any file's weights in a family's own code: whatever it raises, it is the answer.
        return None, f"its weights do not make a head: {line_of(error)}"
    reason = unsuitable(head, capabilities)
    return (None, reason) if reason else (head, "")


# -- a head from its weights ---------------------------------------------------------------------
#
# Its layer is that of a model of the same family with one layer, whose own `sanitize` gets the
# head's weights: so experts are stacked,
# norms shifted, projections split and scales applied as for the model.


def _head(found: HeadWeights, target: Candidate, family: HeadFamily) -> MtpHead:
    body = body_of(target.model)
    if body is None or "embed_tokens" not in body:
        raise ValueError("its model cannot be run without its output layer")
    experts = any(".experts." in name or "switch_mlp" in name for name in found.weights)
    single = _single_layer(target.config, experts=experts)
    weights = _named(_sanitized(found, single), hidden_first=family.hidden_first)
    inner: Any = getattr(single, "language_model", single).model
    size = int(inner.norm.weight.shape[0])
    head = MtpHead(
        inner.layers[0],
        inner.norm,
        size,
        SharedLayers(target.model, body),
        array_mask=family.array_mask,
    )
    pack_as_stored(head, weights)
    head.load_weights(list(weights.items()), strict=True)
    head.eval()
    if device.is_cpu():
        precision.to_float32(head)
    return head


def _single_layer(config: Mapping[str, Any], *, experts: bool) -> Any:
    """A model of one full-attention layer, whose parameters are never evaluated."""
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "first_k_dense_replace": 0 if experts else 1,
    }
    if not experts:
        changes["num_experts"] = 0
    changed = {**config, **changes}
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = {**config["text_config"], **changes}
    kind, arguments = get_classes(changed)
    return kind(arguments.from_dict(changed))


def _sanitized(found: HeadWeights, single: Any) -> Weights:
    """Apply the family's changes; norms outside the layer shift as the final norm."""
    given: Weights = {}
    for name, weight in found.weights.items():
        part, _, leaf = name.rpartition(".")
        given[NORM + leaf if NAMES.get(part) == "norm" else LAYER + name] = weight
    signal = (
        {}
        if found.convolution is None
        else {f"{LAYER}linear_attn.{CONVOLUTION}": found.convolution}
    )
    changed: Weights = {
        name.removeprefix("language_model."): weight
        for name, weight in single.sanitize({**given, **signal}).items()
    }
    norm = f"{NORM}weight"
    shifted = changed[norm] is not given[norm]
    return {
        name: weight + 1.0 if shifted and _own_norm(name) else weight
        for name, weight in _stacked(changed).items()
        if name not in signal
    }


def _own_norm(name: str) -> bool:
    part = NAMES.get(name.removeprefix(LAYER).rpartition(".")[0], "")
    return part in ("embedding_norm", "hidden_norm")


def _stacked(weights: Weights) -> Weights:
    """Stack single experts, as Qwen3.5's code expects."""
    stacked: Weights = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, weight in weights.items():
        if match := EXPERT.fullmatch(name):
            block, index, layer, leaf = match.groups()
            experts.setdefault(f"{block}.switch_mlp.{layer}.{leaf}", {})[int(index)] = weight
        else:
            stacked[name] = weight
    return stacked | {
        name: mx.stack([parts[index] for index in sorted(parts)]) for name, parts in experts.items()
    }


def _named(weights: Weights, *, hidden_first: bool) -> Weights:
    """Name weights as `MtpHead`. `hidden_first`: the projection's halves of columns change places,
    also of packed weights and scales."""
    named: Weights = {}
    for name, stored in weights.items():
        if name.startswith(NORM):
            named["norm." + name.removeprefix(NORM)] = stored
            continue
        weight = stored
        part, _, leaf = name.removeprefix(LAYER).rpartition(".")
        if hidden_first and NAMES.get(part) == "projection":
            half = weight.shape[-1] // 2
            weight = mx.concatenate([weight[..., half:], weight[..., :half]], axis=-1)
        named[f"{NAMES[part]}.{leaf}" if part in NAMES else f"layer.{part}.{leaf}"] = weight
    return named
