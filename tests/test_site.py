"""The documentation as a site: strictly built, with a place for each page, and nothing from other
hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from random import Random
from urllib.parse import quote, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.axe import faults
from tests.browser.driver import DESKTOP, MISSING, PHONE, Browser, chromium
from tests.browser.npm_packages import AXE

PATIENCE_S = 30
SCHEMES = {"light": "default", "dark": "slate"}
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CERTIFICATES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.html"))
"""Pages without the theme."""
ADDRESSES = [
    "404.html",
    *CERTIFICATES,
    *sorted(
        f"{page.relative_to(DOCS).with_suffix('')}/".removesuffix("index/")
        for page in DOCS.rglob("*.md")
    ),
]
AXE_SIZES = ((1280, 900), PHONE)
SEARCHED = [
    ("gguf", "troubleshooting/"),
    ("gguf", "coming-from/"),
    ("ollama", "coming-from/#ollama"),
    ("slow", "troubleshooting/#answers-are-slow"),
    ("out of memory", "troubleshooting/#memory-or-disk-fills-up"),
    ("which model", "choosing-a-model/#which-model-for-how-much-memory"),
]
"""What users type, and a page that answers it."""
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
    r"""<link\b[^>]*\bhref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
"""What a browser asks for without being told to by a click."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page without a place in the navigation, a broken link or a name that the reference does not
    find fail it."""
    target = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return target


def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 15
    assert {
        page.name: found.group()
        for page in pages
        if (found := FETCHED.search(page.read_text("utf-8")))
    } == {}
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/a.css">')


def test_what_pages_include_is_there(site: Path) -> None:
    """The table of flags, examples, and names out of the code."""
    assert "--completion-batch-size" in (site / "flags" / "index.html").read_text("utf-8")
    embedding = (site / "embedding" / "index.html").read_text("utf-8")
    assert "run_summarizer" in embedding
    assert "The client's end of one request." in embedding


@pytest.mark.parametrize(("typed", "page"), SEARCHED)
def test_the_search_finds_what_users_type(site: Path, typed: str, page: str) -> None:
    """The index has a section of that page with all words that are typed."""
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    texts = {each["location"]: f"{each['title']} {each['text']}".lower() for each in index["docs"]}
    matching = {
        address
        for address, text in texts.items()
        if all(re.search(rf"\b{word}", text) for word in typed.split())
    }
    assert page in {address[: len(page)] for address in matching}


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def shown(site: Path) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of the site."""
    if MISSING:
        pytest.skip(f"{MISSING} not installed: apt-get install chromium chromium-driver")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with chromium(told=False) as browser:
                yield browser, f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def show(shown: tuple[Browser, str], page: str, scheme: str, size: tuple[int, int]) -> list[str]:
    """A page as on a first visit; the faults that axe sees in it."""
    browser, url = shown
    browser.resize(*size)
    browser.prefer(scheme)
    browser.open("about:blank")
    # The theme keeps the scheme of the first visit.
    stored = {"origin": url.rstrip("/"), "storageTypes": "local_storage"}
    browser.driver.execute_cdp_cmd("Storage.clearDataForOrigin", stored)
    browser.open(url + page)
    if page not in CERTIFICATES:
        assert browser.run("return document.body.dataset.mdColorScheme") == SCHEMES[scheme]
    return faults(browser)


@pytest.mark.skipif(bool(AXE.missing), reason=AXE.missing)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ADDRESSES)
@pytest.mark.long
def test_axe_finds_no_fault(shown: tuple[Browser, str], page: str, scheme: str) -> None:
    """All pages; five minutes on two cores that other work shares."""
    assert [show(shown, page, scheme, size) for size in AXE_SIZES] == [[], []]


@pytest.mark.skipif(bool(AXE.missing), reason=AXE.missing)
def test_axe_finds_no_fault_in_a_few_pages_of_today(shown: tuple[Browser, str]) -> None:
    """Other ones tomorrow."""
    looks = [*product(ADDRESSES, SCHEMES, AXE_SIZES)]
    today = Random(datetime.now(UTC).toordinal()).sample(looks, 4)
    assert [look for look in today if show(shown, *look)] == []


def test_each_page_has_its_address(site: Path) -> None:
    built = {
        str(page.relative_to(site)).removesuffix("index.html") for page in site.rglob("*.html")
    }
    assert set(ADDRESSES) == built


@pytest.mark.parametrize(("typed", "page"), SEARCHED)
@pytest.mark.long(but=("which model-*",))
def test_the_search_shows_what_users_type(
    shown: tuple[Browser, str], typed: str, page: str
) -> None:
    """The theme's own search, in a browser, has that page among its results."""
    browser, url = shown
    browser.resize(*DESKTOP)
    browser.open(f"{url}?q={quote(typed)}")
    browser.driver.find_element(By.CSS_SELECTOR, ".md-search__input").click()
    links = WebDriverWait(browser.driver, PATIENCE_S).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    assert any(link.text for link in links)
    wanted, _, section = page.partition("#")
    found = [urlsplit(str(link.get_attribute("href"))) for link in links]
    assert [one for one in found if one.path == f"/{wanted}" and one.fragment in ("", section)]
