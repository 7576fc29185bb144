"""GET /openapi.json and GET /docs. Both are open; model names need a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files

import attrs
from quart import Response, request

from trouper.actors.runtime.served_models import ModelEntry
from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.api_keys import Keys
from trouper.protocol.version import VERSION
from trouper.web.http.endpoints import ERROR, REPORT, Endpoint, endpoints_of
from trouper.web.http.json_response import as_json
from trouper.web.http.openapi import DocumentContext, document
from trouper.web.http.request_schema import OBJECT, TEXT, Json, full


def page_headers(sources: str) -> dict[str, str]:
    """Return a page's headers. `sources`: directives of allowed sources."""
    policy = (
        f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors "
        "'none'"
    )
    return {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Content-Security-Policy": policy,
    }


HEADERS = page_headers("style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'")


class Pages:
    """`endpoints` are the whole app's, with these two. `entries`: the models of the request's key.
    `has_aliases`: whether other names are served."""

    def __init__(
        self,
        keys: Keys,
        described: Sequence[Endpoint],
        components: Json,
        *,
        entries: Callable[[], Sequence[ModelEntry]],
        has_aliases: Callable[[], bool],
        strict: bool,
    ) -> None:
        self._keys, self._components = keys, components
        self._entries, self._has_aliases, self._strict = entries, has_aliases, strict
        self._page = files("trouper.web.http").joinpath("docs.html").read_text("utf-8")
        self.endpoints = (*described, *endpoints_of(self))

    @REPORT(
        path="/openapi.json",
        operation="getOpenApi",
        summary="This description of the API",
        description="Names the models only to whoever sends a key, if keys are needed.",
        answer=full({"openapi": TEXT, **dict.fromkeys(("info", "paths", "components"), OBJECT)})
        | {"additionalProperties": True},
    )
    async def openapi(self) -> Response:
        components = {"Error": ERROR, **self._components}
        # The schemas of all requests take 0.1 s the first time.
        work = partial(document, self.endpoints, components, self._context())
        return as_json(await run_on_thread(work, abandon_on_cancel=False))

    def _context(self) -> DocumentContext:
        """Names and bounds for the document: names only for a known key, bounds if all models are
        loaded."""
        listed = self._entries()
        # Otherwise the names are private, or not the only ones.
        closed = self._known() and not self._has_aliases()
        names = [name for entry in listed for name in entry.names] if closed else []
        loaded = [entry.runtime for entry in listed if entry.runtime is not None]
        context = DocumentContext(
            version=VERSION,
            keyed=self._keys.needed,
            restricted=self._keys.restricted,
            models=names,
            strict=self._strict,
        )
        embedders = [
            embedder for runtime in loaded if (embedder := runtime.model.embedding) is not None
        ]
        # The bounds of models that are not loaded are unknown.
        if not loaded or len(loaded) < len(listed):
            return context
        return attrs.evolve(
            context,
            vocabulary=max(runtime.model.vocab_size for runtime in loaded),
            # A longer answer is cut to what the context holds, unless the server is strict.
            context=max(runtime.context_length for runtime in loaded)
            if self._strict
            else context.context,
            dimensions=max(
                (embedder.dimensions for embedder in embedders), default=context.dimensions
            ),
        )

    def _known(self) -> bool:
        headers = request.headers
        return self._keys.let_in(headers.get("Authorization"), headers.get("X-Api-Key"))

    @REPORT(
        path="/docs",
        operation="getDocs",
        summary="A page that shows it",
        answer={"type": "string"},
        content_type="text/html",
    )
    async def docs(self) -> Response:
        return Response(self._page, content_type="text/html; charset=utf-8", headers=HEADERS)
