"""What the tests of the page share: a server beside the browser, a batch that runs, waiting for
what is seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

from tests.browser.driver import Browser
from tests.fakes import EOS, FakeEngine
from tests.web.serving import Served, post, serving
from trouper.protocol.plans import Plan

PATIENCE_S = 60.0
SAID = "The capital of France is Paris."
LOOKING = """
  const late = performance.now() + 500;
  return new Promise((resolve, reject) => {
    const look = () => {
      try {
        if (Boolean(%s)) resolve(true);
        else if (performance.now() > late) resolve(false);
        else setTimeout(look, 10);
      } catch (error) {
        reject(error);
      }
    };
    look();
  });
"""
"""Whether a condition came true within half a second: no longer, so that somebody else may end the
waiting."""


async def slowly(plan: Plan) -> None:
    """As a small device: a chunk takes longer than a token."""
    await trio.sleep(0.02 if plan.prefill else 0.01)


def says(text: str) -> FakeEngine:
    """Answers everything with this, and stops."""
    data = text.encode()
    return FakeEngine(
        before_step=slowly, token_at=lambda _, place: data[place] if place < len(data) else EOS
    )


@attrs.frozen(eq=False)
class Page:
    """The page of one server. The browser is driven from a thread, so that the server can answer
    meanwhile."""

    browser: Browser
    url: str

    async def open(self) -> None:
        await trio.to_thread.run_sync(self.browser.open, self.url)

    async def run(self, script: str, *arguments: object) -> object:
        return await trio.to_thread.run_sync(self.browser.run, script, *arguments)

    async def until(self, condition: str) -> None:
        """Until an expression of JavaScript holds. The page itself looks again and again: asked
        from here each time, the driver and the browser did little else."""
        with trio.fail_after(PATIENCE_S):
            while not await self.run(LOOKING % condition):
                pass

    async def reads(self, selector: str, text: str) -> None:
        """Until an element says this."""
        await self.until(f"document.querySelector({selector!r})?.textContent.includes({text!r})")

    async def type(self, selector: str, text: str) -> None:
        """With the keyboard."""

        def type_there() -> None:
            self.browser.driver.find_element("css selector", selector).send_keys(text)

        await trio.to_thread.run_sync(type_there)

    async def click(self, selector: str) -> None:
        await trio.to_thread.run_sync(
            lambda: self.browser.driver.find_element("css selector", selector).click()
        )

    async def view(self, name: str) -> None:
        """Go to one of the page's views, as its links do."""
        await self.run("location.hash = arguments[0]", name)
        await self.until(f"document.documentElement.dataset.view === {name!r}")

    async def leave(self) -> None:
        await trio.to_thread.run_sync(self.browser.open, "about:blank")

    async def prefer(self, scheme: str) -> None:
        await trio.to_thread.run_sync(self.browser.prefer, scheme)

    async def complaints(self) -> list[str]:
        return await trio.to_thread.run_sync(self.browser.console)

    async def requested(self) -> list[str]:
        return await trio.to_thread.run_sync(self.browser.requested)


@asynccontextmanager
async def shown(
    browser: Browser, engine: FakeEngine | None = None, at: str = "", **server: object
) -> AsyncIterator[tuple[Page, Served]]:
    """The page of a server of its own, opened. Left at the end, or its stream would be the last to
    go."""
    async with serving(engine or FakeEngine(before_step=slowly), **server) as served:  # type: ignore[arg-type]
        page = Page(browser, f"http://127.0.0.1:{served.port}/{at}")
        await page.open()
        try:
            yield page, served
        finally:
            with trio.CancelScope(shield=True):
                await page.leave()


@asynccontextmanager
async def streams(
    served: Served, count: int, length: int = 0, priority: int = 0
) -> AsyncIterator[None]:
    """So many rows decode until this is left, with prompts of `length` tokens if that is given."""

    async def read(stream: trio.SocketStream) -> None:
        async with stream:
            while await stream.receive_some():
                pass

    async with trio.open_nursery() as nursery:
        for number in range(count):
            stream = await served.connect()
            prompt = (
                "hello" * (number + 1) if not length else (f"{length} {number} " * length)[:length]
            )
            body = {
                "prompt": prompt,
                "max_tokens": 4000 - length,
                "stream": True,
                "ignore_eos": True,
                "priority": priority,
            }
            await stream.send_all(post("/v1/completions", body, f"X-Request-Id: row{number}\r\n"))
            nursery.start_soon(read, stream)
        yield
        nursery.cancel_scope.cancel()
