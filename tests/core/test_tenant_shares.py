"""Tenants share rows, the queue and prefill: the core with an engine that answers at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.driving import DrivenCore
from tests.core.test_memory import ask, finish, problem_of, run, running, world
from tests.core.worlds import CoreWorld, RecordingClient
from trouper.actors.scheduling.preemption import PATIENCE_S
from trouper.actors.scheduling.prefill_budget import LOOK_EVERY
from trouper.actors.scheduling.tenant_shares import CREDIT_S
from trouper.protocol.requests import BATCH_PRIORITY

STEP_S = 0.01


def ids(clients: list[RecordingClient]) -> set[str]:
    return {client.request.request_id for client in clients}


def of(asked: CoreWorld, clients: list[RecordingClient]) -> int:
    """Number of rows of these clients."""
    return len({*running(asked)} & ids(clients))


def test_a_tenant_alone_has_all_rows() -> None:
    asked = world(None)
    ask(asked, 12, max_tokens=30, tenant="a")
    run(asked, 3)
    assert len(running(asked)) == 8
    finish(asked)


def test_another_tenant_gets_its_rows_at_once_and_a_share_at_most() -> None:
    asked = world(None)
    first = ask(asked, 12, max_tokens=400, tenant="a")
    run(asked, 3)
    second = ask(asked, 6, max_tokens=400, tenant="b")
    run(asked, 2)
    assert (of(asked, first), of(asked, second)) == (4, 4)
    third = ask(asked, 1, max_tokens=40, tenant="c")
    run(asked, 2)
    assert of(asked, third) == 1
    finish(asked)


def test_a_short_question_interrupts_nobody_while_a_row_is_free() -> None:
    asked = world(None)
    first = ask(asked, 7, max_tokens=400, tenant="a")
    run(asked, 3)
    [question] = ask(asked, 1, max_tokens=20, tenant="b")
    while not question.terminal:
        run(asked)
        assert of(asked, first) == 7
    finish(asked)


def test_rows_beyond_the_share_leave_when_another_tenant_stays() -> None:
    asked = world(None)
    first = ask(asked, 7, max_tokens=600, tenant="a")
    run(asked, 3)
    [stays] = ask(asked, 1, max_tokens=500, tenant="b")
    run(asked, int(PATIENCE_S / STEP_S) - 10)
    assert of(asked, first) == 7
    run(asked, 20)
    assert of(asked, first) == 4, "a step takes longer with each row"
    assert {*running(asked)} >= ids(first[:4]), "the youngest leave"
    assert [client.progress[-1].preempted for client in first[4:]] == [True] * 3
    while not stays.terminal:
        run(asked)
    run(asked, 3)
    assert of(asked, first) == 7, "alone again"
    finish(asked)


def test_tenants_take_turns_in_the_queue() -> None:
    """One after another, as their rows become free; of one tenant in the order of arrival."""
    asked = world(None, completion_batch_size=1)
    [begun] = ask(asked, 1, max_tokens=40, tenant="x")
    run(asked, 2)
    many = ask(asked, 5, max_tokens=4, tenant="a")
    late = ask(asked, 2, max_tokens=4, tenant="b")
    began: list[str] = []
    while len(began) < 8:
        run(asked)
        began += [one for one in running(asked) if one not in began]
    assert begun.terminal
    assert began.index(late[0].request.request_id) <= 2, "not behind all that came before"
    own = [one for one in began if one in ids(many)]
    assert own == sorted(own)
    finish(asked)


def test_priorities_count_more_than_turns() -> None:
    asked = world(None, completion_batch_size=2)
    ask(asked, 2, max_tokens=30, tenant="x")
    run(asked, 2)
    low = ask(asked, 1, max_tokens=8, tenant="a", priority=5)
    high = ask(asked, 2, max_tokens=8, tenant="b", priority=-1)
    seen: list[str] = []
    while not all(client.terminal for client in (*low, *high)):
        run(asked)
        seen += [one for one in running(asked) if one not in seen]
    assert seen.index(low[0].request.request_id) > seen.index(high[0].request.request_id)
    finish(asked)


def test_the_queue_of_one_tenant_is_full_for_nobody_else() -> None:
    asked = world(None, max_queue_size=3)
    many = ask(asked, 20, max_tokens=200, tenant="a")
    refused = [
        client for client in many if (problem := problem_of(client)) and problem.status == 429
    ]
    assert len(refused) == 20 - (3 + 8), "the rows were free"
    [other] = ask(asked, 1, tenant="b")
    assert problem_of(other) is None
    finish(asked)


def test_batches_of_tenants_take_turns_and_have_no_share_of_others_rows() -> None:
    asked = world(None, completion_batch_size=4, batch_min_rows=1)
    first = ask(asked, 6, max_tokens=30, tenant="a", priority=BATCH_PRIORITY)
    second = ask(asked, 6, max_tokens=30, tenant="b", priority=BATCH_PRIORITY)
    run(asked, 3)
    assert (of(asked, first), of(asked, second)) == (2, 2)
    online = ask(asked, 4, max_tokens=30, tenant="a")
    run(asked, 3)
    assert of(asked, online) == 4, "its batch is no other tenant"
    finish(asked)


# -- prefill -------------------------------------------------------------------------------------


def prefilled(core: DrivenCore, steps: int) -> dict[str, int]:
    """Prompt tokens of each request in so many steps."""
    tokens: dict[str, int] = {}
    for _ in range(steps):
        begun = len(core.plans)
        core.step()
        for plan in core.plans[begun:]:
            named = core.core._batch.named(chunk.row for chunk in plan.prefill)
            for chunk in plan.prefill:
                if chunk.row in named:
                    name = named[chunk.row].request.tenant
                    tokens[name] = tokens.get(name, 0) + chunk.tokens
    return tokens


def driven(**settings: Any) -> DrivenCore:
    return DrivenCore(disk=False, viewed=False, prefill_step_size=64, **settings)


def decode_stream() -> DrivenCore:
    """Return a core whose only tenant has decoded for a while, and where prefill takes long."""
    core = driven()
    core.arrive(20, max_tokens=20_000, tenant="stream")
    core.until_decoding()
    for _ in range(40):
        core.step()
    core.prefill_s = 0.09
    return core


def looks(steps: int) -> int:
    """At most so many decode alone, to be measured."""
    return 1 + steps // (LOOK_EVERY + 1)


def test_a_step_is_split_between_tenants_before_it_is_split_between_prompts() -> None:
    core = driven()
    for seed in range(7):
        core.arrive(20_000, seed=seed, tenant="many")
    core.step()
    core.arrive(20_000, seed=8, tenant="one")
    core.step()
    tokens = prefilled(core, 20)
    assert tokens["one"] == pytest.approx(tokens["many"], rel=0.2)


def test_prefill_takes_its_share_beside_streams_of_others_once_its_credit_is_spent() -> None:
    """Two tenants: half of the time each."""
    core = decode_stream()
    core.arrive(100_000, max_tokens=1, seed=1, tenant="long")
    on_credit = int(CREDIT_S / 0.05)
    steps_with_prefill = on_credit - looks(on_credit)
    assert prefilled(core, on_credit)["long"] >= 60 * steps_with_prefill, "in each step"
    for _ in range(on_credit):
        core.step()
    steps = [prefilled(core, 1).get("long", 0) > 0 for _ in range(200)]
    prefill_s, decode_s = sum(steps) * core.prefill_s, len(steps) * STEP_S
    assert prefill_s / (prefill_s + decode_s) == pytest.approx(0.5, abs=0.05)


def test_prompts_whose_clients_leave_at_once_take_their_share_at_most() -> None:
    """A client that leaves had its tenant's credit back, and paid nothing for the step at hand."""
    core = decode_stream()

    def with_prefill(steps: int) -> int:
        begun = len(core.plans)
        for seed in range(steps):
            client = core.arrive(1000, max_tokens=1, seed=seed + 1, tenant="leaves")
            core.step()
            core.step()
            client.aborted = True
        return sum(bool(plan.prefill) for plan in core.plans[begun:])

    with_prefill(int(2 * CREDIT_S / 0.05))
    prefill_s = with_prefill(100) * core.prefill_s
    assert prefill_s / (prefill_s + 200 * STEP_S) <= 0.55


