"""The handshake: how a follower joins the group of ranks, and what must agree with rank 0.

The order of its steps matters, since each protects the next.

1. *Invitation.* Rank 0 sends its address to all ranks by a collective.
2. *Authentication*, in both directions, before any message is parsed.
3. *Hello.* The wire version is compared first, then rank, package versions and flags.
4. *Refusal.* Both processes end with one reason, and the launcher does not try again.
5. *Heartbeats* begin before the load, which may take longer than `--rank-timeout-s`.
6. *Ready.* Rank 0 compares all model cards.
7. *Plans* follow the last `Ready`. Nobody can join later, having missed plans.

"""

from __future__ import annotations

import json
import secrets
from collections.abc import Container, Iterable, Mapping

import attrs
import trio

from trouper.actors.ranks.rank_link import Link, LinkFailed
from trouper.protocol.link import Hello
from trouper.protocol.model import ModelCard
from trouper.protocol.ranks import Joined
from trouper.protocol.settings import Settings
from trouper.protocol.version import installed_version
from trouper.protocol.wire import VERSION

HELLO_S = 5.0
"""Time limit for authentication and `Hello`."""
SECRET_BYTES = 32
Secret = bytes
"""Shared by all ranks; empty: comes with the invitation."""
MAY_DIFFER = (
    "model",
    "draft_model",
    "adapter_path",
    "ssd_cache_dir",
    "control_host",
    "rank_secret_file",
)
"""Settings that depend on the machine. Files are compared by content."""
PACKAGES = ("mlx", "mlx-lm")
"""Packages whose versions change numbers, and thus tokens."""
# Without the fingerprint, which names a rank's own shard; engines compare the files while loading.
SAME_OF_CARDS = ("architecture", "vocab_size", "context_length", "dtype", "batching", "kv")


@attrs.frozen
class Invitation:
    """Address of rank 0, and the secret unless ranks have one."""

    host: str
    port: int
    secret: bytes = attrs.field(repr=False)

    @classmethod
    def to(cls, host: str, port: int, own: Secret = b"") -> Invitation:
        """`own`: the ranks' secret, which is not sent."""
        # Whoever reaches MLX's ring can take part. Without secrets in files (which `trouper launch`
        # makes on one machine) the network of the ring must be trusted.
        return cls(host, port, b"" if own else secrets.token_bytes(SECRET_BYTES))

    def encode(self) -> bytes:
        return json.dumps([self.host, self.port, self.secret.hex()]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        host, port, secret = json.loads(data)
        return cls(host, port, bytes.fromhex(secret))


def shared_flags(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Settings that must be the same on all ranks, as text."""
    names = [field.name for field in attrs.fields(Settings) if field.name not in MAY_DIFFER]
    return tuple((name, str(getattr(settings, name))) for name in names)


def versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, installed_version(name, "none")) for name in PACKAGES)


# -- a follower ----------------------------------------------------------------------------------


async def join_leader(
    stream: trio.abc.Stream, joined: Joined, settings: Settings, own: Secret = b""
) -> Link:
    """Authenticate to rank 0 and send `Hello`. `own`: this rank's secret. Raises `LinkFailed`."""
    invited = Invitation.decode(joined.invitation).secret
    if bool(own) == bool(invited):
        here, there = ("this rank", "rank 0") if own else ("rank 0", "this rank")
        raise LinkFailed(f"{here} has a --rank-secret-file, {there} has none: give it to all ranks")
    # A comparison of 32 bytes is safer to expose than a decoder.
    link = await Link.authenticate(stream, own or invited, "follower")
    hello = Hello(
        rank=joined.rank,
        size=joined.size,
        version=VERSION,
        flags=shared_flags(settings),
        versions=versions(),
    )
    await link.send(hello)
    return link


# -- rank 0 --------------------------------------------------------------------------------------


async def accept_follower(stream: trio.abc.Stream, secret: bytes) -> tuple[Link, Hello]:
    """Authenticate a connection and receive its `Hello`. Raises `LinkFailed`."""
    try:
        with trio.fail_after(HELLO_S):
            link = await Link.authenticate(stream, secret, "leader")
            hello = await link.receive()
    except trio.TooSlowError:
        raise LinkFailed("it was silent") from None
    if not isinstance(hello, Hello):
        raise LinkFailed(f"it began with {type(hello).__name__}")
    return link, hello


def reason_to_refuse(hello: Hello, settings: Settings, ranks: Container[int]) -> str:
    """Reason why a follower cannot join; "" if admitted. `ranks`: ranks that have joined."""
    # All of this precedes the weights: a wrong flag costs seconds. Other fields mean the same only
    # for equal versions.
    ours, theirs = dict(shared_flags(settings)), dict(hello.flags)
    if hello.version != VERSION or ours.keys() != theirs.keys():
        return (
            f"rank {hello.rank} runs another version of Trouper: install the same on all machines"
        )
    if hello.rank in ranks:
        return f"two processes are rank {hello.rank}"
    if differ := _difference(versions(), dict(hello.versions)):
        name, here, there = differ
        return (
            f"rank {hello.rank} has {name} {there}, rank 0 has {here}: install the same on all "
            "machines"
        )
    if differ := _difference(ours.items(), theirs):
        name, here, there = differ
        flag = "--" + name.replace("_", "-")
        return (
            f"rank {hello.rank} has {flag} {there}, rank 0 has {here}: start all ranks with the "
            "same flags"
        )
    return ""


def _difference(
    ours: Iterable[tuple[str, str]], theirs: Mapping[str, str]
) -> tuple[str, str, str] | None:
    pairs = ((name, here, theirs.get(name, "none")) for name, here in ours)
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


def card_difference(ours: ModelCard, theirs: ModelCard) -> str:
    """Difference of a follower's model to rank 0's; "" if the same."""
    for name in SAME_OF_CARDS:
        if getattr(ours, name) != getattr(theirs, name):
            return (
                f"has loaded another model: its {name} is {getattr(theirs, name)}, rank 0's "
                f"{getattr(ours, name)}"
            )
    return ""
