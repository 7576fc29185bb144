"""Debian's Chromium without a window, driven by its own chromedriver. Nothing but this machine can
be reached from it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = " and ".join(
    name
    for name, path in (("chromium", CHROMIUM), ("chromium-driver", CHROMEDRIVER))
    if path is None
)
"""Debian's packages that are not there."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--lang=en",
    "about:blank",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
DESKTOP, PHONE = (1280, 800), (390, 844)
SIZES = ((1440, 780), (1280, 900), PHONE)
"""Two laptops and a phone: what a newcomer sees first is looked at on all of them."""
ENDS_S = 5.0
"""After being told to quit: longer, and a process of it is killed."""


@attrs.frozen(eq=False)
class Browser:
    """One tab. Everything blocks: call it in a thread where a server runs in the same process."""

    driver: Chrome
    profile: Path
    """A directory that all of its processes name in their command lines."""

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a body of JavaScript."""
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(
            self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        ).strip()

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600},
        )

    def prefer(self, scheme: str, motion: str = "no-preference") -> None:
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def console(self) -> list[str]:
        """What was complained about since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._log("browser")]

    def requested(self) -> list[str]:
        """Every URL that was asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [
            one["params"]["request"]["url"]
            for one in events
            if one["method"] == "Network.requestWillBeSent"
        ]

    def _log(self, kind: str) -> list[Any]:
        entries: list[Any] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries


@contextmanager
def chromium(flags: Sequence[str] = (), *, told: bool = True) -> Iterator[Browser]:
    """With a profile of its own, which is gone afterwards. Without `told` nothing is said of what
    it does, which costs it time."""
    options = ChromeOptions()
    assert CHROMIUM is not None and CHROMEDRIVER is not None, f"install {MISSING}"
    options.binary_location = CHROMIUM
    with (
        tempfile.TemporaryDirectory(prefix="trouper-browser-") as place,
        outlived(profile := Path(place)),
    ):
        for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        if told:
            options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options, Service(CHROMEDRIVER))
        try:
            browser = Browser(driver, profile)
            browser.resize(*DESKTOP)
            yield browser
        finally:
            driver.quit()


@contextmanager
def outlived(profile: Path) -> Iterator[None]:
    """Whoever uses it has ended afterwards: a browser still writes when its driver says that it has
    quit, and one whose driver was killed never quits."""
    try:
        yield
    finally:
        _, left = psutil.wait_procs(users_of(profile), timeout=ENDS_S)
        while left:
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(left)
            left = users_of(profile)


def users_of(profile: Path) -> list[psutil.Process]:
    """The processes of the browser of that profile."""
    flag = f"--user-data-dir={profile}"
    return [one for one in psutil.process_iter(["cmdline"]) if flag in (one.info["cmdline"] or ())]
