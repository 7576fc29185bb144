"""One seed: a server under a load of known answers, the faults, and then every promise that they
could have broken."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import attrs
import trio

from tests.chaos.faults import Fault, Hand, drawn
from tests.chaos.house import SSD_BYTES, House
from tests.kill_loop import torn
from tests.soak.client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    STREAMED,
    Ask,
    Heard,
    Manner,
    answer_of,
    ask,
    equal,
    events,
)
from tests.soak.wishes import Question
from trouper.actors.runtime.decoding_process import UNAVAILABLE

CLIENTS, EACH = 5, 3
HANGS_S = 120.0
"""Nobody waits for so long, however busy the machine is."""
SPARE = 8
"""Descriptors that may be open more than before: connections of this moment, a file that is
read."""
ENDS = {CHAT: b"data: [DONE]", COMPLETIONS: b"data: [DONE]", MESSAGES: b"event: message_stop"}
EXIT_S = 60.0
WRITERS, OWN_BYTES = 2, 1000
"""The bound of the tier has a margin of one file for each writer; its tag and its count are beside
it."""


@attrs.define
class Seen:
    """What became of one seed. `broken`: promises."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    broken: list[str] = attrs.field(factory=list)


def whole(wish: Ask, heard: Heard) -> bool:
    """Whether an answer says that it is complete."""
    if not (wish.body and wish.body.get("stream")):
        return heard.json() is not None
    end = ENDS.get(wish.path)
    if end is not None:
        return end in heard.body
    return b"event: response.completed" in heard.body or b"event: response.incomplete" in heard.body


ERROR = re.compile(rb'"error": ?\{')


def failed(heard: Heard) -> bool:
    """Whether an answer, or an event of a stream, is an error: a response that is none has
    `"error": null`."""
    return ERROR.search(heard.body) is not None


def judged(question: Question, heard: Heard, faults: Sequence[Fault]) -> tuple[str, str]:
    """(what happened, which promise that breaks or "")."""
    kinds = {fault.kind for fault in faults}
    wish = question.wish
    if heard.status == 200 and not failed(heard) and whole(wish, heard):
        said = answer_of(wish, heard)
        return "right", "" if equal(
            question.answer, said
        ) else f"a wrong answer: {wish}: {said}, not {question.answer}"
    if heard.status == 400 and equal(question.answer, answer_of(wish, heard)):
        return "right", ""
    if heard.short or (heard.status in (0, 200) and not failed(heard)):
        if not continued(question, heard):
            return "cut", f"a cut answer is no part of the right one: {wish}: {heard.body[-300:]!r}"
        return (
            "cut",
            ""
            if "killed" in kinds
            else f"a connection ended although nothing was killed: {wish}: {heard}",
        )
    problem = (heard.json() or {}).get("error") or {}
    if heard.status != 200 and not problem.get("message"):
        return "error", f"an error without a message: {heard.status} {heard.body[:300]!r}"
    allowed = kinds & {"killed", "descriptors"} or (
        "decoder killed" in kinds and UNAVAILABLE.encode() in heard.body
    )
    return (
        f"error {problem.get('code')}",
        "" if allowed else f"an error that nothing explains: {wish}: {heard}",
    )


def continued(question: Question, heard: Heard) -> bool:
    """Whether the text of a stream that was cut is a beginning of the right one."""
    if (
        not (question.wish.body and question.wish.body.get("stream"))
        or question.wish.path not in ENDS
    ):
        return True
    whole_lines = heard.body.rpartition(b"\n\n")[0]
    texts = STREAMED[question.wish.path](list(events(whole_lines)))
    return all(
        right.startswith(text.rstrip("\ufffd"))
        for (text, _), (right, _) in zip(texts, question.answer, strict=False)
    )


async def load(
    house: House, questions: Sequence[Question], chance: Random, faults: Sequence[Fault], seen: Seen
) -> None:
    async def client(own: Random) -> None:
        for _ in range(EACH):
            question = own.choice(questions)
            manners: tuple[Manner, ...] = ("reads", "slow", "leaves")
            [manner] = own.choices(manners, (7, 1, 2))
            heard = await asked(house, question, f"salt {own.randrange(4)}", manner, own)
            if heard is None:
                seen.broken.append(f"nobody answers: {question.wish}")
            elif heard.left:
                seen.outcomes["left"] += 1
            else:
                outcome, broken = judged(question, heard, faults)
                seen.outcomes[outcome] += 1
                seen.broken += [broken] if broken else []
                if outcome == "cut":
                    await served_again(house)
            await trio.sleep(own.uniform(0, 0.2))

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(client, Random(chance.randrange(2**32)))


