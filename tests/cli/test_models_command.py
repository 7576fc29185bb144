"""`trouper models`: what is on this machine, fetched from a hub on a real socket, and removed
again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from click.testing import CliRunner, Result

from tests.cli.fake_hub import TORN, hub_of
from tests.families import save
from tests.web.serving import serving
from trouper import cli
from trouper.cli.commands import models
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.terminal_text import print_listing
from trouper.engine.loading import bundled_model
from trouper.protocol.names import EMBEDDED
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import HUB_CACHE
from trouper.protocol.suggested_models import SUGGESTED
from trouper.run import scan_of
from trouper.storage import model_files
from trouper.storage.model_files import ModelFiles, read_model_files
from trouper.storage.model_scan import ModelScan

IN_TURN = """
import json, sys
from click.testing import CliRunner
from trouper import cli
for arguments in json.loads(sys.argv[1]):
    outcome = CliRunner().invoke(cli.main, arguments)
    print(json.dumps([outcome.exit_code, outcome.stdout, outcome.stderr]))
"""


def call_in_a_process(
    environment: Mapping[str, str], *commands: Sequence[str]
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command. The hub's client reads its variables once a
    process."""
    outcome = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return [tuple(json.loads(line)) for line in outcome.stdout.splitlines()]


def call(*arguments: str) -> Result:
    # A server at the usual port would be listed, too.
    return CliRunner().invoke(cli.main, ["models", *arguments], env={"TROUPER_PORT": "9"})


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A generator, an embedder and a damaged model in a directory, one of them a level deeper."""
    root = tmp_path / "shelf"
    save("llama", root / "plain")
    (save("qwen3", root / "owner" / "vectors") / "modules.json").write_text("[]")
    for file in save("llama", root / "torn").glob("model*.safetensors"):
        file.write_bytes(file.read_bytes()[:-5])
    return root


def listed(shelf: Path) -> dict[str, dict[str, Any]]:
    bodies = json.loads(call("ls", "--json", "--models-from", str(shelf)).output)
    return {body["name"]: body for body in bodies}


def test_ls_tells_kinds_apart_and_says_what_is_damaged(shelf: Path) -> None:
    change(
        shelf / "plain" / "config.json",
        max_position_embeddings=777,
        architectures=["LlamaForCausalLM"],
    )
    found = listed(shelf)
    assert {name: body["kind"] for name, body in found.items()} == {
        "owner/vectors": "embedder",
        "plain": "generator",
        "torn": "generator",
    }
    assert (
        found["plain"]["context_length"] == 777
        and found["plain"]["fits"]
        and found["plain"]["memory_bytes"] > 0
    )
    assert "truncated" in found["torn"]["problem"] and not found["torn"]["fits"]
    table = call("ls", "--models-from", str(shelf)).output.splitlines()
    assert table[0].split() == ["model", "kind", "memory", "context", "weights", "images", "fits"]
    assert [line.split()[-1] for line in table[1:]] == ["yes", "yes", "unusable"]


def test_a_long_name_is_whole_where_nobody_watches(shelf: Path) -> None:
    """What reads a pipe can do nothing with a name that ends in dots."""
    name = f"owner/{'a-model-of-a-long-name-' * 5}end"
    save("llama", shelf / name)
    [line] = [
        line
        for line in call("ls", "--models-from", str(shelf)).output.splitlines()
        if "a-model" in line
    ]
    assert line.split()[0] == name


@pytest.mark.parametrize("width", [200, 80, 40, 10])
def test_a_narrow_terminal_cuts_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    row = ("mlx-community/A-Model-Of-Some-Name-4bit", "generator", "854.3 kB")
    print_listing(("model", "kind", "memory"), [row])
    head, first, *folded = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "kind", "memory"]
    assert first.split()[1:] == ["generator", "854.3", "kB"]
    assert "".join([first.split()[0], *map(str.strip, folded)]) == row[0]
    assert max(map(len, (head, first, *folded))) <= max(width, 16 + len("  generator  854.3 kB"))


def test_kinds_and_quantization_by_the_config(shelf: Path) -> None:
    config = shelf / "plain" / "config.json"
    change(config, architectures=["BertModel"], quantization={"bits": 4, "group_size": 64})
    assert (listed(shelf)["plain"]["kind"], listed(shelf)["plain"]["quantization"]) == (
        "embedder",
        "4-bit",
    )


@pytest.mark.parametrize(
    "config",
    [
        '{"model_type": "llama", "text_config": "x"}',
        '{"model_type": "llama", "quantization": "4bit"}',
        '{"model_type": "llama", "architectures": 1, "text_config": []}',
        "[" * 100_000,
        "[]",
    ],
)
def test_an_odd_model_is_listed_and_the_others_too(shelf: Path, config: str) -> None:
    """Found by review: any of these ended the command, and a server with --models-from."""
    (shelf / "plain" / "config.json").write_text(config)
    found = listed(shelf)
    assert sorted(found) == ["owner/vectors", "plain", "torn"]
    assert found["owner/vectors"]["problem"] == "" and found["plain"]["architecture"] in (
        "llama",
        "unknown",
    )
    assert found["plain"]["problem"]


def test_no_fault_of_one_model_ends_a_list(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, directory: Path) -> ModelFiles:
        raise ZeroDivisionError

    monkeypatch.setattr(model_files, "_described", fail)
    assert "ZeroDivisionError" in read_model_files("plain", shelf / "plain").problem


def test_a_file_that_vanishes_during_a_scan_ends_nothing(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def vanishing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "tokenizer.json":
            raise PermissionError(path)
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert [files.name for files in ModelScan([str(shelf)]).models()] == [
        "owner/vectors",
        "plain",
        "torn",
    ]


def test_a_damaged_reference_means_the_newest_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--tiny"
    save("llama", repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_bytes(b"\xff\xfe")
    assert [files.name for files in ModelScan([str(tmp_path)]).models()] == ["owner/tiny"]


def test_a_scan_reads_only_what_has_changed(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = ModelScan([str(shelf)])
    assert len(scan.models()) == 3
    read: list[str] = []
    real = model_files.read_model_files

    def reading(name: str, path: Path) -> model_files.ModelFiles:
        read.append(name)
        return real(name, path)

    monkeypatch.setattr("trouper.storage.model_scan.read_model_files", reading)
    scan.models()
    assert read == []
    change(shelf / "plain" / "config.json", max_position_embeddings=778)
    assert {files.name: files.context_length for files in scan.models()}[
        "plain"
    ] == 778 and read == ["plain"]


def test_info_and_what_is_not_there(shelf: Path) -> None:
    said = call("info", "plain", "--models-from", str(shelf)).output
    assert "memory_bytes" in said
    assert re.search(
        r"^used_at +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d$", said, re.MULTILINE
    ), "no Unix time"
    missing = call("info", "nobody", "--models-from", str(shelf))
    assert missing.exit_code == USAGE_ERROR and "trouper models ls" in missing.output
    assert f"`trouper models pull ID` downloads one; hub ids are as {SUGGESTED[0].name}" in (
        missing.output
    )
    absent = call("info", "owner/absent", "--models-from", str(shelf))
    assert "`trouper models pull owner/absent`" in absent.output
    empty = call("ls", "--models-from", str(shelf / "plain"))
    assert empty.exit_code == 0 and empty.output.startswith("no models in")
    assert f"`trouper models pull ID` fetches one, as {SUGGESTED[0].name}" in empty.stderr


async def test_ls_names_the_models_of_a_server_that_runs(shelf: Path) -> None:
    async with serving() as served:
        url = f"http://127.0.0.1:{served.port}"
        arguments = ("ls", "--models-from", str(shelf), "--url", url)
        outcome = await trio.to_thread.run_sync(lambda: call(*arguments))
        async with httpx2.AsyncClient(base_url=url) as client:
            [model] = (await client.get("/v1/models")).json()["data"]
    name = model["id"]
    assert outcome.stderr == f"trouper: the server at {url} has {name}\n"
    assert "plain" in outcome.stdout


def test_info_takes_a_directory_as_serve_does(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use: the directory that `serve --model` has just served was no model for `models
    info`."""
    said = json.loads(call("info", str(shelf / "plain"), "--json").output)
    assert (said["name"], said["architecture"], said["problem"]) == (
        str(shelf / "plain"),
        "llama",
        "",
    )
    monkeypatch.chdir(shelf / "plain")
    nameless = call("info", "", "--models-from", str(shelf))
    assert nameless.exit_code == USAGE_ERROR and "'' is not in" in nameless.output, (
        "not the current directory"
    )
    monkeypatch.chdir(shelf)
    assert json.loads(call("info", "owner/vectors", "--json").output)["kind"] == "embedder"
    assert "truncated" in call("info", "./torn").output
    none = call("info", str(shelf / "owner"))
    assert (none.exit_code, none.output) == (
        USAGE_ERROR,
        f"trouper: {shelf}/owner has no config.json; models are below it: vectors\n",
    )


