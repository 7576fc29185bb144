"""GET /v1/models: one body for OpenAI's and Anthropic's clients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.model import ModelCard
from trouper.protocol.paths import encodable
from trouper.web.serving.tool_support import can_call_tools


def listed_body(listed: ModelEntry, adapter: str = "") -> dict[str, Any]:
    """Format a model or an adapter, with `parent` and `root` as in vLLM. Fields unknown before
    loading are absent; an unknown date is the epoch."""
    name, created = listed.names[0], listed.created
    sizes: dict[str, Any] = {}
    if listed.runtime is not None:
        context = listed.runtime.context_length
        sizes = {"max_model_len": context, "max_input_tokens": context, "max_tokens": context}
        sizes |= {"tool_calls": can_call_tools(listed.runtime.tokenizer)}
        sizes |= {"kind": listed.runtime.model.kind, **_modalities(listed.runtime.model)}
        for card in listed.runtime.adapters:
            sizes |= (
                {"root": encodable(card.directory), "rank": card.rank}
                if card.name == adapter
                else {}
            )
    if adapter:
        sizes["parent"], name = name, f"{name}:{adapter}"
    openai = {"id": name, "object": "model", "created": created, "owned_by": "trouper"}
    anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": _rfc_3339(created),
        "lifecycle": "active",
    }
    if (files := listed.files) is not None:
        sizes = {
            "max_model_len": files.context_length,
            **sizes,
            "kind": files.kind,
            "quantization": files.quantization,
        }
    if listed.weights_bytes:
        sizes["weights_bytes"] = listed.weights_bytes
    if (fits := listed.fits) is not None:
        sizes["fits"] = fits
    state: dict[str, Any] = {
        "loaded": listed.state == "ready",
        "state": listed.state,
        "pinned": listed.pinned,
        "ttl_s": listed.ttl_s,
    }
    if listed.problem is not None and not adapter:
        state["problem"] = listed.problem.message
    return openai | sizes | state | anthropic


def _modalities(card: ModelCard) -> dict[str, Any]:
    """Format what a model reads, in OpenRouter's words. llama.cpp's `capabilities` would break
    Anthropic's clients."""
    inputs = ["text"] if card.images is None else ["text", "image"]
    outputs = ["text"]
    if card.no_generation:
        outputs = ["rerank"] if card.scores else ["embeddings"]
    return {
        "input_modalities": inputs,
        "architecture": {"input_modalities": inputs, "output_modalities": outputs},
    }


def listing_body(entries: Sequence[ModelEntry]) -> dict[str, Any]:
    listed = [listed_body(entry, adapter) for entry in entries for adapter in ("", *entry.adapters)]
    ends = (
        {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        if listed
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": listed, "has_more": False} | ends


def _rfc_3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
