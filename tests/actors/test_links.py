"""The control link: who is let in, and how a loss is found (D12, F27)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

import attrs
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from tests.fakes import FakeEngine, card
from trouper.actors.ranks.follower import Follower
from trouper.actors.ranks.leader import LOADING_S, Leader, or_rank_lost
from trouper.actors.ranks.rank_handshake import Invitation, join_leader, shared_flags, versions
from trouper.actors.ranks.rank_link import LEAVING_S, Link, LinkFailed, RankLost, wait_until_silent
from trouper.protocol.blocks import Tensor
from trouper.protocol.grammar import Grammar
from trouper.protocol.link import (
    Compile,
    Compiled,
    Heartbeat,
    Hello,
    Leave,
    LoadFailed,
    LogRecord,
    Ready,
    Refused,
)
from trouper.protocol.model import LoadedModel, MemoryStats
from trouper.protocol.plans import BlockId, Load, Plan, RowId, Stepped
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.ranks import Joined
from trouper.protocol.settings import Settings
from trouper.protocol.wire import VERSION

SETTINGS = Settings(no_ssd=True)
LONG_S = 1000.0
"""Longer than any limit of the link: what is not noticed by then never is."""


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@asynccontextmanager
async def leading(
    settings: Settings = SETTINGS,
) -> AsyncIterator[tuple[Leader, trio.Nursery, Invitation]]:
    leader = Leader(settings)
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.watch)
            yield leader, nursery, Invitation.decode(leader.invite("here", 1))
            nursery.cancel_scope.cancel()


async def attended(
    leader: Leader, nursery: trio.Nursery, invitation: Invitation, hello: Hello
) -> Link:
    ours, theirs = memory_stream_pair()
    nursery.start_soon(leader.attend, ours)
    link = await Link.authenticate(theirs, invitation.secret, "follower")
    await link.send(hello)
    return link


def hello(**more: str) -> Hello:
    own = dict(shared_flags(SETTINGS)) | more
    return Hello(1, 2, VERSION, tuple(own.items()), versions())


async def test_who_has_not_the_secret_is_not_let_in(autojump_clock: MockClock) -> None:
    """And learns nothing that would let it in: each role's proof is another."""
    async with leading() as (leader, nursery, invitation):
        for role, secret in (("follower", b"x" * 32), ("leader", invitation.secret)):
            ours, theirs = memory_stream_pair()
            nursery.start_soon(leader.attend, ours)
            with pytest.raises(LinkFailed):
                await Link.authenticate(theirs, secret, role)  # type: ignore[arg-type]
        ours, _ = memory_stream_pair()
        await leader.attend(ours)  # It says nothing, and is not waited for.
        assert not leader.lost.is_set()
        assert leader.stats.latest.ranks[1:] == ()


async def test_a_secret_of_a_file_does_not_travel(autojump_clock: MockClock) -> None:
    """Found by audit: whoever played a rank in MLX's ring got the secret of the link."""
    own = b"of a file" * 4
    leader = Leader(SETTINGS, secret=own)
    invitation = leader.invite("here", 1)
    assert own not in invitation and own.hex().encode() not in invitation
    assert Invitation.decode(invitation).secret == b""
    joined = Joined(1, 2, invitation)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leader.watch)
        for wrong in (b"", b"x" * 32):
            ours, theirs = memory_stream_pair()
            nursery.start_soon(leader.attend, ours)
            with pytest.raises(LinkFailed):
                await join_leader(theirs, joined, SETTINGS, wrong)
            await theirs.aclose()
        assert leader.stats.latest.ranks[1:] == ()
        ours, theirs = memory_stream_pair()
        nursery.start_soon(leader.attend, ours)
        await join_leader(theirs, joined, SETTINGS, own)
        nursery.cancel_scope.cancel()


async def test_a_rank_with_a_secret_takes_none_that_travels(autojump_clock: MockClock) -> None:
    _, theirs = memory_stream_pair()
    joined = Joined(1, 2, Invitation.to("here", 1).encode())
    with pytest.raises(LinkFailed, match="this rank has a --rank-secret-file, rank 0 has none"):
        await join_leader(theirs, joined, SETTINGS, b"of a file" * 4)


