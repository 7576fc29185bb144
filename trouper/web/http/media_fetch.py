"""Fetches images that clients name by address, from servers of `--allowed-media-domains` alone."""

# The address that a client sends is parsed once, by `MediaAddress`; no other parser can read it
# differently. A name is resolved once, and the address that was checked is the one that is dialled:
# a second answer of the name server changes nothing (DNS rebinding). Redirects are checked anew.

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from ssl import SSLContext
from typing import Self
from urllib.parse import quote, urljoin

import attrs
import h11
import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.hosts import PORTS, Host
from trouper.protocol.media_domains import NAME, MediaDomain
from trouper.protocol.problems import RequestFailed, bad_request
from trouper.protocol.version import VERSION
from trouper.web.http.image_source import (
    MAX_IMAGE_BYTES,
    RemoteImage,
    check_type,
    too_large,
)

log = logging.getLogger("trouper.web")
FETCH_S = 10.0
"""For one image, with its redirects."""
CONNECT_S = 3.0
"""For one address of a name, so that another gets its turn."""
MAX_REDIRECTS = 3
MAX_ADDRESSES = 8
MAX_URL = 8192
MAX_HEAD = 32_768
AT_ONCE = 32
"""Images that are fetched at a time, of all clients."""
PIECE = 2**16
REDIRECTS = (301, 302, 303, 307, 308)
URL = re.compile(r"(https?)://([^/?#\\]*)([^#]*)", re.IGNORECASE)
PUBLIC_IPV6 = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")
S3_TYPE = "binary/octet-stream"
"""Of files without a type."""
Hold = Callable[[int], None]
"""Holds memory for so many more bytes. Raises `RequestFailed`."""
ReadOnce = Callable[[str, Callable[[], Awaitable[bytes]], Hold], Awaitable[bytes]]
"""Returns the file at an address: what was kept, or what the second argument fetches. `Hold` is
for what was kept."""


class NotAllowed(Exception):
    """The text is a clause for the client, and repeats nothing that was sent."""


class Unreachable(Exception):
    """As `NotAllowed`."""


@attrs.frozen
class MediaAddress:
    """`host`: a name in lower case, or an IPv4 address. `target`: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises `NotAllowed`."""
        match = URL.match(url)
        if match is None or len(url) > MAX_URL:
            raise NotAllowed("the address is not one of http or https, or is too long")
        if "@" in match[2]:
            raise NotAllowed("the address has a name or a password before its host")
        scheme, host = match[1].lower(), Host.parse(match[2])
        if host is None or not NAME.fullmatch(host.name):
            raise NotAllowed("the address has no host in the form of a name")
        target = match[3] if match[3].startswith("/") else f"/{match[3]}"
        # Marks of the syntax stay as they are; all that could end a line does not.
        return cls(
            scheme,
            host.name,
            PORTS[scheme] if host.port is None else host.port,
            quote(target, safe="!$%&'()*+,/:;=?@[]~"),
        )

    @property
    def authority(self) -> str:
        return self.host if self.port == PORTS[self.scheme] else f"{self.host}:{self.port}"

    def redirected(self, location: str) -> Self:
        """Raises `NotAllowed`."""
        try:
            url = urljoin(f"{self.scheme}://{self.authority}{self.target}", location)
        except ValueError:  # Such as brackets around what is no IPv6 address.
            raise NotAllowed("the other server redirects to something that is no address") from None
        return self.parse(url)


