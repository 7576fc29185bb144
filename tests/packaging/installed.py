"""What is asked of an installed trouper, by its command alone and from a folder that is not the
repository."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

PATIENCE_S = 900.0
REPOSITORY = Path(__file__).parent.parent.parent


@attrs.frozen
class Installed:
    """An environment with trouper in it, and an empty folder to be in."""

    trouper: tuple[str, ...]
    folder: Path
    more: Mapping[str, str] = attrs.field(factory=dict)

    def environment(self) -> dict[str, str]:
        """With a home and caches of its own. Nothing of the repository is on the path."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TROUPER_", "VIRTUAL_ENV"))
        }
        own = {
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        return kept | own | {"OPENBLAS_NUM_THREADS": "1"} | dict(self.more)

    def run(self, *arguments: str) -> str:
        """What it printed. An exit code other than 0 is an error."""
        command = [*self.trouper, *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    @contextmanager
    def serving(self, *flags: str) -> Iterator[str]:
        """The server's URL. It must leave with exit code 0."""
        command = [*self.trouper, "serve", "--port", "0", *flags]
        with (self.folder / "serve.log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            assert process.stdout is not None
            try:
                ready = process.stdout.readline()
                log.seek(0)
                assert " is ready at " in ready, ready + log.read()
                yield ready.rsplit(" ", 1)[1].strip().removesuffix("/v1")
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()
                process.communicate()


def chat(url: str, question: str, **more: object) -> str:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 12,
    } | more
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@attrs.frozen
class Built:
    """Wheels, each built from its sdist, so that the sdist holds what is needed."""

    wheel: Path
    sdist: Path
    lab: Path
    """The wheel of trouper-lab."""


def build(folder: Path) -> Built:
    command = ["uv", "build", "--quiet", "--all-packages", "--out-dir", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    [wheel], [sdist] = folder.glob("trouper-*.whl"), folder.glob("trouper-*.tar.gz")
    [lab] = folder.glob("trouper_lab-*.whl")
    return Built(wheel, sdist, lab)
