"""What is kept of responses: never more than the bounds, and what a kept one needs is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from sqlite3 import Connection
from typing import Any

import msgspec
import pytest

from trouper import ServerSettings
from trouper.protocol.problems import RequestFailed
from trouper.protocol.setting_fields import ByteSize
from trouper.web.responses.response_store import ResponseStore, StoredResponse
from trouper.web.serving.state_database import StateDatabase
from trouper.web.streaming.event_log import EventLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def database() -> AsyncIterator[StateDatabase]:
    database = StateDatabase(None)
    await database.open(create=True)
    yield database
    await database.close()


class Store(ResponseStore):
    """Shows what the database holds."""

    def __init__(
        self,
        database: StateDatabase,
        max_count: int = 100,
        max_bytes: int = 10**6,
        ttl_s: float = 100.0,
    ) -> None:
        self.clock, self.key = Clock(), ""
        bounds = ServerSettings(
            stored_responses=max_count,
            stored_responses_bytes=ByteSize(max_bytes),
            stored_responses_ttl_s=ttl_s,
        )
        super().__init__(bounds, database, lambda: {self.key}, self.clock)
        self.database = database

    async def has(self, name: str) -> bool:
        try:
            return (await self.get(name)).id == name
        except RequestFailed as failed:
            return failed.problem.status != 404

    async def number(self, what: str = "count(used) FROM responses") -> int:
        def look(connection: Connection) -> int:
            return int(connection.execute(f"SELECT {what}").fetchone()[0] or 0)

        return await self.database.run(look)

    async def bytes(self) -> int:
        """As counted, which is what is there."""
        counted = await self.number("sum(size) FROM responses")
        rows = "sum(ifnull(length(body), 0) + ifnull(length(events), 0)) FROM responses"
        items = "sum(length(item)) FROM items"
        assert counted == await self.number(rows) + await self.number(items)
        return counted


def response(
    name: str,
    previous: str | None = None,
    text: str = "",
    log: EventLog | None = None,
    owner: str = "",
) -> StoredResponse:
    item: dict[str, Any] = {"id": f"out_{name}", "text": text}
    return StoredResponse(
        {"id": name, "output": [item]}, ({"id": f"in_{name}"},), previous, log, owner
    )


async def ids_of(store: Store, name: str) -> list[str]:
    return [item["id"] for item in await store.conversation(name)]


async def test_a_conversation_outlives_the_responses_that_began_it(
    database: StateDatabase,
) -> None:
    store = Store(database, max_count=2)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.add(response(name, previous))
    assert not await store.has("a")
    items = ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert await ids_of(store, "c") == items
    assert await store.conversation_bytes("c") == sum(
        len(msgspec.json.encode(item)) for item in await store.conversation("c")
    )
    assert await store.item("out_a") == {"id": "out_a", "text": ""}
    before = await store.bytes()
    await store.remove("b")
    assert await ids_of(store, "c") == items, "c needs all of them"
    assert 0 < await store.bytes() < before
    await store.remove("c")
    assert (await store.bytes(), await store.number("count(*) FROM responses")) == (0, 0)
    assert await store.item("out_a") is None


async def test_going_on_from_what_is_gone_stores_it_again(database: StateDatabase) -> None:
    """Its items were read before it went."""
    store = Store(database, max_count=1)
    await store.add(response("a"))
    earlier = await store.conversation("a")
    await store.add(response("x"))
    assert await store.conversation("a") == [] and not await store.has("a")
    await store.add(response("b", "a"), earlier)
    assert await ids_of(store, "b") == ["in_a", "out_a", "in_b", "out_b"]
    assert not await store.has("a") and await store.has("b")
    assert await store.item("in_a") is not None
    await store.bytes()


async def test_age_counts_from_the_last_use(database: StateDatabase) -> None:
    store = Store(database, ttl_s=10)
    await store.add(response("a"))
    await store.add(response("b"))
    store.clock.now = 8
    assert await store.has("a")
    store.clock.now = 15
    assert not await store.has("b")
    assert await store.has("a")
    store.clock.now = 26
    assert await store.item("in_a") is None
    assert await store.bytes() == 0


async def test_bytes_count_events_too(database: StateDatabase) -> None:
    log = EventLog()
    log.add(b"x" * 500)
    store = Store(database, max_bytes=400)
    await store.add(response("a", log=log))
    assert await store.number() == 0
    await store.add(response("a"))
    assert await store.number() == 1
    await store.add(response("b", text="y" * 330))
    assert not await store.has("a") and await store.has("b")
    assert 0 < await store.bytes() <= 400


async def test_events_are_there_as_they_were(database: StateDatabase) -> None:
    log = EventLog()
    for event in (b"first", b"\xff", b""):
        log.add(event)
    store = Store(database)
    await store.add(response("a", log=log))
    stored = (await store.get("a")).log
    assert stored is not None and stored.over
    assert stored.since(1, 10) == [b"\xff", b""] and stored.size == log.size


async def test_events_and_tools_of_what_is_gone_count_no_more(database: StateDatabase) -> None:
    """They counted as long as a later response built on it, until the whole conversation was more
    than the store, and all of it went."""
    store = Store(database, max_bytes=1000)
    previous: str | None = None
    for number in range(10):
        log = EventLog()
        log.add(b"x" * 400)
        await store.add(response(str(number), previous, log=log))
        assert await store.has(str(number))
        previous = str(number)
    assert await store.bytes() <= 1000 and await store.item("in_0") is not None


async def test_an_id_that_is_gone_says_so(database: StateDatabase) -> None:
    store = Store(database, max_count=0)
    await store.add(response("a"))
    with pytest.raises(RequestFailed, match="not found: the last 0 responses are kept") as caught:
        await store.get("a", "previous_response_id", "previous_response_not_found")
    problem = caught.value.problem
    assert (problem.status, problem.param, problem.code) == (
        400,
        "previous_response_id",
        "previous_response_not_found",
    )


@pytest.mark.parametrize("seed", range(6))
async def test_the_bounds_hold_whatever_happens(database: StateDatabase, seed: int) -> None:
    dice = Random(seed)
    max_count, max_bytes = dice.randrange(6), dice.randrange(1500)
    store = Store(database, max_count, max_bytes, ttl_s=50)
    names: list[str] = []
    items: dict[str, list[str]] = {}
    """What each conversation must have, if it is there."""
    for number in range(80):
        match dice.choice(["add", "follow", "find", "remove", "wait"]):
            case "add" | "follow" as way:
                previous = dice.choice(names) if way == "follow" and names else None
                earlier = [] if previous is None else await store.conversation(previous)
                name, previous = f"r{number}", previous if earlier else None
                await store.add(response(name, previous, "z" * dice.randrange(300)), earlier)
                before = items[previous] if previous is not None else []
                items[name] = [*before, f"in_{name}", f"out_{name}"]
                names.append(name)
            case "find" if names:
                await store.has(dice.choice(names))
            case "remove" if names:
                await store.remove(dice.choice(names))
            case "wait":
                store.clock.now += dice.random() * 30
        await store.item("")  # Looks at the clock.
        assert await store.number() <= max_count and await store.bytes() <= max_bytes
        for name in names:
            if await store.number(f"count(*) FROM responses WHERE used >= 0 AND id = '{name}'"):
                assert await ids_of(store, name) == items[name]
    store.clock.now += 1000
    await store.item("")
    assert await store.number("count(*) FROM responses") == 0
    assert await store.number("count(*) FROM items") == 0


@pytest.mark.parametrize(("max_count", "max_bytes"), [(8, 10**6), (1000, 4000)])
async def test_a_key_that_floods_the_store_pushes_out_its_own(
    database: StateDatabase, max_count: int, max_bytes: int
) -> None:
    store = Store(database, max_count, max_bytes)
    for number in range(30):
        await store.add(response(f"a{number}", text="x" * 200, owner="a"))
    assert await store.number() >= 8, "one key alone may have all of it"
    for number in range(3):
        await store.add(response(f"b{number}", text="y" * 200, owner="b"))
    for number in range(30, 90):
        await store.add(response(f"a{number}", text="x" * (number * 10), owner="a"))
    store.key = "b"
    assert all([await store.has(f"b{number}") for number in range(3)])
    assert not await store.has("a89"), "it is another key's"
    assert await store.item("out_a89") is None
    store.key = "a"
    assert await store.has("a89") and not await store.has("a0")
    assert await store.number() <= max_count and await store.bytes() <= max_bytes


@pytest.mark.parametrize("seed", range(6))
async def test_nobody_loses_what_is_within_an_equal_share(
    database: StateDatabase, seed: int
) -> None:
    dice = Random(seed)
    max_count = dice.randrange(1, 10)
    store = Store(database, max_count, max_bytes=2000)
    held: dict[str, list[tuple[str, int]]] = {"a": [], "b": [], "c": []}
    for number in range(60):
        name, owner = f"r{number}", dice.choice("abc")
        await store.add(response(name, text="z" * dice.randrange(400), owner=owner))
        size = await store.number(f"sum(size) FROM responses WHERE id = '{name}'")
        held[owner].append((name, size))
        for store.key, mine in held.items():
            latest, taken = mine[-(max_count // 3) :] if max_count >= 3 else [], 0
            for name, size in reversed(latest):
                taken += size
                if taken <= 2000 // 3:
                    assert await store.number(f"count(*) FROM responses WHERE id = '{name}'")


def with_image(name: str, data: str, previous: str | None = None) -> StoredResponse:
    url = f"data:image/png;base64,{data}"
    content = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": url}] * 2
    item = {"id": f"in_{name}", "type": "message", "content": content}
    output = {"id": f"sent_{name}", "type": "function_call_output", "output": content}
    return StoredResponse({"id": name, "output": []}, (item, output), previous)


async def images_of(store: Store) -> int:
    needed = await store.number("count(*) FROM response_images")
    assert (needed > 0) == (await store.number("count(*) FROM images") > 0)
    return await store.number("sum(size) FROM images")


async def test_an_image_is_stored_once_and_given_back_as_it_was(database: StateDatabase) -> None:
    store, data = Store(database), "A" * 10_000
    first, second = with_image("a", data), with_image("b", data, "a")
    await store.add(first)
    await store.add(second)
    assert await images_of(store) < 10_100, "eight times sent, once stored"
    assert await store.bytes() < 2000
    assert (await store.get("a")).input == list(first.input)
    assert await store.conversation("b") == [*first.input, *second.input]
    assert await store.item("sent_b") == second.input[1]
    assert await store.conversation_bytes("b") > 10_000
    await store.remove("a")
    assert await store.conversation("b") == [*first.input, *second.input]
    await store.remove("b")
    assert await images_of(store) == 0


async def test_images_count_in_the_bytes_of_their_key(database: StateDatabase) -> None:
    store = Store(database, max_bytes=5000)
    for name in "abcdef":
        await store.add(with_image(name, name * 1000))
    kept = [name for name in "abcdef" if await store.has(name)]
    assert kept in ([*"ef"], [*"def"])
    assert await store.bytes() + await images_of(store) <= 5000


async def test_a_database_of_an_earlier_version_gets_images(tmp_path: Path) -> None:
    database = StateDatabase(tmp_path)
    await database.open(create=True)
    await database.run(lambda connection: connection.execute("DROP TABLE images"))
    await database.close()
    again = StateDatabase(tmp_path)
    await again.open(create=True)
    store = Store(again)
    await store.add(with_image("a", "A"))
    assert await images_of(store) > 0
    await again.close()


async def test_a_response_that_comes_again_is_stored_once(
    database: StateDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    store, stored = Store(database), StoredResponse({"id": "resp_1", "output": []}, ())
    for _ in range(2):
        await store.add(stored)
    assert await store.has("resp_1")
    assert "is not stored" not in caplog.text
