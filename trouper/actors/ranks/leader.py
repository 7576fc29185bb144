"""Rank 0's end of the control links: the connected followers, their messages, and the detection of a lost rank.

A collective that never ends cannot be cancelled, so all that finds a loss runs beside the engine: a connection that ends,
beats that stay out, a step that takes too long, a follower that says what is wrong with it. Whichever comes first is the
reason, and sets `lost`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import attrs
import trio

from trouper.actors.ranks.grammar_broadcast import GrammarSpreader
from trouper.actors.ranks.rank_link import Invitation, Link, LinkFailed
from trouper.protocol.health import DirectoryStats, RanksStats, RankState, RankStats
from trouper.protocol.link import (
    Compile,
    Compiled,
    Crashed,
    Fetch,
    Fetched,
    Heartbeat,
    Hello,
    Leave,
    LoadFailed,
    LogRecord,
    Missing,
    Ready,
    Refused,
    StateMismatch,
    WriteDone,
)
from trouper.protocol.model import LoadedModel, MemoryStats, ModelCard
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.wire import VERSION, encode

log = logging.getLogger("trouper.ranks")
HEARTBEAT_S = 0.5
HELLO_S = 5.0
"""Time limit for a connection to authenticate."""
COMING_S = 60.0
"""Time limit for all followers to connect, once the group is formed."""
LEAVING_S = 5.0
"""Time limit for followers to end after their last plan."""
OUTBOX = 256
"""Messages on their way to one follower. More are not owed to anybody who still reads."""
DISK_NEWS = 1024
"""Maximum number of unread reports of followers about their disks. More are dropped; then no request waits for them, either."""
MAY_DIFFER = ("model", "adapter_path", "ssd_cache_dir", "control_host")
"""Settings that are a matter of the machine: what lies behind them is compared by its content."""
SAME_OF_CARDS = ("architecture", "vocab_size", "context_length", "dtype", "batching", "kv")
"""Fields of the model cards that must be equal. The engines have already agreed on the files that they loaded, and a fingerprint
is that of one rank's shard."""


class RankLost(Exception):
    """The group of ranks has ended. The message says why."""


