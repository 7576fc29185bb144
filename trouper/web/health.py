"""What /health and /readyz say, from what the actors publish."""

from __future__ import annotations

from typing import Any

import attrs

from trouper.actors.watches import Health


def health_body(health: Health) -> dict[str, Any]:
    """`status`, `cache_stats` with the agreed names, and the actors one by one."""
    return {
        "status": health.status,
        "detail": health.detail,
        "cache_stats": cache_stats(health),
        "actors": [attrs.asdict(actor) for actor in health.actors],
        "memory": attrs.asdict(health.memory),
        "directory": attrs.asdict(health.directory),
    }


def cache_stats(health: Health) -> dict[str, int | float]:
    """There is no prefix cache yet, so it has no blocks, no hits, and every prefilled token was a miss's."""
    facts = health.scheduler
    prompt_tokens = facts.total_prefill_tokens + facts.total_cached_tokens
    return {
        "active_sequences": facts.active_sequences,
        "queued_requests": facts.queued_requests,
        "total_blocks": 0,
        "used_blocks": 0,
        "free_blocks": 0,
        "cached_blocks": 0,
        "cache_hits_block": 0,
        "cache_hits_sequence": 0,
        "cache_misses": 0,
        "cache_hit_rate": 0.0,
        "cache_effectiveness": facts.total_cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "tokens_generated": facts.tokens_generated,
        "total_prefill_tokens": facts.total_prefill_tokens,
        "total_cached_tokens": facts.total_cached_tokens,
        "requests_completed": facts.requests_completed,
        "requests_errored": facts.requests_errored,
        "total_requests": facts.total_requests,
    }
