"""Attributes of log records for a program's handlers. Nothing here configures logging."""

from __future__ import annotations

from contextvars import ContextVar

CURRENT_REQUEST: ContextVar[str] = ContextVar("trouper_request", default="")
"""Id of the request of the running task."""
REQUEST_ID = "request_id"
"""Attribute with the request's id, where not the current request's."""
FIELDS = "fields"
"""Attribute with structured data: names to plain values."""
