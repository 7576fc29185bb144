"""The chat of the page: in sight, kept by the browser, edited, asked again, by keyboard alone."""

from __future__ import annotations

from base64 import b64encode

import pytest
import trio

from tests.browser.driver import SIZES, Browser
from tests.browser.page import PATIENCE_S, Page, says, shown
from tests.browser.test_markdown import answered
from tests.browser.test_modules import computed
from tests.browser.test_pictures import hand_over, seeing
from tests.fake_images import png_file
from tests.fakes import ints

ANSWER = "The capital of France is Paris."
IN_SIGHT = """
const inside = (selector) => {
  const { top, bottom, left, right, height } = document.querySelector(selector).getBoundingClientRect();
  return height > 20 && top >= 0 && left >= 0 && bottom <= innerHeight && right <= innerWidth;
};
return ["#messages", "#prompt", "#send"].map(inside)
"""
KEPT = "return new module.Store().all().then(([one]) => one?.messages[1]?.text ?? '')"
QUESTIONS = (
    "[...document.querySelectorAll('#messages [data-role=user] .said')].map(one => one.textContent)"
)
TITLES = "[...document.querySelectorAll('#conversations .title')].map(one => one.textContent)"
TAB, SHIFT, ENTER, ESCAPE = "\ue004", "\ue008", "\ue007", "\ue00c"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_chat_is_in_sight_at_once(browser: Browser, scheme: str) -> None:
    browser.prefer(scheme)
    async with shown(browser, says(ANSWER * 40)) as (page, _):
        await page.reads("#status", "Running")
        for size in SIZES:
            await trio.to_thread.run_sync(browser.resize, *size)
            assert await page.run(IN_SIGHT) == [True, True, True], size
        await page.type("#prompt", "Hi\n")
        await answered(page)
        for size in SIZES:
            await trio.to_thread.run_sync(browser.resize, *size)
            assert await page.run(IN_SIGHT) == [True, True, True], size
            assert await page.run("return document.documentElement.scrollHeight") == size[1]


async def say(page: Page, text: str, count: int = 1) -> None:
    await page.type("#prompt", f"{text}\n")
    await answered(page, count)


async def test_conversations_are_there_after_a_reload_and_can_be_deleted(browser: Browser) -> None:
    async with shown(browser, says(ANSWER)) as (page, _):
        await page.reads("#status", "Running")
        await page.run("document.querySelector('#system').value = 'Be brief'")
        await say(page, "First")
        await page.click("#chat-clear")
        await say(page, "Second")
        await page.open()
        await page.until(f"{TITLES}.length === 2")
        await page.until("document.querySelector('#messages .told')")
        assert await page.run(f"return {TITLES}") == ["Second", "First"]
        assert await page.run(f"return {QUESTIONS}") == ["Second"]
        await page.reads("#messages [data-role=assistant] .said", ANSWER)
        assert await page.run("return document.querySelector('#system').value") == "Be brief"
        await page.click("#conversations li:last-child .title")
        await page.reads("#messages .said", "First")
        await page.reads("#status", "Running")
        await say(page, "Third", 2)
        assert await page.run(f"return {TITLES}") == ["First", "Second"], "the latest is the first"
        await page.click("#conversations [aria-label='Delete First']")
        await page.reads("#question", "Delete this conversation?")
        await page.click("#question [value='']")
        assert await page.run(f"return {TITLES}.length") == 2
        await page.click("#conversations [aria-label='Delete First']")
        await page.click("#question [value=yes]")
        await page.until(f"{TITLES}.length === 1")
        assert await page.run(f"return {QUESTIONS}") == []
        await page.open()
        await page.reads("#messages .said", "Second")
        await say(page, "More", 2)
        await page.click("#chat-clear")
        await say(page, "Other")
        await page.click("#forget-all")
        await page.click("#question [value=yes]")
        await page.until(f"{TITLES}.length === 0")
        await page.open()
        await page.reads("#status", "Running")
        assert await page.run(f"return {TITLES}") == []
        assert await page.complaints() == []


SLOW_STORE = """
const real = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function (...all) {
  const asked = real.apply(this, all), late = {};
  asked.onsuccess = () => { window.answer = () => { late.result = asked.result; late.onsuccess(); }; };
  return late;
};
"""
"""The conversations of the browser come when the test calls `answer`."""


