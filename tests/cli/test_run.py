"""`trouper run`: serve and chat in one, and names of models as users of ollama type them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result

from tests.fakes import EOS, FakeEngine
from tests.web.serving import serving
from trouper import cli
from trouper.cli import own_server
from trouper.cli.exits import USAGE_ERROR
from trouper.protocol.suggested_models import SUGGESTED


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments])


async def test_a_model_and_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of its own is started with the model, and answers."""
    started: list[tuple[str, ...]] = []
    tokens = [*b"Paris.", EOS]
    engine = FakeEngine(token_at=lambda _, position: tokens[min(position, len(tokens) - 1)])
    async with serving(engine) as served:

        @contextmanager
        def own(*flags: str) -> Iterator[str]:
            started.append(flags)
            yield f"http://127.0.0.1:{served.port}"

        monkeypatch.setattr(own_server, "serving", own)
        arguments = ("run", "--temperature", "0", "owner/model", "the", "capital?")
        outcome = await trio.to_thread.run_sync(lambda: call(*arguments))
        [body] = [plan.admit[0] for plan in served.engine.plans_seen if plan.admit]
    assert (outcome.exit_code, outcome.stdout) == (0, "Paris.\n")
    assert started[0][:2] == ("--model", "owner/model")
    assert body.sampling.temperature == 0


def test_a_model_must_be_named() -> None:
    outcome = call("run")
    assert (outcome.exit_code, "Missing argument 'MODEL'" in outcome.stderr) == (USAGE_ERROR, True)


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("models", "pull")])
def test_a_name_without_its_owner_is_refused_with_hub_ids(command: tuple[str, ...]) -> None:
    outcome = call(*command, "qwen3")
    assert outcome.exit_code == USAGE_ERROR
    assert "qwen3: no such directory, and not a hub id (owner/name) either" in outcome.stderr
    assert SUGGESTED[0].name in outcome.stderr


@pytest.mark.parametrize("path", ["{}/model.gguf", "{}"])
def test_gguf_is_refused_with_what_to_take(tmp_path: Path, path: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    outcome = call("serve", "--port", "0", path.format(tmp_path))
    assert outcome.exit_code == USAGE_ERROR
    assert "GGUF" in outcome.stderr and "is not read here" in outcome.stderr
    assert "`trouper models pull mlx-community/NAME`" in outcome.stderr


def test_lines_before_a_server_of_ones_own_is_ready_are_read_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plugin or a library prints them."""
    server = tmp_path / "server"
    server.write_text(
        "#!/bin/sh\necho hello\necho tiny is ready at http://a:1/v1\nexec sleep 600\n"
    )
    server.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(server))
    with own_server.serving() as url:
        assert url == "http://a:1"
