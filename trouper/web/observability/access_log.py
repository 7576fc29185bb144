"""The access log: one line for each ended request, without any text of prompts, answers or keys."""

from __future__ import annotations

import logging
from typing import Any

from trouper.protocol.logs import FIELDS, REQUEST_ID
from trouper.protocol.record import RequestRecord

log = logging.getLogger("trouper.requests")
LONGEST_METHOD, LONGEST_PATH = 20, 200
"""Bounds of a client's text, in characters."""


def log_record(record: RequestRecord) -> None:
    """Log the end of a request that was submitted to a model."""
    level = logging.WARNING if record.reason == "error" else logging.INFO
    if log.isEnabledFor(level):
        log.log(
            level, _summary(record), extra={REQUEST_ID: record.request_id, FIELDS: _fields(record)}
        )


def _summary(record: RequestRecord) -> str:
    how = f"{record.reason} ({record.code})" if record.code else record.reason
    by = f" by {record.key}" if record.key else ""
    summary = f"{record.endpoint}{by} {how} after {record.total_s:.2f} s"
    if record.reason == "refused":
        return summary
    cached = f" ({record.cached_tokens} cached)" if record.cached_tokens else ""
    waited = (
        "" if record.first_token_s is None else f", the first after {record.first_token_s:.2f} s"
    )
    return (
        f"{summary}: prompt {record.prompt_tokens}{cached}, answer {record.generated_tokens} "
        f"tokens{waited}"
    )


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields = {
        "event": "request",
        "model": record.model,
        "endpoint": record.endpoint,
        "key": record.key or None,
        "reason": record.reason,
        "code": record.code or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "disk_tokens": record.disk_tokens,
        "generated_tokens": record.generated_tokens,
        "queue_s": _rounded(record.queue_s),
        "prefill_s": _rounded(record.prefill_s),
        "decode_s": _rounded(record.decode_s),
        "first_token_s": _rounded(record.first_token_s),
        "whole_s": _rounded(record.total_s),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def log_response(method: str, path: str, status: int, key: str, code: str) -> None:
    """Log a response to a request without a prompt: at `warning` for a fault of the server, at
    `info` for one of the request, else at `debug`. `key`: its label; `code`: the error's."""
    level = logging.WARNING if status >= 500 else logging.INFO if status >= 400 else logging.DEBUG
    if log.isEnabledFor(level):
        method, path = method[:LONGEST_METHOD], path[:LONGEST_PATH]
        by, why = f" by {key}" if key else "", f" ({code})" if code else ""
        fields = {"event": "response", "method": method, "path": path, "status": status}
        fields |= {name: text for name, text in (("key", key), ("code", code)) if text}
        summary = f"{method} {path!r}{by} {status}{why}"
        log.log(level, summary, extra={FIELDS: fields})
