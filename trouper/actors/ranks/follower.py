"""A follower: RankMirror and ModelStepper, and a disk of its own. It decides nothing and speaks no HTTP.

It replays rank 0's plans, says what it does and what goes wrong, and ends when rank 0 says so or has gone. Its engine may
then be blocked in a collective for ever: `ended` is set beside it, so that whoever runs the process can end it.
"""

from __future__ import annotations

import logging

import trio

from trouper.actors.model_stepper import step_model
from trouper.actors.ranks.follower_disk import FollowerDisk
from trouper.actors.ranks.group_lifecycle import LAST_MESSAGES_S
from trouper.actors.ranks.leader import HEARTBEAT_S, HELLO_S, LEAVING_S, RankLost, flags_of, send_heartbeats
from trouper.actors.ranks.rank_link import Invitation, Link, LinkFailed
from trouper.actors.runtime.supervision import innermost
from trouper.actors.ssd_writer import DiskWriter, write_to_disk
from trouper.protocol.health import DirectoryStats
from trouper.protocol.link import (
    Compile,
    Compiled,
    Crashed,
    Fetch,
    Heartbeat,
    Hello,
    Leave,
    LoadFailed,
    LogRecord,
    Message,
    Ready,
    Refused,
    StateMismatch,
)
from trouper.protocol.model import Engine, Tokenizer
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.problems import ModelUnusable, RequestFailed
from trouper.protocol.ranks import Joined, RankDiffers
from trouper.protocol.settings import Settings
from trouper.protocol.wire import VERSION, encode

log = logging.getLogger("trouper.ranks")
PLANS_AHEAD = 64
"""Maximum number of plans that wait for a follower's engine. Plans without work need no collective, so rank 0 may be ahead."""
LAST_WRITES_S = 2.0
"""Maximum wait at the end for writes in flight to the disk."""
OUTBOX = 1024


