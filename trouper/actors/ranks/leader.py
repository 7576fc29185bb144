"""Rank 0's side of the group of ranks: members, messages to all of them, and the end of the
group."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import attrs
import trio

from trouper.actors.ranks.grammar_broadcast import GrammarSpreader
from trouper.actors.ranks.rank_handshake import (
    Invitation,
    accept_follower,
    card_difference,
    reason_to_refuse,
)
from trouper.actors.ranks.rank_link import (
    HEARTBEAT_S,
    LAST_MESSAGES_S,
    LEAVING_S,
    Link,
    LinkFailed,
    RankLost,
    heartbeat_interval,
)
from trouper.actors.ranks.rank_member import DiskReport, RankMember
from trouper.protocol.health import SEVERITY, DirectoryStats, RanksStats, RankStats
from trouper.protocol.link import Compile, Compiled, Fetch, Heartbeat, Leave, Refused
from trouper.protocol.model import Engine, LoadedModel, MemoryStats
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.problems import ModelUnusable, SettingsInvalid
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.wire import encode

log = logging.getLogger("trouper.ranks")
CONNECT_S = 60.0
LOADING_S = 60.0

# Maximum number of unread disk reports; more are dropped, and no request waits for those.
DISK_REPORTS = 1024


# A collective that never ends cannot be cancelled, so losses are detected outside the engine: a
# closed connection, missing heartbeats (`rank_link`), an overlong step, a reported failure. The
# first one gives the reason, and sets `lost`.
class Leader:
    """The group as rank 0 sees it. `run` lasts for life; other methods may be called meanwhile."""

    def __init__(self, settings: Settings, host: str = "127.0.0.1", secret: bytes = b"") -> None:
        """`secret`: from --rank-secret-file; empty: a new one is sent."""
        self.stats = Watch(RanksStats())
        self.joined = trio.Event()
        self.lost = trio.Event()
        self.unusable = False
        self.size = 1
        self._settings, self._host = settings, host
        self._heartbeat_s = heartbeat_interval(settings.rank_timeout_s)
        self._own_secret = secret
        self._secret = secret
        self._members: dict[int, RankMember] = {}
        self._changed = trio.Event()
        self._disk_reports_in, self.disk_reports = trio.open_memory_channel[tuple[int, DiskReport]](
            DISK_REPORTS
        )
        """Reports with their rank; of directories only changes of use."""
        # Plans, and when each was sent, or became the oldest one without an answer.
        self._unanswered: deque[tuple[Plan, float]] = deque()
        self._answered = -1
        self.grammars = GrammarSpreader(self._post_to_all, settings.grammar_timeout_s)

    @property
    def reason(self) -> str:
        return self.stats.latest.lost

    async def run(self, *, task_status: trio.TaskStatus[bytes] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen; starts with the invitation. Raises OSError if the address is not one of this
        machine."""
        listeners = await trio.open_tcp_listeners(0, host=self._host)
        port: int = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            task_status.started(self.invite(self._host, port))
            await trio.serve_listeners(self.attend, listeners, handler_nursery=nursery)

    def invite(self, host: str, port: int) -> bytes:
        invitation = Invitation.to(host, port, self._own_secret)
        self._secret = self._own_secret or invitation.secret
        return invitation.encode()

    # -- the members ------------------------------------------------------------------------------

    async def attend(self, stream: trio.abc.Stream) -> None:
        try:
            link, hello = await accept_follower(stream, self._secret)
        except LinkFailed as error:
            log.warning("a connection to the control link was refused: %s", error)
            await trio.aclose_forcefully(stream)
            return
        try:
            if refusal := reason_to_refuse(hello, self._settings, self._members):
                with suppress(LinkFailed):
                    await link.send(Refused(refusal))
                self.lose(refusal, unusable=True)
            else:
                await self._run_member(hello.rank, link)
        finally:
            await link.close()

    async def _run_member(self, rank: int, link: Link) -> None:
        member = self._members[rank] = RankMember(
            rank=rank, link=link, group=self, timeout_s=self._settings.rank_timeout_s
        )
        log.info("rank %d is here", rank)
        self.member_changed()
        await member.run(self._heartbeat, self._heartbeat_s)

    def member_changed(self) -> None:
        self._publish()
        self._changed.set()
        self._changed = trio.Event()

    def take_disk_report(self, rank: int, report: DiskReport) -> None:
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            self._disk_reports_in.send_nowait((rank, report))

    def take_compiled(self, rank: int, message: Compiled) -> None:
        self.grammars.take_answer(rank, message)

    # -- start ------------------------------------------------------------------------------------

    async def gather(self, size: int) -> None:
        """Wait until all followers have connected, or the group is lost."""
        self.size = size
        self.joined.set()
        if not self._own_secret:
            log.warning(
                "whoever reaches the network between the ranks can join them: trust it, or give "
                "--rank-secret-file"
            )
        with trio.move_on_after(CONNECT_S):
            await self._wait_until(lambda: len(self._members) == size - 1)
            return
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in self._members)
        self.lose(
            f"rank {missing} did not connect to {self._host} within {CONNECT_S:g} s; see "
            "--control-host"
        )

    async def all_ready(self, model: LoadedModel) -> LoadedModel:
        """Wait until all ranks have loaded the same model. The cache becomes as large as the
        smallest. Raises `RankLost`."""
        await self._wait_until(
            lambda: all(member.card is not None for member in self._members.values())
        )
        cards = {
            rank: member.card for rank, member in self._members.items() if member.card is not None
        }
        for rank, card in cards.items():
            if difference := card_difference(model.card, card):
                self.lose(f"rank {rank} {difference}", unusable=True)
        if self.lost.is_set():
            raise RankLost(self.reason)
        log.info("all %d ranks are ready", self.size)
        cache_bytes = min(card.cache_bytes for card in (model.card, *cards.values()))
        return attrs.evolve(model, card=attrs.evolve(model.card, cache_bytes=cache_bytes))

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.lost.is_set():
            await self._changed.wait()

    # -- plans ------------------------------------------------------------------------------------

    def tell(self, plan: Plan) -> None:
        """Send a plan to every follower, in order, without waiting."""
        if plan.load:  # Each rank has its own shard of it.
            plan = attrs.evolve(
                plan, load=tuple(attrs.evolve(load, payload=()) for load in plan.load)
            )
        if plan.encode:  # Rank 0 alone encodes.
            orders = tuple(attrs.evolve(order, pixels=None) for order in plan.encode)
            plan = attrs.evolve(plan, encode=orders)
        self._unanswered.append((plan, trio.current_time()))
        self._post_to_all(plan)

    def answered(self, stepped: Stepped) -> None:
        self._answered = stepped.step
        self._unanswered.popleft()
        if self._unanswered:
            self._unanswered[0] = self._unanswered[0][0], trio.current_time()

    def fetch(self, fetch: Fetch) -> frozenset[int]:
        """Send a `Fetch` to every follower, in order with the plans. Returns their ranks."""
        return self._post_to_all(fetch)

    def _post_to_all(self, message: Plan | Fetch | Compile) -> frozenset[int]:
        frame = encode(message)
        for member in self._members.values():
            member.post(frame)
        return frozenset(self._members)

    # -- reports ----------------------------------------------------------------------------------

    def directories(self) -> dict[int, DirectoryStats | None]:
        return {rank: member.directory for rank, member in sorted(self._members.items())}

    def memory(self, local: MemoryStats) -> MemoryStats:
        # Resident memory is always this process's own: another's now and then would look like a
        # burst.
        known = [
            local,
            *(member.memory for member in self._members.values() if member.memory is not None),
        ]
        fullest = max(known, key=lambda stats: stats.active_bytes / max(1, stats.limit_bytes))
        shortest = max(known, key=lambda stats: SEVERITY.index(stats.pressure))
        return attrs.evolve(
            fullest,
            resident_bytes=local.resident_bytes,
            pressure=shortest.pressure,
            swapped_bytes=shortest.swapped_bytes,
        )

    async def watch(self) -> None:
        """Publish the state of the group, detect an overlong step, and report followers that do not
        get ready."""
        # A file system that hangs in a load leaves heartbeats going, and loading has no time limit.
        report_at = trio.current_time() + LOADING_S
        while not self.lost.is_set():
            checked_at = trio.current_time()
            await trio.sleep(self._heartbeat_s)
            if checked_at >= report_at:
                report_at = checked_at + LOADING_S
                self._report_loading()
            self._check_oldest_plan(checked_at)
            self._publish()

    def _report_loading(self) -> None:
        ranks = [
            str(rank) for rank, member in sorted(self._members.items()) if member.state == "loading"
        ]
        if ranks:
            log.warning("still loading the model: rank %s", ", ".join(ranks))

    def _check_oldest_plan(self, checked_at: float) -> None:
        # A late check means that this process was suspended, and its step too, which gets a fresh
        # time limit.
        limit_s, now = self._settings.collective_timeout_s, trio.current_time()
        if self._unanswered and now - checked_at > max(limit_s / 2, 2 * self._heartbeat_s):
            self._unanswered[0] = self._unanswered[0][0], now
        if self._unanswered and now - self._unanswered[0][1] > limit_s:
            steps = ", ".join(f"rank {stats.rank}: {stats.step}" for stats in self._stats().ranks)
            step = self._unanswered[0][0].step
            self.lose(
                f"step {step} has not ended for {limit_s:g} s (--collective-timeout-s); the last "
                f"steps done: {steps}"
            )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._answered)

    def _stats(self) -> RanksStats:
        rank_0 = RankStats(rank=0, state="ready", step=self._answered, heard_at=trio.current_time())
        followers = [member.stats for _, member in sorted(self._members.items())]
        return RanksStats(ranks=(rank_0, *followers), lost=self.reason)

    def _publish(self) -> None:
        self.stats.publish(self._stats())

    # -- end --------------------------------------------------------------------------------------

    def lose(self, reason: str, *, unusable: bool = False) -> None:
        if not self.lost.is_set():
            log.critical("the group of ranks ends: %s", reason)
            self.unusable = unusable
            self.stats.publish(attrs.evolve(self.stats.latest, lost=reason))
            self.lost.set()
            # Otherwise the others would only see that rank 0 is gone, too.
            for member in self._members.values():
                if member.state not in ("left", "lost"):
                    member.post(encode(Leave(reason, unusable)))
            self.member_changed()

    async def crashed(self, error: BaseException) -> None:
        """Report a crash of rank 0's engine or actors. Returns when the group is lost."""
        # A failed collective only follows from a lost rank, which the links report.
        with trio.move_on_after(HEARTBEAT_S):
            await self.lost.wait()
        if not self.lost.is_set():
            log.error("rank 0 crashed", exc_info=error)
            self.lose(f"rank 0: {type(error).__name__}: {error}")

    async def leave(self) -> None:
        for member in self._members.values():
            member.leave()
        with trio.move_on_after(LEAVING_S):
            while any(member.connected for member in self._members.values()):
                await self._changed.wait()