async def served_again(house: House) -> None:
    """Until it serves. Raises `trio.TooSlowError`."""
    with trio.fail_after(HANGS_S):
        # A process announces nothing
        while not await trio.to_thread.run_sync(house.ready):  # noqa: ASYNC110
            await trio.sleep(0.05)


async def asked(
    house: House, question: Question, salt: str, manner: Manner = "reads", own: Random | None = None
) -> Heard | None:
    """None: it did not end in time."""
    with trio.move_on_after(HANGS_S):
        return await ask(house.port, question.salted(salt), manner, own)
    return None


async def play(house: House, questions: Sequence[Question], seed: int) -> tuple[list[Fault], Seen]:
    """On a house that serves. It serves afterwards, too, or a promise is broken."""
    chance = Random(seed)
    faults, seen = drawn(chance), Seen()
    hand = Hand(house, house.until_ready)
    before = house.descriptors()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load, house, questions, chance, faults, seen)
        for fault in faults:
            nursery.start_soon(hand.do, fault)
    house.until_ready()
    await settled(house)
    for question in chance.sample(list(questions), 4):
        heard = await asked(house, question, "salt 0")
        _, broken = (
            judged(question, heard, ())
            if heard is not None
            else ("", f"nobody answers: {question.wish}")
        )
        seen.broken += [f"afterwards: {broken}"] if broken else []
    await settled(house)
    seen.broken += promises(house, before=None if hand.killed else before)
    return faults, seen


async def settled(house: House) -> None:
    """Until no request runs. Raises `trio.TooSlowError`."""
    with trio.fail_after(HANGS_S):
        # Nor does a model
        while unsettled(await trio.to_thread.run_sync(house.health)):  # noqa: ASYNC110
            await trio.sleep(0.02)


def unsettled(health: Any) -> bool:
    """Whether a request runs, or a model is on its way, which a client may have asked for and
    left."""
    states = {model.get("state") for model in health.get("models", {}).values()}
    return bool(states & {"waiting", "loading", "unloading"}) or any(
        busy(model) for model in _models(health)
    )


def busy(model: Any) -> int:
    return int(model["cache_stats"]["active_sequences"] + model["cache_stats"]["queued_requests"])


def _models(health: Any) -> list[Any]:
    """The loaded ones: none if the last that was asked for replaces the other, and its client has
    left."""
    return [
        model for model in health.get("models", {"": health}).values() if "cache_stats" in model
    ]


def promises(house: House, before: int | None) -> Iterator[str]:
    """What does not hold of a server at rest. `before`: descriptors, unless it is another
    process."""
    health = house.health()
    for model in _models(health):
        if model["status"] != "ok":
            yield f"/health says {model['status']}: {model['detail']}"
        yield from (
            f"{actor} is not as it was"
            for actor in model["actors"]
            if actor["state"] != "running" or actor["restarts"]
        )
        if model["recovery"]["crashes"]:
            yield f"the engine crashed: {model['recovery']}"
        if model["directory"]["damaged"]:
            yield f"{model['directory']['damaged']} damaged files were found"
        if model["memory"]["kv_row_bytes"] or model["memory"]["preempted_sequences"]:
            yield f"rows are held although none runs: {model['memory']}"
    yield from (f"torn under its final name: {path}" for path in torn(house.cache))
    sizes = stored_sizes(house)
    size = sum(sizes)
    if size > SSD_BYTES + WRITERS * max(sizes, default=0) + OWN_BYTES:
        yield f"{size} bytes on disk, beyond --ssd-max-bytes"
    if before is not None and (now := house.descriptors()) > before + SPARE:
        yield f"{now} descriptors, {before} before"


def stored_sizes(house: House) -> list[int]:
    sizes = []
    for path in house.cache.rglob("*"):
        with suppress(OSError):
            sizes += [path.stat().st_size] if path.is_file() else []
    return sizes


def drained(house: House) -> Iterator[str]:
    """SIGTERM ends a server without requests with 0."""
    house.send(signal.SIGTERM)
    if (codes := house.end(EXIT_S)) != [os.EX_OK]:
        yield f"SIGTERM: it ended with {codes}: {house.said()}"
