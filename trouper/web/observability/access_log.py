"""The access log: one line for each ended request, without any text of prompts, answers or keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import attrs

from trouper.protocol.logs import FIELDS, REQUEST_ID
from trouper.protocol.record import RequestRecord

log = logging.getLogger("trouper.requests")
LONGEST_METHOD, LONGEST_PATH = 20, 200
"""Bounds of a client's text, in characters."""
OF_MANY_PROMPTS = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score"})
"""Endpoints whose prompts share a line, unless one fails: a document has hundreds."""

OF_ONE_PROMPT = frozenset(
    {
        "disk_tokens",
        "generated_tokens",
        "queue_s",
        "prefill_s",
        "decode_s",
        "first_token_s",
        "preempted_s",
    }
)
"""Fields of a line that is not shared."""


def log_record(record: RequestRecord) -> None:
    """Log the end of a request that was submitted to a model."""
    if _shares_line(record):
        return
    level = logging.WARNING if record.reason == "error" else logging.INFO
    if log.isEnabledFor(level):
        log.log(
            level, _summary(record), extra={REQUEST_ID: record.request_id, FIELDS: _fields(record)}
        )


def _shares_line(record: RequestRecord) -> bool:
    return record.endpoint in OF_MANY_PROMPTS and record.reason in ("stop", "length", "abort")


def log_prompts(request_id: str, records: Sequence[RequestRecord]) -> None:
    """Log at the end of a request, in one line, its prompts that `log_record` left out."""
    records = [record for record in records if _shares_line(record)]
    if not records or not log.isEnabledFor(logging.INFO):
        return
    answered = [record for record in records if record.reason != "abort"]
    total = attrs.evolve(
        # The request has the reason of a prompt that was aborted, if there is one.
        min(records, key=lambda record: record.reason),
        prompt_tokens=sum(record.prompt_tokens for record in answered),
        cached_tokens=sum(record.cached_tokens for record in answered),
        ended_at=max(record.ended_at for record in records),
    )
    fields = _fields(total)
    for name in OF_ONE_PROMPT & fields.keys():
        del fields[name]
    fields["prompts"] = len(answered)
    summary = f"{_outcome(total)}: {len(answered)} prompts of {_prompt_tokens(total)} tokens"
    log.info(summary, extra={REQUEST_ID: request_id, FIELDS: fields})


def _outcome(record: RequestRecord) -> str:
    how = f"{record.reason} ({record.code})" if record.code else record.reason
    by = f" by {record.key}" if record.key else ""
    return f"{record.endpoint}{by} {how} after {record.total_s:.2f} s"


def _prompt_tokens(record: RequestRecord) -> str:
    cached = f" ({record.cached_tokens} cached)" if record.cached_tokens else ""
    return f"{record.prompt_tokens}{cached}"


def _summary(record: RequestRecord) -> str:
    if record.reason == "refused":
        return _outcome(record)
    waited = (
        "" if record.first_token_s is None else f", the first after {record.first_token_s:.2f} s"
    )
    return (
        f"{_outcome(record)}: prompt {_prompt_tokens(record)}, answer {record.generated_tokens} "
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
        "preempted_s": _rounded(record.preempted_s or None),
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
