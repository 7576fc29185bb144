"""Server-sent events with a name: those of Anthropic's API, of OpenAI's Responses, of models that
load, and of the live page."""

from __future__ import annotations

from typing import Any

import msgspec


def named_event(name: str, data: Any) -> bytes:
    """Format an event. `data`: what JSON can say."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