def encoding(core: DrivenCore, steps: int) -> float:
    """Seconds of the encoder in so many steps."""
    begun = len(core.plans)
    for _ in range(steps):
        core.step()
    orders = [order for plan in core.plans[begun:] for order in plan.encode]
    return core.encode_s * sum(order.pieces for order in orders)


def pictures(number: int, tenant: str, core: DrivenCore) -> None:
    """A request with so many images of its own."""
    first = 100 * len(core.clients)
    images = [("image", first + at, 16) for at in range(number)]
    core.arrive_with_images(*images, (7, 8, 9), tenant=tenant)


def test_the_encoder_takes_a_share_while_others_stream_once_its_credit_is_spent() -> None:
    """Two tenants: half of the time each, as prefill."""
    core = decode_stream()
    core.prefill_s, core.encode_s = 0.0, 0.09
    pictures(2000, "pictures", core)
    on_credit = int(CREDIT_S / 0.05)
    assert encoding(core, on_credit) > 0.9 * on_credit * core.encode_s, "in each step"
    encoding(core, on_credit)
    encode_s, decode_s = encoding(core, 200), 200 * STEP_S
    assert encode_s / (encode_s + decode_s) == pytest.approx(0.5, abs=0.05)


def test_images_of_a_tenant_without_credit_hold_those_of_others_not_up() -> None:
    core = decode_stream()
    core.prefill_s, core.encode_s = 0.0, 0.09
    pictures(2000, "pictures", core)
    encoding(core, int(2 * CREDIT_S / 0.05))
    pictures(1, "one", core)
    steps = 0
    while not core.clients[-1].terminal:
        core.step()
        steps += 1
    assert steps < 12, "four pieces, in turns with the other's at most"


def test_a_prompt_does_not_pay_for_the_encoder_of_another() -> None:
    """In steps without streams both run."""
    core = driven()
    core.encode_s = 0.05
    pictures(2000, "pictures", core)
    core.arrive(100_000, max_tokens=1, seed=1, tenant="long")
    encoding(core, 100)
    credit = core.core._shares._credit_s
    assert credit.get((False, "long"), CREDIT_S) > 0.9 * CREDIT_S
    assert credit[False, "pictures"] < 0


def test_the_streams_of_its_own_tenant_hold_no_prefill_back() -> None:
    core = driven()
    core.arrive(20, max_tokens=20_000, tenant="a")
    core.until_decoding()
    core.arrive(100_000, max_tokens=1, seed=1, tenant="a")
    core.step_s = 0.2
    later = [prefilled(core, 1).get("a", 0) > 0 for _ in range(200)]
    assert later[2:].count(False) <= looks(200)
