"""`trouper models` and --models-from with directories of LM Studio, ollama, omlx and the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.families import save
from trouper import cli
from trouper.engine.loading import model_source
from trouper.protocol.settings import HUB_CACHE, LM_STUDIO, NAMED_SOURCES, OLLAMA, OMLX
from trouper.run import scan_of
from trouper.storage.model_scan import ModelScan, directory_of

GGUF_BYTES = b"GGUF" + bytes(100)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model of each program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    save("llama", tmp_path / ".lmstudio/models/publisher/of-lm-studio")
    save("llama", tmp_path / ".omlx/models/of-omlx")
    save("llama", hub / "models--owner--of-hub/snapshots/1")
    for directory in (
        tmp_path / ".lmstudio/models/publisher/some-GGUF",
        hub / "models--owner--other-GGUF/snapshots/1",
    ):
        directory.mkdir(parents=True)
        (directory / "some-Q4.gguf").write_bytes(GGUF_BYTES)
    manifest(tmp_path, "registry.ollama.ai/library/llama3/8b", "application/vnd.ollama.image.model")
    manifest(tmp_path, "hf.co/owner/mine/latest", "application/vnd.ollama.image.tensor")
    return tmp_path


def manifest(home: Path, name: str, *kinds: str) -> Path:
    """One of ollama's, with layers of these media types."""
    path = home / ".ollama/models/manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": kind, "digest": "sha256:aa", "size": 1000} for kind in kinds]
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return path


def listed(*arguments: str) -> dict[str, dict[str, Any]]:
    outcome = CliRunner().invoke(cli.main, ["models", "ls", "--json", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return {body["name"]: body for body in json.loads(outcome.stdout)}


def test_a_model_is_served_by_the_name_that_is_listed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a second download; but a file of the hub's cache goes first."""
    reports = list[str]()
    monkeypatch.setattr(model_source, "_fetch", lambda hub_id, _: Path(hub_id))
    lm_studio = home / ".lmstudio/models/publisher/of-lm-studio"
    assert model_source.resolve("publisher/of-lm-studio", reports.append) == lm_studio
    assert reports == [
        f"--model publisher/of-lm-studio is in {lm_studio}, and is not downloaded again"
    ]
    assert model_source.local("publisher/of-lm-studio") == lm_studio
    assert model_source.resolve("of-omlx", reports.append) == home / ".omlx/models/of-omlx"
    assert model_source.resolve("owner/elsewhere", reports.append) == Path("owner/elsewhere")
    monkeypatch.setattr(model_source, "cached", lambda _: Path("of the hub"))
    assert model_source.local("publisher/of-lm-studio") == Path("of the hub")


def test_every_source_is_read_and_named(home: Path) -> None:
    bodies = listed()
    assert {name: body["source"] for name, body in bodies.items()} == {
        "publisher/of-lm-studio": LM_STUDIO,
        "publisher/some-GGUF": LM_STUDIO,
        "of-omlx": OMLX,
        "owner/of-hub": HUB_CACHE,
        "owner/other-GGUF": HUB_CACHE,
        "llama3:8b": OLLAMA,
        "hf.co/owner/mine:latest": OLLAMA,
    }
    usable = {name for name, body in bodies.items() if not body["problem"]}
    assert usable == {"publisher/of-lm-studio", "of-omlx", "owner/of-hub"}
    table = CliRunner().invoke(cli.main, ["models", "ls"]).stdout.splitlines()
    assert table[0].split()[-2:] == ["fits", "from"]
    assert {line.split()[-1] for line in table[1:]} == {*NAMED_SOURCES}


def test_other_formats_are_named_with_what_they_take_and_what_to_do(home: Path) -> None:
    bodies = listed()
    foreign = {name: body for name, body in bodies.items() if body["is_foreign"]}
    assert {name: body["quantization"] for name, body in foreign.items()} == {
        "publisher/some-GGUF": "GGUF",
        "owner/other-GGUF": "GGUF",
        "llama3:8b": "GGUF",
        "hf.co/owner/mine:latest": "ollama's tensors",
    }
    assert foreign["publisher/some-GGUF"]["stored_bytes"] == len(GGUF_BYTES)
    assert foreign["llama3:8b"]["memory_bytes"] == 1000
    for body in foreign.values():
        assert "not read here" in body["problem"] and "trouper models pull" in body["problem"]
    refused = CliRunner().invoke(cli.main, ["models", "info", "llama3:8b"])
    assert refused.exit_code == 2 and "GGUF" in refused.stdout


async def test_a_server_has_those_that_it_can_serve(home: Path) -> None:
    scan = scan_of(NAMED_SOURCES)
    assert scan is not None
    assert {one.files.name for one in await scan()} == {
        "publisher/of-lm-studio",
        "of-omlx",
        "owner/of-hub",
    }


def test_what_programs_say_of_their_directories(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".cache/lm-studio").mkdir(parents=True)
    assert directory_of(LM_STUDIO) == home / ".cache/lm-studio/models", "the older one"
    (home / ".lmstudio-home-pointer").write_text(f"{home}/elsewhere\n")
    assert directory_of(LM_STUDIO) == home / "elsewhere/models"
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "blobs-here"))
    assert directory_of(OLLAMA) == home / "blobs-here"
    assert listed("--models-from", LM_STUDIO, "--models-from", OLLAMA) == {}


@pytest.mark.parametrize("content", ["", "[]", '{"layers": 1}', '{"layers": [1]}', "[" * 100_000])
def test_a_manifest_that_is_none_hides_no_other(home: Path, content: str) -> None:
    manifest(home, "registry.ollama.ai/library/odd/latest").write_text(content)
    models = {files.name: files for files in ModelScan([OLLAMA]).models()}
    assert "llama3:8b" in models
    assert "odd:latest" not in models or models["odd:latest"].problem


def test_a_directory_of_manifests_is_recognised_by_its_content(home: Path) -> None:
    """Whatever it is called."""
    (home / ".ollama/models").rename(home / "shelf")
    assert {"llama3:8b", "hf.co/owner/mine:latest"} == {*listed("--models-from", f"{home}/shelf")}
