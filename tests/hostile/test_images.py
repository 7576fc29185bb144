"""Hostile images for the model of examples/shapes behind a real socket, beside a running stream:
each is shown, or refused by its part. `just hostile-images` plays 10,000."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
import trio

from tests.abuse.asking import Heard
from tests.abuse.streams import Stream
from tests.hostile.image_campaign import PART, Campaign, fault_of, jobs_of
from tests.hostile.images import BOMBS, DECODED, MUTATED, OF_MUTANTS, RARE, mutants
from tests.long_tests import PLAYED
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.host import MlxEngine
from trouper.engine.loading.model_source import SHAPES
from trouper.web.server import serve_http

MUTANTS = 400 if PLAYED else 48
DEAR = {
    "JPEG of 2,000 scans of 16 megapixels",
    "PNG of 64 megapixels",
    "GIF that claims 64 megapixels",
    "JPEG that claims 64 megapixels",
    "WebP that claims 64 megapixels",
    "16,384 x 82",
    "16,385 x 90",
    "PNG of 100,000 chunks",
}
"""Seconds of work."""


@asynccontextmanager
async def shapes() -> AsyncIterator[tuple[int, Runtime]]:
    settings = Settings(
        model=str(SHAPES), no_ssd=True, gather_ms=0, max_image_tokens=64, self_check="off"
    )
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        run = partial(run_runtime, settings, engine=MlxEngine(settings))
        runtime: Runtime = await nursery.start(run)
        serve = partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        [url] = await nursery.start(serve)
        yield int(url.rsplit(":", 1)[1]), runtime
        await runtime.drain(5)
        shutdown.set()


async def test_hostile_images_are_shown_or_refused_by_their_part() -> None:
    cases = [case for case in (*RARE, *BOMBS) if PLAYED or case.name not in DEAR]
    async with shapes() as (port, runtime):
        campaign, stream = Campaign(port, psutil.Process()), Stream(port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await stream.hears()
            await campaign.send((name, data, OF_MUTANTS) for name, data in mutants(MUTANTS))
            await campaign.send(jobs_of(cases))
            await stream.hears()
            nursery.cancel_scope.cancel()
        health = runtime.health()
    assert campaign.wrong == []
    assert campaign.codes.total() == MUTANTS + len(cases)
    assert {"200", "image_damaged", "image_format", "image_too_large"} <= campaign.codes.keys()
    assert stream.broken == ""
    assert not any(actor.restarts for actor in health.actors)


def test_mutants_differ_from_run_to_run_by_the_seed_alone() -> None:
    first = [*mutants(200)]
    assert first == [*mutants(200)]
    assert first != [*mutants(200, seed=1)]
    assert len({data for _, data in first}) > 180
    assert {name.split(",")[0] for name, _ in first} == {*MUTATED}


def test_there_are_enough_hostile_files_and_each_has_its_name() -> None:
    names = [case.name for case in (*RARE, *BOMBS)]
    assert len({*names}) == len(names) > 60
    assert {*names} > DEAR


@pytest.mark.parametrize(
    ("heard", "fault"),
    [
        (Heard(200), ""),
        (Heard(500, b'{"error": {"code": "internal_error"}}'), "500 internal_error"),
        (Heard(0), "0 None"),
        (Heard(400, b'{"error": {"code": "odd"}}'), "400 odd"),
        (
            Heard(400, b'{"error": {"code": "image_damaged", "message": "no"}}'),
            "image_damaged does not name its part",
        ),
        (
            Heard(503, f'{{"error": {{"code": "image_damaged", "param": "{PART}"}}}}'.encode()),
            "503 image_damaged",
        ),
    ],
)
def test_what_is_wrong_with_an_answer(heard: Heard, fault: str) -> None:
    assert fault_of(heard, frozenset({DECODED, "image_damaged"})) == fault
