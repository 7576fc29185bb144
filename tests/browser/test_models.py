"""Models on the live page: what is shown of them, and the buttons that a key with the right `admin`
has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.actors.test_model_manager import manager_of, states
from tests.browser.driver import SIZES, Browser
from tests.browser.page import Page
from tests.web.serving import post, serving_manager
from tests.web.test_model_pull import NAME, Hub
from trouper import ModelManager, ServerSettings
from trouper.actors.runtime.served_models import ModelEntry
from trouper.web.live import site
from trouper.web.live.snapshot import NewGaps, model_body

MODELS = ("small", "middle", "large")
BOSS = "Authorization: Bearer name-of-boss-key\r\n"
BUTTONS = "[...document.querySelectorAll('#models tr[data-model={}] button')].map(one => one.textContent).join(' ')"
KEYS = "name-of-boss-key name=boss observability=true admin=true\nname-of-viewer-key name=viewer observability=true\n"
SEEN = (
    "return [...document.querySelectorAll('#main > *')].filter(one => one.offsetParent)"
    ".map(one => one.classList[0])"
)


@asynccontextmanager
async def shown(
    browser: Browser, settings: ServerSettings | None = None
) -> AsyncIterator[tuple[Page, ModelManager]]:
    async with (
        manager_of(*MODELS, room=70) as (manager, _),
        serving_manager(manager, settings) as port,
    ):
        page = Page(browser, f"http://127.0.0.1:{port}/#models")
        await page.open()
        yield page, manager
        await page.leave()


async def state(page: Page, model: str, text: str) -> None:
    await page.reads(f"#models tr[data-model={model}] td", text)


async def press(page: Page, button: str) -> None:
    await page.click(f"#models [aria-label='{button}']")


async def offers(page: Page, model: str, buttons: str) -> None:
    await page.until(f"{BUTTONS.format(model)} === {buttons!r}")


async def test_models_are_loaded_unloaded_put_to_sleep_woken_and_pinned(browser: Browser) -> None:
    async with shown(browser) as (page, manager):
        await state(page, "large", "unloaded")
        await offers(page, "large", "Load Pin")
        await press(page, "Load large")
        await state(page, "large", "ready")
        await offers(page, "large", "Sleep Unload Pin")
        await press(page, "Sleep large")
        await state(page, "large", "asleep")
        await press(page, "Wake large")
        await state(page, "large", "ready")
        await press(page, "Pin large")
        await offers(page, "large", "Pin")
        await page.reads("#models tr[data-model=large]", "pinned")
        assert manager.entries()[2].pinned
        await press(page, "Pin large")
        await offers(page, "large", "Sleep Unload Pin")
        await press(page, "Unload large")
        await state(page, "large", "unloaded")
        assert states(manager)[2] == "unloaded" and await page.complaints() == []


async def test_why_a_model_cannot_be_loaded_is_said(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        await press_when_there(page, "Load large")
        await state(page, "large", "ready")
        await press(page, "Pin large")
        await offers(page, "large", "Pin")
        await press_when_there(page, "Load middle")
        await page.reads("#models [role=alert]", "middle: middle needs")
        await page.reads("#models [role=alert]", "large (pinned)")


async def press_when_there(page: Page, button: str) -> None:
    await page.until(f"document.querySelector(\"#models [aria-label='{button}']:enabled\")")
    await press(page, button)


async def test_a_model_that_others_use_is_unloaded_only_when_that_is_confirmed(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(listed: ModelEntry, gaps: NewGaps) -> dict[str, Any]:
        body = model_body(listed, gaps)
        if "scheduler" in body:
            body["scheduler"] |= {"active_sequences": 2, "queued_requests": 1}
        return body

    monkeypatch.setattr(site, "model_body", used)
    async with shown(browser) as (page, manager):
        await press_when_there(page, "Load large")
        await state(page, "large", "ready")
        for button in ("Unload large", "Sleep large"):
            await press(page, button)
            await page.reads("#question", "3 requests use it now, and will be answered first.")
            await page.click("#question [value='']")
            await page.until("!document.querySelector('#question').open")
        assert states(manager)[2] == "ready"
        await press(page, "Unload large")
        await page.reads("#question", "Unload large?")
        await page.click("#question [value=yes]")
        await state(page, "large", "unloaded")


async def test_a_model_is_downloaded_with_progress(browser: Browser) -> None:
    async with shown(browser) as (page, manager):
        hub = Hub(manager)
        manager.control.fetch = hub.fetch
        await page.until("document.querySelector('#pull').hidden === false")
        await page.type("#pull-name", f"{NAME}\n")
        await page.reads("#pull-told", "5 B of 10 B, 50 %")
        bar = "const bar = document.querySelector('#pull-bar'); return [bar.hidden, bar.position]"
        assert await page.run(bar) == [False, 0.5]
        hub.may_end.set()
        await page.reads("#pull-told", f"{NAME} is here, and can be loaded.")
        await page.reads(f"#models tr[data-model='{NAME}'] td", "unloaded")
        manager.control.fetch = None
        await page.type("#pull-name", f"{NAME}\n")
        await page.reads("#pull-problem", "--models-from hub-cache")
        manager.models[:] = [one for one in manager.models if one.names != (NAME,)]


async def test_without_the_right_there_are_no_buttons(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    async with shown(browser, ServerSettings(port=0, api_key_file=tmp_path / "keys")) as (page, _):
        await page.type("#key", "name-of-viewer-key\n")
        await state(page, "large", "unloaded")
        assert (
            await page.run("return document.querySelectorAll('#models table button').length") == 0
        )
        assert await page.run("return document.querySelector('#pull').offsetParent") is None
        await page.click("#forget")
        await page.type("#key", "name-of-boss-key\n")
        await offers(page, "large", "Load Pin")
        await press(page, "Load large")
        await state(page, "large", "ready")
        chat = post("/v1/completions", {"model": "large", "prompt": "hi", "max_tokens": 2}, BOSS)
        async with await trio.open_tcp_stream(
            "127.0.0.1", int(page.url.removesuffix("/#models").rpartition(":")[2])
        ) as stream:
            await stream.send_all(chat)
            assert b" 200 " in await stream.receive_some()
        await page.run(
            "const one = document.querySelector('#model'); one.value = 'large'; one.dispatchEvent(new Event('change'))"
        )
        await page.reads("#requests tbody tr", "boss")
        await page.click("#forget")
        await page.type("#key", "name-of-viewer-key\n")
        await page.until("document.querySelectorAll('#models table button').length === 0")
        await state(page, "large", "ready")


@pytest.mark.parametrize("size", SIZES)
async def test_a_long_name_takes_no_room_from_what_is_beside_it(
    browser: Browser, size: tuple[int, int]
) -> None:
    """Buttons were outside of the table, and the chat's title had three lines."""
    browser.resize(*size)
    long = "an-organisation-with-a-long-name/a-model-whose-name-does-not-end-Instruct-2507-4bit-DWQ-and-so-on"
    name = "for (const one of document.querySelectorAll('#models tbody th, #chat-model')) one.textContent = arguments[0];"
    async with shown(browser) as (page, _):
        await offers(page, "large", "Load Pin")
        await page.run(name, long)
        seen = """
          const table = document.querySelector('#models .scrolls').getBoundingClientRect();
          return [...document.querySelectorAll('#models tbody button')].map(one => one.getBoundingClientRect())
            .map(one => one.width > 20 && one.left >= table.left && one.right <= table.right);
        """
        assert await page.run(seen) == [True] * 8
        await page.view("chat")
        line = """
          const [first, ...others] = [...document.querySelectorAll('#chat > header > *')].filter(one => one.offsetParent)
            .map(one => one.getBoundingClientRect());
          return others.every(one => one.top < first.bottom && one.bottom > first.top);
        """
        assert await page.run(line)