async def test_a_message_that_is_sent_before_the_store_answers_is_kept(browser: Browser) -> None:
    async with shown(browser, says(ANSWER)) as (page, _):
        await page.reads("#status", "Running")
        await say(page, "Old")
        script = {"source": SLOW_STORE}
        command = "Page.addScriptToEvaluateOnNewDocument"
        added = browser.driver.execute_cdp_cmd(command, script)
        await page.open()
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        await page.reads("#status", "Running")
        await say(page, "New")
        await page.until("window.answer")
        await page.run("window.answer()")
        await page.until(f"{TITLES}.length === 2")
        assert await page.run(f"return {TITLES}") == ["New", "Old"]
        assert await page.run(f"return {QUESTIONS}") == ["New"]
        await page.open()
        await page.until(f"{TITLES}.length === 2")


async def test_what_came_before_a_reload_in_the_middle_is_kept(browser: Browser) -> None:
    async with shown(browser, says(ANSWER * 300)) as (page, _):
        await page.reads("#status", "Running")
        await page.type("#prompt", "Go on\n")
        with trio.fail_after(PATIENCE_S):
            while len(str(await computed(page, "store.js", KEPT))) < len(ANSWER):
                pass
        await page.open()
        await page.reads("#messages [data-role=user]", "Go on")
        await page.reads("#messages [data-role=assistant] .said", "The capital")


async def test_an_answer_that_comes_takes_the_focus_from_no_conversation(browser: Browser) -> None:
    """The list was built anew whenever the answer was saved."""
    async with shown(browser, says(ANSWER * 300)) as (page, _):
        await page.reads("#status", "Running")
        await page.type("#prompt", "Go on\n")
        await page.until(f"{TITLES}.length === 1")
        await page.run("document.querySelector('#conversations .title').focus()")
        await page.until("document.querySelector('#messages .prose').textContent.length > 400")
        focused = "return document.activeElement.textContent"
        assert await page.run(focused) == "Go on"
        await page.run("document.querySelector('#stop').click()")
        await page.reads("#messages .told", "stopped")
        assert await page.run(focused) == "Go on"


async def test_a_message_is_edited_and_answered_again(browser: Browser) -> None:
    async with shown(browser, says(ANSWER)) as (page, served):
        await page.reads("#status", "Running")
        await say(page, "One")
        await say(page, "Two", 2)
        await page.click("#messages > div:last-child [aria-label='Another answer']")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 3")
        await answered(page, 2)
        assert await page.run(f"return {QUESTIONS}") == ["One", "Two"]
        await page.run(
            "document.querySelector('#messages [aria-label=\"Edit the message\"]').click()"
        )
        await page.reads("#messages form", "What follows is dropped.")
        await page.type("#messages form textarea", " and more")
        await page.click("#messages form [type=submit]")
        await page.until(f"{QUESTIONS}.length === 1")
        await answered(page)
        assert await page.run(f"return {QUESTIONS}") == ["One and more"]
        prompts = [ints(admit.prompt) for plan in served.engine.plans_seen for admit in plan.admit]
        assert bytes(prompts[-1]) == b"<user>One and more<assistant>"
        assert bytes(prompts[-2]) == bytes(prompts[-3])


async def test_an_edit_that_fails_gives_back_what_was_there(browser: Browser) -> None:
    async with shown(browser, says(ANSWER)) as (page, _):
        await page.reads("#status", "Running")
        await say(page, "One")
        await page.run("document.querySelector('#temperature').value = 9")
        await page.run(
            "document.querySelector('#messages [aria-label=\"Another answer\"]').click()"
        )
        await page.reads("#messages [role=alert]", "temperature")
        assert await page.run(f"return {QUESTIONS}") == ["One", "One"], "and what failed, marked"
        await page.reads("#messages [data-failed] .told", "Not answered")
        await page.run("document.querySelector('#temperature').value = ''")
        await page.open()
        await page.reads("#messages [data-role=assistant] .said", ANSWER)
        assert await page.run(f"return {QUESTIONS}") == ["One"]