def is_public(text: str) -> bool:
    """Whether an IP address is one of the public network, and none that stands for another one."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or _behind_nat64(address)
        if inner is None:
            return address in PUBLIC_IPV6 and address.is_global
        address = inner
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _behind_nat64(address: IPv6Address) -> IPv4Address | None:
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None


class MediaFetcher:
    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = tuple(MediaDomain.parse(each) for each in domains)
        self._limiter = trio.CapacityLimiter(AT_ONCE)
        # Threads of slow name servers outlive their fetch, and may hold up no other threads.
        self._resolving = trio.CapacityLimiter(AT_ONCE)
        self._tls: SSLContext | None = None

    @property
    def is_on(self) -> bool:
        return bool(self._domains)

    def check(self, url: str, path: str) -> None:
        """Raises `RequestFailed` (400) for an address that is never fetched. `path`: of the
        part."""
        try:
            self._domain_of(MediaAddress.parse(url))
        except NotAllowed as fault:
            raise _not_allowed(fault, path) from None

    def _domain_of(self, address: MediaAddress) -> MediaDomain:
        where = (address.scheme, address.host, address.port)
        covering = [domain for domain in self._domains if domain.covers(*where)]
        if not covering:
            raise NotAllowed("this server fetches no images from there")
        return next((domain for domain in covering if domain.private), covering[0])

    async def fetch_all(
        self, images: Sequence[RemoteImage], hold: Hold, read_once: ReadOnce | None = None
    ) -> dict[str, bytes]:
        """Return files by address, each fetched once. Raises `RequestFailed` (400, 413, 429,
        503)."""
        files, failures = dict[str, bytes](), list[RequestFailed]()
        by_url = {image.url: image for image in reversed(images)}

        async def fetch(image: RemoteImage) -> None:
            get = partial(self.fetch, image, hold)
            try:
                files[image.url] = await (
                    get() if read_once is None else read_once(image.url, get, hold)
                )
            except RequestFailed as failed:
                failures.append(failed)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for image in by_url.values():
                nursery.start_soon(fetch, image)
        if failures:
            # In a variable it and this frame, with the files, would refer to each other.
            raise failures.pop(0)
        return files

    async def fetch(self, image: RemoteImage, hold: Hold) -> bytes:
        path = image.origin
        try:
            async with self._limiter:
                with trio.fail_after(FETCH_S):
                    return await self._follow(MediaAddress.parse(image.url), path, hold)
        except NotAllowed as fault:
            raise _not_allowed(fault, path) from None
        except Unreachable as fault:
            reason = str(fault)
        except trio.TooSlowError:
            reason = f"the other server took more than {FETCH_S:g} s"
        except h11.RemoteProtocolError:
            reason = "the other server broke its answer off, or speaks no HTTP/1.1"
        # A name that cannot be encoded is a `UnicodeError`; a certificate's fault is an `OSError`
        # below Trio's error.
        except (OSError, UnicodeError, trio.BrokenResourceError) as error:
            cause = error.__cause__ or error
            reason = f"the other server cannot be reached ({type(cause).__name__})"
        raise bad_request(f"{path}: the image was not fetched: {reason}", path, "media_unreachable")

    async def _follow(self, address: MediaAddress, path: str, hold: Hold) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            domain = self._domain_of(address)
            stream = await self._connect(address, private=domain.private)
            try:
                answer = await _request(stream, address, path, hold)
            finally:
                # A polite end would wait for the other server.
                await trio.aclose_forcefully(stream)
            if isinstance(answer, bytes):
                return answer
            address = answer
        raise Unreachable(f"there were more than {MAX_REDIRECTS} redirects")

    async def _connect(self, address: MediaAddress, *, private: bool) -> trio.abc.Stream:
        """Raises `NotAllowed`, `Unreachable` and `OSError`."""
        infos = await run_on_thread(
            partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM),
            self._resolving,
        )
        resolved = tuple(dict.fromkeys(str(info[4][0]) for info in infos))
        if not private and not all(map(is_public, resolved)):
            log.warning(
                "%s has an address that is not public: it is not fetched from", address.host
            )
            raise NotAllowed("this server fetches no images from there")
        # Before a stream is open: SSL_CERT_FILE may name no file. The first takes 0.2 s.
        is_tls = address.scheme == "https"
        context = await run_on_thread(self._context, self._resolving) if is_tls else None
        for ip in resolved[:MAX_ADDRESSES]:
            with suppress(OSError), trio.move_on_after(CONNECT_S):
                stream = await trio.open_tcp_stream(ip, address.port)
                if context is None:
                    return stream
                return trio.SSLStream(
                    stream, context, server_hostname=address.host, https_compatible=True
                )
        raise Unreachable("the other server cannot be reached")

    def _context(self) -> SSLContext:
        if self._tls is None:
            import httpx2  # Takes a while, and most servers fetch nothing.

            # The system's authorities, or those of SSL_CERT_FILE.
            self._tls = httpx2.create_ssl_context()
        return self._tls


def _not_allowed(fault: NotAllowed, path: str) -> RequestFailed:
    message = f"{path}: {fault}; send the image itself, or one of --allowed-media-domains"
    return bad_request(message, path, "media_not_allowed")


async def _request(
    stream: trio.abc.Stream, address: MediaAddress, path: str, hold: Hold
) -> bytes | MediaAddress:
    """Return the file, or where it is instead. Raises `NotAllowed`, `Unreachable`, `RequestFailed`,
    `h11.RemoteProtocolError` and Trio's errors."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    headers = {
        "Host": address.authority,
        "User-Agent": f"trouper/{VERSION}",
        "Accept": "image/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    request = h11.Request(method="GET", target=address.target, headers=[*headers.items()])
    await stream.send_all(connection.send(request) or b"")
    connection.send(h11.EndOfMessage())
    head = await _next_event(connection, stream)
    while isinstance(head, h11.InformationalResponse):
        head = await _next_event(connection, stream)
    if not isinstance(head, h11.Response):
        raise Unreachable("the other server ended the connection")
    fields = {name: value.decode("latin-1") for name, value in head.headers}
    if head.status_code in REDIRECTS and b"location" in fields:
        return address.redirected(fields[b"location"])
    if head.status_code != 200:
        raise Unreachable(f"the other server answered {head.status_code}")
    _check_fields(fields, path)
    return await _read_file(connection, stream, path, hold)


async def _next_event(connection: h11.Connection, stream: trio.abc.Stream) -> object:
    event = connection.next_event()
    while event is h11.NEED_DATA:
        connection.receive_data(bytes(await stream.receive_some(PIECE)))
        event = connection.next_event()
    return event


def _check_fields(fields: Mapping[bytes, str], path: str) -> None:
    """Refuse what need not be read. Raises `Unreachable` and `RequestFailed` (400)."""
    # Nothing is ever unpacked: a small answer could become a large one.
    if fields.get(b"content-encoding", "identity").strip().lower() != "identity":
        raise Unreachable("the other server sent it compressed")
    kind = fields.get(b"content-type", "").partition(";")[0].strip().lower()
    try:
        check_type("" if kind == S3_TYPE else kind, path)
    except RequestFailed:
        message = f"{path}: the other server says that it is no image in a known format"
        raise bad_request(message, path, "image_format") from None
    length = fields.get(b"content-length", "0")
    if int(length) > MAX_IMAGE_BYTES:
        raise too_large(path)


async def _read_file(
    connection: h11.Connection, stream: trio.abc.Stream, path: str, hold: Hold
) -> bytes:
    pieces, size = list[bytes](), 0
    while isinstance(event := await _next_event(connection, stream), h11.Data):
        size += len(event.data)
        if size > MAX_IMAGE_BYTES:
            raise too_large(path)
        hold(len(event.data))
        pieces.append(bytes(event.data))
    if not size:
        raise Unreachable("the other server sent nothing")
    return b"".join(pieces)
