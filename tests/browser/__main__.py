"""`just screenshots`: the page of a real server at work, into docs/: its chat, and its view of the
server, dark and light, on a desktop and on a phone."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import threading
import time
import urllib.request
from http.client import HTTPException
from itertools import count
from pathlib import Path
from random import Random

from PIL import Image

from benchmarks import servers
from tests.browser.driver import Browser, chromium

DOCS = Path(__file__).parents[2] / "docs"
NAME = "SmolLM2-135M-Instruct"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
CHATS = (("dark", "desktop"), ("light", "phone"))
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
    browser.run("document.querySelector('#temperature').value = 0")
    browser.driver.find_element("css selector", "#prompt").send_keys(
        "Write a Python function that reverses the words of a sentence.\n"
    )
    while "token" not in browser.text("#messages .told"):
        time.sleep(0.2)


def take(browser: Browser, view: str, scheme: str, device: str) -> None:
    """Of few colours: it is a drawing, and a third of the bytes."""
    browser.run("location.hash = arguments[0]", {"chat": "chat", "live": "server"}[view])
    browser.prefer(scheme)
    browser.resize(*SIZES[device])
    time.sleep(1.5)
    browser.resize(SIZES[device][0], browser.run("return document.documentElement.scrollHeight"))
    time.sleep(1.5)
    shot = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    path = DOCS / f"{view}-{scheme}-{device}.png"
    shot.quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)
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
