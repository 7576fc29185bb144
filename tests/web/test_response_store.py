"""What is kept of responses: never more than the bounds, and what a kept one needs is there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper import ServerSettings
from trouper.protocol.problems import RequestFailed
from trouper.protocol.setting_fields import ByteSize
from trouper.web.responses.response_store import ResponseStore, StoredResponse, Turn
from trouper.web.streaming.event_log import EventLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_of(
    most: int = 100, most_bytes: int = 10**6, ttl_s: float = 100.0
) -> tuple[ResponseStore, Clock]:
    clock = Clock()
    bounds = ServerSettings(
        stored_responses=most,
        stored_responses_bytes=ByteSize(most_bytes),
        stored_responses_ttl_s=ttl_s,
    )
    return ResponseStore(bounds, clock), clock


def response(
    name: str, before: Turn | None = None, text: str = "", log: EventLog | None = None
) -> StoredResponse:
    said: dict[str, Any] = {"id": f"out_{name}", "text": text}
    return StoredResponse({"id": name, "output": [said]}, ({"id": f"in_{name}"},), before, log)


def test_a_conversation_outlives_the_responses_that_began_it() -> None:
    store, _ = store_of(most=2)
    first = response("a")
    store.add(first)
    second = response("b", first.turn)
    store.add(second)
    alone = second.turn.size
    third = response("c", second.turn)
    store.add(third)
    assert store.find("a") is None
    assert [item["id"] for item in third.turn.all_items()] == [
        "in_a",
        "out_a",
        "in_b",
        "out_b",
        "in_c",
        "out_c",
    ]
    assert store.item("out_a") == {"id": "out_a", "text": ""}
    turns = first.turn.size + alone + third.turn.size
    assert store.bytes == turns + second.size + third.size
    store.remove("b")
    assert store.bytes == turns + third.size, "c needs all turns"
    store.remove("c")
    assert (store.bytes, len(store)) == (0, 0)
    assert store.item("out_a") is None


def test_going_on_from_what_is_gone_counts_it_again() -> None:
    """Its turn was taken before it went."""
    store, _ = store_of(most=1)
    first, other = response("a"), response("x")
    store.add(first)
    store.add(other)
    assert store.bytes == other.turn.size + other.size
    following = response("b", first.turn)
    store.add(following)
    assert store.bytes == first.turn.size + following.turn.size + following.size
    assert store.item("in_a") is not None


def test_age_counts_from_the_last_use() -> None:
    store, clock = store_of(ttl_s=10)
    store.add(response("a"))
    store.add(response("b"))
    clock.now = 8
    assert store.find("a") is not None
    clock.now = 15
    assert store.find("b") is None
    assert store.find("a") is not None
    clock.now = 26
    assert store.item("in_a") is None
    assert store.bytes == 0


def test_bytes_count_events_too() -> None:
    log = EventLog()
    log.add(b"x" * 500)
    store, _ = store_of(most_bytes=400)
    store.add(response("a", log=log))
    assert len(store) == 0
    store.add(response("a"))
    assert len(store) == 1
    store.add(response("b", text="y" * 300))
    assert store.find("a") is None
    assert store.bytes == len(
        msgspec.json.encode(
            ({"id": "b", "output": [{"id": "out_b", "text": "y" * 300}]}, ({"id": "in_b"},))
        )
    )


def test_events_and_tools_of_what_is_gone_count_no_more() -> None:
    """They counted as long as a later response built on it, until the whole conversation was more
    than the store, and all of it went."""
    store, _ = store_of(most_bytes=1000)
    before: Turn | None = None
    for number in range(10):
        log = EventLog()
        log.add(b"x" * 400)
        stored = response(str(number), before, log=log)
        store.add(stored)
        assert store.find(stored.id) is stored
        before = stored.turn
    assert store.bytes <= 1000 and store.item("in_0") is not None


def test_an_id_that_is_gone_says_so() -> None:
    store, _ = store_of(most=0)
    store.add(response("a"))
    with pytest.raises(RequestFailed, match="is gone") as caught:
        store.get("a", "previous_response_id", "previous_response_not_found")
    problem = caught.value.problem
    assert (problem.status, problem.param, problem.code) == (
        404,
        "previous_response_id",
        "previous_response_not_found",
    )


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "follow", "find", "remove", "wait"]),
        st.integers(0, 9),
        st.integers(0, 300),
    ),
    max_size=60,
)


@given(steps, st.integers(0, 5), st.integers(0, 1500))
def test_the_bounds_hold_whatever_happens(
    steps: list[tuple[str, int, int]], most: int, most_bytes: int
) -> None:
    store, clock = store_of(most, most_bytes, ttl_s=50)
    kept: dict[str, StoredResponse] = {}
    for place, (what, which, size) in enumerate(steps):
        name = f"r{which}"
        match what:
            case "add" | "follow":
                before = kept.get(f"r{size % 10}") if what == "follow" else None
                stored = response(
                    f"r{which}-{place}", None if before is None else before.turn, "z" * size
                )
                store.add(stored)
                kept[name] = stored
            case "find" if name in kept:
                store.find(kept[name].id)
            case "remove" if name in kept:
                store.remove(kept[name].id)
            case "wait":
                clock.now += size / 10
        store.item("")  # Looks at the clock.
        alive = [one for one in kept.values() if store.find(one.id) is not None]
        assert len(store) <= most and store.bytes <= most_bytes
        for stored in alive:
            assert all(store.item(item["id"]) == item for item in stored.turn.all_items())
        turns = {id(turn): turn.size for stored in alive for turn in stored.turn._back()}
        assert store.bytes >= sum(turns.values())
    for stored in kept.values():
        store.remove(stored.id)
    clock.now += 1000
    store.item("")
    assert (store.bytes, len(store), store._items) == (0, 0, {})


def of_owner(owner: str, name: str, text: str) -> StoredResponse:
    said: dict[str, Any] = {"id": f"out_{name}", "text": text}
    return StoredResponse({"id": name, "output": [said]}, (), None, None, owner)


@pytest.mark.parametrize(("most", "most_bytes"), [(8, 10**6), (1000, 4000)])
def test_a_key_that_floods_the_store_pushes_out_its_own(most: int, most_bytes: int) -> None:
    asking = ["b"]
    bounds = ServerSettings(stored_responses=most, stored_responses_bytes=ByteSize(most_bytes))
    store = ResponseStore(bounds, lambda: 0.0, lambda: asking[0])
    for number in range(30):
        store.add(of_owner("a", f"a{number}", "x" * 200))
    alone = len(store)
    assert alone >= 8, "one key alone may have all of it"
    for number in range(3):
        store.add(of_owner("b", f"b{number}", "y" * 200))
    for number in range(30, 90):
        store.add(of_owner("a", f"a{number}", "x" * (number * 10)))
    assert all(store.find(f"b{number}") is not None for number in range(3))
    assert store.find("a89") is None, "it is another key's"
    asking[0] = "a"
    assert store.find("a89") is not None and store.find("a0") is None
    assert len(store) <= most and store.bytes <= most_bytes


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 400)), max_size=60), st.integers(1, 9)
)
def test_nobody_loses_what_is_within_an_equal_share(
    added: list[tuple[str, int]], most: int
) -> None:
    store, _ = store_of(most, most_bytes=2000)
    held: dict[str, list[StoredResponse]] = {"a": [], "b": [], "c": []}
    for number, (owner, size) in enumerate(added):
        stored = of_owner(owner, f"r{number}", "z" * size)
        store.add(stored)
        held[owner].append(stored)
        for mine in held.values():
            latest, taken = mine[-(most // 3) :] if most >= 3 else [], 0
            for one in reversed(latest):
                taken += one.size + one.turn.size
                if taken <= 2000 // 3:
                    assert one.id in store._responses
