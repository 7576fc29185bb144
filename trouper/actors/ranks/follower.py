"""A follower: a rank that replays rank 0's plans with its own shard of model and cache. Waits on
plans, reports state and failures to rank 0, and ends when dismissed or when rank 0 is lost."""

from __future__ import annotations

import logging
from functools import partial

import trio

from trouper.actors.model_stepper import step_model
from trouper.actors.ranks.follower_disk import FollowerDisk
from trouper.actors.ranks.rank_handshake import HELLO_S, Invitation, join_leader
from trouper.actors.ranks.rank_link import (
    HEARTBEAT_S,
    LAST_MESSAGES_S,
    LEAVING_S,
    Link,
    LinkFailed,
    RankLost,
    heartbeat_interval,
    send_heartbeats,
    wait_until_silent,
)
from trouper.actors.runtime.disk_orders import DiskWriter
from trouper.actors.runtime.supervision import innermost
from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.actors.ssd_writer import write_to_disk
from trouper.protocol.health import DirectoryStats
from trouper.protocol.link import (
    Compile,
    Compiled,
    Crashed,
    Fetch,
    Heartbeat,
    Leave,
    LoadFailed,
    LogRecord,
    Message,
    Ready,
    Refused,
    StateMismatch,
)
from trouper.protocol.model import Engine, Tokenizer
from trouper.protocol.plan_channel import PlanReceiver, PlanSender, plan_channel
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.problems import SYSTEM_SHORTAGE, ModelUnusable, RequestFailed
from trouper.protocol.ranks import Joined, RankDiffers
from trouper.protocol.settings import Settings
from trouper.protocol.wire import encode

log = logging.getLogger("trouper.ranks")
# Plans without work need no collective, so rank 0 may be ahead.
PLANS_AHEAD = 64  # Maximum number of plans that wait for a follower's engine.
LAST_WRITES_S = 2.0  # Maximum wait at the end for writes in flight; less than LEAVING_S.
OUTBOX = 1024


