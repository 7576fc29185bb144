"""Clients with images, and a decoding process that is slow, refuses, dies, or takes its actor with
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs
import trio

from tests.fake_images import FakeLayout
from tests.fakes import Tokens, card
from tests.image_files import png, png_chunk
from tests.sim.weather import ImageWeather, SimTokenizer, SimulatedCrash, key_of
from trouper import ChatPrompt, Settings, TokenPrompt
from trouper.actors.runtime.decoding_process import DecodingProcess
from trouper.actors.runtime.image_headers import ImageRefused
from trouper.actors.runtime.image_prompts import insert_images
from trouper.protocol.media import DecodeImage, ImageSource, Pixels, PromptImage
from trouper.protocol.requests import Prompt

FILES = tuple(
    png(width, height, png_chunk(b"teXt", bytes([number])))
    for number in range(3)
    for width, height in ((10, 10), (30, 20), (60, 40))
)
TEXTS = ("What is to be seen here, ", "Compare it with the one before: ", "and this ")


def illustrated(chance: Random) -> ChatPrompt:
    """One of few beginnings, with images of few files."""
    files = [chance.choice(FILES) for _ in range(chance.choice((1, 2, 2, 3)))]
    return shown(files, "x" * chance.choice((1, 5, 30)))


def shown(files: Sequence[bytes], question: str = "") -> ChatPrompt:
    content = list[dict[str, Any]]()
    for text, _ in zip(TEXTS, files, strict=False):
        content += [{"type": "text", "text": text}, {"type": "image"}]
    content.append({"type": "text", "text": question})
    sources = tuple(ImageSource(file, f"image {number}") for number, file in enumerate(files))
    return ChatPrompt(({"role": "user", "content": content},), images=sources)


def key_of_prompt(prompt: Prompt) -> int:
    if isinstance(prompt, TokenPrompt):
        return key_of(prompt.tokens, ())
    assert isinstance(prompt, ChatPrompt)
    tokens, images = expanded(prompt)
    return key_of(tokens, [image.span for image in images])


def expanded(prompt: ChatPrompt) -> tuple[Tokens, tuple[PromptImage, ...]]:
    tokenizer, seeing = SimTokenizer(), attrs.evolve(card(), images=FakeLayout())
    tokens = tokenizer.encode_chat(prompt.messages)
    return insert_images(tokens, prompt, seeing, tokenizer, Settings())


class SimDecoder(DecodingProcess):
    """Decodes nothing. `busy`: it is at an image."""

    def __init__(self, weather: ImageWeather, chance: Random) -> None:
        super().__init__()
        self._weather, self._chance = weather, chance
        self.met: Counter[str] = Counter()
        self.busy = False

    async def decode(self, order: DecodeImage) -> Pixels:
        self.busy = True
        try:
            await trio.sleep(self._chance.choice(self._weather.decode_s))
        finally:
            self.busy = False
        fate = self._chance.random()
        for share, code in self._weather.faults:
            if fate < share:
                raise ImageRefused(code, "it has no pixels")
            fate -= share
        if fate < self._weather.crash:
            self.met["decoder crashed"] += 1
            raise SimulatedCrash("the decoder died")
        self.met["decoded"] += 1
        return Pixels(*order.shape.resized, b"")
