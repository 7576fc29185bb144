"""GET /v1/requests and /v1/requests/ID: where requests stand and why they wait. POST
/v1/requests/ID/cancel ends one."""

from __future__ import annotations

from functools import partial

from quart import Response

from trouper.web.http.endpoints import Endpoint
from trouper.web.http.json_response import as_json, error_response, http_problem
from trouper.web.http.request_schema import FLAG, TEXT, full
from trouper.web.serving.running_requests import REQUEST, REQUESTS, ended_body, running_body
from trouper.web.serving.service import Service

CANCELLED = full({"id": TEXT, "object": {"const": "request.cancelled"}, "cancelled": FLAG})
ENDPOINT = partial(Endpoint, tag="Requests")
BY_ID = "By the X-Request-Id of its response, or the id in its body."


class RequestOperations:
    def __init__(self, service: Service) -> None:
        self._service = service

    @ENDPOINT(
        method="GET",
        path="/v1/requests",
        operation="listRequests",
        summary="The requests that run, and why they wait",
        description="Those of the key, by arrival; with `admin`, all.",
        answer=REQUESTS,
    )
    async def listed(self) -> Response:
        requests = self._service.running.of(self._service.manageable_owner)
        return as_json({"object": "list", "data": [*map(running_body, requests)]})

    @ENDPOINT(
        method="GET",
        path="/v1/requests/<request_id>",
        operation="retrieveRequest",
        summary="Where a request stands, and why it waits there",
        description=f"{BY_ID} Each choice has its last 16 states with the reasons for its waits. "
        "The last 200 requests that have ended are known, too.",
        answer=REQUEST,
    )
    async def retrieve(self, request_id: str) -> Response:
        if running := self._service.running.find(request_id, self._service.manageable_owner):
            return as_json(running_body(running[-1]))
        if records := self._service.ended_records(request_id):
            return as_json(ended_body(records))
        return _not_found("request", request_id)

    @ENDPOINT(
        method="POST",
        path="/v1/requests/<request_id>/cancel",
        operation="cancelRequest",
        summary="Cancel a request that runs",
        description=f"{BY_ID} Whoever waits for it is told.",
        answer=CANCELLED,
    )
    async def cancel(self, request_id: str) -> Response:
        if not self._service.running.cancel(request_id, self._service.manageable_owner):
            return _not_found("running request", request_id)
        return as_json({"id": request_id, "object": "request.cancelled", "cancelled": True})


def _not_found(kind: str, request_id: str) -> Response:
    problem = http_problem(404, f"no {kind} has the id {request_id!r}", "request_not_found")
    return error_response(problem)
