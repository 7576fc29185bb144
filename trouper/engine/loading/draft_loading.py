"""The draft model: checked before weights are read, then loaded like the model. Or a drafter that
reads taps (`tapped_loading.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import attrs
from mlx import nn

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.kv import attention_seam
from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.model_caches import flatten, guess_batching, slot_caches
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.loading import checkpoint, precision
from trouper.engine.loading.model_source import resolve
from trouper.engine.loading.tokenizer import HubTokenizer, wrapped_tokenizer
from trouper.engine.loading.weights import count_logits, evaluate, opened
from trouper.engine.platform import device
from trouper.engine.platform.error_text import first_line_of
from trouper.engine.self_check.starting import Candidate
from trouper.engine.spec_decode.draft_model import DraftLimits
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.loading import LoadWatch
from trouper.protocol.names import DRAFT_FLAG
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings
from trouper.storage.checkpoint_files import read_json, section
from trouper.storage.context import context_length

# Maximum share of tokens in one tokenizer alone: special tokens and padding stay below; a smaller
# vocabulary would draft wrong tokens.
MAX_UNKNOWN = 0.01
DrafterKind = Literal["EAGLE-3", "DFlash", "DSpark"]
# Kinds with further heads, by words in the names of architectures.
OTHER_DRAFTERS = {"dflash2": "DFlash2", "domino": "Domino", "peagle": "P-EAGLE"}


@attrs.frozen(eq=False)
class FoundDraft:
    name: str
    checkpoint: checkpoint.StoredWeights
    kind: DrafterKind | None = None
    """Of a drafter that reads taps; None: a model of its own."""


@attrs.frozen(eq=False)
class Draft:
    """Each rank has all of the draft model."""

    name: str
    model: nn.Module
    directory: Path
    limits: DraftLimits


def find_draft(
    settings: Settings,
    target: checkpoint.Checkpoint,
    tokenizer: HubTokenizer,
    report: Callable[[str], None],
    watch: LoadWatch,
    *,
    group: RankGroup,
) -> FoundDraft | None:
    """None without a draft model. Raises `ModelUnusable`."""
    name = settings.draft_model
    if name is None:
        return None
    directory = resolve(name, report, watch, DRAFT_FLAG)
    if (kind := kind_of_drafter(name, directory)) is not None:
        drafter = FoundDraft(name, checkpoint.inspect_drafter(directory), kind)
        needed = target.loaded_bytes // group.size + drafter.checkpoint.loaded_bytes
        checkpoint.require_memory(needed, directory)
        report(
            f"drafting with {kind}, which reads the model's hidden states, from {directory}: "
            f"{drafter.checkpoint.loaded_bytes / 2**20:.0f} MiB"
        )
        return drafter
    found = checkpoint.inspect(directory)
    _require_tokens(name, directory, target.directory, tokenizer)
    checkpoint.require_memory(target.loaded_bytes // group.size + found.loaded_bytes, directory)
    report(
        f"drafting with {found.architecture} from {directory}: {found.loaded_bytes / 2**20:.0f} MiB"
    )
    has = context_length(found.config)
    needed = settings.context_length or context_length(target.config)
    if has < min(needed, settings.max_kv_size or needed):
        report(
            f"{DRAFT_FLAG} {name} has a context of {has} tokens: rows have no drafts of it beyond"
        )
    return FoundDraft(name, found)


def kind_of_drafter(name: str, directory: Path) -> DrafterKind | None:
    """None for a model of its own. Raises `ModelUnusable` for a drafter without a reader."""
    config = read_json(directory / "config.json")
    names = [*(config.get("architectures") or ()), config.get("model_type", "")]
    words = " ".join(map(str, [*names, config.get("speculators_model_type", "")])).lower()
    if other := next((kind for word, kind in OTHER_DRAFTERS.items() if word in words), None):
        kind = other
    elif "dspark" in words or "markov_rank" in {**config, **section(config, "dflash_config")}:
        return "DSpark"
    elif "dflash" in words or "dflash_config" in config:
        return "DFlash"
    elif "eagle3" in words or "draft_vocab_size" in config:
        return "EAGLE-3"
    elif "eagle" in words:
        kind = "EAGLE or EAGLE-2"
    else:
        return None
    raise ModelUnusable(
        f"{DRAFT_FLAG} {name} is a drafter of the kind {kind}, which has no reader here",
        f"give an EAGLE-3, DFlash or DSpark drafter, or leave {DRAFT_FLAG} out",
    )


def _require_tokens(name: str, directory: Path, target: Path, tokenizer: HubTokenizer) -> None:
    """Both models must share token ids, except special tokens or padding in free positions. Raises
    `ModelUnusable`."""
    try:
        mine = {token: text for text, token in wrapped_tokenizer(directory).get_vocab().items()}
    except ModelUnusable as error:
        raise ModelUnusable(f"{DRAFT_FLAG} {name}: {error.message}", error.remedy) from error
    except Exception as error:
        # Libraries may raise any exception over any file.
        raise ModelUnusable(
            f"{DRAFT_FLAG} {name} has no usable tokenizer: {first_line_of(error)}"
        ) from error
    theirs = {token: text for text, token in tokenizer.vocabulary.items()}
    apart = [token for token in sorted(mine.keys() & theirs.keys()) if mine[token] != theirs[token]]
    remedy = f"give a smaller model of the same family, or leave {DRAFT_FLAG} out"
    if apart:
        first = apart[0]
        raise ModelUnusable(
            f"{DRAFT_FLAG} {name} has other tokens than {target} ({len(apart)} differ, the first "
            f"is {first}: {mine[first]!r} and {theirs[first]!r}): {remedy}"
        )
    unknown = len(mine.keys() ^ theirs.keys())
    if unknown > MAX_UNKNOWN * max(len(mine), len(theirs)):
        raise ModelUnusable(
            f"{DRAFT_FLAG} {name} has {len(mine)} tokens, and {target} {len(theirs)}, of which "
            f"{unknown} are tokens of one alone: {remedy}"
        )


def load_draft(
    found: FoundDraft,
    target: Candidate,
    capabilities: Capabilities,
    progress: Callable[[int, int], None],
) -> Draft:
    """Load the draft model in the target's precision. Raises `ModelUnusable`."""
    directory = found.checkpoint.directory
    model = open_draft(found, target.directory, capabilities)
    limits = DraftLimits(
        context=context_length(found.checkpoint.config),
        num_tokens=count_logits(model, directory),
        target_tokens=target.vocabulary,
    )
    evaluate(model, directory, progress)
    return Draft(found.name, model, directory, limits)


