"""HTTP/1.1 as RFC 9112 has it, without what h11 tolerates in a head.

A server behind a proxy must find the end of a request where the proxy finds it: otherwise one
client's bytes become the head of another one's request. What two programs read differently is
refused (RFC 9112, 2.2, 5.2, 6.1 and 11.2).
"""

from __future__ import annotations

import re

import h11

CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters other than those that separate lines and words."""
FOLDED = re.compile(rb"\n[ \t]")


class StrictHttp(h11.Connection):
    """A server's connection that refuses ambiguous heads as it refuses invalid ones."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """As h11's. Raises `h11.RemoteProtocolError` also for an ambiguous head."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        unread, _ = self.trailing_data
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = unread[: len(unread) - len(self.trailing_data[0])]
            if fault := fault_of(head, event):
                raise h11.RemoteProtocolError(fault)
        return event


def fault_of(head: bytes, request: h11.Request) -> str:
    """Return what is ambiguous in a head that h11 has read; empty: nothing."""
    if head.count(b"\n") != head.count(b"\r\n"):
        return "a line ends without CR"
    if FOLDED.search(head):
        return "a header is folded into several lines"
    if CONTROLS.search(head):
        return "a header has a control character"
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return ""
    if b"content-length" in names:
        return "it has both Content-Length and Transfer-Encoding"
    return "Transfer-Encoding is not of HTTP/1.0" if request.http_version < b"1.1" else ""