async def test_what_a_follower_sent_before_lets_nobody_in(autojump_clock: MockClock) -> None:
    """Each connection has a nonce of its own."""
    sent = bytearray()

    class Recorded(trio.abc.Stream):
        def __init__(self, stream: trio.abc.Stream) -> None:
            self.stream = stream

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            sent.extend(data)
            await self.stream.send_all(data)

        async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
            return await self.stream.receive_some(max_bytes)

        async def wait_send_all_might_not_block(self) -> None:
            await self.stream.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await self.stream.aclose()

    async with leading() as (leader, nursery, invitation):
        ours, theirs = memory_stream_pair()
        nursery.start_soon(leader.attend, ours)
        joined = Joined(1, 2, invitation.encode())
        await join_leader(Recorded(theirs), joined, SETTINGS)
        ours, theirs = memory_stream_pair()
        await theirs.send_all(bytes(sent))
        await leader.attend(ours)  # It ends at once: the proof is of another nonce.
        assert not leader.lost.is_set()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            hello(kv_bits="8"),
            "rank 1 has --kv-bits 8, rank 0 has 0: start all ranks with the same flags",
        ),
        (
            attrs.evolve(hello(), version="old"),
            "rank 1 runs another version of Trouper: install the same on all machines",
        ),
        (
            hello(a_newer_flag="1"),
            "rank 1 runs another version of Trouper: install the same on all machines",
        ),
        (
            attrs.evolve(hello(), flags=hello().flags[1:]),
            "rank 1 runs another version of Trouper: install the same on all machines",
        ),
        (
            attrs.evolve(hello(), versions=(*versions()[:-1], (versions()[-1][0], "0.1"))),
            (
                f"rank 1 has mlx-lm 0.1, rank 0 has {version('mlx-lm')}: install the same on all "
                "machines"
            ),
        ),
    ],
)
async def test_a_follower_that_cannot_be_one_is_refused_by_name(
    said: Hello, reason: str, autojump_clock: MockClock
) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, said)
        assert await link.receive() == Refused(reason)
        await leader.lost.wait()
        assert (leader.reason, leader.unusable) == (reason, True)


async def test_a_follower_that_does_not_read_its_refusal_is_refused_all_the_same(
    autojump_clock: MockClock,
) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello(kv_bits="8"))
        await link.close()
        await leader.lost.wait()
        assert leader.unusable


