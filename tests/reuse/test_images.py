"""Prompts with images through the whole graph, on real models of three families: what comes from
memory, a live row or the disk, after preemptions and crashes and in company, is what the row alone
would answer; and images are decoded and encoded as often as the cache lacks them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from PIL import Image

from tests.engine.vision.families import checkpoint, load, text_model
from tests.image_files import encoded, picture
from tests.real.serving import common
from tests.reuse.serving import (
    TOKENS,
    Ask,
    Heard,
    Served,
    Tiny,
    agreed,
    cold,
    hear,
    serving,
    until,
)
from trouper import ChatPrompt, Generate, RequestFailed
from trouper.actors import graph
from trouper.actors.runtime.supervision import RestartLimit
from trouper.actors.scheduling.disk_tier import DiskTier
from trouper.engine.kv.kv_layout import kv_layout
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.passes.media_pass import EncodedImage
from trouper.engine.step import StepEngine
from trouper.engine.vision.encoder import ImageEncoder
from trouper.engine.vision.layouts import Layout
from trouper.protocol.health import SchedulerStats
from trouper.protocol.media import ImageSize, ImageSource, MediaSpan, Pixels
from trouper.protocol.plans import Encode, Plan

CLOSE = 1e-4
Content = str | bytes
"""A text, or an image's file."""
FAMILIES = ("qwen3_vl", "qwen3_5", "mistral3", "gemma3")
every_family = pytest.mark.parametrize("name", FAMILIES)
ATOMIC = ("gemma3",)
"""Families whose images are never cut."""
FIRST, SECOND, THIRD = (
    encoded(picture(width, height, seed), "png")
    for width, height, seed in ((48, 40, 1), (40, 48, 2), (48, 40, 3))
)
TWO: tuple[Content, ...] = ("before the first", FIRST, "between", SECOND, "behind them both")
ONE: tuple[Content, ...] = (THIRD, "what is it?")
TEXT: tuple[Content, ...] = ("a question without any picture in it",)


@attrs.frozen
class ImageAsk(Ask):
    contents: tuple[Content, ...] = ()
    priority: int = 0

    def request(self) -> Generate:
        content = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
            for each in self.contents
        ]
        files = [each for each in self.contents if isinstance(each, bytes)]
        images = tuple(ImageSource(file, f"image {at}") for at, file in enumerate(files))
        prompt = ChatPrompt(({"role": "user", "content": content},), images=images)
        return attrs.evolve(super().request(), prompt=prompt, priority=self.priority)


def of(*contents: Content, **more: Any) -> ImageAsk:
    return ImageAsk((), contents=contents, **more)


@pytest.fixture(scope="session")
def seeing_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    directory, made = tmp_path_factory.mktemp("seeing"), dict[str, Tiny]()

    def saved(name: str) -> Tiny:
        if name not in made:
            path = checkpoint(name, directory / name)
            made[name] = Tiny(name, str(path), kv_layout(text_model(path)[0], PLAIN))
        return made[name]

    return saved


@pytest.fixture
def tiny(name: str, seeing_of: Callable[[str], Tiny]) -> Tiny:
    return seeing_of(name)


