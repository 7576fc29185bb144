"""GET /, the files of the page, and GET /v1/live with its data.

Page and files are open; the data needs a key. The path of the files names their content: browsers
cache them for ever.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from quart import Response, request

from trouper.protocol.api_keys import Keys
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.json_response import as_json
from trouper.web.http.pages import page_headers
from trouper.web.http.query_parameters import Query
from trouper.web.live.feed import Feed, Viewer
from trouper.web.live.snapshot import SNAPSHOT
from trouper.web.serving.service import Service, as_events

TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = page_headers("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")
"""Headers that forbid inline scripts and styles, whatever a model writes."""
ASSETS = "/live/"


class Site:
    def __init__(self, service: Service, keys: Keys) -> None:
        self._service = service
        self._feed = Feed(service.models, service.request_log.recent)
        static = {
            path.name: path.read_bytes()
            for path in files("trouper.web.live").joinpath("static").iterdir()
        }
        page = static.pop("index.html").decode()
        self._files = static
        self._digest = sha256(
            b"".join(name.encode() + data for name, data in sorted(static.items()))
        ).hexdigest()[:16]
        page = page.replace("{files}", f"{ASSETS.strip('/')}/{self._digest}")
        self._page = page.replace("{keyed}", "true" if keys.needed else "false").encode()
        self._etag = sha256(self._page).hexdigest()[:16]

    @Endpoint(
        method="GET",
        path="/v1/live",
        operation="watchLive",
        tag="Server",
        summary="What the actors do now",
        description="One snapshot; with `Accept: text/event-stream` an event `snapshot` a "
                "second while "
                "anything changes, else every two; when it begins also an event `viewer`, which "
                "says whether the key may manage models, and an event `recent` with the last "
                "requests. Nothing is "
                "computed while nobody looks.",
        answer=SNAPSHOT,
        events=SNAPSHOT,
        also=(400,),
    )
    async def live(self) -> Response:
        Query(request.args, (), self._service.report)
        if "text/event-stream" in request.headers.get("Accept", ""):
            return as_events(Viewer(self._feed, manages_models=self._manages_models()))
        return as_json(await self._feed.once())

    def _manages_models(self) -> bool:
        return self._service.models.control is not None and self._service.has_right("admin")

    @Endpoint(
        method="GET",
        path="/",
        operation="getLivePage",
        tag="Server",
        summary="A page that shows it",
        answer={"type": "string"},
        content_type="text/html",
    )
    async def page(self) -> Response:
        response = Response(self._page, content_type="text/html; charset=utf-8", headers=HEADERS)
        response.headers["Cache-Control"] = "no-cache"
        response.set_etag(self._etag)
        return await response.make_conditional(request)

    async def file(self, digest: str, name: str) -> Response:
        """Serve a file of the page; 404 for files of another version."""
        kind = name.rpartition(".")[2]
        if digest != self._digest or name not in self._files:
            return Response(b"", 404, headers=HEADERS)
        response = Response(self._files[name], content_type=TYPES[kind], headers=HEADERS)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response
