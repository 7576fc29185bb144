"""Addresses that a server listens on."""

from __future__ import annotations

import errno
import socket

# What is connected to instead
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


class CannotListenError(Exception):
    """`reason`: the system's error number."""

    def __init__(self, message: str, reason: int | None) -> None:
        super().__init__(message)
        self.reason = reason


def require_address(host: str, port: int) -> None:
    """Try an address before a model is loaded for minutes."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    except UnicodeError as error:  # A label of the name is empty or too long.
        raise CannotListenError(
            f"cannot listen on {host}:{port}: no host has such a name", None
        ) from error


def cannot_listen(host: str, port: int, error: OSError) -> CannotListenError:
    remedy = "; choose another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
    return CannotListenError(
        f"cannot listen on {host}:{port}: {error.strerror or error}{remedy}", error.errno
    )


def url_to(host: str, port: int) -> str:
    address = EVERYWHERE.get(host, host)
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"
