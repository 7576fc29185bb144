"""One `trouper serve` at a time, with the flags that a test's own server has, as far as these mean
something here."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PLAN = json.loads(Path(os.environ["SUITE_PLAN"]).read_text("utf-8"))
START_S = 180
_now = {"flags": None, "process": None, "url": "", "uses": 0}


def serve(*flags):
    """Return the URL, without /v1, of a server with these flags: the one that runs, if it has
    them."""
    _now["uses"] += 1
    if _now["flags"] == flags and _now["process"].poll() is None:
        return _now["url"]
    stop()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [*PLAN["program"], "--port", str(port), *PLAN["server"], *flags]
    log = Path(PLAN["report"]).with_name("server.log").open("ab")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
    _now.update(flags=flags, process=process, url=f"http://127.0.0.1:{port}")
    wait(process, _now["url"])
    return _now["url"]


def count_uses():
    """Return how often a server was wanted: a test that never does has shown nothing of it."""
    return _now["uses"]


def wait(process, url):
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no server came up: {process.args}")


def stop():
    if (process := _now["process"]) is not None and process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _now.update(flags=None, process=None)


atexit.register(stop)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
