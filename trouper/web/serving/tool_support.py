"""Drops and reports tools for a model whose calls are not read, or that makes none."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.model import Tokenizer
from trouper.protocol.suggested_models import that_fit

log = logging.getLogger("trouper.web")
SUGGESTIONS = 3
DOCTOR = "trouper doctor --for agents"
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def can_call_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model was trained to call tools in a known format."""
    return tokenizer.tool_parser is not None


def why_not(name: str, tokenizer: Tokenizer) -> str:
    """Why the model calls no tools, unless `can_call_tools`."""
    if tokenizer.unread_calls:
        return (
            f"{name} calls tools in a format that has no parser here (its chat template writes it; "
            "--tool-parser names another)"
        )
    return f"{name} was not trained to call tools"


def suggestions(runtime: Runtime) -> str:
    """Name tool-calling models that fit this device, as one sentence."""
    memory = runtime.health().memory.limit_bytes * runtime.settings.memory_fraction
    models = that_fit(memory, float32=runtime.model.dtype.startswith("float32"))[:SUGGESTIONS]
    if not models:
        return f"no suggested model that can fits this device; {DOCTOR} lists them with their sizes"
    names = ", ".join(f"{model.name} ({model.weights_bytes / 1e9:.1f} GB)" for model in models)
    return f"models that can and fit this device: {names}; {DOCTOR} says more"


def notice(name: str, runtime: Runtime) -> str:
    if can_call_tools(runtime.tokenizer):
        return ""
    reason = why_not(name, runtime.tokenizer)
    return f"{reason}: agents get plain text; {suggestions(runtime)}"


def without_tools(request: BodyT) -> BodyT:
    return msgspec.structs.replace(request, tools=None, tool_choice=None)
