"""Requests that run: found by id, cancelled, and shown with the reasons for their waits."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import attrs
import trio

from trouper.actors.runtime.answer import Answer
from trouper.protocol.record import RequestRecord
from trouper.protocol.waits import History, Transition
from trouper.web.http.request_schema import (
    COUNT,
    NUMBER,
    TEXT,
    Json,
    array,
    full,
    nullable,
    titled,
)
from trouper.web.observability.request_log import KEPT, RequestOrigin

TIME: Json = {**NUMBER, "description": "Unix time in seconds."}
STANDING: Json = {"state": TEXT, "reason": nullable(TEXT), "message": TEXT, "seconds": NUMBER}
TOKEN_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "max_tokens",
    "unread_tokens",
)
TRANSITION = titled("RequestTransition", full({**STANDING, "at": TIME}))
CHOICE = titled(
    "RequestChoice",
    full(
        {
            "index": COUNT,
            **STANDING,
            **dict.fromkeys(TOKEN_COUNTS, COUNT),
            "history": array(TRANSITION),
        }
    ),
)
REQUEST = titled(
    "RunningRequest",
    full(
        {
            "id": TEXT,
            "object": {"const": "request"},
            "model": TEXT,
            "endpoint": TEXT,
            "key": TEXT,
            "created": TIME,
            "choices": array(CHOICE),
        }
    ),
)
REQUESTS = full({"object": {"const": "list"}, "data": array(REQUEST)})
WAIT = full({"model": TEXT, "request_id": TEXT, "state": TEXT, "message": TEXT, "since": NUMBER})
MAX_WAITS = 20


@attrs.define(eq=False)
class RunningRequest:
    owner: str
    """Identity of the key; "" without keys."""
    names: set[str]
    """The id of the request, and of its response."""
    request_id: str
    origin: RequestOrigin
    history: History
    """Before the request has an answer."""
    answers: list[Answer] = attrs.field(factory=list)
    records: list[RequestRecord] = attrs.field(factory=list)
    """Records of the answers that have ended."""


class RunningRequests:
    def __init__(self) -> None:
        # Ordered by arrival.
        self._requests: dict[RunningRequest, None] = {}
        # Response ids of the last requests that ended, with the ids of the requests.
        self._ended: OrderedDict[str, str] = OrderedDict()

    def open(self, owner: str, request_id: str, origin: RequestOrigin) -> RunningRequest:
        history = History(request_id, trio.current_time)
        opened = RunningRequest(owner, {request_id}, request_id, origin, history)
        self._requests[opened] = None
        return opened

    def close(self, request: RunningRequest) -> None:
        del self._requests[request]
        for name in request.names - {request.request_id}:
            self._ended[name] = request.request_id
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)

    def ended_id(self, request_id: str) -> str:
        """Return the X-Request-Id of an ended request, by that or its response id."""
        return self._ended.get(request_id, request_id)

    def of(self, owner: str | None) -> list[RunningRequest]:
        """Return a key's requests by arrival; None: all."""
        return [request for request in self._requests if owner in (None, request.owner)]

    def find(self, request_id: str, owner: str | None) -> list[RunningRequest]:
        own = self.of(owner)
        for name in (request_id, header_id(request_id)):
            if found := [request for request in own if name in request.names]:
                return found
        return []

    def cancel(self, request_id: str, owner: str | None) -> bool:
        """Cancel the answers of a request. Returns whether any existed."""
        answers = [one for request in self.find(request_id, owner) for one in request.answers]
        for answer in answers:
            answer.cancel()
        return bool(answers)


def header_id(response_id: str) -> str:
    """Return the X-Request-Id of a response whose id is that with a prefix."""
    return re.split("[-_]", response_id, maxsplit=1)[-1]


def running_body(request: RunningRequest) -> Json:
    offset = time.time() - trio.current_time()
    now = trio.current_time()
    choices = [
        {"index": index, **_choice(answer, now, offset)}
        for index, answer in enumerate(request.answers)
    ]
    if not choices:
        choices = [
            {
                "index": 0,
                **_standing(request.history.latest, now),
                **dict.fromkeys(TOKEN_COUNTS, 0),
                "history": _history(request.history.transitions, now, offset),
            }
        ]
    return _body(request.request_id, request.origin, offset, choices)


def waits_of(requests: Iterable[RunningRequest]) -> list[Json]:
    """Return the first waits for the live page. `since` is the server's trio.current_time()."""
    latest = (
        (request, answer.history.latest) for request in requests for answer in request.answers
    )
    waits = (
        {
            "model": request.origin.model,
            "request_id": request.request_id,
            "state": one.state,
            "message": _message(one),
            "since": one.at,
        }
        for request, one in latest
        if one is not None and one.reason
    )
    return [*islice(waits, MAX_WAITS)]


def ended_body(records: Iterable[RequestRecord]) -> Json:
    """Format the records of one ended request's choices, of which there is at least one."""
    records = sorted(records, key=lambda record: record.arrived_at)
    first = records[0]
    choices = [
        {
            "index": index,
            "state": "ended",
            "reason": record.code or record.reason,
            "message": f"ended: {record.reason}" + (f" ({record.code})" if record.code else ""),
            "seconds": record.total_s,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.generated_tokens,
            "max_tokens": record.max_tokens,
            "unread_tokens": 0,
            "history": _history(record.transitions, record.ended_at, record.unix_offset),
        }
        for index, record in enumerate(records)
    ]
    origin = RequestOrigin(
        first.model, first.endpoint, first.arrived_at, first.adapter, key=first.key
    )
    request_id = min((record.request_id for record in records), key=len)  # The first choice's.
    return _body(request_id, origin, first.unix_offset, choices)


def _body(request_id: str, origin: RequestOrigin, offset: float, choices: list[Json]) -> Json:
    return {
        "id": request_id,
        "object": "request",
        "model": f"{origin.model}:{origin.adapter}" if origin.adapter else origin.model,
        "endpoint": origin.endpoint,
        "key": origin.key,
        "created": origin.at + offset,
        "choices": choices,
    }


def _choice(answer: Answer, now: float, offset: float) -> Json:
    latest, progress = answer.history.latest, answer.progress
    standing = _standing(latest, now)
    if latest is not None and latest.state == "prefilling" and progress.tokens_to_prefill:
        done, total = progress.prefilled_tokens, progress.tokens_to_prefill
        standing["message"] = f"prefills: {done} of {total} tokens"
    return standing | {
        "prompt_tokens": len(answer.accepted.prompt_tokens),
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "max_tokens": answer.accepted.max_tokens,
        "unread_tokens": answer.waiting,
        "history": _history(answer.history.transitions, now, offset),
    }


def _standing(one: Transition | None, until: float) -> Json:
    if one is None:
        return {"state": "preparing", "reason": None, "message": "preparing", "seconds": 0.0}
    return {
        "state": one.state,
        "reason": one.reason or None,
        "message": _message(one),
        "seconds": until - one.at,
    }


def _message(transition: Transition) -> str:
    waits = f": waits for {transition.waits_for}" if transition.reason else ""
    return transition.state + waits


def _history(transitions: Iterable[Transition], until: float, offset: float) -> list[Json]:
    noted = [*transitions]
    ends = [transition.at for transition in noted[1:]] + [until]
    return [
        {**_standing(one, end), "at": one.at + offset} for one, end in zip(noted, ends, strict=True)
    ]
