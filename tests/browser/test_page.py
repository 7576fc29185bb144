"""The live page in real Chromium, without a window. Skipped by name where it is not installed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio

from tests.actors.test_model_manager import manager_of
from tests.browser.driver import Browser
from tests.browser.page import SAID, Page, says, shown, slowly, streams
from tests.fakes import FakeEngine
from tests.web.serving import eventually, exchange, post, serving, serving_manager
from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.plans import Plan
from trouper.web.live import site
from trouper.web.live.snapshot import NewGaps, model_body

PICTURE = "document.querySelector('#timeline').toDataURL()"


async def test_a_running_batch_moves_without_complaints_or_other_hosts(browser: Browser) -> None:
    async with shown(browser) as (page, served), streams(served, 5):
        await page.reads("#status", "Running")
        await page.view("server")
        await page.reads("#figure-running dd", "5")
        await page.until(
            "parseFloat(document.querySelector('#figure-generated dd').textContent) > 0"
        )
        await page.until("document.querySelector('#figure-gap dd').textContent.includes('ms')")
        before = await page.run(f"return {PICTURE}")
        await page.until(f"{PICTURE} !== {before!r}")
        await page.until("document.querySelectorAll('.plots canvas').length === 3")
        await page.view("actors")
        await page.reads("#actors svg", "ModelStepper")
        await page.view("server")
        await page.click("#rows summary")
        await page.reads("#rows td, #rows th[scope=row]", "row")
        rows = await page.run(
            "return [...document.querySelectorAll('#rows tbody th')].map(one => one.textContent)"
        )
        assert rows == [f"row{number}" for number in range(5)]
        assert await page.complaints() == []
        assert {url for url in await page.requested() if not url.startswith(page.url)} == set()


async def test_it_chats(browser: Browser) -> None:
    async with shown(browser, says(SAID)) as (page, _):
        await page.reads("#status", "Running")
        await page.type("#prompt", "What is the capital of France?\n")
        await page.reads("#messages [data-role=assistant] .said", SAID)
        await page.reads("#messages .told", f"{len(SAID) + 1} tokens")
        await page.type("#prompt", "And <b>now</b>?")
        await page.click("#send")
        await page.until(
            "document.querySelectorAll('#messages [data-role=assistant] .said')[1]?.textContent"
        )
        said = await page.run(
            "return [...document.querySelectorAll('#messages .said')].map(one => one.innerHTML)"
        )
        assert isinstance(said, list) and said[2] == "And &lt;b&gt;now&lt;/b&gt;?", (
            "text, never markup"
        )
        await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
        await page.click("#chat-clear")
        assert await page.run("return document.querySelectorAll('#messages > div').length") == 0
        assert await page.complaints() == []


async def test_an_answer_can_be_stopped_and_its_row_is_gone(browser: Browser) -> None:
    async with shown(browser) as (page, served):
        await page.reads("#status", "Running")
        await page.run("document.querySelector('#most').value = 4000")
        await page.type("#prompt", "Go on for ever\n")
        await page.until(
            "document.querySelector('#messages [data-role=assistant] .said').textContent.length > 5"
        )
        await page.click("#stop")
        await page.reads("#messages .told", "stopped")
        await eventually(lambda: served.busy == 0)
        await page.reads("#requests tbody", "abort")


async def test_what_the_server_refuses_is_said(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        await page.reads("#status", "Running")
        await page.run("document.querySelector('#temperature').value = 9")
        await page.type("#prompt", "Hi\n")
        await page.reads("#messages [role=alert]", "temperature")
        await page.reads("#messages [data-role=user] .told", "Not answered")


async def test_options_that_are_empty_are_the_servers_to_choose(browser: Browser) -> None:
    """An empty temperature is none, and not 0."""
    sent = """
      window.sent = [];
      const real = window.fetch;
      window.fetch = (url, options = {}) => { if (options.body) window.sent.push(JSON.parse(options.body)); return real(url, options); };
    """
    async with shown(browser, says(SAID)) as (page, _):
        await page.reads("#status", "Running")
        await page.run(
            sent
            + "for (const id of ['temperature', 'most']) document.getElementById(id).value = '';"
        )
        await page.type("#prompt", "Hi\n")
        await page.reads("#messages", SAID)
        body = cast("dict[str, Any]", await page.run("return window.sent[0]"))
        assert {"temperature", "max_tokens"}.isdisjoint(body) and body["stream"] is True


async def test_an_answer_that_is_cut_off_is_no_whole_one(browser: Browser) -> None:
    """As by a proxy that ends the response properly."""
    half = """
      const real = window.fetch, body = 'data: {"choices": [{"index": 0, "delta": {"content": "The cap"}}]}\\n\\n';
      window.fetch = (url, options) => (url.endsWith("completions") ? Promise.resolve(new Response(body)) : real(url, options));
    """
    async with shown(browser) as (page, _):
        await page.reads("#status", "Running")
        await page.run(half)
        await page.type("#prompt", "Hi\n")
        await page.reads("#messages [data-role=assistant]", "The cap")
        await page.reads("#messages [role=alert]", "The answer has ended in the middle.")


async def test_a_message_to_an_absent_server_is_marked_and_can_be_sent_again(
    browser: Browser,
) -> None:
    async with serving(says(SAID)) as served:
        page = Page(browser, f"http://127.0.0.1:{served.port}/")
        await page.open()
        await page.reads("#status", "Running")
    await page.reads("#status", "Reconnecting")
    await page.type("#prompt", "Are you there?\n")
    await page.reads("#messages [data-role=user] .told", "Not sent")
    assert await page.run("return document.querySelector('#prompt').value") == "Are you there?"
    async with serving(says(SAID), port=served.port):
        await page.reads("#status", "Running")
        await page.type("#prompt", "\n")
        await page.reads("#messages", SAID)
        sent = "[...document.querySelectorAll('#messages [data-role=user]')].map(one => one.textContent)"
        assert await page.run(f"return {sent}") == ["Are you there?Not sent", "Are you there?"]
        assert await page.run("return document.querySelector('#prompt').value") == ""
        await page.leave()


async def test_it_comes_back_after_a_restart_of_the_server(browser: Browser) -> None:
    async with serving() as served:
        page = Page(browser, f"http://127.0.0.1:{served.port}/")
        await page.open()
        await page.reads("#status", "Running")
        await exchange(served, post("/v1/completions", {"prompt": "hi", "max_tokens": 2}))
        await page.reads("#figure-answered dd", "1")
        assert await page.complaints() == []
    await page.reads("#status", "Reconnecting")
    async with (
        serving(FakeEngine(before_step=slowly), port=served.port) as again,
        streams(again, 3),
    ):
        await page.reads("#status", "Running")
        await page.reads("#figure-running dd", "3")
        await page.reads("#figure-answered dd", "0")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 0")
        complaints = [one for one in await page.complaints() if "ERR_CONNECTION_REFUSED" not in one]
        assert complaints == [], (
            "the browser itself says that a server is away, and nothing else is wrong"
        )
        await page.leave()


RATES = "[...document.querySelectorAll('#figure-generated dd, #figure-computed dd, #figure-gap dd')].map(one => one.textContent)"
SOFT = """(() => {
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'var(--soft)';
  const soft = getComputedStyle(probe).color;
  probe.remove();
  return getComputedStyle(document.querySelector('#figure-running dd')).color === soft;
})()"""

SHOWN_AGAIN = """
  const look = hidden => {
    Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
  };
  look(true);
  look(false);
