"""The budget of bytes: who may hold how much, and what a refusal says."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper import RequestFailed, ServerSettings
from trouper.web.http.body_complexity import parsed_bytes
from trouper.web.http.byte_budget import (
    BODIES,
    LITTLE,
    MAX_DEFAULT,
    STEP,
    ByteBudget,
    Holding,
    default_bytes,
)

MB = 2**20


def refusal(holding: Holding, amount: int) -> tuple[int, str | None]:
    with pytest.raises(RequestFailed) as caught:
        holding.take(amount)
    assert "--request-memory" in caught.value.problem.message
    return caught.value.problem.status, caught.value.problem.code


def test_a_client_may_hold_as_much_as_is_left_free() -> None:
    budget = ByteBudget(12 * MB)
    first, second, other = budget.open("a"), budget.open("a"), budget.open("b")
    assert refusal(first, 6 * MB + 1) == (413, "request_memory_too_small")
    first.take(4 * MB)
    assert refusal(second, 3 * MB) == (429, "request_memory_share")
    second.take(2 * MB)
    assert refusal(other, 5 * MB) == (503, "request_memory_full")
    other.take(3 * MB)
    budget.open("c").take(MB)
    for holding in (first, second, other):
        holding.give_back()
        holding.give_back()
    assert budget.held == MB and budget._clients["a"] == 0


def test_requests_that_hold_little_have_room_beside_large_ones() -> None:
    budget = ByteBudget(12 * MB)
    budget.open("a").take(6 * MB)
    assert refusal(budget.open("a"), LITTLE + 1)[0] == 429
    budget.open("a").take(LITTLE)


def test_an_answer_grows_in_steps() -> None:
    budget = ByteBudget(4 * STEP)
    holding = budget.open("a")
    for _ in range(STEP - 1):
        holding.grow(1)
    assert not budget.held
    holding.grow(1)
    assert budget.held == STEP
    holding.take_up_to(STEP)
    assert budget.held == STEP


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9 * MB)), max_size=60))
def test_there_is_always_room_for_one_more_client(asked: list[tuple[str, int]]) -> None:
    budget, held = ByteBudget(32 * MB), list[Holding]()
    for client, amount in asked:
        holding = budget.open(client)
        try:
            holding.take(amount)
        except RequestFailed:
            assert not holding.bytes
        held.append(holding)
    assert budget.held == sum(holding.bytes for holding in held) < budget.total
    budget.open("new").take((budget.total - budget.held) // 2)


def test_the_default_has_room_for_large_bodies() -> None:
    assert default_bytes(ServerSettings(max_body_bytes=MAX_DEFAULT)) == BODIES * MAX_DEFAULT
    assert default_bytes(ServerSettings(max_body_bytes=2**20)) <= MAX_DEFAULT


@pytest.mark.parametrize(
    "part",
    ["[]", '{"":{}}', '{"":0}', "[0]", "1000", "1.5", '"a"', '"\U0001f600"', '{"a":{"b":[1,2]}}'],
    ids=str,
)
@pytest.mark.parametrize("count", [300, 20_000])
def test_what_is_parsed_takes_no_more_than_is_held(part: str, count: int) -> None:
    body = f"[{','.join([part] * count)}]".encode()
    assert decoded_bytes(body) + len(body) <= parsed_bytes(body)


@pytest.mark.parametrize("end", ["", "\u00e9", "\u2014", "\U0001f600", "\\u2014", "\\ud83d\\ude00"])
def test_a_wide_character_makes_all_of_its_text_wide(end: str) -> None:
    body = f'"{"a" * 200_000}{end}"'.encode()
    assert 2 * decoded_bytes(body) + len(body) - 1000 <= parsed_bytes(body) <= 10 * len(body)


def test_commas_of_a_long_text_are_no_values() -> None:
    assert parsed_bytes(msgspec.json.encode(["a, b: [c] {d}" * 20_000])) < 4 * 13 * 20_000


def decoded_bytes(body: bytes) -> int:
    tracemalloc.start()
    value = msgspec.json.decode(body)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value is not None
    return held
