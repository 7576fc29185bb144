"""ImageDecoder in the graph: only for models that take images, and never a reason to end."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, generate, running
from tests.fakes import FakeEngine
from trouper import Runtime
from trouper.actors import graph
from trouper.engine.vision.layouts import layout_of
from trouper.protocol.health import ActorStats
from trouper.protocol.media import DecodeImage, ImageDecoded
from trouper.protocol.model import LoadedModel


class SeeingEngine(FakeEngine):
    """Its card has a layout of images."""

    async def load(self) -> LoadedModel:
        model = await super().load()
        layout = layout_of(
            {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 1}, {}, {}
        )
        return attrs.evolve(model, card=attrs.evolve(model.card, images=layout))


def decoder_of(runtime: Runtime) -> ActorStats | None:
    return {actor.name: actor for actor in runtime.health().actors}.get("ImageDecoder")


async def test_a_model_that_takes_images_has_a_decoder(autojump_clock: MockClock) -> None:
    async with running(SeeingEngine()) as runtime:
        await trio.testing.wait_all_tasks_blocked()
        decoder = decoder_of(runtime)
        assert decoder is not None
        assert decoder.state == "running"
        [images] = [channel for channel in runtime.channels() if channel.name == "images"]
        assert (images.source, images.target, images.used) == ("Scheduler", "ImageDecoder", 0)
        with await runtime.submit(generate(max_tokens=3)) as answer:
            await answer.next()


async def test_a_model_of_text_has_none(autojump_clock: MockClock) -> None:
    async with running() as runtime:
        assert decoder_of(runtime) is None
        assert "images" not in {channel.name for channel in runtime.channels()}


async def test_a_decoder_that_crashes_too_often_leaves_text_alone(
    opened: Opened, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(
        orders: trio.MemoryReceiveChannel[DecodeImage], news: trio.MemorySendChannel[ImageDecoded]
    ) -> None:
        await trio.lowlevel.checkpoint()
        raise AssertionError("a bug")

    monkeypatch.setattr(graph, "decode_images", crash)
    async with running(SeeingEngine()) as runtime:
        await trio.sleep(60)
        decoder = decoder_of(runtime)
        assert decoder is not None
        assert (decoder.state, decoder.last_error) == ("degraded", "AssertionError: a bug")
        assert runtime.health().ready
        with await runtime.submit(generate(max_tokens=3)) as answer:
            await answer.next()
