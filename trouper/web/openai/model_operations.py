"""POST /v1/models/load, unload, sleep, wake, pin and pull. An operation goes on when the client
leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import trio
from msgspec import Meta
from quart import Response

from trouper.actors.runtime.served_models import ModelControl, ModelEntry, Operation
from trouper.protocol.loading import Loading
from trouper.protocol.problems import Problem, RequestFailed
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.field_types import Flag, Model
from trouper.web.http.json_response import as_json, error_body
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import COUNT, TEXT, either, full, ref, titled
from trouper.web.openai.model_listing import listed_body
from trouper.web.serving.service import Service, as_events
from trouper.web.streaming.event_log import named_event

TICK_S = 0.2
"""Interval between progress events."""
HEARTBEAT = b": \n\n"
PROGRESS = titled(
    "ModelProgress",
    full(
        {"id": TEXT, "state": TEXT, "stage": TEXT, "done": COUNT, "total": COUNT, "unit": TEXT},
        optional=("stage", "done", "total", "unit"),
    ),
)
EVENTS = titled("ModelEvent", either(ref("ModelBody"), PROGRESS, ref("Error")))
ENDPOINT = partial(
    Endpoint, tag="Models", method="POST", answer=ref("ModelBody"), also=(409, 503, 507)
)


class ModelRequest(Body, kw_only=True, frozen=True):
    """The body of all of these."""

    essential: ClassVar[frozenset[str]] = frozenset({"force", "pinned", "ttl_s", "keep_alive"})
    model: Model | None = None
    stream: Flag = False


class WakeRequest(ModelRequest, kw_only=True, frozen=True):
    pass


class LoadRequest(ModelRequest, kw_only=True, frozen=True):
    pinned: Flag | None = None
    ttl_s: Annotated[float, Meta(ge=0)] | None = None


class UnloadRequest(ModelRequest, kw_only=True, frozen=True):
    force: Flag = False


class SleepRequest(ModelRequest, kw_only=True, frozen=True):
    force: Flag = False


class PinRequest(Body, kw_only=True, frozen=True):
    model: Model | None = None
    pinned: Flag = True


class PullRequest(Body, kw_only=True, frozen=True):
    model: Annotated[str, Meta(pattern=r"^[\w.-]+/[\w.-]+$", max_length=200)]
    stream: Flag = False


class ModelOperations:
    def __init__(self, service: Service) -> None:
        self._service = service

    @ENDPOINT(
        path="/v1/models/load",
        operation="loadModel",
        summary="Load a model, or wake it",
        description="Its memory is planned first: idle models make room, others are not "
        "disturbed (507). With `stream` events "
        "of progress, the last of which is the model or an error.",
        request=LoadRequest,
        events=EVENTS,
        examples={"The default model": {}},
    )
    async def load(self) -> Response:
        body = await self._service.read(LoadRequest.parse)
        if self._service.models.control is None and body.pinned is None and body.ttl_s is None:
            return await self._already_loaded(body)
        operation = self._control().load(self._name(body), pinned=body.pinned, ttl_s=body.ttl_s)
        return await self._respond(operation, stream=body.stream)

    @ENDPOINT(
        path="/v1/models/wake",
        operation="wakeModel",
        summary="Load a model that sleeps",
        request=WakeRequest,
        events=EVENTS,
        examples={"The default model": {}},
    )
    async def wake(self) -> Response:
        body = await self._service.read(WakeRequest.parse)
        if self._service.models.control is None:
            return await self._already_loaded(body)
        return await self._respond(self._control().load(self._name(body)), stream=body.stream)

    @ENDPOINT(
        path="/v1/models/unload",
        operation="unloadModel",
        summary="Unload a model when its requests have ended",
        description="`force` ends them with an error. The next request for the model loads it "
        "again.",
        request=UnloadRequest,
        events=EVENTS,
    )
    async def unload(self) -> Response:
        body = await self._service.read(UnloadRequest.parse)
        operation = self._control().unload(self._name(body), force=body.force)
        return await self._respond(operation, stream=body.stream)

    @ENDPOINT(
        path="/v1/models/sleep",
        operation="sleepModel",
        summary="Free a model's memory; its cached blocks stay on disk",
        request=SleepRequest,
        events=EVENTS,
    )
    async def sleep(self) -> Response:
        body = await self._service.read(SleepRequest.parse)
        operation = self._control().unload(self._name(body), force=body.force, sleep=True)
        return await self._respond(operation, stream=body.stream)

    @ENDPOINT(
        path="/v1/models/pin",
        operation="pinModel",
        summary="Keep a model from being unloaded, or release it",
        request=PinRequest,
    )
    async def pin(self) -> Response:
        body = await self._service.read(PinRequest.parse)
        name = self._control().pin(self._name(body), pinned=body.pinned)
        return as_json(listed_body(self._service.listed(name)))

    @ENDPOINT(
        path="/v1/models/pull",
        operation="pullModel",
        summary="Download a model of the hub, which is then served",
        description="Into the hub's cache, by a server with `--models-from hub-cache`. With "
        "`stream` events of progress in bytes, the last of which is the model or an error.",
        request=PullRequest,
        events=EVENTS,
        also=(409, 422, 503),
    )
    async def pull(self) -> Response:
        body = await self._service.read(PullRequest.parse)
        operation = self._control().pull(body.model)
        progress = partial(download_body, operation)
        return await self._respond(operation, stream=body.stream, progress=progress)

    def _control(self) -> ModelControl:
        control = self._service.models.control
        if control is None:
            message = (
                "the only model is that of the program which embeds the server; load and unload it "
                "there"
            )
            raise RequestFailed(Problem(409, message, code="model_not_managed"))
        return control

    def _name(self, body: ModelRequest | PinRequest) -> str:
        """Raises `RequestFailed` (404), also for a model outside of the key's list."""
        name = None if body.model is None else self._service.resolved(body.model)
        return self._service.listed(name).names[0]

    async def _already_loaded(self, body: ModelRequest) -> Response:
        operation = Operation(self._name(body))
        operation.done.set()
        return await self._respond(operation, stream=body.stream)

    async def _respond(
        self,
        operation: Operation,
        *,
        stream: bool,
        progress: Callable[[], dict[str, Any]] | None = None,
    ) -> Response:
        if stream:
            return as_events(events_of(self._service, operation, progress))
        await operation.done.wait()
        if operation.problem is not None:
            raise RequestFailed(operation.problem)
        return as_json(listed_body(self._service.listed(operation.name)))