"""
"""The page asks at once, and not after its pause of five seconds."""


async def test_figures_of_an_absent_server_are_not_shown_as_of_now(browser: Browser) -> None:
    async with serving(FakeEngine(before_step=slowly)) as served, streams(served, 2):
        page = Page(browser, f"http://127.0.0.1:{served.port}/")
        await page.open()
        await page.until(
            "parseFloat(document.querySelector('#figure-generated dd').textContent) > 0"
        )
        assert await page.run(f"return {SOFT}") is False
    await page.until(
        "/^Reconnecting, last heard at \\d\\d:\\d\\d:\\d\\d$/.test(document.querySelector('#status').textContent)"
    )
    await page.until(f"{RATES}.every(one => one === '–')")
    assert await page.run(f"return {SOFT}") is True, "dimmed, as far as it can still be read"
    await page.view("actors")
    await page.reads("#actors svg", "– steps/s")
    await page.click("#theme")
    await page.click("#theme")
    await page.click("#theme")
    await page.until(f"{RATES}.every(one => one === '–')")
    async with (
        serving(FakeEngine(before_step=slowly), port=served.port) as again,
        streams(again, 3),
    ):
        await page.run(SHOWN_AGAIN)
        await page.reads("#status", "Running")
        await page.reads("#figure-running dd", "3")
        await page.until(
            "parseFloat(document.querySelector('#figure-generated dd').textContent) > 0"
        )
        assert await page.run(f"return {SOFT}") is False
        await page.run("localStorage.clear()")
        await page.leave()


async def test_a_key_is_asked_for_kept_in_the_tab_and_sent_as_a_header(browser: Browser) -> None:
    async with shown(browser, says(SAID), api_key=("secret",)) as (page, _):
        await page.reads("#status", "Locked")
        assert await page.complaints() == [], "it knows that a key is needed without being refused"
        await page.type("#key", "wrong\n")
        await page.reads("#wrong", "The key is wrong.")
        await page.complaints()
        await page.type("#key", "secret\n")
        await page.reads("#status", "Running")
        await page.type("#prompt", "Hi\n")
        await page.reads("#messages", SAID)
        await page.open()
        await page.reads("#status", "Running")
        assert await page.run("return [{...sessionStorage}, {...localStorage}]") == [
            {"trouper-key": "secret"},
            {},
        ]
        assert not [url for url in await page.requested() if "secret" in url]
        assert await page.complaints() == []
        await page.click("#forget")
        await page.reads("#status", "Locked")
        assert await page.run(
            "return [sessionStorage.length, document.querySelector('#main').hidden]"
        ) == [0, True]


async def test_a_key_that_no_header_can_hold_is_wrong(browser: Browser) -> None:
    async with shown(browser, says(SAID), api_key=("secret",)) as (page, _):
        await page.reads("#status", "Locked")
        for key in ("ключ", "schlüssel", "secret\u200b"):
            await page.type("#key", f"{key}\n")
            await page.reads("#wrong", "The key is wrong.")
            assert await page.run(
                "return [document.querySelector('#main').hidden, sessionStorage.length]"
            ) == [True, 0]
            await page.run("document.querySelector('#wrong').textContent = ''")
        await page.run("sessionStorage.setItem('trouper-key', 'ключ')")
        await page.open()
        await page.reads("#wrong", "The key is wrong.")
        assert await page.complaints() == []
        await page.type("#key", "secret\n")
        await page.reads("#status", "Running")
        await page.run("sessionStorage.setItem('trouper-key', 'ключ')")
        await page.type("#prompt", "Hi\n")
        await page.reads("#messages [role=alert]", "The key is wrong.")


async def test_a_hidden_page_looks_at_nothing(browser: Browser) -> None:
    async with shown(browser) as (page, served):
        await page.reads("#status", "Running")
        await eventually(lambda: served.connections > 0)
        await page.run(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
        )
        looks = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.run(looks)
        await trio.to_thread.run_sync(browser.requested)
        await page.run("delete document.hidden")
        assert not [url for url in await page.requested() if url.endswith("live")], (
            "it does not come back while hidden"
        )
        await page.run(looks)
        await page.reads("#status", "Running")
        assert [url for url in await page.requested() if url.endswith("live")]


async def test_several_models_are_chosen_from(browser: Browser) -> None:
    async with manager_of("small", "large") as (manager, _), serving_manager(manager) as port:
        page = Page(browser, f"http://127.0.0.1:{port}/")
        await page.open()
        await page.reads("#status", "Running")
        assert await page.run(
            "return [...document.querySelectorAll('#model option')].map(one => one.value)"
        ) == [
            "small",
            "large",
        ]
        await choose(page, "large")
        await page.reads("#chat-model", "large")
        await page.type("#prompt", "Hi\n")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 1")
        await choose(page, "small")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 0")
        assert await page.complaints() == []
        await page.leave()


async def choose(page: Page, model: str) -> None:
    await page.until(f"document.querySelector('#model option[value={model}]')")
    await page.run(
        "const one = document.querySelector('#model'); one.value = arguments[0]; one.dispatchEvent(new Event('change'))",
        model,
    )


OVERFLOWING = """[...document.querySelectorAll('#kv, #kv *, :is(.kv, .batch) > header *')].filter(one => {
  const inner = one.getBoundingClientRect(), outer = one.closest('section').getBoundingClientRect();
  return inner.width && (inner.left < outer.left || inner.right > outer.right || inner.bottom > outer.bottom);
}).map(one => one.className)"""


async def tardily(_: Plan) -> None:
    """So that rows do not outgrow their banks while somebody looks."""
    await trio.sleep(0.1)


async def test_kv_memory_its_banks_and_preempted_rows_are_shown(browser: Browser) -> None:
    """There is memory for a long row and a short one. A second short one, of a higher priority,
    takes the place of the first."""
    settings = {"kv_memory": 150_000, "cache_memory": 0}
    async with shown(browser, FakeEngine(before_step=tardily), settings=settings) as (page, served):
        await page.reads("#status", "Running")
        await page.view("server")
        await page.reads("#kv", "No row is in use.")
        async with streams(served, 1, 600), streams(served, 1, 20, priority=5):
            await page.until("document.querySelectorAll('.bank').length === 2")
            names = "[...document.querySelectorAll('.bank b')].map(one => one.textContent)"
            assert await page.run(f"return {names}") == ["up to 512 tokens", "up to 1,024 tokens"]
            await page.reads(".bank", "1 of 1 slot")
            await page.reads("#kv .kv-total", "of 150 kB")
            assert await page.run("return document.querySelector('#kv-note').textContent") == ""
            async with streams(served, 1, 25, priority=-1):
                await page.reads("#kv-note", "1 preemption, 1 request waiting to return")
                await page.reads("#batch-note", "2 rows of 32, 1 waiting, 1 of them preempted")
                await page.click("#rows summary")
                await page.reads("#rows tbody", "preempted")
                cells = "[...document.querySelectorAll('#rows td')].map(one => one.textContent)"
                assert {"decoding", "preempted", "0", "5", "-1"} <= {
                    *cast("list[str]", await page.run(f"return {cells}"))
                }
                for width in (1280, 800, 390, 320):
                    await trio.to_thread.run_sync(page.browser.resize, width, 900)
                    assert await page.run(f"return {OVERFLOWING}") == []
            await page.until("document.querySelector('#kv-note').textContent === '1 preemption'")
        assert await page.complaints() == []


FIGURES = "[...document.querySelectorAll('#figures dd')].map(one => one.textContent)"
SEEN = "[...document.querySelectorAll('#main > section')].filter(one => one.offsetParent).map(one => one.classList[0])"
VIEWS = {
    "chat": ["chat"],
    "models": ["models"],
    "server": ["batch", "kv", "rates", "tiers", "requests"],
    "actors": ["actors"],
}


async def seen(page: Page) -> dict[str, object]:
    """The sections of each view; the last one stays."""
    sections = {}
    for view in VIEWS:
        await page.view(view)
        sections[view] = await page.run(f"return {SEEN}")
    return sections


async def test_a_model_that_is_not_loaded_shows_no_other_models_figures(browser: Browser) -> None:
    async with (
        manager_of("small", "large", "middle") as (manager, _),
        serving_manager(manager) as port,
    ):
        page = Page(browser, f"http://127.0.0.1:{port}/")
        await page.open()
        await page.reads("#figure-running dd", "0")
        await page.reads("#about", "fake")
        assert await seen(page) == VIEWS
        await choose(page, "middle")
        await page.reads("#status", "Not loaded (unloaded)")
        await page.until(f"{FIGURES}.every(one => one === '–')")
        assert await seen(page) == VIEWS | {"server": ["requests"], "actors": []}
        assert (
            await page.run("return document.querySelector('#about').textContent.includes('fake')")
            is False
        )
        await page.open()
        await choose(page, "middle")
        await page.reads("#status", "Not loaded")
        await page.view("chat")
        await page.type("#prompt", "Hi\n")
        await page.reads("#status", "Running")
        await page.reads("#figure-running dd", "0")
        await page.reads("#about", "fake")
        await page.view("server")
        await page.until("document.querySelectorAll('.tier').length === 3")
        assert await seen(page) == VIEWS
        await page.until(
            "document.querySelector('#actors svg').getBoundingClientRect().width > 300"
        )
        await page.view("server")
        await page.until("document.querySelector('#timeline').width > 300")
        assert await page.complaints() == []
        await page.leave()


async def test_the_model_on_show_is_unloaded_and_a_page_opens_on_one_that_is_not_there(
    browser: Browser,
) -> None:
    async with (
        manager_of("small", "large", "middle") as (manager, _),
        serving_manager(manager) as port,
    ):
        page = Page(browser, f"http://127.0.0.1:{port}/")
        await page.open()
        await page.reads("#status", "Running")
        (await manager.lease("large")).release()
        (await manager.lease("middle")).release()
        (await manager.lease("large")).release()
        await page.reads("#status", "Not loaded")
        await page.until(f"{FIGURES}.every(one => one === '–')")
        await page.open()
        await page.reads("#status", "Not loaded")
        await page.until(f"{FIGURES}.every(one => one === '–')")
        assert await seen(page) == VIEWS | {"server": ["requests"], "actors": []}
        (await manager.lease("small")).release()
        await page.reads("#status", "Running")
        await page.reads("#figure-running dd", "0")
        await page.view("actors")
        await page.reads("#actors svg", "ModelStepper")
        assert await page.complaints() == []
        await page.leave()


async def test_why_a_model_could_not_be_loaded_is_said(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(listed: ModelEntry, gaps: NewGaps) -> dict[str, Any]:
        body = model_body(listed, gaps)
        return body if listed.runtime else body | {"problem": "no weights"}

    monkeypatch.setattr(site, "model_body", failed)
    async with (
        manager_of("small", "large", "middle") as (manager, _),
        serving_manager(manager) as port,
    ):
        page = Page(browser, f"http://127.0.0.1:{port}/")
        await page.open()
        await choose(page, "middle")
        await page.reads(
            "#notice:not([hidden])",
            "It could not be loaded: no weights. It is tried again when it is asked for.",
        )
        await choose(page, "small")
        await page.until("document.querySelector('#notice').hidden")
        await page.leave()