class Follower:
    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        *,
        disk_writer: DiskWriter = write_to_disk,
        secret: bytes = b"",
    ) -> None:
        """`secret`: from --rank-secret-file; empty: rank 0 sends one."""
        self._secret = secret
        self._disk_writer = disk_writer
        self.joined = trio.Event()
        # Set outside of the engine's thread, and ends the process: the engine may be blocked in a
        # collective for ever.
        self.ended = trio.Event()
        self.reason = ""
        """Reason of the end; "" if regular."""
        self.unusable = False
        self.linked = False
        """Whether the follower has joined, so that rank 0 decides its end."""
        self._settings, self._engine = settings, engine
        self._heartbeat_s = heartbeat_interval(settings.rank_timeout_s)
        self._outbox, self._frames = trio.open_memory_channel[bytes](OUTBOX)
        # Last completed step.
        self._step = -1
        self._sent = trio.Event()
        # None until the model is loaded.
        self._disk: FollowerDisk | None = None
        self._reported_directory: DirectoryStats | None = None
        self._tokenizer: Tokenizer | None = None

    def say(self, level: int, text: str) -> bool:
        """Send a log record to rank 0's terminal. False if not connected."""
        return self.linked and self._post(LogRecord(level, text))

    async def run(self) -> None:
        """Join the group, load the model, replay plans until dismissed. Raises `RankLost` or
        `ModelUnusable`, after `ended` is set: the exception may wait for an engine that never
        ends."""
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

    async def _connect(self, joined: Joined) -> Link:
        invitation = Invitation.decode(joined.invitation)
        try:
            with trio.fail_after(HELLO_S):
                stream = await trio.open_tcp_stream(invitation.host, invitation.port)
                return await join_leader(stream, joined, self._settings, self._secret)
        except (OSError, LinkFailed, trio.TooSlowError) as error:
            reason = (
                f"rank 0 is not to be reached at {invitation.host}:{invitation.port} "
                f"(--control-host): {error}"
            )
            raise self._end(reason) from error

    async def _follow(self, link: Link, joined: Joined) -> None:
        self.linked = True
        mirrored, plans = plan_channel(*trio.open_memory_channel[Plan](PLANS_AHEAD))
        results, answers = trio.open_memory_channel[Stepped](PLANS_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, link)
            nursery.start_soon(send_heartbeats, self._outbox, self._heartbeat, self._heartbeat_s)
            nursery.start_soon(self._receive, link, mirrored, nursery)
            nursery.start_soon(self._end_when_silent, link)
            nursery.start_soon(self._take_answers, answers)
            try:
                await self._load_and_step(plans, results, nursery)
            except* RankDiffers as group:
                differs = innermost(group)
                assert isinstance(differs, RankDiffers)
                await self._send_last(
                    StateMismatch(
                        step=differs.step,
                        field=differs.field,
                        expected=differs.expected,
                        found=differs.found,
                    )
                )
                raise self._end(str(differs)) from None
            except* ModelUnusable as group:
                reason = str(innermost(group))
                await self._send_last(LoadFailed(reason))
                raise self._end(reason, unusable=True) from None
            except* Exception as group:
                crash = innermost(group)
                # It may only follow from the loss of another rank.
                with trio.move_on_after(HEARTBEAT_S):
                    await self.ended.wait()
                if self.ended.is_set():
                    raise RankLost(self.reason) from None
                log.exception("the engine of rank %d crashed", joined.rank)
                await self._send_last(Crashed(f"{type(crash).__name__}: {crash}"))
                raise self._end(f"{type(crash).__name__}: {crash}") from crash
            nursery.cancel_scope.cancel(reason="rank 0 has dismissed this rank")

    async def _load_and_step(
        self,
        plans: PlanReceiver,
        results: trio.MemorySendChannel[Stepped],
        background: trio.Nursery,
    ) -> None:
        # The disk runs in `background`, so that an engine that raises does not wait for the disk.
        model = await self._engine.load()
        self._tokenizer = model.tokenizer
        disk = self._disk = FollowerDisk(
            card=model.card,
            settings=self._settings,
            read_memory=self._engine.memory,
            report=self._post,
            directory_changed=self._report_directory,
            disk_writer=self._disk_writer,
        )
        background.start_soon(disk.run)
        self._post(Ready(model.card))
        await step_model(plans, results, self._engine)
        with trio.move_on_after(LAST_WRITES_S):
            await disk.ended.wait()

    # -- messages of rank 0 -----------------------------------------------------------------------

    async def _receive(self, link: Link, mirrored: PlanSender, background: trio.Nursery) -> None:
        """Receive messages until rank 0 leaves. A full `mirrored` delays all, and then rank 0's
        writes."""
        with mirrored:
            while True:
                try:
                    message = await link.receive()
                except LinkFailed as failed:
                    raise self._end(f"rank 0 is gone: {failed}") from None
                match message:
                    case Plan():
                        assert self._disk is not None, "a plan came before this rank was ready"
                        try:
                            await mirrored.send(self._disk.replay(message))
                        except trio.BrokenResourceError:
                            return  # The engine has raised, and `_follow` reports why.
                    case Fetch():
                        assert self._disk is not None, "a read came before this rank was ready"
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
                        raise self._end(
                            f"rank 0 sent {type(message).__name__}, which is not for a follower"
                        )
        await trio.sleep(LEAVING_S / 2)
        self._end("")  # The engine waits for a collective that rank 0 never began.

    async def _compile(self, message: Compile) -> None:
        # The result stays in the tokenizer's cache; after an eviction the engine's thread compiles
        # again.
        assert self._tokenizer is not None, "a grammar came before this rank was ready"
        timeout_s, problem = self._settings.grammar_timeout_s, None
        try:
            compiled = partial(self._tokenizer.compile_grammar, message.grammar, timeout_s)
            await run_on_thread(compiled, trio.to_thread.current_default_thread_limiter())
        except RequestFailed as refused:
            problem = refused.problem
        except OSError:
            problem = SYSTEM_SHORTAGE
        answer = Compiled(message.ticket)
        if problem is not None:
            answer = Compiled(message.ticket, problem.message, passes=problem.status == 503)
        self._post(answer)

    async def _end_when_silent(self, link: Link) -> None:
        timeout_s = self._settings.rank_timeout_s
        await wait_until_silent(link, timeout_s, self._heartbeat_s)
        raise self._end(f"rank 0 is silent for {timeout_s:g} s (--rank-timeout-s)")

    # -- messages to rank 0 -----------------------------------------------------------------------

    async def _send(self, link: Link) -> None:
        async for frame in self._frames:
            try:
                with trio.fail_after(self._settings.rank_timeout_s):
                    await link.send_frame(frame)
            except LinkFailed:
                # A last message may still wait to be received, and gives a better reason.
                return
            except trio.TooSlowError:
                raise self._end(
                    f"rank 0 has not read for {self._settings.rank_timeout_s:g} s"
                ) from None
        self._sent.set()

    async def _take_answers(self, answers: trio.MemoryReceiveChannel[Stepped]) -> None:
        async for stepped in answers:
            self._step = stepped.step
            assert self._disk is not None
            self._disk.take_answer(stepped)
        if self._disk is not None:
            self._disk.close()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self._step, self._engine.memory(), self._disk.stats if self._disk is not None else None
        )

    def _report_directory(self) -> None:
        # Rank 0 waits for the first report, and reads nothing while a disk is detached.
        assert self._disk is not None
        stats, before = self._disk.stats, self._reported_directory
        if stats is not None and (
            before is None or (stats.attached, stats.reason) != (before.attached, before.reason)
        ):
            self._reported_directory = stats
            self._post(self._heartbeat())

    def _post(self, message: Message) -> bool:
        try:
            self._outbox.send_nowait(encode(message))
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    async def _send_last(self, message: Message) -> None:
        # A socket that is closed too early may discard the message.
        self._post(message)
        self._outbox.close()
        with trio.move_on_after(LAST_MESSAGES_S, shield=True):
            await self._sent.wait()
            await trio.sleep(HEARTBEAT_S)

    def _end(self, reason: str, *, unusable: bool = False) -> RankLost:
        if not self.ended.is_set():
            self.reason, self.unusable = reason, unusable
            self.ended.set()
        return RankLost(self.reason)
