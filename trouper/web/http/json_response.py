"""Answers in JSON; long ones are written on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio
from quart import Response


def as_json(body: Any, status: int = 200) -> Response:
    return encoded(msgspec.json.encode(body), status)


async def formatted(body: Callable[[], Any], *, is_long: bool) -> Response:
    if not is_long:
        return as_json(body())
    return encoded(await trio.to_thread.run_sync(lambda: msgspec.json.encode(body())))


def encoded(data: bytes, status: int = 200) -> Response:
    return Response(data, status, content_type="application/json")
