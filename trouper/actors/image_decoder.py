"""The ImageDecoder actor. Waits on orders of the Scheduler; owns the process that decodes images.

Images are decoded once the prefix cache is known to lack them.
"""

from __future__ import annotations

from contextlib import suppress

import attrs
import trio

from trouper.actors.runtime.decoding_process import UNAVAILABLE, DecodingProcess
from trouper.actors.runtime.image_headers import ImageRefused
from trouper.protocol.media import DecodeImage, ImageDecoded
from trouper.protocol.problems import INTERNAL


async def decode_images(
    orders: trio.MemoryReceiveChannel[DecodeImage],
    news: trio.MemorySendChannel[ImageDecoded],
    process: DecodingProcess | None = None,
) -> None:
    """Run the actor, which ends after the last order. Each order has one answer, also at a
    crash."""
    process = process or DecodingProcess()
    try:
        async for order in orders:
            began = trio.current_time()
            try:
                answer = ImageDecoded(order.item, await process.decode(order))
            except ImageRefused as refused:
                answer = ImageDecoded(order.item, fault=refused.reason, code=refused.code)
            except Exception:
                fault = INTERNAL.message
                await _send(news, ImageDecoded(order.item, fault=fault, code=UNAVAILABLE))
                raise
            await _send(news, attrs.evolve(answer, seconds=trio.current_time() - began))
    finally:
        await process.stop()


async def refuse_images(
    orders: trio.MemoryReceiveChannel[DecodeImage], news: trio.MemorySendChannel[ImageDecoded]
) -> None:
    """Answer each order in place of the actor, which has crashed too often."""
    fault = "images cannot be decoded any more: the decoder has crashed too often"
    async for order in orders:
        await _send(news, ImageDecoded(order.item, fault=fault, code=UNAVAILABLE))


async def _send(news: trio.MemorySendChannel[ImageDecoded], answer: ImageDecoded) -> None:
    with suppress(trio.BrokenResourceError):  # The scheduler has ended and needs no news.
        await news.send(answer)
