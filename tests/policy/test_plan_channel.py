"""The channel of plans: in turns with tasks, or straight into an engine's queue."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trouper.protocol.plan_channel import PlanReceiver, PlanSender, plan_channel
from trouper.protocol.plans import Plan


def opened(capacity: int = 2) -> tuple[PlanSender, PlanReceiver]:
    return plan_channel(*trio.open_memory_channel[Plan](capacity))


async def test_plans_are_iterated_over_in_order_until_the_sender_ends() -> None:
    sender, receiver = opened()
    with sender:
        sender.send_nowait(Plan(0))
        await sender.send(Plan(1))
        with pytest.raises(trio.WouldBlock):
            sender.send_nowait(Plan(2))
    assert [plan.step async for plan in receiver] == [0, 1]


async def test_those_that_wait_are_put_first_and_then_each_as_it_is_sent() -> None:
    sender, receiver = opened()
    put: list[int] = []
    sender.send_nowait(Plan(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver.put_by, lambda plan: put.append(plan.step))
        await wait_all_tasks_blocked()
        assert put == [0]
        sender.send_nowait(Plan(1))
        assert put == [0, 1], "in the sender's task"
        await sender.send(Plan(2))
        sender.close()
    assert [plan async for plan in receiver] == []
    assert put == [0, 1, 2]


async def test_a_session_that_ends_leaves_later_plans_in_the_channel() -> None:
    """As an engine's that crashes."""
    sender, receiver = opened()
    put: list[Plan] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receiver.put_by, put.append)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    sender.send_nowait(Plan(0))
    assert put == []
    receiver.close()
    with pytest.raises(trio.BrokenResourceError):
        sender.send_nowait(Plan(1))
