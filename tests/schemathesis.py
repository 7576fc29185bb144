"""`python -m tests.schemathesis [URL] [FLAGS]`: bodies that schemathesis makes of /openapi.json,
valid and not.

All its checks, 100 examples an operation, against this server with the fake engine or the one at
URL. FLAGS go to `schemathesis run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

from tests.fakes import EOS, FakeEngine
from tests.web.serving import serving

KEY = "a-key"
ROOT = Path(__file__).parent.parent
SETTINGS = {"max_kv_size": 256, "completion_batch_size": 128, "max_queue_size": 1024}
"""Answers stay short, and no queue is full."""


def brief(key: int, position: int) -> int:
    """Letters, and an end now and then, so that an answer may stop by itself."""
    return EOS if (key + position) % 13 == 0 else 97 + (key + 7 * position) % 26


async def generated(url: str, *flags: str) -> subprocess.CompletedProcess[bytes]:
    command = [
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "run",
        f"{url}/openapi.json",
        "--header",
        f"Authorization: Bearer {KEY}",
        "--generation-database",
        "none",
        "--no-color",
        "--checks",
        "all",
        "--continue-on-failure",
        "--request-timeout",
        "120",
        "--max-response-time",
        "120",
        *flags,
    ]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.web.schemathesis_hooks",
        "PYTHONPATH": str(ROOT),
    }
    return await trio.run_process(
        command, capture_stdout=True, stderr=subprocess.STDOUT, check=False, env=environment
    )


async def generated_here(*flags: str, strict: bool = True) -> subprocess.CompletedProcess[bytes]:
    """With the fake engine, and a key, so that it is seen who is let in without one. A server that
    is not strict takes what its description does not allow."""
    with TemporaryDirectory() as directory:
        settings: dict[str, Any] = {
            "api_key": (KEY,),
            "strict": strict,
            "batch_dir": Path(directory),
        }
        async with serving(FakeEngine(token_at=brief), SETTINGS, **settings) as served:
            return await generated(served.base_url.removesuffix("/v1"), *flags)


async def main() -> int:
    urls = [argument for argument in sys.argv[1:] if argument.startswith("http")]
    flags = [argument for argument in sys.argv[1:] if argument not in urls]
    if "--max-examples" not in flags:
        flags += ["--max-examples", "100"]
    result = await (generated(urls[0], *flags) if urls else generated_here(*flags))
    sys.stdout.buffer.write(result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(trio.run(main))
