"""A connection between two ranks: the proof that both are of the group, then messages.

The secret came to both through the group itself. Each proves that it has it, over a nonce of the other, before it
believes a byte; each signs with its own role, so that nobody's own proof can be played back to him.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Literal, Self

import attrs
import trio

from trouper.protocol.link import Message
from trouper.protocol.wire import LENGTH, NotUnderstood, body_length, decode, encode

Role = Literal["leader", "follower"]
OTHER: dict[Role, Role] = {"leader": "follower", "follower": "leader"}
SECRET_BYTES = 32
PROOF_BYTES = 32
READ_BYTES = 2**16


class LinkFailed(Exception):
    """The other end has gone, does not read, or is not of this group. The message says which."""


@attrs.frozen
class Invitation:
    """Address of rank 0, and the secret by which ranks authenticate each other."""

    host: str
    port: int
    secret: bytes = attrs.field(repr=False)

    @classmethod
    def to(cls, host: str, port: int) -> Invitation:
        return cls(host, port, secrets.token_bytes(SECRET_BYTES))

    def encode(self) -> bytes:
        return json.dumps([self.host, self.port, self.secret.hex()]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        host, port, secret = json.loads(data)
        return cls(host, port, bytes.fromhex(secret))


@attrs.define(eq=False)
class Link:
    """Messages over a stream. One task receives, one sends."""

    _stream: trio.abc.Stream
    heard_at: float = attrs.field(factory=trio.current_time)
    """Time of the last message from the other end."""
    _held: bytearray = attrs.field(factory=bytearray)
    """Received bytes that were not read yet."""

    @classmethod
    async def proved(cls, stream: trio.abc.Stream, secret: bytes, role: Role) -> Self:
        """Authenticate a stream. Raises `LinkFailed` if the other end does not have the secret. The caller limits the duration."""
        nonce = secrets.token_bytes(PROOF_BYTES)
        link = cls(stream)
        await link._write(nonce)
        theirs = await link._exactly(PROOF_BYTES)
        await link._write(_proof(secret, role, nonce, theirs))
        if not hmac.compare_digest(await link._exactly(PROOF_BYTES), _proof(secret, OTHER[role], theirs, nonce)):
            raise LinkFailed("who connected is not of this group")
        return link

    async def send(self, message: Message) -> None:
        """Raises `LinkFailed`."""
        await self._write(encode(message))

    async def send_frame(self, frame: bytes) -> None:
        """Send a message that was encoded once for all followers. Raises `LinkFailed`."""
        await self._write(frame)

    async def receive(self) -> Message:
        """Raises `LinkFailed` when the other end has gone."""
        try:
            message = decode(await self._exactly(body_length(await self._exactly(LENGTH.size))))
        except NotUnderstood as error:
            raise LinkFailed(str(error)) from None
        self.heard_at = trio.current_time()
        return message

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def _write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkFailed("its connection ended") from error

    async def _exactly(self, wanted: int) -> bytes:
        while len(self._held) < wanted:
            try:
                more = await self._stream.receive_some(max(READ_BYTES, wanted - len(self._held)))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkFailed("its connection ended") from error
            if not more:
                raise LinkFailed("its connection ended")
            self._held += more
        data = bytes(self._held[:wanted])
        del self._held[:wanted]
        return data


def _proof(secret: bytes, role: Role, own: bytes, theirs: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + own + theirs, "sha256")
