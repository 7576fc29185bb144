"""Finds, checks, loads and adapts the model of the settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.distributed import pipeline, sharding
from trouper.engine.distributed.rank_group import ALONE, RankGroup, split_settings
from trouper.engine.embeddings.pooling import (
    ENCODES,
    NO_GENERATION,
    Embedder,
    embedder_of,
    encoder_embedder,
)
from trouper.engine.encoders.encoder import Encoder
from trouper.engine.kv.kv_layout import kv_layout
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.loading import bundled_model, checkpoint, lora_adapter, precision, tokenizer
from trouper.engine.loading.adapter_files import bytes_together, find_adapter
from trouper.engine.loading.adapter_loading import (
    find_adapters,
    load_adapters,
    read_adapters,
    require_applied,
)
from trouper.engine.loading.draft_loading import Draft, FoundDraft, find_draft, load_draft
from trouper.engine.loading.head_loading import Drafters, LoadedHead, load_head
from trouper.engine.loading.image_loading import LoadedImages, load_images
from trouper.engine.loading.model_fingerprint import fingerprint
from trouper.engine.loading.model_source import resolve
from trouper.engine.loading.opening import NO_OUTPUT_HEAD, lacks_head
from trouper.engine.loading.tapped_loading import load_tapped
from trouper.engine.loading.tokenizer import HubTokenizer
from trouper.engine.loading.unread_keys import list_unapplied, list_unread
from trouper.engine.loading.weights import bytes_of, count_logits, evaluate, opened
from trouper.engine.lora.lora_layers import adapter_bytes
from trouper.engine.platform import device
from trouper.engine.self_check.starting import STAGE, Candidate, self_check
from trouper.engine.spec_decode.draft_model import MtpHead
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import KvLayout
from trouper.protocol.loading import LoadWatch, nobody_watches, stage
from trouper.protocol.media import ImageLayout
from trouper.protocol.model import Measured, ModelCard
from trouper.protocol.names import DRAFT_FLAG, adapters_of
from trouper.protocol.output_formats import NONE
from trouper.protocol.private_files import others_may_write
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.sampling import MODEL_DEFAULTS, Sampling, bounds_of_parameters
from trouper.protocol.settings import Settings
from trouper.storage.checkpoint_files import read_json
from trouper.storage.context import context_length
from trouper.storage.model_files import created_at, kind_of
from trouper.storage.sentence_files import context_of, read_sentence_files

MIN_VOCABULARY = 0.25
"""Minimum share of the vocabulary in the tokenizer: embeddings are padded a little."""


@attrs.frozen(eq=False)
class EvaluatedModel:
    model: nn.Module
    card: ModelCard
    tokenizer: HubTokenizer
    directory: Path
    config: dict[str, Any]
    kv: KvFormat
    embedder: Embedder
    drafters: Drafters
    images: LoadedImages

    @property
    def draft(self) -> Draft | None:
        return self.drafters.draft

    @property
    def head(self) -> MtpHead | None:
        return self.drafters.head.module


# Cheap checks come first: adapter files, headers, tokenizer and memory, before any weight
# is read. Everything up to `evaluate` is lazy: adapters, dtype and shard change the graph of the
# weights, and a rank never holds more than the rank's own part. Collectives begin afterwards
# (`_require_same`): no rank waits in the middle of a load for one that failed. The fingerprint is
# last, because the self-check decides whether blocks may be kept at all.


def load(
    settings: Settings,
    report: Callable[[str], None],
    watch: LoadWatch = nobody_watches,
    group: RankGroup = ALONE,
) -> EvaluatedModel:
    """Load the model or this rank's part. `report` gets one line per stage. Several ranks wait for
    one another at the end. Raises `ModelUnusable`."""
    settings = split_settings(settings, group)
    target, hub_tokenizer = _checked(settings, report, watch)
    _announce(target, report, group)
    load_kind = _load_encoder if target.source.encodes else _load_generator
    return load_kind(target, hub_tokenizer, settings, report, watch=watch, group=group)


def _load_generator(
    target: checkpoint.Checkpoint,
    hub_tokenizer: HubTokenizer,
    settings: Settings,
    report: Callable[[str], None],
    *,
    watch: LoadWatch,
    group: RankGroup,
) -> EvaluatedModel:
    """Load a model that generates. Raises `ModelUnusable`."""
    name = settings.model or bundled_model.NAME
    directory = target.directory
    found_adapters = find_adapters(adapters_of(settings.adapter), group)
    found_draft = find_draft(settings, target, hub_tokenizer, report, watch, group=group)
    model, config = _prepared(directory, settings, report, group)
    matrices = read_adapters(found_adapters, model, target)
    evaluate(model, directory, stage(watch, name, "loading the weights"))
    _require_same(target, group)
    adapters = load_adapters(found_adapters, matrices, model, report)
    candidate = candidate_of(model, config, target, settings)
    _require_vocabulary(hub_tokenizer, candidate, report)
    capabilities, check = self_check(
        candidate, settings, group, report, stage(watch, name, STAGE, "steps")
    )
    head = _head_unless_read(found_draft) or load_head(
        candidate, capabilities, settings, report=report, watch=watch
    )
    drafters = Drafters(_loaded_draft(found_draft, candidate, capabilities, watch, group), head)
    require_applied(model, capabilities, drafters.reader)
    images = load_images(candidate, hub_tokenizer, capabilities, settings, report, group=group)
    hub_tokenizer = attrs.evolve(hub_tokenizer, image_text=images.image_text)
    embedder = embedder_of(model, directory, report, target.config)
    card = images.on(_card(settings, target, candidate, capabilities, drafters))
    card = attrs.evolve(
        card,
        ranks=group.size,
        pipeline=settings.pipeline,
        adapters=adapters,
        cache_bytes=min(group.gather(_cache_bytes(settings, card, group))),
        self_check=check,
        **_found_in_files(hub_tokenizer, embedder, card.images),
    )
    if embedder.modules.encode is not None:
        card = _without_generation(card)
    if settings.blocks_dir is not None and card.kv.cached:
        progress = stage(watch, name, "reading again for the cache's sake")
        extra = _rank(settings, group) | images.identity | dict.fromkeys(adapted(model).names, "1")
        content = _fingerprint(target, drafters, settings, extra, report=report, progress=progress)
        card = attrs.evolve(card, fingerprint=content)
    return EvaluatedModel(
        model=model,
        card=card,
        tokenizer=hub_tokenizer.with_grammars(card.vocab_size),
        directory=directory,
        config=config,
        kv=candidate.kv,
        drafters=drafters,
        images=images,
        embedder=embedder,
    )


def _head_unless_read(draft: FoundDraft | None) -> LoadedHead | None:
    """No MTP head, if a drafter reads the hidden states. None: the checkpoint's."""
    if draft is None or draft.kind is None:
        return None
    return LoadedHead(reason=f"{DRAFT_FLAG} reads the hidden states in its place")


