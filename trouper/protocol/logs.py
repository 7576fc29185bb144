"""Attributes of log records for a program's handlers. Nothing here configures logging."""

from __future__ import annotations

from contextvars import ContextVar

# Id of the request of the running task.
CURRENT_REQUEST: ContextVar[str] = ContextVar("trouper_request", default="")
# Attribute with the request's id, where not the current request's.
REQUEST_ID = "request_id"
# Attribute with structured data: names to plain values.
FIELDS = "fields"
