"""One browser for all of these tests: starting it takes longer than any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.driver import DESKTOP, MISSING, Browser, chromium


@pytest.fixture(scope="session")
def _chromium() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(f"{MISSING} not installed: apt-get install chromium chromium-driver")
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(_chromium: Browser) -> Browser:
    """As new: no page, nothing kept, nothing to complain about so far."""
    _chromium.open("about:blank")
    _chromium.resize(*DESKTOP)
    _chromium.prefer("light")
    _chromium.console()
    _chromium.requested()
    return _chromium