def _load_encoder(
    target: checkpoint.Checkpoint,
    hub_tokenizer: HubTokenizer,
    settings: Settings,
    report: Callable[[str], None],
    *,
    watch: LoadWatch,
    group: RankGroup,
) -> EvaluatedModel:
    """Load a model of `trouper.engine.encoders`. Raises `ModelUnusable`."""
    _require_encoder_settings(target, settings, group)
    model, config = _prepared(target.directory, settings, report, ALONE)
    name = settings.model or target.directory.name
    evaluate(model, target.directory, stage(watch, name, "loading the weights"))
    candidate = candidate_of(model, config, target, settings)
    _require_vocabulary(hub_tokenizer, candidate, report)
    embedder = encoder_embedder(model, target.directory, report)
    drafters, images = Drafters(None, LoadedHead()), LoadedImages()
    card = _card(settings, target, candidate, Capabilities(batch=ENCODES), drafters)
    card = attrs.evolve(
        card,
        context_length=min(card.context_length, context_length(config)),
        no_generation=ENCODES,
        one_pass=True,
        scores=model.scores,
        **_found_in_files(hub_tokenizer, embedder, None),
    )
    return EvaluatedModel(
        model=model,
        card=card,
        tokenizer=hub_tokenizer,
        directory=target.directory,
        config=config,
        kv=candidate.kv,
        drafters=drafters,
        images=images,
        embedder=embedder,
    )


def _require_encoder_settings(
    target: checkpoint.Checkpoint, settings: Settings, group: RankGroup
) -> None:
    """Raises `ModelUnusable`."""
    unusable = {
        "an adapter": settings.adapter_path is not None or bool(settings.adapter),
        "a draft model": settings.draft_model is not None,
        "several ranks": group.size > 1,
    }
    for name, given in unusable.items():
        if given:
            raise ModelUnusable(
                f"{target.directory} is an encoder, with which {name} cannot be used"
            )