async def test_pictures_and_files_of_text_are_kept_with_the_conversation(browser: Browser) -> None:
    """A file that is neither is refused at once."""
    async with shown(browser, seeing("a square")) as (page, served):
        await page.reads("#status", "Running")
        await hand_over(page, "paste", "#prompt", png_file(20, 10))
        await page.until("document.querySelector('#pictures canvas')")
        await choose(page, "notes.md", b"x = 1\n")
        await page.reads("#pictures", "notes.md")
        await choose(page, "a.bin", b"\0\1\2")
        await page.reads("#picture-problem", "a.bin is neither text nor a picture.")
        await say(page, "What is it?")
        await page.open()
        await page.until("document.querySelector('#messages canvas')")
        await page.reads("#messages .file", "notes.md")
        await page.reads("#status", "Running")
        await say(page, "Again", 2)
        prompts = [ints(admit.prompt) for plan in served.engine.plans_seen for admit in plan.admit]
        first, second = (bytes(token for token in prompt if token < 256) for prompt in prompts)
        assert b"notes.md:\n```\nx = 1\n```\n\nWhat is it?" in first
        assert second.startswith(first) and second.endswith(b"Again<assistant>")


CHOSEN = """
const [name, data] = arguments, transfer = new DataTransfer(), field = document.querySelector("#files");
transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name));
field.files = transfer.files;
field.dispatchEvent(new Event("change"));
"""


async def choose(page: Page, name: str, data: bytes) -> None:
    """As the dialog of the button does."""
    await page.run(CHOSEN, name, b64encode(data).decode())


FOCUSED = "document.activeElement.id || document.activeElement.textContent || document.activeElement.ariaLabel"


async def tab_to(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until the focus is there; its outline is seen."""
    for _ in range(30):
        await page.type(":focus", f"{SHIFT}{TAB}" if back else TAB)
        if name in str(await page.run(f"return {FOCUSED}")):
            outline = "return getComputedStyle(document.activeElement).outlineStyle"
            assert await page.run(outline) != "none", name
            return
    raise AssertionError(f"{name} cannot be reached")


async def test_everything_is_done_by_keyboard_alone(browser: Browser) -> None:
    async with shown(browser, says(f"{ANSWER}\n\n```\ncode\n```\n")) as (page, _):
        await page.reads("#status", "Running")
        await page.type("body", TAB)
        await page.type(":focus", ENTER)
        await page.until("document.activeElement.id === 'chat'")
        await tab_to(page, "prompt")
        await page.type(":focus", f"Hi{ENTER}")
        await answered(page)
        await tab_to(page, "Edit the message", back=True)
        await page.type(":focus", ENTER)
        await page.until("document.activeElement.tagName === 'TEXTAREA'")
        await page.type(":focus", ESCAPE)
        await page.until("document.activeElement.ariaLabel === 'Edit the message'")
        await tab_to(page, "Copy")
        await tab_to(page, "prompt")
        await tab_to(page, "chat-clear", back=True)
        await page.type(":focus", ENTER)
        await page.until("document.activeElement.id === 'prompt'")
        await page.type(":focus", f"Second{ENTER}")
        await answered(page)
        await tab_to(page, "Delete Second", back=True)
        await page.type(":focus", ENTER)
        await page.until("document.querySelector('#question').open")
        await page.type(":focus", ESCAPE)
        await page.until("!document.querySelector('#question').open")
        await tab_to(page, "Server", back=True)
        await page.type(":focus", ENTER)
        await page.until("document.documentElement.dataset.view === 'server'")


async def test_on_a_phone_the_conversations_cover_the_chat_only_when_opened(
    browser: Browser,
) -> None:
    browser.resize(390, 844)
    async with shown(browser, says(ANSWER)) as (page, _):
        await page.reads("#status", "Running")
        await say(page, "Hello")
        height = "return document.querySelector('#conversations').getBoundingClientRect().height"
        assert await page.run(height) == 0
        await page.click("#show-conversations")
        assert await page.run(height)
        await page.click("#conversations .title")
        await page.until(
            "document.querySelector('#conversations').getBoundingClientRect().height === 0"
        )
        assert await page.run("return document.activeElement.id") == "show-conversations"


async def test_the_line_at_the_top_says_in_words_what_the_server_does(browser: Browser) -> None:
    async with shown(browser, says(ANSWER * 200)) as (page, _):
        await page.reads("#now", "free")
        await page.type("#prompt", "Go on\n")
        await page.reads("#now", "writing 1 answer")
        await page.reads("#now", "tokens a second")
        await page.type("#prompt", ESCAPE)
        await page.reads("#now", "free")
        await page.reads("#messages .told", "stopped")