def flags_of(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Settings that must be the same on all ranks."""
    names = [field.name for field in attrs.fields(Settings) if field.name not in MAY_DIFFER]
    return tuple((name, str(getattr(settings, name))) for name in names)


@attrs.define(eq=False)
class FollowerConnection:
    """The connection of one follower, and its last reported state."""

    rank: int
    link: Link
    outbox: trio.MemorySendChannel[bytes]
    state: RankState = "loading"
    step: int = -1
    memory: MemoryStats | None = None
    card: ModelCard | None = None
    directory: DirectoryStats | None = None

    @property
    def stats(self) -> RankStats:
        return RankStats(
            rank=self.rank,
            state=self.state,
            step=self.step,
            heard_at=self.link.heard_at,
            directory=self.directory,
        )


DiskReport = Fetched | WriteDone | Missing | DirectoryStats
"""Message of a follower about its disk."""


class Leader:
    """The links of rank 0. `run` for its whole life; every other method may be called meanwhile."""

    def __init__(self, settings: Settings, host: str = "127.0.0.1", heartbeat_s: float = HEARTBEAT_S) -> None:
        self.stats = Watch(RanksStats())
        self.joined = trio.Event()
        self.lost = trio.Event()
        self.unusable = False
        """A second try would be lost in the same way."""
        self.size = 1
        self._settings, self._host, self._heartbeat_s = settings, host, heartbeat_s
        self._secret = b""
        self._followers: dict[int, FollowerConnection] = {}
        self._changed = trio.Event()
        self._disks, self.disks = trio.open_memory_channel[tuple[int, DiskReport]](DISK_NEWS)
        """(rank, what it tells), of a directory only whether it is in use."""
        self._unanswered: deque[tuple[Plan, float]] = deque()
        """Plans and when they, or the answer before theirs, came."""
        self._answered = -1
        self.grammars = GrammarSpreader(self._tell_all, settings.grammar_timeout_s)

    @property
    def reason(self) -> str:
        """Reason why the group ended; "" while it runs."""
        return self.stats.latest.lost

    async def run(self, *, task_status: trio.TaskStatus[bytes] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen; starts with the invitation. Raises OSError if that address is not ours."""
        listeners = await trio.open_tcp_listeners(0, host=self._host)
        port: int = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            task_status.started(self.invite(self._host, port))
            await trio.serve_listeners(self.attend, listeners, handler_nursery=nursery)

    def invite(self, host: str, port: int) -> bytes:
        invitation = Invitation.to(host, port)
        self._secret = invitation.secret
        return invitation.encode()

    def lose(self, reason: str, *, unusable: bool = False) -> None:
        """The group ends. The first reason is the one."""
        if not self.lost.is_set():
            log.critical("the group of ranks ends: %s", reason)
            self.unusable = unusable
            self.stats.publish(attrs.evolve(self.stats.latest, lost=reason))
            self.lost.set()
            for follower in self._followers.values():  # Else the others would only see that rank 0 has gone, too.
                if follower.state not in ("left", "lost"):
                    self._post(follower, encode(Leave(reason, unusable)))
            self._tell_change()

    async def crashed(self, error: BaseException) -> None:
        """Rank 0's own engine has raised, or what steers it. A collective that fails is only the consequence: the links say
        of what. Returns when the group is lost."""
        with trio.move_on_after(HEARTBEAT_S):
            await self.lost.wait()
        if not self.lost.is_set():
            log.error("rank 0 crashed", exc_info=error)
            self.lose(f"rank 0: {type(error).__name__}: {error}")

    # -- starting --------------------------------------------------------------------------------

    async def gather(self, size: int) -> None:
        """Wait until all followers have connected. Returns also when the group is lost."""
        self.size = size
        self.joined.set()
        with trio.move_on_after(COMING_S):
            await self._until(lambda: len(self._followers) == size - 1)
            return
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in self._followers)
        self.lose(f"rank {missing} did not connect to {self._host} within {COMING_S:g} s; see --control-host")

    async def all_ready(self, model: LoadedModel) -> LoadedModel:
        """Wait until all have loaded the same. What is cached must fit everybody. Raises `RankLost`."""
        await self._until(lambda: all(follower.card is not None for follower in self._followers.values()))
        cards = [follower.card for follower in self._followers.values() if follower.card is not None]
        for follower in self._followers.values():
            if follower.card is not None and (difference := _difference(model.card, follower.card)):
                self.lose(f"rank {follower.rank} {difference}", unusable=True)
        if self.lost.is_set():
            raise RankLost(self.reason)
        log.info("all %d ranks are ready", self.size)
        cache_bytes = min(card.cache_bytes for card in (model.card, *cards))
        return attrs.evolve(model, card=attrs.evolve(model.card, cache_bytes=cache_bytes))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.lost.is_set():
            await self._changed.wait()

    def _tell_change(self) -> None:
        self._publish()
        self._changed.set()
        self._changed = trio.Event()

    # -- a follower --------------------------------------------------------------------------------

    async def attend(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end."""
        try:
            with trio.fail_after(HELLO_S):
                link = await Link.proved(stream, self._secret, "leader")
                hello = await link.receive()
        except (LinkFailed, trio.TooSlowError) as error:
            reason = "it was silent" if isinstance(error, trio.TooSlowError) else error
            log.warning("a connection to the control link was refused: %s", reason)
            await trio.aclose_forcefully(stream)
            return
        try:
            if not isinstance(hello, Hello):
                log.warning("a connection to the control link was refused: it began with %s", type(hello).__name__)
            elif wrong := self._fault(hello):
                await link.send(Refused(wrong))
                self.lose(wrong, unusable=True)
            else:
                await self._accompany(hello.rank, link)
        finally:
            await link.close()

    async def _accompany(self, rank: int, link: Link) -> None:
        outbox, frames = trio.open_memory_channel[bytes](OUTBOX)
        follower = self._followers[rank] = FollowerConnection(rank, link, outbox)
        log.info("rank %d is here", rank)
        self._tell_change()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, follower, frames)
                nursery.start_soon(send_heartbeats, outbox, self._heartbeat, self._heartbeat_s)
                try:
                    await self._hear(follower)
                except LinkFailed as failed:
                    self._end_connection(follower, str(failed))
                nursery.cancel_scope.cancel()
        finally:
            outbox.close()
            self._tell_change()

    def _end_connection(self, follower: FollowerConnection, why: str) -> None:
        leaves = follower.state == "left"
        follower.state = "left" if leaves else "lost"
        if not leaves:
            self.lose(f"rank {follower.rank}: {why}")

    async def _send(self, follower: FollowerConnection, frames: trio.MemoryReceiveChannel[bytes]) -> None:
        async for frame in frames:
            try:
                with trio.fail_after(self._settings.rank_timeout_s):
                    await follower.link.send_frame(frame)
            except trio.TooSlowError:
                self._end_connection(
                    follower, f"it has not read for {self._settings.rank_timeout_s:g} s (--rank-timeout-s)"
                )
                return
            except LinkFailed:  # What it said at the end may still lie here unread: whoever hears it says why.
                return

    async def _hear(self, follower: FollowerConnection) -> None:
        while True:
            message = await follower.link.receive()
            match message:
                case Heartbeat():
                    self._take_heartbeat(follower, message)
                case Fetched() | WriteDone() | Missing():
                    self._pass_on(follower, message)
                case Compiled():
                    self.grammars.heard(follower.rank, message)
                case LogRecord(level=level, text=text):
                    log.log(level, "rank %d: %s", follower.rank, text)
                case Ready(card=card):
                    follower.state, follower.card = "ready", card
                    log.info("rank %d is ready", follower.rank)
                    self._tell_change()
                case LoadFailed(reason=reason):
                    self.lose(f"rank {follower.rank}: {reason}", unusable=True)
                case Crashed(reason=reason):
                    self.lose(f"rank {follower.rank} crashed: {reason}")
                case StateMismatch():
                    self.lose(
                        f"rank {follower.rank} differs at step {message.step}: its {message.field} are not what the plan "
                        f"expects ({message.found:016x}, not {message.expected:016x})"
                    )
                case _:
                    raise LinkFailed(f"it sent {type(message).__name__}, which is not for rank 0")

    def _take_heartbeat(self, follower: FollowerConnection, heartbeat: Heartbeat) -> None:
        before, follower.directory = follower.directory, heartbeat.directory
        follower.step, follower.memory = heartbeat.step, heartbeat.memory
        if heartbeat.directory is not None and _in_use(heartbeat.directory) != (before and _in_use(before)):
            self._pass_on(follower, heartbeat.directory)

    def _pass_on(self, follower: FollowerConnection, news: DiskReport) -> None:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._disks.send_nowait((follower.rank, news))

    def _fault(self, hello: Hello) -> str:
        """Reason why a follower cannot join the group; "" if it can."""
        if hello.version != VERSION:
            return f"rank {hello.rank} runs another version of Trouper: install the same on all machines"
        if hello.rank in self._followers:
            return f"two processes are rank {hello.rank}"
        for (name, ours), (_, theirs) in zip(flags_of(self._settings), hello.flags, strict=True):
            if ours != theirs:
                flag = "--" + name.replace("_", "-")
                return f"rank {hello.rank} has {flag} {theirs}, rank 0 has {ours}: start all ranks with the same flags"
        return ""

    # -- plans -----------------------------------------------------------------------------------

    def tell(self, plan: Plan) -> None:
        """Send a plan to every follower, in order. Never waits: a follower that does not read is lost."""
        if plan.load:  # Each rank has its own shard of it.
            plan = attrs.evolve(plan, load=tuple(attrs.evolve(load, payload=()) for load in plan.load))
        self._unanswered.append((plan, trio.current_time()))
        self._tell_all(plan)

    def fetch(self, fetch: Fetch) -> frozenset[int]:
        """Send a `Fetch` to every follower, in order with the plans. Returns their ranks."""
        return self._tell_all(fetch)

    def directories(self) -> dict[int, DirectoryStats | None]:
        """Every follower's, by its rank; None until it has looked."""
        return {rank: follower.directory for rank, follower in sorted(self._followers.items())}

    def _tell_all(self, message: Plan | Fetch | Compile) -> frozenset[int]:
        """Send a message to every follower. Returns their ranks."""
        frame = encode(message)
        for follower in self._followers.values():
            self._post(follower, frame)
        return frozenset(self._followers)

    def answered(self, stepped: Stepped) -> None:
        """Record that rank 0 has completed a step."""
        self._answered = stepped.step
        self._unanswered.popleft()
        if self._unanswered:
            self._unanswered[0] = self._unanswered[0][0], trio.current_time()

    def _post(self, follower: FollowerConnection, frame: bytes) -> None:
        try:
            follower.outbox.send_nowait(frame)
        except trio.WouldBlock:
            self._end_connection(follower, f"{OUTBOX} messages wait for it")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end_connection(follower, "its connection ended")

    def memory(self, own: MemoryStats) -> MemoryStats:
        """Memory of the rank that has least left, since no rank can compute what that one has no room for. Resident memory is always
        this process's own: that of another process now and then would look like a burst."""
        known = [own, *(follower.memory for follower in self._followers.values() if follower.memory is not None)]
        least_left = max(known, key=lambda stats: stats.active_bytes / stats.limit_bytes)
        return attrs.evolve(least_left, resident_bytes=own.resident_bytes)

    async def leave(self) -> None:
        """No plan comes any more: let followers end, and wait for them."""
        for follower in self._followers.values():
            if follower.state == "ready":
                follower.state = "left"
                self._post(follower, encode(Leave()))
        with trio.move_on_after(LEAVING_S):
            while any(follower.outbox.statistics().open_receive_channels for follower in self._followers.values()):
                await self._changed.wait()

    # -- watching --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look now and then who is silent, and whether the oldest plan is answered."""
        looked = trio.current_time()
        while not self.lost.is_set():
            await trio.sleep(self._heartbeat_s)
            now = trio.current_time()
            if (
                now - looked > self._settings.rank_timeout_s / 2
            ):  # We were away ourselves: what they said still lies here.
                for follower in self._followers.values():
                    follower.link.heard_at = now
            looked = now
            self._look(now)
            self._publish()

    def _look(self, now: float) -> None:
        timeout_s, limit_s = self._settings.rank_timeout_s, self._settings.collective_timeout_s
        for follower in self._followers.values():
            if follower.state != "left" and now - follower.link.heard_at > timeout_s:
                self._end_connection(follower, f"it has been silent for {timeout_s:g} s (--rank-timeout-s)")
        if self._unanswered and now - self._unanswered[0][1] > limit_s:
            steps = ", ".join(f"rank {one.rank}: {one.step}" for one in self._stats().ranks)
            step = self._unanswered[0][0].step
            self.lose(
                f"step {step} has not ended for {limit_s:g} s (--collective-timeout-s); the last steps done: {steps}"
            )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._answered)

    def _stats(self) -> RanksStats:
        own = RankStats(rank=0, state="ready", step=self._answered, heard_at=trio.current_time())
        ranks = sorted((follower.stats for follower in self._followers.values()), key=lambda stats: stats.rank)
        return RanksStats(ranks=(own, *ranks), lost=self.reason)

    def _publish(self) -> None:
        self.stats.publish(self._stats())


async def send_heartbeats(
    outbox: trio.MemorySendChannel[bytes], heartbeat: Callable[[], Heartbeat], every_s: float
) -> None:
    """Send heartbeats periodically. A full outbox needs none, since its messages are signs of life, too."""
    while True:
        try:
            outbox.send_nowait(encode(heartbeat()))
        except trio.WouldBlock:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        await trio.sleep(every_s)


def _in_use(directory: DirectoryStats) -> tuple[bool, str]:
    return directory.attached, directory.reason


def _difference(ours: ModelCard, theirs: ModelCard) -> str:
    for name in SAME_OF_CARDS:
        if getattr(ours, name) != getattr(theirs, name):
            return f"has loaded another model: its {name} is {getattr(theirs, name)}, rank 0's {getattr(ours, name)}"
    return ""