def _without_generation(card: ModelCard) -> ModelCard:
    kv = KvLayout(cached=False, description=NO_GENERATION)
    return attrs.evolve(card, kv=kv, no_generation=NO_GENERATION, one_pass=True)


def check(settings: Settings) -> tuple[checkpoint.Checkpoint, HubTokenizer, nn.Module]:
    """Open the model lazily, in whatever memory there is. Raises `ModelUnusable` as `load` does for
    all that shows before weights are read."""
    target, hub_tokenizer = _checked(settings, _report_nothing, nobody_watches)
    model, config = _prepared(target.directory, settings, _report_nothing, ALONE)
    candidate = candidate_of(model, config, target, settings)
    _require_vocabulary(hub_tokenizer, candidate, _report_nothing)
    return target, hub_tokenizer, model


def _announce(
    target: checkpoint.Checkpoint, report: Callable[[str], None], group: RankGroup
) -> None:
    """Raises `ModelUnusable` for lack of memory."""
    checkpoint.require_memory(target.loaded_bytes, target.directory, group)
    code = "" if target.source.native else f", by {target.source.provider}"
    report(
        f"loading {target.architecture} from {target.directory}{code}: "
        f"{target.loaded_bytes / 2**20:.0f} MiB on {device.name()}"
    )


def _report_nothing(_line: str) -> None:
    pass


def _loaded_draft(
    found: FoundDraft | None,
    target: Candidate,
    capabilities: Capabilities,
    watch: LoadWatch,
    group: RankGroup,
) -> Draft | None:
    """Raises `ModelUnusable`."""
    if found is None:
        return None
    load = load_draft if found.kind is None else load_tapped
    draft = load(
        found, target, capabilities, stage(watch, found.name, "loading the draft model's weights")
    )
    _require_same(found.checkpoint, group)
    return draft


def _require_vocabulary(
    tokenizer: HubTokenizer, candidate: Candidate, report: Callable[[str], None]
) -> None:
    """Raises `ModelUnusable` if the tokenizer belongs to another model."""
    tokens, logits = max(tokenizer.vocabulary.values(), default=-1) + 1, candidate.vocabulary
    if tokens < MIN_VOCABULARY * logits:
        raise ModelUnusable(
            f"{candidate.directory}: tokenizer.json has {tokens} tokens, and the model {logits}: "
            "it is of another model, or damaged; download it again"
        )
    if tokens > logits:
        report(f"{tokens - logits} tokens of the tokenizer are none of the model's {logits}")


def candidate_of(
    model: nn.Module, config: dict[str, Any], found: checkpoint.Checkpoint, settings: Settings
) -> Candidate:
    return Candidate(
        model=model,
        config=config,
        directory=found.directory,
        digest=found.digest,
        vocabulary=model.vocabulary
        if isinstance(model, Encoder)
        else count_logits(model, found.directory),
        kv=KvFormat(settings.kv_bits, settings.kv_group_size),
    )


