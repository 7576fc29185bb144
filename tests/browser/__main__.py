"""`just screenshots`: the page of a real server at work, into docs/: its chat, and its view of the
server, dark and light, on a desktop and on a phone; and a chat as it is written."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import threading
import time
import urllib.request
from http.client import HTTPException
from itertools import count, pairwise
from pathlib import Path
from random import Random

from PIL import Image

from benchmarks import servers
from tests.browser.driver import Browser, chromium

DOCS = Path(__file__).parents[2] / "docs"
NAME = "SmolLM2-135M-Instruct"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
CHATS = (("dark", "desktop"), ("light", "phone"))
QUESTION = "Write a Python function that says whether a number is even."
COLORS, LAST_MS = 192, 5000
CLIENTS, WORK_S = 7, 100.0
SYSTEM = (
    "You are a patient teacher. Explain each thing by a small example from everyday life, in plain words. "
    * 3
)
TOPICS = (
    "rivers",
    "bridges",
    "the moon",
    "bread",
    "winter",
    "trains",
    "letters",
    "gardens",
    "glass",
    "the sea",
)


def ask(port: int, topic: str, number: int, tokens: int) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Lesson {number}: {topic}?"},
    ]
    body = json.dumps({"messages": messages, "max_tokens": tokens, "temperature": 0.8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


def client(port: int, seed: int, over: threading.Event) -> None:
    """Asks, reads, thinks a while, asks again. The server's end ends it: the last answers are
    nobody's."""
    chance = Random(seed)
    for number in count(1):
        try:
            ask(port, chance.choice(TOPICS), number, chance.choice([20, 40, 80, 120]))
        except (OSError, HTTPException):
            if over.is_set():
                return
            raise
        if over.wait(3 * chance.random()):
            return


def chat(browser: Browser) -> None:
    """Ask, and record what is seen until it is answered."""
    browser.run("document.querySelector('#temperature').value = 0")
    box = browser.driver.find_element("css selector", "#prompt")
    seen = [(time.monotonic(), screenshot(browser))]
    for word in QUESTION.split():
        box.send_keys(f"{word} ")
        seen.append((time.monotonic(), screenshot(browser)))
    box.send_keys("\n")
    while "token" not in browser.text("#messages .told"):
        seen.append((time.monotonic(), screenshot(browser)))
    seen.append((time.monotonic(), screenshot(browser)))
    record(seen)


def record(seen: list[tuple[float, bytes]]) -> None:
    """An animation of screenshots and their times, as fast as it was; it plays three times, and
    rests at the end."""
    palette = image_of(seen[-1][1]).quantize(COLORS, dither=Image.Dither.NONE)
    first, *others = (
        image_of(png).quantize(palette=palette, dither=Image.Dither.NONE) for _, png in seen
    )
    path = DOCS / "chat.gif"
    milliseconds = [round(1000 * (after - at)) for (at, _), (after, _) in pairwise(seen)]
    durations = [*milliseconds, LAST_MS]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=2, optimize=True)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")


def screenshot(browser: Browser) -> bytes:
    return browser.driver.get_screenshot_as_png()


def image_of(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def take(browser: Browser, view: str, scheme: str, device: str) -> None:
    """Of few colours: it is a drawing, and a third of the bytes."""
    browser.run("location.hash = arguments[0]", {"chat": "chat", "live": "server"}[view])
    browser.prefer(scheme)
    browser.resize(*SIZES[device])
    time.sleep(1.5)
    browser.resize(SIZES[device][0], browser.run("return document.documentElement.scrollHeight"))
    time.sleep(1.5)
    path = DOCS / f"{view}-{scheme}-{device}.png"
    image_of(screenshot(browser)).quantize(COLORS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as disk,
        servers.trouper(
            servers.embedded(),
            "--served-model-name",
            NAME,
            "--completion-batch-size",
            "16",
            disk=Path(disk),
        ) as server,
        chromium() as browser,
    ):
        browser.prefer("dark")
        browser.open(f"http://127.0.0.1:{server.port}/")
        chat(browser)
        over = threading.Event()
        for seed in range(CLIENTS):
            threading.Thread(target=client, args=(server.port, seed, over), daemon=True).start()
        try:
            time.sleep(WORK_S)
            for scheme in ("dark", "light"):
                for device in SIZES:
                    take(browser, "live", scheme, device)
            for scheme, device in CHATS:
                take(browser, "chat", scheme, device)
        finally:
            over.set()


main()
