"""Measurements for `trouper doctor`: device, speed, memory fit. Loads no weights."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import mlx.core as mx

from trouper.engine.distributed.rank_group import ALONE
from trouper.engine.kv.kv_layout import kv_layout
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.loading import bundled_model, checkpoint, precision, tokenizer
from trouper.engine.loading.adapter_files import find_adapter
from trouper.engine.loading.draft_loading import FoundDraft, find_draft, open_draft
from trouper.engine.loading.head_loading import open_head
from trouper.engine.loading.model_loading import candidate_of, check
from trouper.engine.loading.model_source import cached, local, source_of
from trouper.engine.loading.tapped_loading import open_tapped
from trouper.engine.loading.template_probe import TOOL
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.engine.loading.weights import opened
from trouper.engine.platform import device
from trouper.engine.self_check.starting import key_of, line_of, recalled
from trouper.protocol.loading import nobody_watches
from trouper.protocol.names import DRAFT_FLAG, Kind, adapters_of
from trouper.protocol.problems import RequestFailed
from trouper.protocol.settings import Settings
from trouper.storage.context import context_length
from trouper.storage.model_files import kind_of, takes_images
from trouper.workarounds import mlx_reference_blas

PRODUCT_SIZE = 1024
PRODUCTS = 8


@attrs.frozen(kw_only=True)
class Device:
    name: str
    is_cpu: bool
    memory_bytes: int
    fast_blas: Path | None
    """OpenBLAS in use, or None."""


@attrs.frozen(kw_only=True)
class Fit:
    architecture: str
    weights_bytes: int
    token_bytes: int
    """Bytes of a token's KV; 0 for none or a fixed size."""
    kind: Kind
    encodes: bool
    """Whether the model is an encoder, which needs no self-check."""


def device_stats() -> Device:
    return Device(
        name=device.name(),
        is_cpu=device.is_cpu(),
        memory_bytes=device.memory_limit_bytes(),
        fast_blas=mlx_reference_blas.load_fast(),
    )


def product_gflops() -> float:
    """Return the speed of float32 products, in 10^9 operations a second."""
    matrix = mx.random.normal((PRODUCT_SIZE, PRODUCT_SIZE))
    mx.eval(matrix @ matrix)
    best = float("inf")
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        mx.eval(matrix @ matrix)
        best = min(best, time.perf_counter() - began)
    return float(2 * PRODUCT_SIZE**3 / best / 1e9)


def is_here(model: str | None, flag: str = "--model") -> bool:
    """Whether a start needs no download. `flag`: source of the name. Raises `ModelUnusable`."""
    match source_of(model, flag):
        case Path():
            return True
        case None:
            return bundled_model.is_here()
        case hub_id:
            return cached(hub_id) is not None


def require_parts(settings: Settings) -> None:
    """Check tokenizer, adapters, a demanded MTP head and a local draft model. Raises
    `ModelUnusable`."""
    draft = None
    found, words, _ = check(attrs.evolve(settings, model=str(local(settings.model))))
    for name, path in adapters_of(settings.adapter).items():
        find_adapter(name, path)
    if settings.draft_model is not None and is_here(settings.draft_model, DRAFT_FLAG):
        drafting = attrs.evolve(settings, draft_model=str(local(settings.draft_model)))
        draft = find_draft(drafting, found, words, lambda _: None, nobody_watches, group=ALONE)
    if draft is not None or settings.speculation == "mtp":
        _require_drafters(settings, found, draft)


def _require_drafters(
    settings: Settings, found: checkpoint.Checkpoint, draft: FoundDraft | None
) -> None:
    """Check that what the settings demand can draft for the model's rows. Raises
    `ModelUnusable`."""
    model, config = opened(found.directory)
    known = recalled(key_of(found.digest, settings, ALONE, found.source.identity))
    capabilities = by_caches(model) if known is None else known[0]
    candidate = candidate_of(model, config, found, settings)
    if draft is not None and draft.kind is not None:
        open_tapped(draft, candidate, capabilities)
        return
    open_head(candidate, capabilities, settings)
    if draft is not None:
        open_draft(draft, found.directory, capabilities)


@attrs.frozen
class SelfCheckSummary:
    """An earlier self-check. off: a feature was turned off that the caches allow."""

    summary: str
    off: bool


def checked(settings: Settings) -> SelfCheckSummary | None:
    """None: no self-check yet. Raises `ModelUnusable`."""
    found = checkpoint.inspect(directory := local(settings.model))
    # Before the key, which depends on the architecture's imported code.
    model, _ = opened(directory)
    known = recalled(key_of(found.digest, settings, ALONE, found.source.identity))
    if known is None:
        return None
    capabilities, check = known
    wrong = set(capabilities.off) - set(by_caches(model).off)
    return SelfCheckSummary(line_of(capabilities, attrs.evolve(check, mode="fast")), bool(wrong))


def fit(settings: Settings) -> Fit:
    """Raises `ModelUnusable`."""
    found = checkpoint.inspect(directory := local(settings.model))
    model, _ = opened(directory)
    if device.is_cpu():
        precision.to_float32(model)
    return Fit(
        architecture=found.architecture,
        weights_bytes=found.loaded_bytes,
        token_bytes=kv_layout(
            model, KvFormat(settings.kv_bits, settings.kv_group_size)
        ).token_bytes,
        kind=kind_of(directory, found.config),
        encodes=found.source.encodes,
    )


def reads_images(settings: Settings) -> bool:
    """Raises `ModelUnusable`."""
    return takes_images(checkpoint.inspect(local(settings.model)).config)


QUESTION = {"role": "user", "content": "hello"}


@attrs.frozen(kw_only=True)
class AgentProbe:
    context_length: int
    tokenizer: HubTokenizer
    renders_tools: bool
    """Whether the chat template puts tools into the prompt."""


def probe_for_agents(settings: Settings) -> AgentProbe:
    """Raises `ModelUnusable`."""
    found = checkpoint.inspect(local(settings.model))
    loaded = tokenizer.load(
        found.directory,
        found.config,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    length = settings.context_length or context_length(found.config)
    return AgentProbe(
        context_length=min(length, settings.max_kv_size or length),
        tokenizer=loaded,
        renders_tools=loaded.has_chat_template and _renders_tools(loaded),
    )


def _renders_tools(loaded: HubTokenizer) -> bool:
    try:
        return loaded.encode_chat([QUESTION], tools=[TOOL]) != loaded.encode_chat([QUESTION])
    except RequestFailed:
        return False