def _fingerprint(
    found: checkpoint.Checkpoint,
    drafters: Drafters,
    settings: Settings,
    extra: dict[str, str],
    *,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> str:
    """`extra`: what else shapes KV, by name."""
    parts = dict(extra)
    if not found.source.native:
        parts["architecture"] = found.source.identity
    if drafters.head.module is not None:
        parts["mtp"] = "1"
    if drafters.draft is not None:
        parts["draft_model"] = fingerprint(drafters.draft.directory, None, report, progress, {})
        if not parts["draft_model"]:
            return ""
    return fingerprint(found.directory, settings.adapter_path, report, progress, parts)


def _found_in_files(
    hub_tokenizer: HubTokenizer, embedder: Embedder, images: ImageLayout | None
) -> dict[str, Any]:
    roles = frozenset() if images is None else hub_tokenizer.template.roles_with(images.marker)
    return {
        "image_roles": tuple(sorted(roles)),
        "embedding": embedder.layout,
        "no_embedding": embedder.reason,
        "adapted_messages": hub_tokenizer.template.lines,
        "tool_parser": hub_tokenizer.tool_parser or NONE,
        "reasoning_parser": hub_tokenizer.reasoning_parser or NONE,
    }


def _checked(
    settings: Settings, report: Callable[[str], None], watch: LoadWatch
) -> tuple[checkpoint.Checkpoint, HubTokenizer]:
    """Raises `ModelUnusable`."""
    if settings.adapter_path is not None:
        lora_adapter.require(settings.adapter_path)
    directory = resolve(settings.model, report, watch)
    found = checkpoint.inspect(directory)
    _require_head(found)
    adapters = (settings.adapter_path, *adapters_of(settings.adapter).values())
    for path in filter(None, (str(directory), *adapters)):
        if others_may_write(Path(path)):
            report(f"other users may change {path}, by its mode; chmod go-w closes it")
    name = settings.model or bundled_model.NAME
    progress = stage(watch, name, "reading the tokenizer", "steps")
    progress(0, 1)
    generation_config = _generation_config(directory, settings, report)
    found = attrs.evolve(found, generation_config=generation_config)
    hub_tokenizer = tokenizer.load(
        directory,
        found.config,
        generation_config,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        special_tokens_in_content=settings.special_tokens_in_content,
        lower_case=read_sentence_files(directory).lower_case,
    )
    progress(1, 1)
    output_format = hub_tokenizer.output_format
    unread = "in a format that has no parser here" if output_format.unread else NONE
    report(
        f"tool calls: {output_format.tool_parser or unread}; reasoning: "
        f"{output_format.reasoning_parser or NONE}"
    )
    if (summary := hub_tokenizer.template.summary) is not None:
        report(summary)
    _require_read(found, settings, report)
    return found, hub_tokenizer


def _require_head(target: checkpoint.Checkpoint) -> None:
    """Raises `ModelUnusable` for a decoder that scores pairs by a head."""
    if kind_of(target.directory, target.config) == "reranker" and not target.source.encodes:
        raise ModelUnusable(
            f"{target.directory} is a {target.config['architectures'][0]} with a head that is not "
            "computed",
            "use the causal model, as Qwen3-Reranker, or a cross-encoder of docs/models.md",
        )


def _require_read(
    found: checkpoint.Checkpoint, settings: Settings, report: Callable[[str], None]
) -> None:
    """Raises `ModelUnusable` for a key that changes tokens, unless --unread-config allows the
    key."""
    try:
        classes = found.source.get_classes()
    except (Exception, SystemExit):  # noqa: BLE001 - loading meets the same, and says it
        return
    unread = list_unread(found.config, classes)
    wrong = [each for each in unread if each.wrong]
    if wrong and settings.unread_config == "refuse":
        raise ModelUnusable(
            f"{found.directory}/config.json has what {found.source.provider} does not compute for "
            f"{found.architecture}: {'; '.join(each.line for each in wrong)}",
            "use another version of the model, or --unread-config name for wrong answers",
        )
    if unread:
        report(f"config.json, read by nobody here: {'; '.join(each.line for each in unread)}")


def _prepared(
    directory: Path,
    settings: Settings,
    report: Callable[[str], None],
    group: RankGroup,
) -> tuple[nn.Module, dict[str, Any]]:
    """Open the model and its config, and apply adapter, dtype and shard, all lazily. Raises
    `ModelUnusable`."""
    model, config = opened(directory)
    if settings.adapter_path is not None:
        report(f"applying the adapter {settings.adapter_path}")
        lora_adapter.apply(model, settings.adapter_path)
    if group.size > 1:
        sharding.fuse_adapters(model)
    if device.is_cpu():
        precision.to_float32(model)
    if group.size > 1:
        _shard(model, config, directory, settings, group)
    return model, config


def measured(settings: Settings) -> Measured:
    """Downloads missing files. Raises `ModelUnusable`."""
    models = (
        [settings.model] if settings.draft_model is None else [settings.model, settings.draft_model]
    )
    found = [checkpoint.inspect(resolve(model, lambda _: None)) for model in models]
    adapters = [find_adapter(name, path) for name, path in adapters_of(settings.adapter).items()]
    adapter_bytes = bytes_together(adapters, 4 if device.is_cpu() else 2)
    return Measured(
        sum(each.loaded_bytes for each in found) + adapter_bytes, created_at(found[0].directory)
    )


def _generation_config(
    directory: Path, settings: Settings, report: Callable[[str], None]
) -> dict[str, Any]:
    """An unreadable file is skipped, as in mlx-lm."""
    path = directory / "generation_config.json"
    try:
        config = read_json(path) if path.exists() else {}
    except ModelUnusable as error:
        report(f"{error.message}: read past")
        return {}
    applied = dict(_sampling_defaults(config, settings))
    if applied:
        values = ", ".join(f"{name} {value:g}" for name, value in applied.items())
        report(f"sampling of requests that name none: {values} (generation_config.json)")
    if unapplied := list_unapplied(config, applied):
        report(f"generation_config.json, left to requests: {'; '.join(unapplied)}")
    return config


def _sampling_defaults(
    generation_config: Mapping[str, Any], settings: Settings
) -> tuple[tuple[str, float], ...]:
    """Values that are none or out of bounds are skipped."""
    if settings.sampling_defaults != "model":
        return ()
    bounds, found = dict(bounds_of_parameters()), dict[str, float]()
    for name in MODEL_DEFAULTS:
        value: Any = generation_config.get(name)
        bound = bounds[name]
        kinds = (int,) if bound.integer else (int, float)
        if type(value) in kinds and bound.minimum <= value <= bound.maximum:
            found[name] = value
    neutral = Sampling()
    return tuple((name, each) for name, each in found.items() if each != getattr(neutral, name))


def _shard(
    model: nn.Module, config: dict[str, Any], directory: Path, settings: Settings, group: RankGroup
) -> None:
    if settings.pipeline:
        pipeline.keep_stage(model, directory, group)
        return
    sharding.shard(model, config, directory, group, lambda: opened(directory)[0])
    if settings.tp_reduce_dtype == "float32":
        sharding.sum_in_float32(model, group)


def _rank(settings: Settings, group: RankGroup) -> dict[str, str]:
    """KV differs by layers, or by heads and the way of summing parts."""
    if group.size == 1:
        return {}
    split = {"pipeline": "1"} if settings.pipeline else {"sums": settings.tp_reduce_dtype}
    return {"rank": f"{group.rank} of {group.size}", **split}


def _require_same(found: checkpoint.StoredWeights, group: RankGroup) -> None:
    """The first collective of several ranks. Raises `ModelUnusable`."""
    digests = group.gather(found.digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise ModelUnusable(
            f"{found.directory} is another model on rank {other} than on rank 0: copy rank 0's "
            "there"
        )


def _card(
    settings: Settings,
    found: checkpoint.Checkpoint,
    candidate: Candidate,
    capabilities: Capabilities,
    drafters: Drafters,
) -> ModelCard:
    model = candidate.model
    parameters = [parameter for _, parameter in tree_flatten(model.parameters())]
    kind = kind_of(found.directory, found.config)
    context = settings.context_length or context_of(found.directory, candidate.config, kind)
    return ModelCard(
        id=settings.model or bundled_model.NAME,
        kind=kind,
        created=created_at(found.directory),
        context_length=context,
        vocab_size=candidate.vocabulary,
        architecture=found.architecture,
        architecture_source=found.source.provider,
        dtype=_dtype(parameters),
        sampling_defaults=_sampling_defaults(found.generation_config, settings),
        weights_bytes=bytes_of(model) + drafters.nbytes,
        adapter_bytes=adapter_bytes(model),
        device=device.name(),
        capabilities=capabilities,
        kv=drafters.with_held_states(
            kv_layout(
                model,
                candidate.kv,
                capabilities,
                drafters.modules,
                draft_tokens=settings.spec_draft_tokens,
            ),
            settings.spec_draft_tokens,
        ),
        draft_model=None if drafters.draft is None else drafters.draft.name,
        draft_context=None if drafters.draft is None else drafters.draft.limits.context,
        no_mtp=drafters.head.reason,
        no_generation=NO_OUTPUT_HEAD if lacks_head(found.config, candidate.config) else "",
    )


def _cache_bytes(settings: Settings, card: ModelCard, group: RankGroup) -> int:
    """Default of --cache-memory: half of the memory beside weights, at most a third of all."""
    limit = device.memory_limit_bytes(group.sharers)
    remaining = limit * settings.memory_fraction - card.weights_bytes
    return max(0, int(min(remaining / 2, limit / 3)))


def _dtype(parameters: Iterable[mx.array]) -> str:
    """The dtype of most floating-point bytes, and whether weights are packed."""
    sizes: Counter[str] = Counter()
    packed = False
    for parameter in parameters:
        packed |= parameter.dtype == mx.uint32
        if mx.issubdtype(parameter.dtype, mx.floating):
            sizes[str(parameter.dtype).rsplit(".", 1)[-1]] += parameter.nbytes
    (dtype, _), *_ = sizes.most_common(1) or [("none", 0)]
    return f"{dtype}, quantized weights" if packed else dtype
