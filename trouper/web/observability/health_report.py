"""Bodies of /health, /readyz and /server_info, from statistics that the actors publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import trio

from trouper.actors.runtime.channels import Health
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.health import RankStats, SchedulerStats
from trouper.protocol.model import ModelCard
from trouper.protocol.version import VERSION
from trouper.web.http.request_schema import COUNT, OBJECT, TEXT, Json, array, full
from trouper.web.keys.key_limits import KeyAccount, ModelUsage

STATUS: Json = {"type": "object", "properties": {"status": TEXT}, "required": ["status"]}
READY = full({"status": TEXT, "detail": TEXT})
SELF_CHECK = full(
    {
        "mode": TEXT,
        "checked": TEXT,
        "seconds": {"type": "number"},
        "remembered": {"type": "boolean"},
        "off": {"type": "object", "additionalProperties": TEXT},
    }
)
ARCHITECTURE = full({"model_type": TEXT, "source": TEXT})
HEALTH = full(
    {
        "status": TEXT,
        "detail": TEXT,
        "cache_stats": {"type": "object", "additionalProperties": {"type": "number"}},
        "cache": OBJECT,
        "speculation": OBJECT,
        "recovery": OBJECT,
        "actors": array(OBJECT),
        "memory": OBJECT,
        "directory": OBJECT,
        "ranks": array(OBJECT),
        "pipeline": {"type": "boolean"},
        "architecture": ARCHITECTURE,
        "self_check": SELF_CHECK,
        "tool_calls": {"type": "boolean"},
        "tool_parser": TEXT,
        "reasoning_parser": TEXT,
        "adapted_messages": {"type": "object", "additionalProperties": TEXT},
        "images": full({"roles": array(TEXT), "reason": TEXT}),
        "batches": OBJECT,
        "api_key_file": TEXT,
    },
    optional=("batches", "api_key_file"),
)


def health_body(listed: Sequence[ModelEntry], *, draining: bool) -> dict[str, Any]:
    """Return the health of the default model, or else of a loaded one; with several models that of
    each."""
    listed = [entry for entry in listed if not entry.is_unused]
    staying = sorted(listed, key=lambda entry: entry.state == "unloading")
    loaded = [_model_body(entry.runtime) for entry in staying if entry.runtime is not None]
    body: dict[str, Any] = loaded[0] if loaded else none_loaded(draining=draining)
    if len(listed) > 1:
        body["models"] = {entry.names[0]: _entry_body(entry) for entry in listed}
    return body


def none_loaded(*, draining: bool, unloading: bool = False) -> dict[str, str]:
    """Return the status of a server without a loaded model. `unloading`: the last one is."""
    detail = (
        "the model is being unloaded; a request loads it again"
        if unloading
        else "no model is loaded"
    )
    return {"status": "draining" if draining else "ok", "detail": detail}


def _entry_body(entry: ModelEntry) -> dict[str, Any]:
    if entry.runtime is not None:
        return {"state": entry.state} | _model_body(entry.runtime)
    return (
        {"state": entry.state}
        if entry.problem is None
        else {"state": entry.state, "detail": entry.problem.message}
    )


def _model_body(runtime: Runtime) -> dict[str, Any]:
    health = runtime.health()
    return {
        "status": health.status,
        "detail": health.detail,
        "cache_stats": cache_stats(health),
        "cache": attrs.asdict(health.scheduler.cache),
        "speculation": attrs.asdict(health.scheduler.speculation) | _drafters(runtime.model),
        "recovery": attrs.asdict(health.scheduler.recovery),
        "actors": [attrs.asdict(actor) for actor in health.actors],
        "memory": attrs.asdict(health.memory)
        | _model_memory(runtime, health)
        | _kv_memory(health.scheduler),
        "directory": attrs.asdict(health.directory),
        "ranks": [_rank(rank) for rank in health.ranks.ranks],
        "pipeline": runtime.model.pipeline,
        "architecture": {
            "model_type": runtime.model.architecture,
            "source": runtime.model.architecture_source,
        },
        "self_check": self_check_body(runtime.model),
        "tool_calls": runtime.tokenizer.tool_parser is not None,
        "tool_parser": runtime.model.tool_parser,
        "reasoning_parser": runtime.model.reasoning_parser,
        "adapted_messages": dict(runtime.model.adapted_messages),
        "images": _images(runtime.model),
    }


def _images(card: ModelCard) -> dict[str, Any]:
    roles = [] if card.images is None else list(card.image_roles)
    reason = card.no_images
    if card.images is not None and not roles:
        reason = "the chat template has no place for images"
    return {"roles": roles, "reason": reason}


def _model_memory(runtime: Runtime, health: Health) -> dict[str, int]:
    """Return the bytes of the weights with all LoRA adapters, of the adapters alone, and of an
    adapter that is being loaded."""
    adapters = health.adapters
    return {
        "weights_bytes": runtime.weights_bytes,
        "adapter_bytes": adapters.held_bytes,
        "adapter_reserved_bytes": adapters.reserved_bytes,
    }


def _drafters(card: ModelCard) -> dict[str, Any]:
    return {
        "draft_model": card.draft_model,
        "mtp": {"loaded": not card.no_mtp, "reason": card.no_mtp},
    }


def self_check_body(card: ModelCard) -> dict[str, Any]:
    """`off`: features that are turned off, each with the reason."""
    return attrs.asdict(card.self_check) | {"off": card.capabilities.off}


def _kv_memory(stats: SchedulerStats) -> dict[str, Any]:
    """Return the bytes of rows and the limit shared with cached blocks (0: none), and the numbers
    of preempted rows and of sequences that wait to return."""
    return {
        "kv_row_bytes": stats.kv_row_bytes,
        "kv_limit_bytes": stats.kv_limit_bytes,
        "preemptions": stats.preemptions,
        "preempted_sequences": stats.preempted_sequences,
        "banks": [attrs.asdict(bank) for bank in stats.banks],
    }


def _rank(rank: RankStats) -> dict[str, Any]:
    """`silent_s`: since its last sign of life. `directory`: a follower's; rank 0's is the
    server's."""
    silent_s = round(max(0.0, trio.current_time() - rank.heard_at), 3)
    directory = {} if rank.directory is None else {"directory": attrs.asdict(rank.directory)}
    return {
        "rank": rank.rank,
        "state": rank.state,
        "step": rank.step,
        "silent_s": silent_s,
    } | directory


