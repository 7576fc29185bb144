"""Pictures in the chat of the live page: pasted and dropped ones."""

from __future__ import annotations

from base64 import b64encode

import pytest

from tests.browser.driver import Browser
from tests.browser.page import Page, says, shown, slowly
from tests.fake_images import SeeingEngine, png_file
from tests.fake_images import shown as tokens_of
from tests.fakes import EOS, ints

HANDED_OVER = """
  const [kind, place, data] = arguments, transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  transfer.items.add(new File([bytes], "a.png", { type: "image/png" }));
  const field = kind === "paste" ? "clipboardData" : "dataTransfer";
  const options = { [field]: transfer, bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
  document.querySelector(place).dispatchEvent(event);
"""
"""As the browser does when a person pastes or drops a file."""


async def hand_over(page: Page, kind: str, place: str, data: bytes) -> None:
    await page.run(HANDED_OVER, kind, place, b64encode(data).decode())


def seeing(text: str) -> SeeingEngine:
    tokens = [*text.encode(), EOS]
    return SeeingEngine(before_step=slowly, token_at=lambda _, at: tokens[min(at, len(text))])


@pytest.mark.parametrize(("kind", "place"), [("paste", "#prompt"), ("drop", "#messages")])
async def test_a_picture_is_shown_and_sent(browser: Browser, kind: str, place: str) -> None:
    async with shown(browser, seeing("a square")) as (page, served):
        await page.reads("#status", "Running")
        for number in (1, 2):
            await hand_over(page, kind, place, png_file(20, 10))
            await page.until(f"document.querySelectorAll('#pictures canvas').length === {number}")
        await page.click("#pictures button")
        await page.type("#prompt", "What is it?\n")
        await page.reads("#messages [data-role=assistant] .said", "a square")
        [admit] = [admit for plan in served.engine.plans_seen for admit in plan.admit]
        assert ints(admit.prompt) == (*b"<user>", *tokens_of(20, 10), *b"What is it?<assistant>")
        assert await page.run("return document.querySelectorAll('#messages canvas').length") == 1
        assert await page.run("return document.querySelector('#pictures').childElementCount") == 0
        assert await page.complaints() == [], "the page's rules hold"


async def test_a_text_model_says_that_it_saw_none(browser: Browser) -> None:
    async with shown(browser, says("no")) as (page, _):
        await page.reads("#status", "Running")
        await hand_over(page, "paste", "#prompt", png_file(20, 10))
        await page.until("document.querySelector('#pictures canvas')")
        await page.type("#prompt", "What is it?\n")
        await page.reads("#messages .told", "the model reads text only")