@pytest.fixture(autouse=True)
def _decide_without_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice is one piece, and the disk is always faster."""
    monkeypatch.setattr(DiskTier, "_faster", lambda *_: True)
    monkeypatch.setattr("trouper.actors.scheduling.image_items.IDLE_STEP_S", 0.0)


async def assert_as_alone(tiny: Tiny, heard: Sequence[Heard]) -> None:
    plain = [attrs.evolve(each.ask, priority=0) for each in heard]  # type: ignore[call-arg]
    lone = await cold(tiny, plain)
    same = sum(agreed(mine, its, CLOSE) for mine, its in zip(heard, lone, strict=True))
    assert same > 0.9 * sum(len(each.tokens) for each in heard), "too little was compared"


async def one(served: Served, *contents: Content, **more: Any) -> Heard:
    [heard] = await served.ask(of(*contents, **more))
    return heard


def stats_of(served: Served) -> SchedulerStats:
    return served.runtime.health().scheduler


def seen(served: Served) -> tuple[int, int]:
    """Images decoded and encoded."""
    stats = stats_of(served)
    return stats.images_decoded, stats.images_encoded


@attrs.define
class Watch:
    """What plans say on their way to the engine; something that happens in one of the steps."""

    restored: list[tuple[int, tuple[MediaSpan, ...]]] = attrs.field(factory=list)
    """Of each row that entered: tokens, and the images of its prompt."""
    left: int = -1
    """Steps with work until `act`; negative: never."""
    act: Callable[[], object] = lambda: None
    met: Counter[str] = attrs.field(factory=Counter)
    """Kinds of the steps in which it happened."""

    def __call__(self, plan: Plan, engine: StepEngine) -> None:
        for admit in plan.admit:
            if admit.media:
                self.restored.append((admit.restore.tokens if admit.restore else 0, admit.media))
        if not plan.has_work:
            return
        self.left -= 1
        if self.left == 0:
            kinds = {"encode": plan.encode, "prefill": plan.prefill, "decode": plan.decode}
            self.met.update(kind for kind, work in kinds.items() if work)
            self.act()

    @property
    def missing(self) -> int:
        """Images that no block restored whole, of all rows so far."""
        return sum(
            len({span.digest for span in media if span.end > tokens})
            for tokens, media in self.restored
        )


STARTS = range(1, 6)
each_step = pytest.mark.parametrize("start", STARTS)
"""The first step of a request in which something happens; then each fifth."""


def steps_from(start: int) -> Iterator[int]:
    return count(start, len(STARTS))


# -- alone and in company ------------------------------------------------------------------------


@every_family
async def test_alone_the_whole_graph_answers_what_mlx_vlm_does(
    name: str, tiny: Tiny, tmp_path: Path
) -> None:
    """Of Gemma, what one pass over the whole prompt does (`GEMMA`)."""
    model = load(name, tmp_path / name)
    async with serving(tiny) as served:
        heard = await one(served, *TWO)
    images = [pixels_of(file, model.layout) for file in (FIRST, SECOND)]
    assert list(heard.tokens) == model.answer(heard.prompt, images, TOKENS)
    logits = model.logits(heard.text, images)[len(heard.prompt) - 1 : -1]
    for at, (token, values) in enumerate(zip(heard.logprobs, logits, strict=True)):
        exact = values - np.logaddexp.reduce(values)
        for each, logprob in [(token.token, token.logprob), *token.top]:
            assert abs(logprob - exact[each]) < CLOSE, at


def pixels_of(file: bytes, layout: Layout) -> Pixels:
    image = Image.open(io.BytesIO(file)).convert("RGB")
    shape = layout.shape(ImageSize(image.width, image.height, "png"), "auto", 4096)
    image = image.resize(shape.resized[::-1], Image.Resampling(shape.resample))
    return Pixels(image.height, image.width, image.tobytes())


@every_family
@pytest.mark.parametrize("step", [1, 5, 16, 200])
@pytest.mark.long(but=("1-mistral3", "5-qwen3_5", "5-gemma3", "16-qwen3_vl"))
async def test_rows_in_company_cut_anywhere(name: str, step: int, tiny: Tiny) -> None:
    """With text rows, and two rows of one prompt, in chunks of so many tokens."""
    asks = [of(*contents, salt=str(at)) for at, contents in enumerate((TWO, TEXT, ONE, TWO))]
    async with serving(tiny, prefill_step_size=step) as served:
        heard = await served.ask(*asks)
        heard += await served.ask(*(attrs.evolve(ask, salt="again") for ask in asks))
    await assert_as_alone(tiny, heard)


# -- from memory, live rows and the disk ---------------------------------------------------------

DEPARTS: dict[str, tuple[Content, ...]] = {
    "the same": TWO,
    "behind the last text": (*TWO, ", and more"),
    "in the last text": (*TWO[:4], "behold"),
    "in the second image": (*TWO[:3], THIRD, "behind them both"),
    "between the images": (*TWO[:2], "beyond", SECOND, "behind them both"),
    "right behind the first image": (*TWO[:2], "?"),
    "in the first image": (TWO[0], SECOND, *TWO[2:]),
    "before the first image": ("begin", *TWO[1:]),
}
OTHER_IMAGES = {"in the first image": 0, "in the second image": 1}
"""Places of images that differ."""


@every_family
@pytest.mark.long(but=("qwen3_vl",))
async def test_what_memory_has_is_neither_decoded_nor_encoded(name: str, tiny: Tiny) -> None:
    watch = Watch()
    heard: list[Heard] = []
    async with serving(tiny, watch, image_cache=0) as served:
        for salt, contents in DEPARTS.items():
            heard.append(await one(served, *TWO, salt=salt))
            heard.append(await one(served, *contents, salt=salt))
            check_reuse(tiny, heard[-2], heard[-1], salt, watch)
            assert seen(served) == (watch.missing, watch.missing)
    await assert_as_alone(tiny, heard)


def check_reuse(tiny: Tiny, first: Heard, heard: Heard, departs: str, watch: Watch) -> None:
    """As much as both prompts have in common, or up to a snapshot."""
    _, media = watch.restored[-1]
    reached = min(common(first.prompt, heard.prompt), len(heard.prompt) - 1)
    if departs in OTHER_IMAGES:
        reached = media[OTHER_IMAGES[departs]].start
    assert heard.cached <= reached, departs
    assert heard.cached == reached or tiny.layout.needs_snapshots, departs
    assert heard.cached == reached or departs != "the same"


@every_family
@pytest.mark.long(but=("qwen3_5", "mistral3"))
async def test_after_a_restart_the_disk_has_them(name: str, tiny: Tiny, tmp_path: Path) -> None:
    heard: list[Heard] = []
    async with serving(tiny, ssd_cache_dir=tmp_path / "blocks") as served:
        heard += [await one(served, *TWO, salt=salt) for salt in DEPARTS]
    watch = Watch()
    async with serving(tiny, watch, ssd_cache_dir=tmp_path / "blocks", image_cache=0) as served:
        for first, (salt, contents) in zip(tuple(heard), DEPARTS.items(), strict=True):
            heard.append(await one(served, *contents, salt=salt))
            check_reuse(tiny, first, heard[-1], salt, watch)
            assert seen(served) == (watch.missing, watch.missing)
    assert watch.missing <= (9 if tiny.layout.needs_snapshots else 6)
    await assert_as_alone(tiny, heard)


@every_family
@pytest.mark.long(but=("qwen3_5",))
async def test_a_live_row_gives_its_images_to_others(name: str, tiny: Tiny) -> None:
    """Those that come while it decodes, and those that wait for it."""
    asks = [of(*contents) for contents in (TWO, *DEPARTS.values())]
    leader = of(*TWO, tokens=40)
    async with serving(tiny, prefill_step_size=16, gather_ms=50, image_cache=0) as served:
        answer = await served.submit(leader)
        await until(lambda: stats_of(served).total_prefill_tokens > 40)
        heard = await served.ask(*asks)
        heard.append(await hear(leader, answer))
        assert stats_of(served).total_cached_tokens > 300
    await assert_as_alone(tiny, heard)


@every_family
@pytest.mark.parametrize("source", ["memory", "disk"])
@each_step
@pytest.mark.long(but=("2-disk-mistral3",))
async def test_an_image_is_restored_up_to_its_middle(
    name: str, source: str, start: int, tiny: Tiny, tmp_path: Path
) -> None:
    """Rows end in each of their steps; others continue where they were."""
    settings: dict[str, Any] = {"ssd_cache_dir": tmp_path / "blocks", "prefill_step_size": 6}
    settings |= {"image_cache": 0}
    watch, heard, inside = Watch(), list[Heard](), 0

    async def go_on(served: Served, salt: str) -> None:
        nonlocal inside
        heard.append(await one(served, *TWO, salt=salt))
        tokens, media = watch.restored[-1]
        inside += any(span.start < tokens < span.end for span in media)

    async with serving(tiny, watch, **settings) as served:
        salts = [salt async for salt in leaving(start, served, watch)]
        if source == "memory":
            for salt in salts:
                await go_on(served, salt)
    if source == "disk":
        async with serving(tiny, watch, **settings) as served:
            for salt in salts:
                await go_on(served, salt)
            assert stats_of(served).cache.hits_disk > 0
    assert (inside > 0) != (name in ATOMIC)
    await assert_as_alone(tiny, heard)


async def leaving(start: int, served: Served, watch: Watch) -> AsyncIterator[str]:
    """The salts of requests that left, each in another step."""
    token = trio.lowlevel.current_trio_token()
    for step in steps_from(start):
        ask = of(*TWO, salt=str(step))
        answer = await served.submit(ask)
        watch.left = step
        watch.act = partial(trio.from_thread.run_sync, answer.close, trio_token=token)
        with suppress(trio.ClosedResourceError):
            await hear(ask, answer)
        await until(lambda: stats_of(served).active_sequences == 0)
        if watch.left > 0:
            return
        yield ask.salt


# -- preempted -----------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("cache", [0, 2**20], ids=["computed again", "restored"])
@each_step
@pytest.mark.long(but=("2-restored-qwen3_5", "3-computed again-qwen3_vl", "4-restored-mistral3"))
async def test_a_row_is_preempted_in_each_step(
    name: str, cache: int, start: int, tiny: Tiny
) -> None:
    """A request of a higher priority takes its memory: in prefill, between two slices of an
    image's encoder, between encoder and prefill, while it decodes."""
    row = tiny.layout.row_bytes(200)
    watch, heard = Watch(), list[Heard]()
    token = trio.lowlevel.current_trio_token()
    async with (
        serving(
            tiny, watch, kv_memory=19 * row // 10, cache_memory=cache, prefill_step_size=24
        ) as served,
        trio.open_nursery() as nursery,
    ):
        first = of(*TEXT, *TEXT, *TEXT, priority=-1, tokens=2)

        def interrupt() -> None:
            trio.from_thread.run_sync(nursery.start_soon, served.ask, first, trio_token=token)

        watch.act = interrupt
        for step in steps_from(start):
            watch.left = step
            heard.append(await one(served, *TWO, salt=str(step)))
            if watch.left > 0:
                break
        await until(lambda: stats_of(served).active_sequences == 0)
        assert stats_of(served).preemptions >= len(heard) - 3
        assert len(watch.met) > 1
    await assert_as_alone(tiny, heard)


