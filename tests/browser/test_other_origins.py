"""What pages of other origins can do in a real browser: nothing, unless their origin or their name
is allowed.

Whether something was run is asked of the server, since a page cannot read what became of a simple
request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from tests.browser import npm_packages
from tests.browser.driver import MISSING, Browser, chromium
from tests.browser.page import SAID, Page, says, slowly, streams
from tests.browser.pages import PageServer, page_server
from tests.fakes import FakeEngine
from tests.web.scraping import scrape
from tests.web.serving import Served, ask, eventually, serving
from trouper.protocol.record import RequestRecord

NAMES = "MAP page.example 127.0.0.1, MAP evil.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Both names mean this machine, as a page's name does once it is rebound."""
READS = (
    "/v1/models",
    "/v1/live",
    "/metrics",
    "/health",
    "/livez",
    "/readyz",
    "/openapi.json",
    "/docs",
    "/",
    "/server_info",
)
BODY = {"prompt": "hello", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}

ATTEMPTS = """
const [base, reads, body, stored] = arguments;
const tried = {};
const attempt = async (name, what) => {
  try { tried[name] = await what(); } catch (error) { tried[name] = error.name; }
};
const read = (path, options) => fetch(base + path, options).then(async answer => `${answer.status} ${(await answer.text()).slice(0, 9)}`);
const opaque = (path, options) => fetch(base + path, {mode: "no-cors", ...options}).then(answer => `${answer.type} ${answer.status}`);
const settled = (element, events = ["load", "error"]) => new Promise(done => {
  for (const event of events) element["on" + event] = () => done(event);
  document.body.append(element);
});
const said = {method: "POST", body: JSON.stringify(body)};
for (const path of [...reads, stored]) {
  await attempt("read " + path, () => read(path));
  await attempt("no-cors " + path, () => opaque(path));
}
for (const kind of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]) {
  await attempt("simple " + kind, () => read("/v1/completions", {...said, headers: {"Content-Type": kind}}));
  await attempt("no-cors " + kind, () => opaque("/v1/completions", {...said, headers: {"Content-Type": kind}}));
}
await attempt("simple untyped", () => read("/v1/completions", {method: "POST", body: new Blob([said.body])}));
await attempt("preflighted", () => read("/v1/completions", {...said, headers: {"Content-Type": "application/json"}}));
await attempt("with a key", () => read("/v1/models", {headers: {Authorization: "Bearer secret"}}));
await attempt("cancel", () => opaque("/v1/requests/row0/cancel", {method: "POST"}));
await attempt("cancel stored", () => opaque(stored + "/cancel", {method: "POST"}));
await attempt("delete", () => read(stored, {method: "DELETE"}));
await attempt("beacon", () => String(navigator.sendBeacon(base + "/v1/completions", said.body)));
await attempt("image", () => settled(Object.assign(new Image(), {src: base + "/metrics"})));
await attempt("script", () => settled(Object.assign(document.createElement("script"), {src: base + "/v1/models"})));
await attempt("events", () => settled(Object.assign(document.createElement("i"), {}), []).constructor && new Promise(done => {
  const events = new EventSource(base + "/v1/live");
  events.onopen = events.onmessage = () => { events.close(); done("open"); };
  events.onerror = () => { events.close(); done("error"); };
}));
await attempt("socket", () => new Promise(done => {
  const socket = new WebSocket(base.replace("http", "ws") + "/v1/live");
  socket.onopen = () => done("open");
  socket.onerror = () => done("error");
}));
await attempt("form", () => new Promise(done => {
  const form = document.createElement("form");
  Object.assign(form, {method: "post", enctype: "text/plain", action: base + "/v1/completions", target: "frame"});
  const field = document.createElement("input");
  Object.assign(field, {name: said.body.slice(0, -1) + ', "stop": "', value: '"}'});
  form.append(field);
  document.body.append(form);
  document.querySelector("iframe").onload = () => done("load");
  form.submit();
}));
return tried;
"""
FETCH = """
const [url, options] = arguments;
try {
  const answer = await fetch(url, options);
  return [answer.status, await answer.text(), answer.headers.get("x-request-id")];
} catch (error) { return [0, error.name, null]; }
"""
OPENAI = """
const [base, key] = arguments;
const {OpenAI, AuthenticationError} = await import("/openai/index.mjs");
const client = new OpenAI({baseURL: base, apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0});
const messages = [{role: "user", content: "What is the capital of France?"}];
const stream = await client.chat.completions.create({model: "fake", messages, stream: true, max_tokens: 60});
let text = "", chunks = 0;
for await (const chunk of stream) { text += chunk.choices[0]?.delta?.content ?? ""; chunks += 1; }
const whole = await client.chat.completions.create({model: "fake", messages, max_tokens: 60});
const models = [];
for await (const model of client.models.list()) models.push(model.id);
const told = {text, chunks, whole: whole.choices[0].message.content, id: whole._request_id, models};
try {
  await client.withOptions({apiKey: "wrong"}).models.list();
} catch (error) { told.wrong = [error instanceof AuthenticationError, error.status, error.code, error.requestID]; }
try {
  await client.chat.completions.create({model: "none", messages});
} catch (error) { told.refused = [error.status, error.code]; }
return told;
"""