T = TypeVar("T")


async def gather_ranks(nursery: trio.Nursery, engine: Engine, ranks: Leader) -> Leader | None:
    """Wait until all ranks have joined. None for a single rank. Raises `SettingsInvalid`."""
    running = trio.CancelScope()

    async def run(*, task_status: trio.TaskStatus[bytes]) -> None:
        with running:
            await ranks.run(task_status=task_status)

    try:
        invitation = await nursery.start(run)
    except OSError as error:
        raise SettingsInvalid(
            f"--control-host: cannot listen there: {error.strerror or error}"
        ) from error
    joined = await or_rank_lost(engine.join(invitation), ranks)
    if joined.size == 1:
        ranks.joined.set()
        running.cancel()
        return None
    await ranks.gather(joined.size)
    return ranks


async def or_rank_lost(work: Awaitable[T], ranks: Leader) -> T:
    """Await work that all ranks do together. Raises `RankLost`, which names the rank, instead of a
    collective's failure."""
    try:
        return await work
    except (ModelUnusable, SettingsInvalid):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a collective raises
        await ranks.crashed(error)
    await trio.sleep(LAST_MESSAGES_S)
    raise RankLost(ranks.reason)


async def leave_ranks(ranks: Leader) -> None:
    """End the group of ranks. Raises `RankLost` if a rank was lost."""
    if ranks.lost.is_set():
        await trio.sleep(LAST_MESSAGES_S)
        raise RankLost(ranks.reason)
    await ranks.leave()