async def test_readiness_waits_for_all_and_keeps_to_the_least(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        await link.send(LogRecord(30, "half of it is there"))
        await link.send(Ready(attrs.evolve(card(), cache_bytes=7)))
        model = await leader.all_ready(LoadedModel(card(), FakeEngine().tokenizer))
        assert model.card.cache_bytes == 7
        await link.send(Heartbeat(5, MemoryStats(active_bytes=9, spare_bytes=0, limit_bytes=10)))
        await trio.sleep(1)
        assert [(rank.state, rank.step) for rank in leader.stats.latest.ranks] == [
            ("ready", -1),
            ("ready", 5),
        ]
        own = MemoryStats(active_bytes=1, spare_bytes=0, limit_bytes=10)
        assert leader.memory(own).active_bytes == 9, "the fullest rank is everybody's bound"


async def test_a_model_that_one_rank_cannot_load_ends_all_with_its_reason(
    autojump_clock: MockClock,
) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        await link.send(LoadFailed("there is no config.json"))
        with pytest.raises(RankLost, match=r"rank 1: there is no config\.json"):
            await leader.all_ready(LoadedModel(card(), FakeEngine().tokenizer))
        assert leader.unusable


async def test_followers_that_do_not_get_ready_are_named(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose disk hangs in the middle of a load sends heartbeats all the same."""
    caplog.set_level("WARNING", "trouper.ranks")
    settings = attrs.evolve(SETTINGS, rank_timeout_s=LONG_S)
    async with leading(settings) as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello(rank_timeout_s=str(LONG_S)))
        await trio.sleep(2.5 * LOADING_S)
        assert caplog.messages == ["still loading the model: rank 1"] * 2
        await link.send(Ready(card()))
        await trio.sleep(2 * LOADING_S)
        assert len(caplog.messages) == 2


async def test_f27_silence_is_a_loss(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        for _ in range(10):
            await link.send(Heartbeat())
            await trio.sleep(0.5)
        assert not leader.lost.is_set()
        await leader.lost.wait()
        assert leader.reason == "rank 1: it has been silent for 4 s (--rank-timeout-s)"


async def test_f27_silence_is_a_loss_within_a_short_limit(autojump_clock: MockClock) -> None:
    """Of both ends: a rank looks for heartbeats so often that no look seems late."""
    settings = attrs.evolve(SETTINGS, rank_timeout_s=0.5)
    async with leading(settings) as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello(rank_timeout_s="0.5"))
        heard_at = trio.current_time()
        while trio.current_time() < heard_at + 5:
            assert isinstance(await link.receive(), Heartbeat)
            await link.send(Heartbeat())
        assert not leader.lost.is_set()
        await leader.lost.wait()
        assert leader.reason == "rank 1: it has been silent for 0.5 s (--rank-timeout-s)"


async def test_f27_a_rank_that_was_suspended_takes_nobody_for_silent(
    autojump_clock: MockClock,
) -> None:
    """What the others sent meanwhile may not have been read yet, so they get the whole time
    limit."""
    stream, _ = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_until_silent, Link(stream), 4.0, 0.5)
        await trio.sleep(1)
        autojump_clock.jump(100)
        resumed_at = trio.current_time()
    assert 4 < trio.current_time() - resumed_at <= 5


async def test_rank_0_leaves_as_soon_as_its_followers_have_ended(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())

        async def follow() -> None:
            await link.send(Ready(card()))
            while not isinstance(await link.receive(), Leave):
                pass
            await trio.sleep(1)
            await link.close()

        nursery.start_soon(follow)
        await leader.gather(2)
        await leader.all_ready(LoadedModel(card(), FakeEngine().tokenizer))
        began = trio.current_time()
        await leader.leave()
        assert trio.current_time() - began < LEAVING_S / 2
        assert not leader.lost.is_set()


async def test_f27_a_step_that_never_ends_is_named_with_who_is_behind(
    autojump_clock: MockClock,
) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())

        async def live() -> None:
            while True:
                await link.send(Heartbeat(3))
                await trio.sleep(0.5)

        nursery.start_soon(live)
        await leader.gather(2)
        for step in (4, 5):
            leader.tell(Plan(step, decode=(RowId(0),)))
        leader.answered(Stepped(4))
        await leader.lost.wait()
        assert leader.reason == (
            "step 5 has not ended for 60 s (--collective-timeout-s); the last steps done: rank 0: "
            "4, rank 1: 3"
        )


async def test_f27_a_step_takes_no_longer_for_a_pause_of_the_process(
    autojump_clock: MockClock,
) -> None:
    """A container or a virtual machine that is paused: the clock goes on, the step does not."""
    async with leading() as (leader, _, _):
        leader.tell(Plan(4, decode=(RowId(0),)))
        await trio.sleep(1)
        autojump_clock.jump(SETTINGS.collective_timeout_s + 1)
        resumed_at = trio.current_time()
        await leader.lost.wait()
        assert (
            SETTINGS.collective_timeout_s
            <= trio.current_time() - resumed_at
            <= SETTINGS.collective_timeout_s + 2
        )


async def test_d12_a_follower_that_does_not_read_is_lost(autojump_clock: MockClock) -> None:
    """Its connection stands and it beats, but the plans pile up."""
    async with leading() as (leader, nursery, invitation):
        ours, theirs = memory_stream_pair()
        nursery.start_soon(leader.attend, ours)
        link = await Link.authenticate(theirs, invitation.secret, "follower")
        await link.send(hello())
        await leader.gather(2)
        ours.send_stream.send_all_hook = trio.sleep_forever
        for step in range(3):
            leader.tell(Plan(step))
            await link.send(Heartbeat())
        with trio.move_on_after(3):
            while True:
                await link.send(Heartbeat())
                await trio.sleep(0.5)
        nursery.start_soon(_beat, link)
        await leader.lost.wait()
        assert leader.reason == "rank 1: it has not read for 4 s (--rank-timeout-s)"


async def _beat(link: Link) -> None:
    while True:
        await link.send(Heartbeat())
        await trio.sleep(0.5)


async def test_f27_whoever_is_lost_the_others_hear_of_it(autojump_clock: MockClock) -> None:
    """Else they would only see that rank 0 has gone, too, or their own collective fail."""
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        leader.lose("rank 2: its connection ended")
        while isinstance(said := await link.receive(), Heartbeat):
            pass
        assert said == Leave("rank 2: its connection ended")


async def test_f27_a_collective_that_fails_while_ranks_load_is_only_the_consequence(
    autojump_clock: MockClock,
) -> None:
    class Failing(FakeEngine):
        async def load(self) -> LoadedModel:
            raise RuntimeError("a connection to a peer was lost")

    async with leading() as (leader, nursery, _):

        async def find_out() -> None:
            await trio.sleep(0.1)
            leader.lose("rank 1: its connection ended")

        nursery.start_soon(find_out)
        with pytest.raises(RankLost, match="rank 1: its connection ended"):
            await or_rank_lost(Failing().load(), leader)


class Near(Follower):
    """Its rank 0 is at the other end of `stream`."""

    stream: trio.abc.Stream

    async def _connect(self, joined: Joined) -> Link:
        return await join_leader(self.stream, joined, self._settings)


def invited(secret: Invitation) -> tuple[Near, trio.abc.Stream]:
    """A follower, and rank 0's end of its connection."""

    class Joining(FakeEngine):
        async def join(self, invitation: bytes) -> Joined:
            return Joined(1, 2, secret.encode())

    follower = Near(SETTINGS, Joining())
    ours, follower.stream = memory_stream_pair()
    return follower, ours


async def lost(lead: Callable[[Link], Awaitable[None]]) -> Near:
    """A follower whose leader does so much, and is then silent."""
    secret = Invitation.to("here", 1)
    follower, ours = invited(secret)

    async def run() -> None:
        await lead(await Link.authenticate(ours, secret.secret, "leader"))

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            with pytest.RaisesGroup(RankLost, flatten_subgroups=True, allow_unwrapped=True):
                await follower.run()
    return follower


async def test_f27_a_follower_whose_leader_has_gone_ends(autojump_clock: MockClock) -> None:
    """Also while its engine waits in native code: `ended` does not wait for it."""

    async def lead(link: Link) -> None:
        assert isinstance(await link.receive(), Hello)
        assert isinstance(await link.receive(), Heartbeat | Ready)

    follower = await lost(lead)
    assert follower.ended.is_set()
    assert follower.reason == "rank 0 is silent for 4 s (--rank-timeout-s)"


async def test_f27_a_follower_ends_with_the_reason_that_rank_0_has(
    autojump_clock: MockClock,
) -> None:
    async def lead(link: Link) -> None:
        await link.send(Leave("rank 2: its connection ended"))

    follower = await lost(lead)
    assert (follower.reason, follower.unusable) == ("rank 2: its connection ended", False)


async def test_f27_the_first_reason_is_the_one(autojump_clock: MockClock) -> None:
    """What follows from a loss is no reason of its own, neither at rank 0 nor at a follower."""
    async with leading() as (leader, _, _invitation):
        leader.lose("rank 2: its connection ended", unusable=True)
        leader.lose("rank 3: its connection ended")
        assert (leader.reason, leader.unusable) == ("rank 2: its connection ended", True)
    follower, _ = invited(Invitation.to("here", 1))
    follower._end("rank 0 is gone", unusable=True)
    assert str(follower._end("")) == follower.reason == "rank 0 is gone"
    assert follower.unusable


async def test_what_a_plan_loads_travels_without_its_bytes(autojump_clock: MockClock) -> None:
    """Each rank has its own shard of it."""
    load = Load(BlockId(7), (Tensor("U8", (3,), b"abc"),), 5, 1)
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        leader.tell(Plan(1, load=(load,)))
        while isinstance(message := await link.receive(), Heartbeat):
            pass
        assert message == Plan(1, load=(attrs.evolve(load, payload=()),))


async def test_f27_a_rank_that_is_lost_while_they_meet_is_no_crash(
    autojump_clock: MockClock,
) -> None:
    """Its process ended with a traceback and exit code 1."""

    class Alone(FakeEngine):
        async def join(self, invitation: bytes) -> Joined:
            raise RuntimeError("a connection to a peer was lost")

    follower = Follower(SETTINGS, Alone())
    with pytest.RaisesGroup(RankLost, flatten_subgroups=True, allow_unwrapped=True):
        await follower.run()
    assert follower.ended.is_set()
    assert follower.reason == "a rank was lost while they met: a connection to a peer was lost"


GRAMMAR = Grammar("regex", "a+", "guided_regex")


async def spread_to(leader: Leader, link: Link, *answers: Compiled) -> list[Problem]:
    """What became of two grammars that are spread at once, where the follower answers so."""
    problems: list[Problem] = []

    async def spread() -> None:
        try:
            await leader.grammars.spread(GRAMMAR)
        except RequestFailed as failed:
            problems.append(failed.problem)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spread)
        nursery.start_soon(spread)
        tickets: set[int] = set()
        while len(tickets) < 2:
            if isinstance(said := await link.receive(), Compile):
                assert said.grammar == GRAMMAR
                tickets.add(said.ticket)
        assert tickets == {0, 1}
        for answer in answers:
            await link.send(answer)
        for _ in range(100):
            await link.send(Heartbeat())
            await trio.sleep(0.5)
    return problems


async def test_a_grammar_is_spread_when_every_rank_has_it(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        assert not await spread_to(leader, link, Compiled(0), Compiled(1), Compiled(7))


async def test_a_grammar_that_one_rank_cannot_follow_is_refused(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        [problem] = await spread_to(leader, link, Compiled(0), Compiled(1, "it is too slow"))
        assert (problem.status, problem.param) == (400, "guided_regex")
        assert "rank 1: it is too slow" in problem.message


async def test_a_rank_that_has_no_process_for_the_moment_costs_a_503(
    autojump_clock: MockClock,
) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        [problem] = await spread_to(
            leader, link, Compiled(0), Compiled(1, "no process", passes=True)
        )
        assert (problem.status, problem.code, problem.retry_after_s) == (503, "system_shortage", 1)
        assert "rank 1: no process" in problem.message


async def test_a_rank_that_compiles_for_ever_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with leading() as (leader, nursery, invitation):
        link = await attended(leader, nursery, invitation, hello())
        await leader.gather(2)
        [problem] = await spread_to(leader, link, Compiled(1))
        assert "rank 1 takes more than 20 s" in problem.message


@pytest.mark.parametrize(
    ("source", "fault"), [("a+", ""), ("wrong", "guided_regex cannot be followed: it is wrong")]
)
async def test_a_follower_compiles_what_it_is_told_to_beside_its_plans(
    source: str, fault: str
) -> None:
    """On a real clock, since it does so on a thread."""
    heard: list[Compiled] = []

    async def lead(link: Link) -> None:
        while not isinstance(await link.receive(), Ready):
            pass
        await link.send(Compile(3, attrs.evolve(GRAMMAR, source=source)))
        while not isinstance(said := await link.receive(), Compiled):
            pass
        heard.append(said)
        await link.send(Leave("that is all"))

    await lost(lead)
    assert heard == [Compiled(3, fault)]
