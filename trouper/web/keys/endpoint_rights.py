"""Which endpoints are open, and which right each other one needs: for the check of every request,
and for what /openapi.json says of it. A route that is missing here needs `admin`; a test checks
that none is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from trouper.protocol.key_options import ApiKey, Right
from trouper.protocol.problems import Problem

Access = Right | Literal["key", "open"]
"""key: any accepted key. open: no key."""


@attrs.frozen
class OpenWithoutRights:
    """Access to an endpoint that is open as long as keys have no rights, since there is no key
    file."""

    right: Right


ENDPOINT_ACCESS: Mapping[str, Access | OpenWithoutRights] = {
    "/": "open",
    "/live/<digest>/<name>": "open",
    "/livez": "open",
    "/readyz": "open",
    "/health": "open",
    "/openapi.json": "open",
    "/docs": "open",
    "/metrics": OpenWithoutRights("observability"),
    "/v1/live": "observability",
    "/server_info": "key",
    "/v1/usage": "key",
    "/v1/models": "key",
    "/v1/models/<path:model>": "key",
    "/v1/models/load": "admin",
    "/v1/models/unload": "admin",
    "/v1/models/sleep": "admin",
    "/v1/models/wake": "admin",
    "/v1/models/pin": "admin",
    "/v1/load_lora_adapter": "admin",
    "/v1/unload_lora_adapter": "admin",
    "/v1/chat/completions": "inference",
    "/v1/completions": "inference",
    "/infill": "inference",
    "/v1/embeddings": "inference",
    "/v1/rerank": "inference",
    "/v1/score": "inference",
    "/tokenize": "inference",
    "/detokenize": "inference",
    "/v1/messages": "inference",
    "/v1/messages/count_tokens": "inference",
    "/v1/requests/<request_id>/cancel": "inference",
    "/v1/responses": "inference",
    "/v1/responses/input_tokens": "inference",
    "/v1/responses/<response:response_id>": "inference",
    "/v1/responses/<response:response_id>/cancel": "inference",
    "/v1/responses/<response:response_id>/input_items": "inference",
    "/v1/files": "inference",
    "/v1/files/<file_id>": "inference",
    "/v1/files/<file_id>/content": "inference",
    "/v1/batches": "inference",
    "/v1/batches/<batch_id>": "inference",
    "/v1/batches/<batch_id>/cancel": "inference",
}
"""By the router's path. /health is open, but shows its details to keys with `observability`
only."""


UNLIMITED = frozenset({"/v1/batches"})
"""Of the endpoints with a body that need `inference`, those that ask no model yet, and count
against no limit of a key."""


def asks_model(path: str) -> bool:
    """Whether a request with a body counts against the key's requests a minute."""
    return ENDPOINT_ACCESS.get(path) == "inference" and path not in UNLIMITED


def access_of(path: str, *, restricted: bool = True) -> Access:
    """Return what a route needs. `restricted`: whether keys have rights."""
    access = ENDPOINT_ACCESS.get(path, "admin")
    if isinstance(access, OpenWithoutRights):
        return access.right if restricted else "open"
    return access


def missing_right(path: str, key: ApiKey) -> Problem | None:
    """Return the reason to refuse a key at a route, or None."""
    access = access_of(path)
    if access in ("key", "open") or access in key.rights:
        return None
    message = (
        f"the API key {key.label!r} has no right to {access}, which {path} needs; whoever runs the "
        "server gives it by "
        f"{access}=true in --api-key-file"
    )
    return Problem(403, message, "permission_error", None, "missing_right")


def admin_without_key(path: str) -> Problem:
    """The refusal of a request without a key that comes from another machine, or through a
    proxy."""
    message = (
        f"{path} needs an API key, except from a program on the server's own machine; start the "
        "server with --api-key, or "
        "with --allow-admin-without-key if whoever reaches it may change it"
    )
    return Problem(403, message, "permission_error", None, "admin_needs_key")
