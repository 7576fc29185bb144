"""--models-from: models that are found are served, and those that vanish are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import attrs
import msgspec
import pytest
import trio

from tests.actors.test_model_manager import manager_of, states
from tests.families import save
from tests.web.serving import Served, ask, exchange, get, serving_manager
from trouper import ModelManager, RequestFailed, ServerSettings, Settings, run_models
from trouper.actors.runtime.managed_model import RESCAN_S, ScannedModel, keep_found
from trouper.protocol.names import names_of
from trouper.storage.model_files import ModelFiles, read_model_files
from trouper.storage.model_scan import ModelScan
from trouper.web.openai.model_listing import listing_body


def found(name: str, directory: Path) -> ScannedModel:
    return ScannedModel(attrs.evolve(read_model_files(name, directory), name=name), 20)


async def test_what_scans_find_comes_and_goes(autojump_clock: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.utime(tmp_path / "config.json", (0, 1_600_000_000))
    shelf = [found("middle", tmp_path), found("small", tmp_path)]

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        return list(shelf)

    async with manager_of("small", "large") as (manager, _), trio.open_nursery() as nursery:
        nursery.start_soon(keep_found, manager.models, scan, 60.0)
        await trio.sleep(1)
        assert [entry.names for entry in manager.entries()] == [("small",), ("large",), ("middle",)]
        entry = manager.entries()[2]
        assert (entry.state, entry.ttl_s, entry.weights_bytes, entry.fits) == (
            "unloaded",
            60.0,
            20,
            True,
        )
        assert entry.created == 1_600_000_000, "the date of its config"
        assert entry.is_unused and not manager.entries()[0].is_unused
        lease = await manager.lease("large")
        assert manager.entries()[2].fits is False, "70 is the limit, and 60 are in use"
        lease.release()
        shelf.clear()
        await trio.sleep(RESCAN_S)
        assert states(manager) == ["ready", "ready"]
        nursery.cancel_scope.cancel()


async def test_a_found_model_that_is_pinned_or_failed_is_shown_with_those_in_use(
    autojump_clock: object, tmp_path: Path
) -> None:
    """Else nobody sees that it is pinned, to release it, nor why it could not be loaded."""

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        return [found("middle", tmp_path)]

    async with manager_of("small") as (manager, _), trio.open_nursery() as nursery:
        nursery.start_soon(keep_found, manager.models, scan, 0.0)
        await trio.sleep(1)
        shown = []
        for pinned in (True, False):
            manager.control.pin("middle", pinned=pinned)
            shown.append(not manager.entries()[1].is_unused)
        with pytest.raises(RequestFailed):
            await manager.lease("middle")  # It is not there.
        assert manager.entries()[1].problem is not None
        assert [*shown, not manager.entries()[1].is_unused] == [True, False, True]
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform == "darwin", reason="file systems of a Mac take UTF-8 only")
async def test_a_name_that_is_no_text_is_escaped_and_hides_no_other_model(
    autojump_clock: object, tmp_path: Path
) -> None:
    """One directory with a name of Latin-1 made the list of all models a 500."""
    odd = tmp_path / os.fsdecode(b"mod\xe8le")
    for directory in (odd, tmp_path / "plain"):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    files = ModelScan([str(tmp_path)]).models()

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        return [ScannedModel(each, 20) for each in files]

    async with manager_of("small") as (manager, _), trio.open_nursery() as nursery:
        nursery.start_soon(keep_found, manager.models, scan, 0.0)
        await trio.sleep(1)
        operation = manager.control.load("mod\\udce8le")
        await operation.done.wait()
        listed = msgspec.json.decode(msgspec.json.encode(listing_body(manager.entries())))["data"]
        assert [each["id"] for each in listed] == ["small", "mod\\udce8le", "plain"]
        assert operation.problem is not None and msgspec.json.encode(operation.problem.message)
        nursery.cancel_scope.cancel()
    assert msgspec.json.encode(names_of(str(odd), (), default=True))


async def test_a_scan_that_fails_is_tried_again(autojump_clock: object, tmp_path: Path) -> None:
    shelf: list[ScannedModel] = []

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        if not shelf:
            raise PermissionError("not yours")
        return shelf

    async with manager_of("small") as (manager, _), trio.open_nursery() as nursery:
        nursery.start_soon(keep_found, manager.models, scan, 60.0)
        await trio.sleep(2 * RESCAN_S)
        shelf.append(found("middle", tmp_path))
        await trio.sleep(RESCAN_S)
        assert [entry.names for entry in manager.entries()] == [("small",), ("middle",)]
        nursery.cancel_scope.cancel()


async def test_a_model_whose_cache_has_a_new_commit_is_loaded_from_there(
    autojump_clock: object, tmp_path: Path
) -> None:
    shelf = [found("middle", tmp_path / "old")]

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        return list(shelf)

    async with manager_of("small") as (manager, _), trio.open_nursery() as nursery:
        nursery.start_soon(keep_found, manager.models, scan, 60.0)
        await trio.sleep(1)
        model = manager.find("middle")
        assert model.settings.model == str(tmp_path / "old")
        model.state, shelf[:] = "loading", [found("middle", tmp_path / "new")]
        await trio.sleep(RESCAN_S)
        assert model.settings.model == str(tmp_path / "old"), "it is being loaded from there"
        model.state = "asleep"
        await trio.sleep(RESCAN_S)
        assert model.settings.model == str(tmp_path / "new")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("speculation", ["draft_model", "mtp", "ngram"])
async def test_drafts_of_the_default_model_are_not_those_of_a_found_one(
    autojump_clock: object, tmp_path: Path, speculation: str
) -> None:
    """Found by review: the settings of a found model were invalid, which ended the server."""

    async def scan() -> list[ScannedModel]:
        await trio.lowlevel.checkpoint()
        return [found("middle", tmp_path)]

    async with manager_of("small") as (manager, _), trio.open_nursery() as nursery:
        default = manager.models[0]
        default.settings = attrs.evolve(
            default.settings, draft_model="tiny", speculation=speculation
        )
        nursery.start_soon(keep_found, manager.models, scan, 60.0)
        await trio.sleep(1)
        settings = manager.find("middle").settings
        assert settings.draft_model is None
        assert settings.speculation == ("ngram" if speculation == "ngram" else "auto")
        nursery.cancel_scope.cancel()


async def test_a_model_of_a_directory_is_served_on_request(tmp_path: Path) -> None:
    (save("qwen3", tmp_path / "shelf" / "owner" / "vectors") / "modules.json").write_text("[]")
    default = str(save("llama", tmp_path / "default"))
    server = ServerSettings(models_from=(str(tmp_path / "shelf"),), port=0)
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(
            run_models, [Settings(model=default, no_ssd=True)], server
        )
        with trio.fail_after(60):
            while len(manager.entries()) < 2:  # noqa: ASYNC110 - a scan does not announce itself
                await trio.sleep(0.01)
        listed = listing_body(manager.entries())["data"][1]
        assert (listed["id"], listed["kind"], listed["state"], listed["fits"]) == (
            "owner/vectors",
            "embedder",
            "unloaded",
            True,
        )
        runtime = manager.entries()[0].runtime
        assert runtime is not None
        async with serving_manager(manager) as port:
            served = Served(port, runtime, None, trio.Event())  # type: ignore[arg-type]
            _, _, metrics = await exchange(served, get("/metrics"))
            assert b"owner/vectors" not in metrics, "one that nobody uses costs no series"
            wish = {
                "model": "owner/vectors",
                "prompt": [1, 2, 3],
                "max_tokens": 3,
                "ignore_eos": True,
            }
            status, body = await ask(served, wish)
            assert (status, body["model"], body["usage"]["completion_tokens"]) == (
                200,
                "owner/vectors",
                3,
            )
            assert (await ask(served, wish | {"model": "owner/nobody"}))[0] == 404
            assert manager.entries()[1].names == ("owner/vectors",), (
                "its directory is no name that a key could match"
            )
        assert await manager.drain(10)


def test_a_directory_without_a_model_says_so(tmp_path: Path) -> None:
    files: ModelFiles = read_model_files("nothing", tmp_path)
    assert "config.json" in files.problem and files.stored_bytes == 0