async def events_of(
    service: Service, operation: Operation, progress: Callable[[], dict[str, Any]] | None = None
) -> AsyncIterator[bytes]:
    """Yield `progress` at each change, by default of the model's entry, then `model` or `error`."""
    last: dict[str, Any] = {}
    sent_at = trio.current_time()
    while not (last and operation.done.is_set()):
        body = progress() if progress else progress_body(service.listed(operation.name))
        if body != last:
            last = body
            yield named_event("progress", body)
        elif trio.current_time() - sent_at >= service.settings.heartbeat_s:
            yield HEARTBEAT
        else:
            with trio.move_on_after(min(TICK_S, service.settings.heartbeat_s)):
                await operation.done.wait()
            continue
        sent_at = trio.current_time()
    if operation.problem is not None:
        yield named_event("error", error_body(operation.problem))
    else:
        yield named_event("model", listed_body(service.listed(operation.name)))


def progress_body(entry: ModelEntry) -> dict[str, Any]:
    return _with_amounts({"id": entry.names[0], "state": entry.state}, entry.progress)


def download_body(operation: Operation) -> dict[str, Any]:
    """Format the progress of a model that is not listed yet."""
    return _with_amounts({"id": operation.name, "state": "unloaded"}, operation.progress)


def _with_amounts(body: dict[str, Any], loading: Loading | None) -> dict[str, Any]:
    """Loading progress is in bytes or steps."""
    if loading is None:
        return body
    amounts = {"done": loading.done_bytes, "total": loading.total_bytes, "unit": loading.unit}
    return body | {"stage": loading.stage} | amounts
