"""What a log record may carry besides its text, for a program's handlers. Nothing here configures logging."""

from __future__ import annotations

from contextvars import ContextVar

CURRENT_REQUEST: ContextVar[str] = ContextVar("trouper_request", default="")
"""The id of the request that the running task is about."""
REQUEST_ID = "request_id"
"""The attribute of a record that names its request, where it is not the current one's."""
FIELDS = "fields"
"""The attribute that holds what a machine reads of the record: a mapping of names to plain values."""
