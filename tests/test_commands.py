"""Each command of the README and of the documentation is run, or says why not
(tests/commands.py)."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests.commands import (
    COMMANDS,
    DATA,
    PAGES,
    ROOT,
    THE_PAGES_SERVER,
    THE_SERVER,
    Block,
    all_blocks,
)
from trouper.system.ports import free_ports

BLOCKS = all_blocks()
PATIENCE_S = 300.0
SHORT = 16
"""Tokens of an answer that names no length."""
ADDRESS = "127.0.0.1:8000"
INSTALLING = "pip install uv rust-just && "
"""What CI itself begins with."""


def named(block: Block) -> str:
    return block.name


def to_run(language: str) -> list[Block]:
    """Blocks that stand alone; tests/test_tutorials.py plays tutorials in their order."""
    return [
        block
        for block in BLOCKS
        if block.language == language
        and not (block.run or block.not_run)
        and not block.page.name.startswith("tutorial-")
    ]


QUICK = tuple(block.name for block in to_run("sh") if "just mutants" not in block.text)
"""Mutants are played in the long version alone, as by their own test."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A user's: the packages, no settings and no cache of their own, but the embedded model, which
    was converted once."""
    return environment_of(tmp_path_factory.mktemp("home"))


def environment_of(home: Path) -> dict[str, str]:
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    (own / "trouper" / "models").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "trouper").mkdir(parents=True)
    (home / "cache" / "trouper" / "models").symlink_to(own / "trouper" / "models")
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(own / "uv"),
        "PYTHONPATH": str(ROOT),
        "TROUPER_PORT": str(free_ports(1)[0]),
        "PYTHONWARNINGS": "default",
    }


def server_of(shell: psutil.Process) -> psutil.Process:
    """The last process that `just` and the shell have become; the server has children of its
    own."""
    serving = [one for one in (shell, *shell.children(recursive=True)) if "serve" in one.cmdline()]
    return serving[-1]


@contextmanager
def serving(block: Block, environment: Mapping[str, str]) -> Iterator[int]:
    """Its port. What the block starts must become ready, and leave with 0 when it is told to."""
    [port] = free_ports(1)
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", "exec " + block.text.removeprefix(INSTALLING)],
        env={**environment, "TROUPER_PORT": str(port), "TROUPER_DEFAULT_MAX_TOKENS": str(SHORT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        own = psutil.Process(process.pid)
        try:
            assert f"is ready at http://127.0.0.1:{port}/v1" in process.stdout.readline()
            yield port
            server_of(own).terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            for one in (*own.children(recursive=True), own) if process.poll() is None else ():
                one.kill()


@pytest.fixture(scope="module")
def port(environment: Mapping[str, str]) -> Iterator[int]:
    [block] = [block for block in BLOCKS if block.run == THE_SERVER]
    with serving(block, environment) as port:
        yield port


def text_of(block: Block, request: pytest.FixtureRequest) -> str:
    """With the address of the server of all pages, if it asks one."""
    if ADDRESS not in block.text:
        return block.text
    return block.text.replace(ADDRESS, f"127.0.0.1:{request.getfixturevalue('port')}")


@pytest.mark.skipif(
    shutil.which("just") is None, reason="just is what runs the recipes: pip install rust-just"
)
@pytest.mark.parametrize("block", to_run("sh"), ids=named)
@pytest.mark.long(but=QUICK)
def test_a_command_does_what_it_says(
    block: Block, environment: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    command = ["bash", "-euo", "pipefail", "-c", text_of(block, request)]
    ran = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip(), "it said nothing"


@pytest.mark.skipif(
    shutil.which("just") is None, reason="just is what starts the server: pip install rust-just"
)
@pytest.mark.parametrize("block", to_run("python"), ids=named)
def test_a_program_does_what_it_says(
    block: Block,
    environment: Mapping[str, str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, since what they import takes longer than what they do."""
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    program = compile(text_of(block, request), block.name, "exec")
    with warnings.catch_warnings():
        # Clients of a program live as long as it does; here they are collected with its test.
        warnings.simplefilter("ignore", ResourceWarning)
        exec(program, {"__name__": "__main__"})
        gc.collect()
    assert capsys.readouterr().out.strip(), "it said nothing"


def test_each_block_has_a_language_that_is_known() -> None:
    """One without a name is a picture, or what a program said."""
    assert {
        block.name: block.language
        for block in BLOCKS
        if block.language not in COMMANDS | DATA | {""}
    } == {}


def test_marks_are_known_and_on_commands() -> None:
    marked = [block for block in BLOCKS if block.run or block.not_run]
    assert {block.name for block in marked if not block.is_command} == set()
    marks = (None, THE_SERVER, THE_PAGES_SERVER)
    assert {block.name: block.run for block in marked if block.run not in marks} == {}
    written = sum(page.read_text("utf-8").count("run: ") for page in PAGES)
    assert len(marked) == written, "a mark stands right above its block"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in DATA], ids=named)
def test_data_is_well_formed(block: Block) -> None:
    match block.language:
        case "toml":
            tomllib.loads(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            yaml.safe_load(block.text)
        case _:
            assert block.text.count("{") == block.text.count("}")