def cache_stats(health: Health) -> dict[str, int | float]:
    """Return the blocks in memory and the work saved. `free_blocks` would still fit."""
    stats, cache = health.scheduler, health.scheduler.cache
    prompt_tokens = stats.total_prefill_tokens + stats.total_cached_tokens
    lookups = cache.hits_block + cache.misses
    return {
        "active_sequences": stats.active_sequences,
        "queued_requests": stats.queued_requests,
        "total_blocks": cache.capacity_blocks,
        "used_blocks": cache.blocks,
        "free_blocks": max(0, cache.capacity_blocks - cache.blocks),
        "cached_blocks": cache.blocks,
        "cache_hits_block": cache.hits_block,
        "cache_hits_sequence": cache.hits_sequence,
        "cache_misses": cache.misses,
        "cache_hit_rate": cache.hits_block / lookups if lookups else 0.0,
        "cache_effectiveness": stats.total_cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "tokens_generated": stats.tokens_generated,
        "total_prefill_tokens": stats.total_prefill_tokens,
        "total_cached_tokens": stats.total_cached_tokens,
        "requests_completed": stats.requests_completed,
        "requests_errored": stats.requests_errored,
        "total_requests": stats.total_requests,
    }


INFO = full(
    {
        "served_model_name": TEXT,
        "model_path": TEXT,
        "version": TEXT,
        "max_running_requests": {"type": "integer"},
    },
    optional=("max_running_requests",),
)


def info_body(model: ModelEntry) -> dict[str, str | int]:
    """Describe a replica by the names of SGLang's servers, for SGLang's router."""
    name = model.names[0]
    body: dict[str, str | int] = {"served_model_name": name, "model_path": name, "version": VERSION}
    if model.runtime is not None:
        body["max_running_requests"] = model.runtime.settings.rows
    return body


COUNTS: Json = dict.fromkeys((field.name for field in attrs.fields(ModelUsage)), COUNT)
MODEL_USAGE = full({"model": TEXT} | COUNTS)
KEY_USAGE = full({"key": TEXT} | COUNTS | {"models": array(MODEL_USAGE)})
USAGE = full({"object": {"const": "list"}, "data": array(KEY_USAGE)})


def usage_body(accounts: Sequence[KeyAccount]) -> Json:
    return {"object": "list", "data": [_account_body(account) for account in accounts]}


def _account_body(account: KeyAccount) -> Json:
    models = {name: attrs.asdict(used) for name, used in sorted(account.usage.items())}
    total = {name: sum(used[name] for used in models.values()) for name in COUNTS}
    return (
        {"key": account.key.label}
        | total
        | {"models": [{"model": name} | used for name, used in models.items()]}
    )
