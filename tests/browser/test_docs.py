"""/docs, the page that shows the API."""

from __future__ import annotations

from tests.browser.driver import Browser
from tests.browser.page import shown
from tests.web.serving import exchange, get

STRICT = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")


async def test_it_sends_a_request_and_is_as_closed_as_the_live_page(browser: Browser) -> None:
    async with shown(browser, at="docs") as (page, served):
        for path in ("/", "/docs"):
            _, headers, _ = await exchange(served, get(path))
            assert set(STRICT) <= set(headers["content-security-policy"].split("; ")), path
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
                "nosniff",
                "no-referrer",
            ), path
        operation = "[...document.querySelectorAll('details')].find(one => one.querySelector('.path').textContent === '/v1/models')"
        await page.until("document.querySelector('details .path')")
        await page.run(f"{operation}.open = true")
        await page.until("document.querySelector('form')")
        await page.run("document.querySelector('form').requestSubmit()")
        await page.until(
            "[...document.querySelectorAll('form pre')].some(one => one.textContent.includes('fake'))"
        )
        assert not [one for one in await page.complaints() if one.startswith("SEVERE")]


async def test_every_operation_opens_and_is_searched_for(browser: Browser) -> None:
    """Those with a body did not, since their schema had a name."""
    operations = "document.querySelectorAll('#main > details')"
    async with shown(browser, at="docs") as (page, _):
        await page.until(f"{operations}.length > 40")
        await page.run(f"for (const one of {operations}) one.open = true")
        await page.until(f"[...{operations}].every(one => one.querySelector('form'))")
        assert not [one for one in await page.complaints() if one.startswith("SEVERE")]
        await page.type("#search", "post embed")
        seen = (
            f"return [...{operations}].filter(one => !one.hidden)"
            ".map(one => one.querySelector('.path').textContent)"
        )
        assert await page.run(seen) == ["/v1/embeddings"]