# -- crashes -------------------------------------------------------------------------------------


@pytest.fixture
def endless_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "RestartLimit", partial(RestartLimit, 10**6, pause_s=0.0))


@every_family
@each_step
@pytest.mark.long(but=("3-qwen3_vl", "5-mistral3"))
async def test_rows_go_on_after_a_crash_in_each_step(
    name: str, start: int, tiny: Tiny, endless_restarts: None
) -> None:
    watch, heard = Watch(), list[Heard]()
    async with serving(tiny, watch, prefill_step_size=24, gather_ms=50) as served:
        for step in steps_from(start):
            # Rows that crash by one cause in company run alone from then on.
            broken = type(f"BrokenInStep{step}", (Exception,), {})

            def crash() -> None:
                raise broken  # noqa: B023 - called within the turn

            watch.left, watch.act = step, crash
            asks = [of(*contents, salt=str(step)) for contents in (TWO, ONE, TEXT)]
            heard += await served.ask(*asks)
            if watch.left > 0:
                watch.left = -1  # No step of the drain is meant.
                break
        recovery = stats_of(served).recovery
    assert recovery.crashes == len(heard) // len(asks) - 1 > 1
    assert (recovery.convicted, recovery.refused) == (0, 0)
    assert len(watch.met) > 1
    await assert_as_alone(tiny, heard)