class Follower:
    """The actor's state, and its end."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        heartbeat_s: float = HEARTBEAT_S,
        *,
        disk_writer: DiskWriter = write_to_disk,
    ) -> None:
        self._disk_writer = disk_writer
        self.joined = trio.Event()
        self.ended = trio.Event()
        self.reason = ""
        """Reason why the follower ended; "" after a regular end."""
        self.unusable = False
        """Whether a second try would fail in the same way."""
        self.linked = False
        """Whether the follower is connected, so that rank 0 decides when it ends."""
        self._settings, self._engine, self._heartbeat_s = settings, engine, heartbeat_s
        self._outbox, self._frames = trio.open_memory_channel[bytes](OUTBOX)
        self._step = -1
        self._sent = trio.Event()
        self._disk: FollowerDisk | None = None
        """The disk of this rank; None until the model is loaded."""
        self._reported_directory: DirectoryStats | None = None
        self._tokenizer: Tokenizer | None = None

    def say(self, level: int, text: str) -> bool:
        """Send a log record to rank 0's terminal. False if rank 0 is not connected."""
        return self.linked and self._post(LogRecord(level, text))

    async def run(self) -> None:
        """Join, load, follow. Returns when rank 0 leaves. Raises `RankLost` or `ModelUnusable`; `ended` is set before, since
        raising may have to wait for an engine that never ends."""
        async with trio.open_nursery() as thread:
            await thread.start(self._engine.run)
            joined = await self._join()
            self.joined.set()
            link = await self._connect(joined)
            try:
                await self._follow(link, joined)
            finally:
                await link.close()
            self._end("")
            thread.cancel_scope.cancel()

    async def _join(self) -> Joined:
        try:
            return await self._engine.join(b"")
        except ModelUnusable:
            raise
        except Exception as error:
            raise self._end(f"a rank was lost while they met: {error}") from error

    async def meet(self, stream: trio.abc.Stream, joined: Joined) -> Link:
        """Authenticate to rank 0 and send `Hello`."""
        link = await Link.proved(stream, Invitation.decode(joined.invitation).secret, "follower")
        await link.send(Hello(joined.rank, joined.size, VERSION, flags_of(self._settings)))
        return link

    async def _connect(self, joined: Joined) -> Link:
        invitation = Invitation.decode(joined.invitation)
        try:
            with trio.fail_after(HELLO_S):
                stream = await trio.open_tcp_stream(invitation.host, invitation.port)
                return await self.meet(stream, joined)
        except (OSError, LinkFailed, trio.TooSlowError) as error:
            reason = f"rank 0 is not to be reached at {invitation.host}:{invitation.port} (--control-host): {error}"
            raise self._end(reason) from error

    async def _follow(self, link: Link, joined: Joined) -> None:
        self.linked = True
        mirrored, plans = trio.open_memory_channel[Plan](PLANS_AHEAD)
        results, answers = trio.open_memory_channel[Stepped](PLANS_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, link)
            nursery.start_soon(send_heartbeats, self._outbox, self._heartbeat, self._heartbeat_s)
            nursery.start_soon(self._hear, link, mirrored, nursery)
            nursery.start_soon(self._watch, link)
            nursery.start_soon(self._count, answers)
            try:
                await self._load_and_step(plans, results, nursery)
            except* RankDiffers as group:
                one = innermost(group)
                assert isinstance(one, RankDiffers)
                await self._last_words(StateMismatch(one.step, one.field, one.expected, one.found))
                raise self._end(str(one)) from None
            except* ModelUnusable as group:
                reason = str(innermost(group))
                await self._last_words(LoadFailed(reason))
                raise self._end(reason, unusable=True) from None
            except* Exception as group:
                crash = innermost(group)
                with trio.move_on_after(self._heartbeat_s):  # A collective that fails is only the consequence.
                    await self.ended.wait()
                if self.ended.is_set():
                    raise RankLost(self.reason) from None
                log.exception("the engine of rank %d crashed", joined.rank)
                await self._last_words(Crashed(f"{type(crash).__name__}: {crash}"))
                raise self._end(f"{type(crash).__name__}: {crash}") from crash
            nursery.cancel_scope.cancel()

    async def _load_and_step(
        self,
        plans: trio.MemoryReceiveChannel[Plan],
        results: trio.MemorySendChannel[Stepped],
        background: trio.Nursery,
    ) -> None:
        """The disk lives beside: nobody waits for it when the engine has raised."""
        model = await self._engine.load()
        self._tokenizer = model.tokenizer
        disk = self._disk = FollowerDisk(
            model.card,
            self._settings,
            self._engine.memory,
            self._post,
            self._report_directory,
            disk_writer=self._disk_writer,
        )
        background.start_soon(disk.run)
        self._post(Ready(model.card))
        await step_model(plans, results, self._engine)
        with trio.move_on_after(LAST_WRITES_S):
            await disk.ended.wait()

    # -- the link --------------------------------------------------------------------------------

    async def _hear(self, link: Link, mirrored: trio.MemorySendChannel[Plan], background: trio.Nursery) -> None:
        """Plans, until rank 0 leaves. When `mirrored` is full this waits, and rank 0 with it."""
        with mirrored:
            while True:
                try:
                    message = await link.receive()
                except LinkFailed as failed:
                    raise self._end(f"rank 0 is gone: {failed}") from None
                match message:
                    case Plan():
                        assert self._disk is not None, "a plan came before we were ready"
                        try:
                            await mirrored.send(self._disk.replay(message))
                        except trio.BrokenResourceError:
                            return  # The engine has raised, and says why itself.
                    case Fetch():
                        assert self._disk is not None, "a plan came before we were ready"
                        self._disk.fetch(message)
                    case Compile():
                        background.start_soon(self._compile, message)
                    case Heartbeat():
                        pass
                    case Leave(reason="", unusable=_):
                        break
                    case Leave(reason=reason, unusable=unusable):
                        raise self._end(reason, unusable=unusable)
                    case Refused(reason=reason):
                        raise self._end(reason, unusable=True)
                    case _:
                        raise self._end(f"rank 0 sent {type(message).__name__}, which is not for a follower")
        await trio.sleep(LEAVING_S / 2)
        self._end("")  # The engine waits for a collective that rank 0 never began.

    async def _compile(self, message: Compile) -> None:
        """Compile a grammar before the plan that admits its row. The result stays in the tokenizer's cache; if it is evicted before the
        plan comes, the engine's thread compiles it again."""
        assert self._tokenizer is not None, "a grammar came before we were ready"
        compiling, fault = self._tokenizer.compile_grammar, ""
        try:
            await trio.to_thread.run_sync(
                compiling, message.grammar, self._settings.grammar_timeout_s, abandon_on_cancel=True
            )
        except RequestFailed as refused:
            fault = refused.problem.message
        self._post(Compiled(message.ticket, fault))

    async def _send(self, link: Link) -> None:
        async for frame in self._frames:
            try:
                with trio.fail_after(self._settings.rank_timeout_s):
                    await link.send_frame(frame)
            except LinkFailed:  # What rank 0 said at the end may still lie here unread.
                return
            except trio.TooSlowError:
                raise self._end(f"rank 0 has not read for {self._settings.rank_timeout_s:g} s") from None
        self._sent.set()

    async def _watch(self, link: Link) -> None:
        """Rank 0 is silent, or we were away ourselves, in which case what it said still lies here."""
        looked = trio.current_time()
        while True:
            await trio.sleep(self._heartbeat_s)
            now, limit_s = trio.current_time(), self._settings.rank_timeout_s
            if now - looked > limit_s / 2:
                link.heard_at = now
            looked = now
            if now - link.heard_at > limit_s:
                raise self._end(f"rank 0 is silent for {limit_s:g} s (--rank-timeout-s)")

    async def _count(self, answers: trio.MemoryReceiveChannel[Stepped]) -> None:
        async for stepped in answers:
            self._step = stepped.step
            assert self._disk is not None
            self._disk.answered(stepped)
        if self._disk is not None:
            self._disk.close()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._step, self._engine.memory(), self._disk.stats if self._disk is not None else None)

    def _report_directory(self) -> None:
        """Report a changed directory at once: rank 0 waits for the first report, and orders nothing of a detached disk."""
        assert self._disk is not None
        stats, before = self._disk.stats, self._reported_directory
        if stats is not None and (before is None or (stats.attached, stats.reason) != (before.attached, before.reason)):
            self._reported_directory = stats
            self._post(self._heartbeat())

    def _post(self, message: Message) -> bool:
        try:
            self._outbox.send_nowait(encode(message))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _last_words(self, message: Message) -> None:
        """Send the last message, which must leave before the process ends."""
        self._post(message)
        self._outbox.close()
        with trio.move_on_after(LAST_MESSAGES_S, shield=True):
            await self._sent.wait()
            await trio.sleep(
                self._heartbeat_s
            )  # Until they are read: a socket that is closed too early may forget them.

    def _end(self, reason: str, *, unusable: bool = False) -> RankLost:
        if not self.ended.is_set():
            self.reason, self.unusable = reason, unusable
            self.ended.set()
        return RankLost(self.reason)