@pytest.fixture(scope="module")
def browsing() -> Iterator[Browser]:
    """Chromium to which other names are this machine's."""
    if MISSING:
        pytest.skip(f"{MISSING} not installed: apt-get install chromium chromium-driver")
    with chromium([f"--host-resolver-rules={NAMES}"]) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages() -> Iterator[PageServer]:
    with page_server() as server:
        yield server


@attrs.frozen(eq=False)
class World:
    """A server with a stored response, and what was run on it since."""

    served: Served
    stored: str
    ended: list[RequestRecord]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.served.port}"


@asynccontextmanager
async def world(engine: FakeEngine | None = None, **server: Any) -> AsyncIterator[World]:
    ended: list[RequestRecord] = []
    async with serving(
        engine or FakeEngine(before_step=slowly), observers=[ended.append], **server
    ) as served:
        key = "Authorization: Bearer secret\r\n"
        _, answer = await ask(
            served, {"input": "hello", "max_output_tokens": 3}, "/v1/responses", key
        )
        ended.clear()
        yield World(served, f"/v1/responses/{answer['id']}", ended)


@asynccontextmanager
async def opened(browser: Browser, url: str) -> AsyncIterator[Page]:
    """Left at the end, with what it still loads."""
    page = Page(browser, url)
    await page.open()
    try:
        yield page
    finally:
        with trio.CancelScope(shield=True):
            await page.leave()


async def tried(page: Page, at: World, base: str = "") -> dict[str, str]:
    found = await page.run(ATTEMPTS, base or at.base, READS, BODY, at.stored)
    assert isinstance(found, dict)
    return found


async def answered(at: World) -> Counter[str]:
    """How often the server answered with each status."""
    counts: Counter[str] = Counter()
    for (name, labels), value in (await scrape(at.served)).samples.items():
        if name == "trouper_http_responses_total":
            counts[dict(labels)["status"]] += int(value)
    return counts


