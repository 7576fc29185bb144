"""The live page for everybody: contrast, names, the keyboard, a phone, the theme."""

from __future__ import annotations

import re
from typing import cast

import pytest
import trio

from tests.browser.driver import DESKTOP, PHONE, Browser
from tests.browser.page import SAID, says, shown, streams

UNNAMED = """
const named = one => one.labels?.length || one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
  || one.textContent.trim();
return [...document.querySelectorAll("button, input, textarea, select, canvas, [tabindex], a, svg[role], [role=region]")]
  .filter(one => !one.closest("[aria-hidden]") && !named(one)).map(one => one.outerHTML.slice(0, 80))
"""
CONTRASTS = """
const lit = name => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255)
    .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  probe.remove();
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => { const [low, high] = [lit(a), lit(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
return arguments[0].map(([one, other]) => [one, other, ratio(one, other)])
"""
TEXTS = [
    (one, back)
    for one in ("text", "soft", "accent", "bad", "warn", "good")
    for back in ("card", "page", "sunk")
]
MARKS = [(one, "card") for one in ("decode", "prefill", "cached", "focus")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrast_is_aa(browser: Browser, scheme: str) -> None:
    """4.5 for text, 3 for what is drawn."""
    async with shown(browser) as (page, _):
        await page.prefer(scheme)
        found = await page.run(CONTRASTS, [*TEXTS, ("on-accent", "accent"), *MARKS])
        assert isinstance(found, list)
        assert len({ratio for _, _, ratio in found}) > 10, "they are measured"
        low = [one for one in found if one[2] < (3 if (one[0], one[1]) in MARKS else 4.5)]
        assert low == []


async def test_everything_has_a_name_and_a_place(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        await page.reads("#status", "Running")
        await page.view("actors")
        await page.until("document.querySelector('#actors svg')?.getAttribute('aria-label')")
        await page.view("server")
        await page.until("document.querySelector('.tier')")
        assert await page.run(UNNAMED) == []
        levels = await page.run(
            "return [...document.querySelectorAll('#main h2, #main h3')].map(one => +one.tagName[1])"
        )
        assert levels == [2, 2, 2, 2, 2, 3, 3, 3, 2, 2, 2], "eight sections, three tiers in one"
        landmarks = await page.run(
            "return ['body > header', 'header > nav', 'body > main:not([hidden])', 'body > footer']"
            ".map(one => document.querySelectorAll(one).length)"
        )
        assert landmarks == [1, 1, 1, 1]
        assert await page.run("return document.documentElement.lang") == "en"


async def test_tables_have_names_and_plots_say_their_latest_values(browser: Browser) -> None:
    async with shown(browser) as (page, served), streams(served, 2):
        await page.view("server")
        await page.reads("#figure-running dd", "2")
        await page.click("#rows summary")
        await page.until("document.querySelector('#rows table')")
        names = await page.run(
            "return [...document.querySelectorAll('table')].map(one => one.getAttribute('aria-label')"
            " ?? document.getElementById(one.getAttribute('aria-labelledby')).textContent)"
        )
        assert names == ["Rows of the batch", "Recent requests", "Models"]
        said = "[...document.querySelectorAll('#plots .hidden')].map(one => one.textContent)"
        await page.until(f"/^: now longest [\\d.]+, median [\\d.]+$/.test({said}[2])")
        answers, prompts, _ = cast("list[str]", await page.run(f"return {said}"))
        assert re.fullmatch(r": now answers [\d,.]+", answers)
        assert re.fullmatch(r": now computed [\d,.]+, from cache [\d,.]+", prompts)
        live = "return document.querySelectorAll('#plots [aria-live], #plots [role=status], #plots [role=alert]').length"
        assert await page.run(live) == 0, "it changes all the time"


async def test_the_keyboard_alone_reaches_the_chat(browser: Browser) -> None:
    async with shown(browser, says(SAID)) as (page, _):
        await page.reads("#status", "Running")
        await page.type("body", "\ue004")
        assert await page.run("return document.activeElement.className") == "skip"
        await page.type(":focus", "\ue007")
        await page.until("document.activeElement.id === 'chat'")


async def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser) -> None:
    async with shown(browser) as (page, served), streams(served, 2):
        for width, height in (PHONE, (320, 640), DESKTOP):
            await trio.to_thread.run_sync(browser.resize, width, height)
            await page.reads("#figure-running dd", "2")
            for view in ("chat", "models", "server", "actors"):
                await page.view(view)
                assert await page.run("return document.documentElement.scrollWidth") == width
            await page.until(
                f"document.querySelector('#actors svg').getBoundingClientRect().width <= {width}"
            )
            assert await page.run("return document.documentElement.scrollWidth") == width


async def test_the_theme_follows_the_system_until_it_is_chosen(browser: Browser) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    async with shown(browser) as (page, _):
        light = await page.run(back)
        await page.prefer("dark")
        dark = await page.run(back)
        assert light != dark
        await page.click("#theme")
        await page.reads("#theme", "light")
        assert await page.run(back) == light
        await page.open()
        assert await page.run(back) == light, "it is remembered"
        await page.click("#theme")
        assert await page.run(back) == dark
        await page.click("#theme")
        await page.reads("#theme", "auto")
        await page.run("localStorage.clear()")
