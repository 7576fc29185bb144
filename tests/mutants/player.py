"""Runs selections of tests in a scratch copy of the checkout, each in a fork of this process. A
script, run as such: `python tests/mutants/player.py`, with the copy as the working directory. A
line of JSON in, {"tests", "file", "limit_s", "log"}; a line of JSON out, {"code", "imported",
"foreign"}.

What third parties bring is imported once, before the forks: it takes longer than most selections.
Nothing of the package, of its tests or of MLX (which has threads) is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

TIMED_OUT = -1
PRELOADED = (
    "attrs",
    "cattrs",
    "click",
    "h11",
    "hypercorn",
    "hypothesis.stateful",
    "hypothesis.strategies",
    "jinja2",
    "msgspec",
    "numpy",
    "prometheus_client",
    "pytest",
    "quart",
    "rich.console",
    "tokenizers",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "trio",
    "xxhash",
)
ROOT = Path.cwd()


def main() -> None:
    sys.path[:1] = [str(ROOT), str(ROOT / "packages" / "trouper-lab")]
    for name in PRELOADED:
        __import__(name)
    for line in sys.stdin:
        print(json.dumps(_play(json.loads(line))), flush=True)  # noqa: T201


def _play(order: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reading)
        _run(order, writing)
    os.close(writing)
    code = _wait(child, order["limit_s"])
    with open(reading, "rb") as said:  # noqa: PTH123  A descriptor.
        told = said.read()
    return {"code": code, **(json.loads(told) if told else {"imported": True, "foreign": []})}


def _run(order: dict[str, Any], writing: int) -> None:
    """The child: never returns."""
    code = 70
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pytest

        # Some of pytest's plugins came with what was imported before; nothing is lost if they stay
        # as they are.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options = [
            *quiet,
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:schemathesis",
            "--hypothesis-seed=0",
            "--tb=short",
        ]
        code = int(pytest.main([*options, *order["tests"]]))
        os.write(writing, json.dumps(_imported(order["file"])).encode())
    except BaseException:  # noqa: BLE001  Nobody else would see it.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _imported(file: str) -> dict[str, Any]:
    """Whether the mutated file was imported, and what of the package came from elsewhere than the
    copy."""
    files = {
        str(getattr(module, "__file__", None) or "")
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("trouper", "trouper_lab", "tests")
    } - {""}
    return {
        "imported": not file or str(ROOT / file) in files,
        "foreign": sorted(one for one in files if not one.startswith(f"{ROOT}{os.sep}")),
    }


def _wait(child: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


if __name__ == "__main__":
    main()