@pytest.fixture
def encoder_faults(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Each ends one slice of an image that is begun."""
    faults, advance = list[Exception](), ImageEncoder._advance

    def fail(encoder: ImageEncoder, order: Encode) -> EncodedImage | None:
        if faults and order.pixels is None:
            raise faults.pop()
        return advance(encoder, order)

    monkeypatch.setattr(ImageEncoder, "_advance", fail)
    return faults


@every_family
@pytest.mark.long(but=("mistral3",))
async def test_a_fault_of_the_encoder_costs_its_request_alone(
    name: str, tiny: Tiny, encoder_faults: list[Exception]
) -> None:
    encoder_faults.append(ValueError("no such layer"))
    async with serving(tiny) as served:
        answers = [await served.submit(of(*contents)) for contents in (ONE, TWO, TEXT)]
        with pytest.raises(RequestFailed) as failed:
            await hear(of(), answers[0])
        assert failed.value.problem.code == "image_not_encoded"
        asks = (of(*TWO), of(*TEXT))
        heard = [await hear(*pair) for pair in zip(asks, answers[1:], strict=True)]
        heard += await served.ask(of(*ONE))
    await assert_as_alone(tiny, heard)


@every_family
@pytest.mark.long(but=("qwen3_vl",))
async def test_an_encoder_without_memory_is_tried_again_with_less_for_others(
    name: str, tiny: Tiny, encoder_faults: list[Exception], endless_restarts: None
) -> None:
    encoder_faults.append(RuntimeError("[malloc] out of memory"))
    async with serving(tiny) as served:
        heard = await served.ask(*(of(*contents) for contents in (ONE, TWO, TEXT)))
        assert stats_of(served).recovery.allocation_failures == 1
    await assert_as_alone(tiny, heard)