async def test_a_key_that_may_not_look_has_the_chat_alone(browser: Browser, tmp_path: Path) -> None:
    """Nothing that it may not see is asked for again, or shown as an error."""
    (tmp_path / "keys").write_text(KEYS + "name-of-worker-key name=worker\n")
    async with shown(browser, ServerSettings(port=0, api_key_file=tmp_path / "keys")) as (page, _):
        await page.type("#key", "name-of-worker-key\n")
        await page.reads("#status", "Ready")
        assert await page.run(SEEN) == ["conversations", "chat"]
        assert await page.run("return document.querySelector('#views').hidden") is True
        names = "return [...document.querySelectorAll('#model option')].map(one => one.value)"
        assert await page.run(names) == list(MODELS)
        await page.view("chat")
        await page.type("#prompt", "Hi\n")
        await page.until(
            "document.querySelector('#messages [data-role=assistant] .said')?.textContent"
        )
        await page.click("#stop")
        await page.reads("#messages .told", "stopped")
        assert (
            await page.run("return document.querySelectorAll('#messages [role=alert]').length") == 0
        )
        await page.requested()
        await page.run("document.dispatchEvent(new Event('visibilitychange'))")
        assert not [url for url in await page.requested() if url.endswith("live")]
        await page.click("#forget")
        await page.type("#key", "name-of-viewer-key\n")
        await page.reads("#status", "Running")
        await page.view("models")
        await state(page, "large", "unloaded")


async def test_the_keyboard_keeps_its_button(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        await page.until("document.querySelector(\"#models [aria-label='Load large']\")")
        await page.run("document.querySelector(\"#models [aria-label='Load large']\").focus()")
        await page.type(":focus", "\ue007")
        await state(page, "large", "ready")
        await page.until("document.activeElement.closest('tr')?.dataset.model === 'large'")
