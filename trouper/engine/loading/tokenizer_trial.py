"""Tries a tokenizer and chat templates in a process, once per content. See
`tokenizer_trial_script.py`."""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from trouper.engine.loading.template_probe import conversations
from trouper.engine.loading.tokenizer_trial_script import END, FAULT, TEMPLATE, TOKENIZER
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import default_cache_dir
from trouper.protocol.version import VERSION
from trouper.storage.checkpoint_files import require_regular
from trouper.storage.memos import add_to_memo, read_memo

log = logging.getLogger("trouper.loading")
SCRIPT = Path(__file__).with_name("tokenizer_trial_script.py")
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
CPU_S = 10  # CPU seconds; models take one at most.
WAIT_S = 120.0
LONGEST_BYTES = 2**27  # Tokenizers of 260,000 tokens have 35 MB.
MAX_REMEMBERED = 200
TIME_SIGNALS = (signal.SIGXCPU, signal.SIGKILL)


class Passed(msgspec.Struct, frozen=True):
    """at: Unix seconds."""

    at: float


def try_tokenizer(directory: Path) -> None:
    """Raises `ModelUnusable` if the trial exceeds time or memory, or crashes."""
    key, memo = _content(directory), default_cache_dir() / "tokenizer-trials.json"
    if key in read_memo(memo, Passed) or not sys.executable:
        return
    if fault := _fault(directory):
        raise ModelUnusable(f"{directory}: {fault}", "give it another one, or use another model")
    add_to_memo(memo, Passed, {key: Passed(time.time())}, MAX_REMEMBERED)


def _files(directory: Path) -> Iterator[Path]:
    for pattern in FILES:
        yield from sorted(directory.glob(pattern))


def _content(directory: Path) -> str:
    """Raises `ModelUnusable` for anything but a file of bounded size."""
    versions = [VERSION, version("tokenizers"), version("jinja2")]
    digest = hashlib.sha256(json.dumps(versions).encode() + SCRIPT.read_bytes())
    for path in _files(directory):
        try:
            require_regular(path)
            if (size := path.stat().st_size) > LONGEST_BYTES:
                raise ModelUnusable(
                    f"{path} has {size} bytes, and at most {LONGEST_BYTES} are read"
                )
            content = path.read_bytes()
        except OSError as error:
            raise ModelUnusable(f"{path} cannot be read: {error}") from error
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _fault(directory: Path) -> str:
    """Also "" if no process can be started."""
    order = {
        "directory": str(directory.absolute()),
        "conversations": conversations(),
        "cpu_s": CPU_S,
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, "-P", str(SCRIPT)],
            input=json.dumps(order).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WAIT_S,
            start_new_session=True,  # Ctrl-C goes to the server, which ends this process.
            check=False,
        )
        output = done.stdout
        how = "ends the process that reads it"
        if -done.returncode in TIME_SIGNALS:
            how = f"does not end within {CPU_S} s of computing"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        how = f"does not end within {WAIT_S:g} s"
    except OSError as error:
        log.warning(
            "a tokenizer is read without a trial: its process cannot be started (%s)", error
        )
        return ""
    lines = [TOKENIZER, *output.decode(errors="replace").splitlines()]
    last = lines[-1]
    if last == END:
        return ""
    if last.startswith(FAULT):
        return f"its {lines[-2]}: {last.removeprefix(FAULT)}"
    return f"its {last if last == TEMPLATE else TOKENIZER} {how}"
