"""The clients of a world: whoever streams, dawdles, stalls for ever, leaves or times out."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import attrs
import trio

from tests.fakes import EOS
from tests.policy.reference import reference
from tests.sim.pictures import illustrated, key_of_prompt
from tests.sim.weather import IMAGE_FAULTS, POISON, Weather, token_at
from trouper import (
    Answer,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    RequestFailed,
    Runtime,
    TextPrompt,
    Timeouts,
    TokenPrompt,
)
from trouper.protocol.record import RequestRecord

FOREVER = float("inf")
STOPS = ("end", "the end", "🦜", "ïve", "rots", "✂ c", "then ", "zz")


@attrs.define(eq=False)
class Client:
    """One client: what it will do, and what it met."""

    name: int
    request: Generate
    arrives_s: float
    patience_s: float
    pause_s: float
    """Between two reads."""
    stalls_after: float
    """So many reads, then it never reads again and never leaves."""
    coalesces: bool
    text: str = ""
    tokens: int = 0
    met: list[Finished | RequestFailed | Literal["left"]] = attrs.field(factory=list)
    stalled: Answer | None = None
    told: list[RequestRecord] = attrs.field(factory=list)
    """What became of it, as the runtime tells."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """It met its end, or it stalled."""

    @classmethod
    def draw(cls, name: int, chance: Random, weather: Weather) -> Client:
        pick = chance.choice
        return cls(
            name=name,
            request=draw_request(name, chance, weather),
            arrives_s=chance.random() * weather.rush_s,
            patience_s=pick(
                (FOREVER, FOREVER, FOREVER, chance.random() * 0.1, chance.random() * 3)
            ),
            pause_s=pick((0, 0, 0, 0.05, 3)),
            stalls_after=pick((0, 2)) if chance.random() < 0.08 else FOREVER,
            coalesces=chance.random() < 0.3,
        )

    def illustrate(self, chance: Random) -> None:
        self.request = attrs.evolve(self.request, prompt=illustrated(chance))

    async def live(self, runtime: Runtime, trace: list[Any]) -> None:
        await trio.sleep(self.arrives_s)
        with trio.move_on_after(self.patience_s) as leaving:
            try:
                with await runtime.submit(self.request, self.told.append) as answer:
                    self.met.append(await self._read(answer))
            except RequestFailed as failed:
                self.met.append(failed)
        if leaving.cancelled_caught:
            self.met.append("left")
        self.settled.set()
        trace.append((trio.current_time(), self.name, self.tokens, self.text, self.outcome))

    async def _read(self, answer: Answer) -> Finished:
        reads = 0
        while True:
            if reads >= self.stalls_after:
                self.stalled = answer
                self.settled.set()
                await trio.sleep_forever()
            piece = await answer.next()
            if isinstance(piece, Finished):
                return piece
            self._hear(piece)
            while self.coalesces and (more := answer.next_nowait()) is not None:
                self._hear(more)
            reads += 1
            await trio.sleep(self.pause_s)

    def _hear(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += len(delta.tokens)
        visible = [token for token in delta.tokens if token not in ends(self.request)]
        wanted = visible if self.request.logprobs is not None else []
        assert [one.token for one in delta.logprobs] == wanted, (
            "of each token but the one that ends the answer"
        )

    @property
    def outcome(self) -> str:
        match self.met:
            case [Finished(reason=reason)]:
                return reason
            case [RequestFailed() as failed]:
                return str(failed.problem.code)
            case ["left"]:
                return "left"
            case []:
                return "stalled" if self.stalled else "nothing"
            case more:
                return f"too much: {more}"

    def check(self) -> None:
        """One end, and the right one: neither neighbours nor withdrawals nor restarts change an
        answer."""
        if self.outcome in ("stop", "length"):
            text, reason, tokens = expected(self.request)
            assert (self.text, self.outcome, self.tokens) == (text, reason, tokens), self
        else:
            assert len(self.met) == 1 or self.stalled, self
        if self.outcome in IMAGE_FAULTS:
            assert isinstance(self.request.prompt, ChatPrompt), self
        self._check_told()

    def _check_told(self) -> None:
        """Once, and nothing else than what it met; in the order in which things happen."""
        [told] = self.told
        times = (
            told.arrived_at,
            told.admitted_at,
            told.first_token_at,
            told.last_token_at,
            told.ended_at,
        )
        came = [at for at in times if at is not None]
        assert came == sorted(came), told
        assert told.cached_tokens <= told.prompt_tokens, told
        match self.outcome:
            case "stop" | "length" as reason:
                assert (told.reason, told.code, told.generated_tokens) == (
                    reason,
                    "",
                    self.tokens,
                ), told
            case "left":  # What it never read may have been a whole answer, or an error.
                assert told.generated_tokens >= self.tokens, told
            case "stalled":
                assert told.generated_tokens >= self.tokens, told
            case code:
                assert (told.reason, told.code) in {("error", code), ("refused", code)}, (
                    told,
                    self,
                )


def draw_request(name: int, chance: Random, weather: Weather) -> Generate:
    length = chance.choice((1, 5, 30, 30, 30, 600))
    root = chance.choice(weather.roots)[: chance.choice((0, 20, 40, 100, 300))]
    prompt = TokenPrompt(root + tuple(chance.randrange(256) for _ in range(length)))
    small = Timeouts(
        queue_s=chance.choice((None, 0.01, 1)),
        first_token_s=chance.choice((None, 0.01, 1)),
        between_tokens_s=chance.choice((None, 0.01, 1)),
        request_s=chance.choice((None, 0.05, 3)),
    )
    return Generate(
        request_id=str(name),
        prompt=TextPrompt(POISON) if chance.random() < weather.poison else prompt,
        max_tokens=chance.choice((None, 1, 2, 10, 40)),
        stop=tuple(chance.sample(STOPS, chance.choice((0, 0, 1, 2)))),
        stop_token_ids=(ord("t"),) if chance.random() < 0.1 else (),
        ignore_eos=chance.random() < 0.1,
        cache_salt=chance.choice(("", "", "", "other")),
        logprobs=chance.choice((None, None, 0, 2)),
        speculation=chance.choice((None, None, "ngram", "off")),
        timeouts=small if chance.random() < 0.2 else None,
        priority=chance.choice((0, 0, -1, 3)),
    )


def ends(request: Generate) -> set[int]:
    return set(request.stop_token_ids) | (set() if request.ignore_eos else {EOS})


def expected(request: Generate) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens) of the whole answer."""
    key = key_of_prompt(request.prompt)
    pieces: list[bytes] = []
    ended = False
    while not ended and len(pieces) < (request.max_tokens or 20):
        token = token_at(key, len(pieces))
        ended = token in ends(request)
        pieces.append(b"" if ended or token == EOS else bytes([token]))
    text, stop, used = reference(pieces, request.stop)
    return text, "stop" if ended or stop else "length", used
