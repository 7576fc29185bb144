"""The clients of a soak: a few at a time, with pauses, each answer compared with the known one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
import trio

from tests.soak import features
from tests.soak.client import RESPONSES, TEXTS, Ask, Heard, Manner, answer_of, ask, equal
from tests.soak.features import Script
from tests.soak.wishes import Question

IDENTIFIERS = re.compile("/(resp|file|batch)[-_].*")
PAGES = (
    "/v1/models",
    "/health",
    "/livez",
    "/metrics",
    "/server_info",
    "/openapi.json",
    "/docs",
    "/",
    "/v1/live",
)
SALTS = 6
"""Caches of the last so many turns may be asked for again: some is in memory, some on disk, some
nowhere any more."""
KEPT = 30
"""Wrong answers that are told in full."""


@attrs.define
class Tally:
    """What the clients met. `firsts` and `gaps`: (when, seconds) of streams that were read at
    once."""

    asked: Counter[str] = attrs.field(factory=Counter)
    """Answers by endpoint, and by how they were read."""
    checked: int = 0
    wrong: list[str] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)
    """Answers that should not be errors and were, and connections that ended early."""
    firsts: list[tuple[float, float]] = attrs.field(factory=list)
    gaps: list[tuple[float, float]] = attrs.field(factory=list)


@attrs.frozen
class Target:
    """A server and what it is asked; `watched`: the latency of its streams is judged. `keyed`: it
    has keys with limits. `exchanged`: a model that is put to sleep and loaded."""

    port: int
    questions: Sequence[Question]
    watched: bool = False
    keyed: bool = False
    exchanged: str = ""

    def scripts(self) -> dict[Script, int]:
        """What a client does, and how often."""
        often: dict[Script, int] = {
            Load.question: 40,
            Load.page: 4,
            Load.conversation: 2,
            Load.background: 2,
        }
        often |= {Load.cancelled: 2, features.batch: 1}
        return (
            often
            | ({features.limited: 2} if self.keyed else {})
            | ({features.exchanged: 1} if self.exchanged else {})
        )

    def of(self, models: Sequence[str], exchanged: str) -> Target:
        questions = [question for question in self.questions if question.model in models]
        return attrs.evolve(self, questions=questions, exchanged=exchanged)


@attrs.define
class Load:
    """Asks a target until it is told to stop. `now`: seconds since the soak began."""

    tally: Tally
    chance: Random
    now: Callable[[], float]
    pause_s: float
    turn: int = 0

    async def run(self, targets: Sequence[Target], clients: int, seconds: float) -> None:
        """One turn: a new cache, and those of the last ones. Each client finishes what it asks, now
        of one target, now of another."""
        self.turn += 1
        end = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for number in range(clients):
                nursery.start_soon(
                    self._client, targets, end, Random(self.chance.randrange(2**32) + number)
                )

    async def _client(self, targets: Sequence[Target], end: float, chance: Random) -> None:
        while trio.current_time() < end:
            target = chance.choice(targets)
            scripts = target.scripts()
            [script] = chance.choices([*scripts], [*scripts.values()])
            await script(self, target, chance)
            await trio.sleep(min(chance.expovariate(1 / self.pause_s), 5 * self.pause_s))

    async def question(self, target: Target, chance: Random) -> None:
        question = chance.choice(target.questions)
        manners: tuple[Manner, ...] = ("reads", "slow", "leaves")
        manner = chance.choices(manners, (8, 1, 1))[0]
        salt = f"turn {max(1, self.turn - min(int(chance.expovariate(0.5)), SALTS))}"
        heard = await ask(target.port, question.salted(salt), manner, chance)
        self.tally.asked[question.wish.path] += 1
        self.tally.asked[manner] += 1
        if heard.left:
            return
        self.compare(question.wish, heard, question.answer)
        if target.watched and manner == "reads" and heard.first_s is not None:
            now = self.now()
            self.tally.firsts.append((now, heard.first_s))
            self.tally.gaps += [(now, gap) for gap in heard.gaps_s]

    def compare(self, wish: Ask, heard: Heard, answer: Any) -> None:
        self.tally.checked += 1
        if heard.status in (0, 429) or heard.status >= 500:
            self.tally.errors.append(
                f"{self.now():.0f} s: {wish.path} {heard.status} {heard.body[:200]!r}"
            )
        elif not equal(answer, said := answer_of(wish, heard)):
            told = (
                f"{self.now():.0f} s: {json.dumps(wish.body)[:300]}: {json.dumps(said)}, not "
                f"{json.dumps(answer)}"
            )
            self.tally.wrong.append(told if len(self.tally.wrong) < KEPT else "another")

    async def heard(self, target: Target, wish: Ask) -> Heard:
        """Whatever is answered."""
        self.tally.asked[IDENTIFIERS.sub("", wish.path)] += 1
        return await ask(target.port, wish)

    async def answer(self, target: Target, wish: Ask) -> Heard:
        """What is answered; all but 200 counts as an error."""
        heard = await self.heard(target, wish)
        if heard.status != 200:
            self.tally.errors.append(
                f"{self.now():.0f} s: {wish.method} {wish.path} {heard.status} {heard.body[:200]!r}"
            )
        return heard

    async def object_of(self, target: Target, wish: Ask) -> Any:
        """The object that is answered, or None where it became an error, which is counted."""
        heard = await self.answer(target, wish)
        return heard.json() if heard.status == 200 else None

    async def _get(self, target: Target, path: str, method: str = "GET") -> Heard:
        return await self.answer(target, Ask(path, method=method))

    async def page(self, target: Target, chance: Random) -> None:
        path = chance.choice(PAGES)
        if path == "/v1/live":  # A feed without an end.
            await ask(target.port, Ask(path, method="GET"), "leaves", chance)
            self.tally.asked[path] += 1
        else:
            await self._get(target, path)

    def _response(self, target: Target, chance: Random) -> Question:
        return chance.choice(
            [one for one in target.questions if one.wish.path == RESPONSES and _whole(one.wish)]
        )

    async def _stored(self, target: Target, question: Question, **fields: Any) -> Any:
        """The response, or None where it became an error, which is counted."""
        wish = attrs.evolve(question.wish, body={**(question.wish.body or {}), **fields})
        return await self.object_of(target, wish)

    async def conversation(self, target: Target, chance: Random) -> None:
        """A response that goes on, is looked at, and is deleted."""
        question = self._response(target, chance)
        if (first := await self._stored(target, question)) is None:
            return
        again = {"previous_response_id": first["id"], "input": "And again."}
        if (second := await self._stored(target, question, **again)) is None:
            return
        self._same(question, first)
        found = await self._get(target, f"{RESPONSES}/{first['id']}")
        self._same(question, found.json())
        await self._get(target, f"{RESPONSES}/{second['id']}/input_items")
        await self._get(target, f"{RESPONSES}/{second['id']}", "DELETE")

    async def background(self, target: Target, chance: Random) -> None:
        """A response whose client comes back for it."""
        question = self._response(target, chance)
        said = await self._stored(target, question, background=True)
        while said is not None and said.get("status") in ("queued", "in_progress"):
            await trio.sleep(0.2)
            said = (await self._get(target, f"{RESPONSES}/{said['id']}")).json()
        if said is not None:
            self._same(question, said)

    async def cancelled(self, target: Target, chance: Random) -> None:
        """A response in the background that is not awaited."""
        question = self._response(target, chance)
        said = await self._stored(target, question, background=True, max_output_tokens=200)
        if said is not None:
            await trio.sleep(chance.uniform(0, 0.5))
            await self._get(target, f"{RESPONSES}/{said['id']}/cancel", "POST")

    def _same(self, question: Question, response: Any) -> None:
        self.tally.checked += 1
        said = [list(one) for one in TEXTS[RESPONSES](response)]
        if not equal(question.answer, said):
            self.tally.wrong.append(
                f"{self.now():.0f} s: {question.wish.path}: {said}, not {question.answer}"
            )


def _whole(wish: Ask) -> bool:
    return not (wish.body or {}).get("stream")
