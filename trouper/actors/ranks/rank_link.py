"""The control link: an authenticated connection for messages between rank 0 and a follower."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Literal, Self

import attrs
import trio

from trouper.protocol.link import Heartbeat, Message
from trouper.protocol.wire import LENGTH, NotUnderstood, body_length, decode, encode

Role = Literal["leader", "follower"]
OTHER: dict[Role, Role] = {"leader": "follower", "follower": "leader"}
PROOF_BYTES = 32
READ_BYTES = 2**16
LAST_MESSAGES_S = 1.0  # Time for the last messages before a lost group ends.
LEAVING_S = 5.0  # Time limit for followers to end after their last plan.


class LinkFailed(Exception):
    """The connection ended, or the other end does not belong to this group, as the message says."""


class RankLost(Exception):
    """The group of ranks has ended, for the reason in the message."""


@attrs.define(eq=False)
class Link:
    """Messages over a stream. One task receives, one sends."""

    _stream: trio.abc.Stream
    heard_at: float = attrs.field(factory=trio.current_time)
    # Received bytes that are not decoded yet.
    _received: bytearray = attrs.field(factory=bytearray)

    @classmethod
    async def authenticate(cls, stream: trio.abc.Stream, secret: bytes, role: Role) -> Self:
        """Raises `LinkFailed` if the other end lacks the secret. The caller limits the duration."""
        # Each end sends a nonce, then an HMAC of both nonces and its role under the shared secret,
        # and parses no message before the other's HMAC is verified. The role defeats reflection of
        # an HMAC to its sender.
        nonce = secrets.token_bytes(PROOF_BYTES)
        link = cls(stream)
        await link.send_frame(nonce)
        peer_nonce = await link._read(PROOF_BYTES)
        await link.send_frame(_proof(secret, role, nonce, peer_nonce))
        if not hmac.compare_digest(
            await link._read(PROOF_BYTES), _proof(secret, OTHER[role], peer_nonce, nonce)
        ):
            raise LinkFailed("who connected is not of this group")
        return link

    async def send(self, message: Message) -> None:
        await self.send_frame(encode(message))

    async def receive(self) -> Message:
        try:
            message = decode(await self._read(body_length(await self._read(LENGTH.size))))
        except NotUnderstood as error:
            raise LinkFailed(str(error)) from None
        self.heard_at = trio.current_time()
        return message

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def send_frame(self, frame: bytes) -> None:
        try:
            await self._stream.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkFailed("its connection ended") from error

    async def _read(self, nbytes: int) -> bytes:
        while len(self._received) < nbytes:
            try:
                received = await self._stream.receive_some(
                    max(READ_BYTES, nbytes - len(self._received))
                )
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkFailed("its connection ended") from error
            if not received:
                raise LinkFailed("its connection ended")
            self._received += received
        data = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return data


def _proof(secret: bytes, role: Role, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + sender_nonce + receiver_nonce, "sha256")


HEARTBEAT_S = 0.5


def heartbeat_interval(timeout_s: float) -> float:
    """Interval of heartbeats and of checks: several within the time limit."""
    return min(HEARTBEAT_S, timeout_s / 4)


async def send_heartbeats(
    outbox: trio.MemorySendChannel[bytes], heartbeat: Callable[[], Heartbeat], every_s: float
) -> None:
    """Send heartbeats periodically, unless the outbox is full of other signs of life."""
    while True:
        try:
            outbox.send_nowait(encode(heartbeat()))
        except trio.WouldBlock:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        await trio.sleep(every_s)


async def wait_until_silent(link: Link, timeout_s: float, every_s: float) -> None:
    # A late check means that this process was suspended, and messages may wait in the socket, so
    # the link gets a fresh time limit.
    checked_at = trio.current_time()
    while trio.current_time() - link.heard_at <= timeout_s:
        await trio.sleep(every_s)
        now = trio.current_time()
        if now - checked_at > timeout_s / 2:
            link.heard_at = now
        checked_at = now