def open_draft(found: FoundDraft, target: Path, capabilities: Capabilities) -> nn.Module:
    """Open lazily. Raises `ModelUnusable` if the model cannot draft."""
    require_drafts(found.name, target, capabilities)
    model, _ = opened(found.checkpoint.directory)
    if device.is_cpu():
        precision.to_float32(model)
    if reason := unsuitable(model, capabilities):
        raise ModelUnusable(
            f"{DRAFT_FLAG} {found.name} cannot draft in the batch: {reason}; give a model with "
            f"full attention in all layers, or leave {DRAFT_FLAG} out"
        )
    return model


def require_drafts(name: str, target: Path, capabilities: Capabilities) -> None:
    """Raises `ModelUnusable`."""
    if not capabilities.allows("drafts"):
        raise ModelUnusable(
            f"{DRAFT_FLAG} {name}: rows of {target} cannot take drafts back "
            f"({capabilities.drafts}); leave {DRAFT_FLAG} out"
        )


def unsuitable(model: nn.Module, capabilities: Capabilities) -> str:
    """Return the reason against drafting in the target's slots, or "". Evaluates nothing."""
    found = guess_batching(model)
    if found.batch or found.drafts:
        return found.batch or found.drafts
    leaves = flatten(slot_caches(model, PLAIN))
    if any(isinstance(leaf, StateSlots) for leaf in leaves):
        return "it has recurrent state"
    if not all(isinstance(leaf, FullSlots) for leaf in leaves):
        return "it has sliding windows"
    if capabilities.allows("banks") and (reason := attention_seam.fault(model)):
        return f"attention over several banks cannot be built: {reason}"
    return ""
