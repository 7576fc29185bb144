"""The right that each endpoint needs. A route that is missing here needs `admin`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from trouper.protocol.api_keys import ApiKey, Right
from trouper.protocol.hosts import Host, is_loopback
from trouper.protocol.problems import Problem

Access = Right | Literal["key", "open"]
"""key: any accepted key. open: no key."""


@attrs.frozen
class OpenWithoutRights:
    """Access that is open as long as there is no key file."""

    right: Right


ENDPOINT_ACCESS: Mapping[str, Access | OpenWithoutRights] = {
    "/": "open",
    "/live/<digest>/<name>": "open",
    "/livez": "open",
    "/api/hello": "open",
    "/readyz": "open",
    "/health": "open",
    "/openapi.json": "open",
    "/docs": "open",
    "/metrics": OpenWithoutRights("observability"),
    "/v1/live": "observability",
    "/server_info": "key",
    "/version": "key",
    "/v1/usage": "key",
    "/v1/models": "key",
    "/v1/models/<path:model>": "key",
    "/v1/models/load": "admin",
    "/v1/models/unload": "admin",
    "/v1/models/sleep": "admin",
    "/v1/models/wake": "admin",
    "/v1/models/pin": "admin",
    "/v1/models/pull": "admin",
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
    "/v1/requests": "inference",
    "/v1/requests/<request_id>": "inference",
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
"""By the router's path. /health is open, but shows details only to keys with `observability`."""


# Endpoints with `inference` that ask no model yet: no limit counts them.
UNCOUNTED = frozenset({"/v1/batches"})


def asks_model(path: str) -> bool:
    """Whether a request with a body counts against the key's requests a minute."""
    return ENDPOINT_ACCESS.get(path) == "inference" and path not in UNCOUNTED


def access_of(path: str, *, restricted: bool = True) -> Access:
    access = ENDPOINT_ACCESS.get(path, "admin")
    if isinstance(access, OpenWithoutRights):
        return access.right if restricted else "open"
    return access


def missing_right(path: str, key: ApiKey) -> Problem | None:
    access = access_of(path)
    if access in ("key", "open") or access in key.rights:
        return None
    message = (
        f"the API key {key.label!r} has no right to {access}, which {path} needs; whoever runs "
        f"the server gives it by {access}=true in --api-key-file"
    )
    return Problem(403, message, "permission_error", None, "missing_right")


def admin_without_key(path: str) -> Problem:
    message = (
        f"{path} needs an API key, except from a program on the server's own machine; start the "
        "server with --api-key, or "
        "with --allow-admin-without-key if whoever reaches it may change it"
    )
    return Problem(403, message, "permission_error", None, "admin_needs_key")


FORWARDING = re.compile(
    r"via|forwarded|x-(?:forwarded|original|proxy|envoy|remote)(?:-.+)?|(?:cf|tailscale)-.+"
    r"|(?:x-)?(?:real|client|true-client|cluster-client|proxyuser)-ip|(?:fly|fastly)-client-ip"
)
"""Names of headers in which proxies name their client."""


def is_local(client: Sequence[Any] | None, headers: Mapping[str, str], http_version: str) -> bool:
    """Whether the peer is a program on this machine that asks for itself. `client`: host and port,
    as in ASGI. `headers`: by names in lower case."""
    # Most proxies name a client in a header, keep the public name as `Host`, or speak HTTP/1.0
    # (nginx before 1.29.7). Behind any other proxy on this machine, keys are needed.
    if not client or not is_loopback(str(client[0])) or http_version == "1.0":
        return False
    host = Host.parse(headers.get("host") or "localhost")
    return host is not None and host.is_loopback and not any(map(FORWARDING.fullmatch, headers))
