"""What a seed makes of a world: the engine's speed and faults, the settings, the moment of the end.
All drawn once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs
import trio

from tests.fake_images import FakeLayout, ImageTokenizer
from tests.fakes import CUTTABLE, EOS, UNCUTTABLE, FakeEngine, Tokens
from trouper.actors.runtime.decoding_process import UNAVAILABLE
from trouper.actors.runtime.supervision import RestartLimit
from trouper.protocol.kv import KvLayout
from trouper.protocol.media import MediaSpan
from trouper.protocol.model import LoadedModel, MemoryStats
from trouper.protocol.plans import Admit, Plan
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings

STALL_TIMEOUT_S = 0.4
IMAGE_FAULTS = ("image_damaged", "image_crashes_decoder", UNAVAILABLE)
"""Codes of requests whose image has no pixels."""
SAID = "naïve 🦜 parrots say: the end, then ✂ cut. ".encode()
POISON = "poison"
"""A prompt that crashes RequestIntake."""


class SimulatedCrash(Exception):
    """The device died, or something else that is a bug and not a bad request."""


def token_at(key: int, position: int) -> int:
    """Bytes of many lengths of character, from somewhere in the middle; some answers end by
    themselves."""
    return (
        EOS if position > 3 and (key + position) % 37 == 0 else SAID[(key + position) % len(SAID)]
    )


def key_of(prompt: Tokens, media: Sequence[MediaSpan]) -> int:
    """The number on which an answer depends: on the prompt, on its images and on their places."""
    return sum(prompt) + sum(at * span.digest[0] for at, span in enumerate(media, 1))


class SimTokenizer(ImageTokenizer):
    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if text == POISON:
            raise SimulatedCrash("the tokenizer died")
        return super().encode(text)


@attrs.frozen(kw_only=True)
class ImageWeather:
    """Of a model that takes images. The chances are per client, per image that is decoded."""

    illustrated: float
    decode_s: tuple[float, ...]
    faults: tuple[tuple[float, str], ...]
    """Chances and codes: the image is damaged, or the process dies, by the image or from
    outside."""
    crash: float
    """The actor itself crashes."""
    image_cache: int | None
    atomic: bool = False
    """Tokens of an image attend to later ones."""

    @classmethod
    def draw(cls, chance: Random) -> ImageWeather | None:
        pick = chance.choice
        if chance.random() < 0.5:
            return None
        return cls(
            illustrated=pick((0.1, 0.3, 0.6)),
            decode_s=pick(((0.001,), (0.01, 0.3), (0.5, 10.0), (0.001, 30.0))),
            faults=tuple((pick((0, 0, 0.1)), code) for code in IMAGE_FAULTS),
            crash=pick((0, 0, 0, 0.05, 0.5)),
            image_cache=pick((None, 0, 200)),
            atomic=pick((False, True)),
        )


@attrs.frozen(kw_only=True)
class Weather:
    """The chances are per step of the engine, per look of the janitor, per client."""

    settings: Settings
    limit: RestartLimit
    step_s: tuple[float, ...]
    crash: float
    hang: float
    pressure: float
    janitor_crash: float
    poison: float
    rush_s: float
    """All clients arrive within so many seconds."""
    drain_at_s: float | None
    """None: when all clients are done."""
    drain_s: float
    kv: KvLayout
    repeats: float
    """Rows have something to draft at so many of their places."""
    eager: bool
    """They draft whether it pays or not."""
    roots: tuple[tuple[int, ...], ...]
    """What prompts begin with."""
    images: ImageWeather | None = None
    """None: the model takes no images."""

    @classmethod
    def draw(cls, chance: Random) -> Weather:
        pick = chance.choice
        settings = Settings(
            completion_batch_size=pick((1, 2, 4, 8, 32)),
            prefill_batch_size=pick((1, 4)),
            prefill_step_size=pick((4, 64, 2048)),
            max_queue_size=pick((0, 8, 128, 128)),
            default_max_tokens=20,
            stall_timeout_s=STALL_TIMEOUT_S,
            queue_timeout_s=pick((0, 5)),
            first_token_timeout_s=pick((0, 5)),
            token_timeout_s=pick((0, 5)),
            request_timeout_s=pick((0, 20)),
            janitor_interval_s=pick((0.1, 5)),
            spec_draft_tokens=pick((1, 3, 8)),
            block_size=pick((1, 4, 16, 16)),
            cache_memory=ByteSize(pick((0, 5_000, 50_000, 1_000_000))),
            num_blocks=pick((None, None, 3)),
            snapshot_tokens=pick((16, 64)),
            kv_memory=pick((None, None, ByteSize(105_000), ByteSize(150_000))),
            no_ssd=True,
        )
        forgiving = RestartLimit(max_crashes=10**6, pause_s=0.01)
        return cls(
            settings=settings,
            limit=pick((forgiving, forgiving, forgiving, RestartLimit())),
            step_s=pick(((0.01,), (0.001, 0.05), (0.01, 0.5))),
            crash=pick((0, 0, 0, 0.005, 0.05)),
            hang=pick((0, 0, 0, 0.01)),
            pressure=pick((0, 0, 0.3, 1)),
            janitor_crash=pick((0, 0, 0, 0.1)),
            poison=pick((0, 0, 0, 0.1)),
            rush_s=pick((0.01, 3, 20)),
            drain_at_s=pick((None, None, None, chance.random() * 5)),
            drain_s=pick((0, 0.5, 60, 1000)),
            kv=pick((CUTTABLE, CUTTABLE, UNCUTTABLE)),
            repeats=pick((0, 0.5, 1, 1)),
            eager=pick((False, True, True)),
            roots=tuple(
                tuple(chance.randrange(EOS + 1) for _ in range(300)) for _ in range(pick((1, 3)))
            ),
        )


class SimEngine(FakeEngine):
    """The fake engine in this weather. Counts what it did to the actors, so that no other crash
    goes unseen."""

    def __init__(self, weather: Weather, chance: Random, trace: list[Any]) -> None:
        super().__init__(
            before_step=self._suffer,
            token_at=token_at,
            tokenizer=SimTokenizer(),
            kv=weather.kv,
            guess=self._guess,
        )
        self.crashes: Counter[str] = Counter()
        self._weather = weather
        self._chance = chance
        self._trace = trace

    async def load(self) -> LoadedModel:
        model = await super().load()
        if self._weather.images is None:
            return model
        layout = FakeLayout(atomic=self._weather.images.atomic)
        return attrs.evolve(model, card=attrs.evolve(model.card, images=layout))

    def key_of(self, admit: Admit, prompt: Tokens) -> int:
        return key_of(prompt, admit.media)

    async def _suffer(self, plan: Plan) -> None:
        weather, fate = self._weather, self._chance.random()
        self._trace.append(
            (trio.current_time(), plan.step, plan.drop, len(plan.decode), plan.prefill, plan.forget)
        )
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        await trio.sleep(self._chance.choice(weather.step_s) + 0.0005 * prefilled)
        if fate < weather.crash:
            self.crashes["group"] += 1
            raise SimulatedCrash("the device died")
        if fate < weather.crash + weather.hang:
            await trio.sleep(STALL_TIMEOUT_S * self._chance.choice((1.5, 9, 25)))

    def _guess(self, key: int, position: int) -> tuple[int, int]:
        """Of one row and place always the same, whatever else happens."""
        drawn = (2654435761 * (1000 * key + position)) >> 4
        tokens = 1 + drawn % 8 if drawn % 97 < 97 * self._weather.repeats else 0
        return tokens, (0, tokens, drawn % (tokens + 1))[drawn % 3]

    def memory(self) -> MemoryStats:
        if self._chance.random() < self._weather.janitor_crash:
            self.crashes["janitor"] += 1
            raise SimulatedCrash("the device does not say")
        used = 95 if self._chance.random() < self._weather.pressure else 50
        return MemoryStats(
            active_bytes=used, spare_bytes=self._chance.randrange(10), limit_bytes=100
        )
