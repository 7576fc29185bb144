"""Faults that axe sees in the pages: none, in neither theme, on two laptops and a phone; the short
version has each size once."""

from __future__ import annotations

import pytest
import trio

from tests.browser.axe import faults
from tests.browser.driver import PHONE, SIZES, Browser
from tests.browser.npm_packages import AXE
from tests.browser.page import Page, says, shown, streams

pytestmark = pytest.mark.skipif(bool(AXE.missing), reason=AXE.missing)
ANSWER = """# Title

Some *text* with [a link](https://example.org/) and `code`.

```python
print("a line of code that is much longer than a phone is wide, so that the block scrolls")
```

| a | b |
|---|---|
| 1 | 2 |

> quoted
"""


async def violations(page: Page) -> list[str]:
    return await trio.to_thread.run_sync(faults, page.browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.long(but=("size0-light", "size1-dark", "size2-dark"))
async def test_axe_finds_no_fault_in_any_view(
    browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    browser.resize(*size)
    browser.prefer(scheme)
    async with shown(browser, says(ANSWER)) as (page, _):
        await page.reads("#status", "Running")
        assert await violations(page) == []
        await page.type("#prompt", "Show me all of it\n")
        await page.reads("#messages .told", "token")
        for view in ("chat", "models", "server", "actors"):
            await page.view(view)
            assert await violations(page) == [], view
        await page.view("chat")
        await page.click("#messages [aria-label='Edit the message']")
        await page.click("#chat summary")
        assert await violations(page) == []
        if size == PHONE:
            await page.click("#show-conversations")
        await page.click("#conversations [aria-label^=Delete]")
        assert await violations(page) == [], "a question stands above it"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.long(but=("dark",))
async def test_axe_finds_no_fault_in_a_busy_server_nor_where_a_key_is_needed(
    browser: Browser, scheme: str
) -> None:
    browser.prefer(scheme)
    async with shown(browser) as (page, served), streams(served, 3):
        await page.view("server")
        await page.reads("#figure-running dd", "3")
        await page.click("#rows summary")
        await page.until("document.querySelector('#rows table')")
        assert await violations(page) == []
    async with shown(browser, api_key=("secret",)) as (page, _):
        await page.reads("#status", "Locked")
        assert await violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.long(but=("size0-dark", "size1-light", "size2-light"))
async def test_axe_finds_no_fault_in_docs(
    browser: Browser, scheme: str, size: tuple[int, int]
) -> None:
    browser.resize(*size)
    browser.prefer(scheme)
    async with shown(browser, at="docs") as (page, _):
        await page.until("document.querySelector('details .path')")
        await page.run("document.querySelector('details').open = true")
        await page.until("document.querySelector('details form')")
        assert await violations(page) == []
