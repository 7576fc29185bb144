"""The content of a snapshot for the live page, from statistics that the actors publish."""

from __future__ import annotations

import statistics
from typing import Any, get_args

import attrs

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.batch import BatchStats, RowState
from trouper.protocol.health import SchedulerStats
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    TEXT,
    Json,
    array,
    full,
    nullable,
    titled,
)
from trouper.web.serving.running_requests import WAIT

APART = ("cache", "speculation", "banks", "inter_token_latency", "step_tokens")
"""Fields of the scheduler's statistics with a key of their own, and histograms."""
COUNTERS = tuple(field.name for field in attrs.fields(SchedulerStats) if field.name not in APART)


def open_object(properties: Json, *optional: str) -> Json:
    """Return the schema of an object with at least these properties: statistics may grow."""
    return full(properties, optional=optional) | {"additionalProperties": True}


ROW = open_object(
    {
        "row": COUNT,
        "request_id": TEXT,
        "prompt_tokens": COUNT,
        "cached_tokens": COUNT,
        "prefilled_tokens": COUNT,
        "generated_tokens": COUNT,
        "max_tokens": COUNT,
        "since": NUMBER,
        "first_token_at": nullable(NUMBER),
        "state": {"enum": list(get_args(RowState))},
        "priority": {"type": "integer"},
        "restored_tokens": COUNT,
        "tokens_to_restore": COUNT,
    }
)
BANK = open_object(
    {
        "max_tokens": nullable(COUNT),
        "capacity_tokens": COUNT,
        "rows": COUNT,
        "slots": COUNT,
        "bytes": COUNT,
    }
)
BATCH = open_object(
    {
        "at": NUMBER,
        "rows": array(ROW),
        "gaps": COUNT,
        "gap_median_s": nullable(NUMBER),
        "gap_longest_s": nullable(NUMBER),
    }
)
PROGRESS = full({"stage": TEXT, "done": COUNT, "total": COUNT})
FOUND = full({"name": TEXT, "weights_bytes": COUNT, "fits": nullable(FLAG)})
"""A model that --models-from has found and nobody uses."""
SOMETIMES = {
    "progress": PROGRESS,
    "problem": TEXT,
    "status": TEXT,
    "detail": TEXT,
    "card": OBJECT,
    "scheduler": OBJECT,
    "cache": OBJECT,
    "memory": OBJECT,
    "directory": OBJECT,
    "speculation": OBJECT,
    "ranks": OBJECT,
    "actors": array(OBJECT),
    "channels": array(
        open_object({"name": TEXT, "used": COUNT, "capacity": COUNT, "senders_waiting": COUNT})
    ),
    "batch": BATCH,
    "banks": array(BANK),
}
MODEL = open_object(
    {
        "name": TEXT,
        "state": {"enum": ["unloaded", "asleep", "waiting", "loading", "ready", "unloading"]},
        "pinned": FLAG,
        "ttl_s": NUMBER,
        "weights_bytes": COUNT,
        "waiting": COUNT,
        **SOMETIMES,
    },
    *SOMETIMES,
)
SNAPSHOT = titled(
    "LiveSnapshot",
    open_object(
        {
            "version": TEXT,
            "started": NUMBER,
            "number": COUNT,
            "at": NUMBER,
            "models": array(MODEL),
            "found": array(FOUND),
            "waits": array(WAIT),
            "ended": array(OBJECT),
            "recent": array(OBJECT),
        },
        "recent",
    ),
)


@attrs.define
class NewGaps:
    """Remembers the gaps of a model's batch that were reported already."""

    seen_count: int | None = None

    def of(self, batch: BatchStats) -> tuple[float, ...]:
        """Return the gaps since the last call; none the first time, since they may be old."""
        new = 0 if self.seen_count is None else batch.inter_token_latency_count - self.seen_count
        self.seen_count = batch.inter_token_latency_count
        return batch.inter_token_latencies_s[-new:] if new > 0 else ()


def model_body(listed: ModelEntry, gaps: NewGaps) -> dict[str, Any]:
    """Format a model: with statistics if loaded, else with the reason of a failed load."""
    body: dict[str, Any] = {
        "name": listed.names[0],
        "state": listed.state,
        "pinned": listed.pinned,
        "ttl_s": listed.ttl_s,
        "weights_bytes": listed.weights_bytes,
        "waiting": listed.waiting,
    }
    if (loading := listed.progress) is not None:
        body["progress"] = {
            "stage": loading.stage,
            "done": loading.done_bytes,
            "total": loading.total_bytes,
        }
    if listed.runtime is not None:
        return body | _loaded(listed.runtime, gaps)
    return body if listed.problem is None else body | {"problem": listed.problem.message}


def found_body(listed: ModelEntry) -> dict[str, Any]:
    return {"name": listed.names[0], "weights_bytes": listed.weights_bytes, "fits": listed.fits}


def _loaded(runtime: Runtime, gaps: NewGaps) -> dict[str, Any]:
    health = runtime.health()
    return {
        "status": health.status,
        "detail": health.detail,
        "card": _card(runtime),
        "scheduler": {name: getattr(health.scheduler, name) for name in COUNTERS},
        "cache": health.scheduler.cache,
        "speculation": health.scheduler.speculation,
        "memory": health.memory,
        "directory": health.directory,
        "ranks": health.ranks,
        "actors": health.actors,
        "channels": runtime.channels(),
        "batch": _batch(runtime.view_batch(), gaps),
        "banks": health.scheduler.banks,
    }


def _card(runtime: Runtime) -> dict[str, Any]:
    card, settings = runtime.model, runtime.settings
    return {
        "architecture": card.architecture,
        "dtype": card.dtype,
        "device": card.device,
        "context_length": runtime.context_length,
        "weights_bytes": runtime.weights_bytes,
        "rows": settings.rows,
        "queue": settings.max_queue_size,
        "ssd_max_bytes": int(settings.ssd_max_bytes),
        "chats": runtime.tokenizer.has_chat_template,
        "images": card.images is not None,
        "off": card.capabilities.off,
    }


def _batch(batch: BatchStats, gaps: NewGaps) -> dict[str, Any]:
    new = gaps.of(batch)
    return {
        "at": batch.at,
        "rows": batch.rows,
        "gaps": len(new),
        "gap_median_s": statistics.median(new) if new else None,
        "gap_longest_s": max(new, default=None),
    }