def test_info_takes_the_name_of_the_embedded_model_as_serve_does(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundled_model, "is_here", lambda: True)
    monkeypatch.setattr(bundled_model, "directory", lambda: shelf / "plain")
    said = json.loads(call("info", EMBEDDED, "--json").output)
    assert (said["name"], said["directory"]) == (EMBEDDED, str(shelf / "plain"))
    monkeypatch.setattr(bundled_model, "is_here", lambda: False)
    absent = call("info", EMBEDDED)
    assert (
        absent.exit_code == USAGE_ERROR
        and f"`trouper models pull {EMBEDDED}` fetches it" in absent.output
    )
    monkeypatch.setattr(bundled_model, "directory", lambda *_: shelf / "plain")
    pulled = call("pull", EMBEDDED)
    assert (pulled.exit_code, pulled.stdout.splitlines()[-1].split(":")[0]) == (0, EMBEDDED)
    own = call("pull", str(shelf / "plain"))
    assert own.exit_code == USAGE_ERROR and "is no model of the hub" in own.output


def test_a_hub_cache_that_is_a_file_is_refused(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty list with exit code 0 would hide it."""
    file = shelf / "plain" / "config.json"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(file))
    for command in (("ls",), ("info", "x"), ("pull", "owner/tiny")):
        outcome = call(*command)
        assert outcome.exit_code == USAGE_ERROR
        assert (
            f"the hub's cache {file} is no directory" in outcome.output
            and "HF_HUB_CACHE" in outcome.output
        )
    with pytest.raises(SettingsInvalid):
        scan_of([HUB_CACHE])
    assert call("ls", "--models-from", str(shelf)).exit_code == 0, "the cache is not asked"


@pytest.mark.parametrize("command", [("ls",), ("ls", "--json"), ("info", "plain")])
def test_models_from_what_is_no_directory_is_refused_as_by_serve(
    command: tuple[str, ...], shelf: Path
) -> None:
    """Found by use: a misspelt directory was an empty one, with exit code 0."""
    (file := shelf / "a-file").touch()
    for source in (str(shelf / "nope"), str(file), ""):
        outcome = call(*command, "--models-from", str(shelf), "--models-from", source)
        assert (outcome.exit_code, outcome.output) == (
            USAGE_ERROR,
            (
                f"trouper: --models-from {source or repr('')} is no directory; give one, or "
                "hub-cache\n"
            ),
        )


def test_half_a_model_without_a_hub_is_named_as_that(tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "model")
    (directory / TORN).write_text("[1, 2, 3]")
    with hub_of("owner/tiny", directory) as url:
        environment = os.environ | {
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }

        def pull() -> str:
            [(code, _, errors)] = call_in_a_process(environment, ("models", "pull", "owner/tiny"))
            assert (code, "Traceback" in errors) == (USAGE_ERROR, False), errors
            return errors.splitlines()[-1]

        assert pull().startswith("trouper: owner/tiny could not be downloaded: ")
    assert pull() == (
        "trouper: only a part of owner/tiny is cached, and the model hub cannot be reached; "
        "`trouper models pull owner/tiny` "
        "fetches the rest"
    )


def test_a_model_is_pulled_examined_listed_and_removed(tmp_path: Path) -> None:
    """Found by use: a repository has files that no server fetches, and without them the model
    counted as absent. Else the doctor asked the hub, and would have downloaded what is newer
    there."""
    directory, asked = save("llama", tmp_path / "model"), list[str]()
    (directory / "README.md").write_text("# Tiny")
    with hub_of("owner/tiny", directory, asked) as url:
        environment = os.environ | {
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_ENDPOINT": url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        }
        (_, _, refusal), (code, output, errors) = call_in_a_process(
            environment, ("models", "pull", "owner/other"), ("models", "pull", "owner/tiny")
        )
        assert code == 0 and output.startswith("owner/tiny: llama, "), errors
        assert "the hub has no owner/other" in refusal
        assert asked
        asked.clear()
        of_model = ("--json", "--no-ssd", "--port", "0", "--model", "owner/tiny")
        remove = ("models", "rm", "owner/tiny", "--yes")
        *outcomes, (_, listing, _), (_, removed, _), (again, _, _) = call_in_a_process(
            environment,
            ("doctor", *of_model),
            ("doctor", "--for", "agents", *of_model),
            ("models", "ls", "--json"),
            remove,
            remove,
        )
        assert asked == []
    said = [finding["said"] for _, output, _ in outcomes for finding in json.loads(output)]
    assert not [each for each in said if "is not here" in each]
    assert [each for each in said if each.startswith("owner/tiny (llama): ")]
    assert [each for each in said if re.match("owner/tiny: .* tokens of context", each)]
    [body] = json.loads(listing)
    assert (body["name"], body["kind"], body["problem"]) == ("owner/tiny", "generator", "")
    assert "removed owner/tiny" in removed
    assert not (tmp_path / "hub" / "models--owner--tiny").exists()
    assert again == USAGE_ERROR


def test_ls_says_which_models_read_images(shelf: Path) -> None:
    change(shelf / "plain" / "config.json", model_type="qwen3_5_moe", vision_config={})
    assert [body["images"] for body in listed(shelf).values()] == [False, True, False]
    change(shelf / "plain" / "config.json", model_type="mllama")
    assert not listed(shelf)["plain"]["images"]


def test_a_file_that_a_download_renames_meanwhile_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    sizes = [models._size_of(tmp_path / name) for name in ("a", "link", "gone", "")]
    assert sizes == [5, 0, 0, 0]
