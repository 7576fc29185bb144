"""Attributes of a log record besides its text, for a program's handlers. Nothing here configures
logging."""

from __future__ import annotations

from contextvars import ContextVar

CURRENT_REQUEST: ContextVar[str] = ContextVar("trouper_request", default="")
"""Id of the request that the running task handles."""
REQUEST_ID = "request_id"
"""Attribute of a record with the id of its request, where that is not the current request."""
FIELDS = "fields"
"""Attribute of a record with its structured data: a mapping of names to plain values."""
