"""Decides from a request's head whether a web page may make the request, and signs responses for
the pages that may (CORS of the Fetch standard). Other programs send neither Origin nor
Sec-Fetch-Site."""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
from quart import Request, Response

from trouper.protocol.hosts import Host, Origin, is_loopback, str_of
from trouper.protocol.problems import Problem
from trouper.protocol.settings import ServerSettings

JSON = re.compile(r"application/(?:[\w.!#$&^-]+\+)?json", re.IGNORECASE | re.ASCII)

# The only endpoint that takes a form. A browser without either header could at most store a file.
FORM, UPLOADS = "multipart/form-data", "/v1/files"
CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

# Values of Sec-Fetch-Site. Other ports of this machine are same-site, but another origin.
CROSSES = frozenset({"cross-site", "same-site"})
LONGEST_SHOWN = 100


@attrs.frozen(kw_only=True)
class Head:
    """Deciding parts of a head. None: no such header."""

    method: str = "GET"
    host: str | None = None
    origin: str | None = None
    content_type: str | None = None
    has_body: bool = False
    target: str = "/"
    """The path, or a whole URL, as sent to proxies (RFC 9112, 3.2.2)."""
    fetch_site: str | None = None
    fetch_mode: str | None = None
    fetch_dest: str | None = None
    wants_method: str | None = None

    @property
    def is_preflight(self) -> bool:
        return (
            self.method == "OPTIONS" and self.origin is not None and self.wants_method is not None
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        target = (
            "" if self.target.startswith("/") else self.target.partition("://")[2].partition("/")[0]
        )
        return tuple(name for name in (self.host, target) if name)


@attrs.frozen
class Policy:
    listens_on: str
    keyed: bool
    allowed_hosts: tuple[str, ...]
    cors_origins: tuple[str, ...]

    @classmethod
    def of(cls, settings: ServerSettings) -> Policy:
        keyed = bool(settings.api_key or settings.api_key_file)
        return cls(settings.host, keyed, settings.allowed_hosts, settings.cors_origins)

    @property
    def any_origin(self) -> bool:
        return "*" in self.cors_origins

    def names(self, origin: str) -> bool:
        """Whether --cors-origins allows pages of this origin."""
        parsed = Origin.parse(origin)
        return self.any_origin or (parsed is not None and str_of(parsed) in self.cors_origins)

    def answers_to(self, host: Host) -> bool:
        """Whether the server answers to a host: addresses, which cannot be rebound, names that no
        page can own, and with keys any name."""
        if host.is_loopback or any(host.within(pattern) for pattern in self.allowed_hosts):
            return True
        if is_loopback(self.listens_on):
            return False
        if host.address is not None or host.name == self.listens_on.lower():
            return True
        return not self.allowed_hosts and (self.keyed or host.is_private)


def decide(head: Head, policy: Policy) -> Problem | None:
    return _host(head, policy) or _origin(head, policy) or _site(head, policy) or _body(head)


def _host(head: Head, policy: Policy) -> Problem | None:
    """Refuse unknown names, since a stranger's may resolve to this server (rebinding,
    CVE-2024-28224 in another server). No Host means HTTP/1.0, not a browser."""
    if "*" in policy.allowed_hosts:
        return None
    for authority in head.hosts:
        host = Host.parse(authority)
        if host is None or not policy.answers_to(host):
            name = _shown(authority if host is None else host.name)
            message = (
                f"this server does not answer to the name {name}; if it is one of its own, start "
                f"it with --allowed-hosts {name}"
            )
            return _forbidden(message, "host_not_allowed")
    return None


def _origin(head: Head, policy: Policy) -> Problem | None:
    """Refuse `fetch` and forms of other origins."""
    if head.origin is None or policy.names(head.origin) or _same_origin(head.origin, head):
        return None
    name = _shown(head.origin)
    remedy = f"start the server with --cors-origins {name}"
    if Origin.parse(head.origin) is None:
        remedy = "serve the page by HTTP and name its origin by --cors-origins"
    message = f"web pages of the origin {name} may not use this server; if one should, {remedy}"
    return _forbidden(message, "origin_not_allowed")


def _same_origin(origin: str, head: Head) -> bool:
    # Sec-Fetch-Site comes first: behind a proxy that rewrites Host, Origin and Host differ.
    parsed, host = Origin.parse(origin), Host.parse(head.host or "")
    if parsed is None:
        return False
    return head.fetch_site == "same-origin" or (host is not None and parsed.is_of(host))


def _site(head: Head, policy: Policy) -> Problem | None:
    """Refuse other origins' images, scripts and frames (https://www.w3.org/TR/fetch-metadata/),
    which cost as much as a client's request. Links that a user follows are answered."""
    if head.origin is not None or head.fetch_site not in CROSSES or policy.any_origin:
        return None
    if (
        head.method in ("GET", "HEAD")
        and head.fetch_mode == "navigate"
        and head.fetch_dest == "document"
    ):
        return None
    message = (
        "web pages of other origins may not load this; a page that --cors-origins names may, by "
        "fetch with mode cors"
    )
    return _forbidden(message, "origin_not_allowed")


def _body(head: Head) -> Problem | None:
    """Refuse bodies that a page may send without a preflight: text and forms, never JSON."""
    if head.method not in CHANGES or not head.has_body:
        return None
    essence = (head.content_type or "").partition(";")[0].strip()
    if JSON.fullmatch(essence) or (essence.lower() == FORM and head.target.endswith(UPLOADS)):
        return None
    given = f"not {_shown(essence)}" if essence else "and nothing says so"
    message = (
        f"the body must be JSON, {given}: send `Content-Type: application/json` (with curl: -H "
        "'Content-Type: application/json')"
    )
    return Problem(415, message, code="unsupported_media_type")


def _forbidden(message: str, code: str) -> Problem:
    return Problem(403, message, "permission_error", None, code)


def _shown(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."


METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Trouper-Ignored, " + ", ".join(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
REMEMBERED_S = 600
HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)


def head_of(request: Request, headers: Mapping[str, str]) -> Head:
    """Return a request's `Head`. `headers` have lower-case names. X-Forwarded-Host does not count:
    any client can send one."""
    return Head(
        method=request.method,
        host=headers.get("host"),
        origin=headers.get("origin"),
        content_type=headers.get("content-type"),
        has_body="transfer-encoding" in headers or headers.get("content-length", "0") != "0",
        target=request.scope["path"],
        fetch_site=headers.get("sec-fetch-site"),
        fetch_mode=headers.get("sec-fetch-mode"),
        fetch_dest=headers.get("sec-fetch-dest"),
        wants_method=headers.get("access-control-request-method"),
    )


class Cors:
    def __init__(self, settings: ServerSettings) -> None:
        self._policy = Policy.of(settings)

    def problem(self, head: Head) -> Problem | None:
        return decide(head, self._policy)

    def preflight(self, head: Head, headers: Mapping[str, str]) -> Response | None:
        """Return the response to a preflight, before any check of keys; None for other requests."""
        if not head.is_preflight:
            return None
        response = Response(b"", 204)
        requested = headers.get("access-control-request-headers", "")
        response.headers["Access-Control-Allow-Methods"] = METHODS
        response.headers["Access-Control-Max-Age"] = str(REMEMBERED_S)
        # Clients send many headers of their own (x-stainless-*), and `*` does not cover
        # Authorization.
        if HEADER_NAMES.fullmatch(requested):
            response.headers["Access-Control-Allow-Headers"] = requested
        if headers.get("access-control-request-private-network") == "true":
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response

    def sign(self, headers: Mapping[str, str], response: Response) -> None:
        """Let pages of --cors-origins read this response, even an error."""
        policy = self._policy
        if not policy.cors_origins:
            return
        if not policy.any_origin:
            response.vary.add("Origin")
        origin = headers.get("origin")
        if origin is not None and policy.names(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if policy.any_origin else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