async def still_stored(at: World) -> bool:
    stream = await at.served.connect()
    async with stream:
        await stream.send_all(
            f"GET {at.stored} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n".encode()
        )
        return (await stream.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1"])
async def test_a_page_of_another_origin_runs_nothing_and_reads_nothing(
    browsing: Browser, pages: PageServer, name: str
) -> None:
    """Of another name, or of another port of this machine, which is of the same site."""
    async with world() as at, streams(at.served, 1), opened(browsing, pages.origin(name)) as page:
        await eventually(lambda: at.served.busy == 1)
        before = await answered(at)
        found = await tried(page, at)
        since = await answered(at) - before - Counter({"200": 1})
        readable = {what: how for what, how in found.items() if how[:3].isdigit()}
        assert readable == {}, "no status, no text"
        assert (
            found["preflighted"]
            == found["read /v1/models"]
            == found["with a key"]
            == found["delete"]
            == "TypeError"
        )
        assert found["events"] == found["socket"] == found["image"] == "error"
        assert found["no-cors /v1/live"] == "opaque 0", "sent, and told nothing"
        assert (found["beacon"], found["form"]) == ("true", "load"), "sent"
        assert {*since} == {"403"} and since["403"] > 3 * len(READS), (
            "the question before was the only other one"
        )
        assert at.ended == [] and at.served.busy == 1, (
            "nothing was run, and nothing that runs was cancelled"
        )
        assert await still_stored(at)


async def test_the_attempts_would_succeed_from_the_servers_own_page(browsing: Browser) -> None:
    """A negative control: the same script on a page of the server itself. Only what says no JSON is
    refused."""
    async with (
        world() as at,
        opened(browsing, f"http://127.0.0.1:{at.served.port}/nowhere") as page,
    ):
        await page.run(
            "document.body.insertAdjacentHTML('beforeend', '<iframe name=frame></iframe>')"
        )
        found = await tried(page, at)
        assert all(
            found[f"read {path}"].startswith("200 ") for path in (*READS[:4], *READS[6:], at.stored)
        )
        assert found["preflighted"].startswith("200 ") and found["delete"].startswith("200 ")
        assert found["simple text/plain"].startswith("415 ") and found["simple untyped"].startswith(
            "415 "
        )
        assert found["events"] == "open"
        assert len(at.ended) == 1


async def test_a_page_whose_origin_is_named_reads_and_runs_and_no_other_does(
    browsing: Browser, pages: PageServer
) -> None:
    async with world(cors_origins=pages.origin("page.example")) as at:
        async with opened(browsing, pages.origin("page.example")) as page:
            found = await tried(page, at)
            assert all(
                found[f"read {path}"].startswith("200 ")
                for path in (*READS[:4], *READS[6:], at.stored)
            )
            assert found["preflighted"].startswith("200 ") and found["delete"].startswith("200 ")
            assert found["simple text/plain"].startswith("415 ") and found[
                "simple untyped"
            ].startswith("415 ")
            assert found["events"] == "open"
            assert [record.reason for record in at.ended] == ["length"], (
                "the one that said it was JSON"
            )
            answer: Any = await page.run(
                FETCH, f"{at.base}/v1/chat/completions", {"method": "POST"}
            )
            assert (answer[0], json.loads(answer[1])["error"]["code"]) == (
                400,
                "invalid_json",
            ) and answer[2]
        async with opened(browsing, pages.origin("evil.example")) as page:
            assert not [how for how in (await tried(page, at)).values() if how[:3].isdigit()]
            assert len(at.ended) == 1


async def test_a_page_that_rebound_its_name_reads_nothing(browsing: Browser) -> None:
    """To the browser it is the server's own origin, and it sends neither Origin nor Sec-Fetch-Site
    with what it reads."""
    async with world() as at:
        url = f"http://evil.example:{at.served.port}"
        async with opened(browsing, f"{url}/") as page:
            assert await page.run("return location.hostname") == "evil.example"
            text = str(await page.run("return document.body.textContent"))
            assert "--allowed-hosts evil.example" in text
            for path in (*READS, at.stored):
                status, body, _ = await page.run(FETCH, url + path)  # type: ignore[misc]
                assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed"), (  # type: ignore[has-type]
                    path
                )
            sent = {
                "method": "POST",
                "headers": {"Content-Type": "application/json"},
                "body": json.dumps(CHAT),
            }
            for path in (
                "/v1/chat/completions",
                "/v1/messages",
                "/v1/responses",
                f"{at.stored}/cancel",
            ):
                answer: Any = await page.run(FETCH, url + path, sent)
                assert answer[0] == 403, path
            assert at.ended == [] and await still_stored(at)


async def test_a_name_that_is_allowed_has_the_live_page_and_its_chat(browsing: Browser) -> None:
    async with world(says(SAID), allowed_hosts="page.example") as at:
        async with opened(browsing, f"http://page.example:{at.served.port}/") as page:
            await page.reads("#status", "Running")
            await page.type("#prompt", "What is the capital of France?\n")
            await page.reads("#messages [data-role=assistant] .said", SAID)
        async with opened(browsing, f"http://evil.example:{at.served.port}/") as page:
            assert "host_not_allowed" in str(await page.run("return document.body.textContent"))


async def test_a_link_to_the_live_page_is_followed(browsing: Browser, pages: PageServer) -> None:
    """The user sees it, the page that has the link does not."""
    async with world() as at, opened(browsing, pages.origin("evil.example")) as page:
        await page.run("location.href = arguments[0]", f"{at.base}/")
        await page.reads("#status", "Running")


@pytest.mark.skipif(bool(npm_packages.OPENAI.missing), reason=npm_packages.OPENAI.missing)
async def test_the_openai_package_streams_on_a_page_of_a_named_origin(
    browsing: Browser, pages: PageServer
) -> None:
    """With a key, which a preflight does not send; and the package's own errors, as it makes them
    of what it may read."""
    origin = pages.origin("page.example")
    async with world(
        says(SAID), cors_origins=origin, api_key=("secret",), model_alias=("off",)
    ) as at:
        async with opened(browsing, origin) as page:
            told: Any = await page.run(OPENAI, f"{at.base}/v1", "secret")
            assert told["text"] == told["whole"] == SAID
            assert told["chunks"] > len(SAID) / 2 and told["id"] and told["models"] == ["fake"]
            right, status, code, request_id = told["wrong"]
            assert (right, status, code) == (True, 401, "invalid_api_key") and request_id
            assert told["refused"] == [404, "model_not_found"]
            assert len(at.ended) == 2
        async with opened(browsing, pages.origin("evil.example")) as page:
            with pytest.raises(Exception, match="Connection error"):
                await page.run(OPENAI, f"{at.base}/v1", "secret")
            assert len(at.ended) == 2
