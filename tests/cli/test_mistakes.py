"""Mistakes of a first hour: each is refused with its cause and with what to do.

More of them: in a chat tests/cli/test_server_checks.py, on the wire tests/web/test_meant_paths.py.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from trouper import cli
from trouper.cli.exits import USAGE_ERROR

NOWHERE = "http://127.0.0.1:1"

MISTAKES = (
    # Command line; words of the cause; words of the remedy.
    ("serve --prot 8000", "no flag --prot", "did you mean --port?"),
    ("serve --nonsense 3", "no flag --nonsense", "`main serve --help` lists them"),
    ("doctor --nope", "no flag --nope", "`main doctor --help` lists them"),
    ("serve --port abc", "--port: 'abc'", "valid integer"),
    ("serve --port 99999", "not 99999", "between 0 and 65535"),
    ("serve --port USED", "already in use", "choose another --port"),
    ("serve --host 0.0.0.0", "lets other machines in", "give --api-key"),
    ("serve --max-model-len 4096", "a flag of vLLM", "here it is --max-kv-size"),
    ("serve --ctx-size 4096", "a flag of llama.cpp", "here it is --max-kv-size"),
    ("serve --ssl-keyfile x", "no TLS here", "put a proxy before the server"),
    ("serve --gpu-memory-utilization 0.9", "a flag of vLLM", "here it is --memory-fraction"),
    ("serve --tensor-parallel-size 2", "a flag of vLLM", "`trouper launch -n N"),
    ("serve --quantization awq", "a flag of vLLM", "take a checkpoint that is quantized"),
    ("serve -ngl 99", "the whole model is on the device", "take a smaller one"),
    ("serve --temperature 0.5", "a flag of llama.cpp", "requests say it here"),
    ("serve --kv-bits 3", "not 3", "must be 8, 4 or 0"),
    ("serve --cache-memory 4XB", "'4XB' is no size", "a unit as in 500MB or 4GB"),
    ("serve --tool-parser nope", "not nope", "--tool-parser must be auto"),
    ("serve --log-level loud", "'loud' is not one of", "'debug', 'info'"),
    ("serve --api-key ä", "a header cannot hold", "use letters, digits"),
    ("serve --api-key-file absent", "No such file", "give a file with one key a line"),
    ("serve --cors-origins localhost", "is no origin", "as in http://localhost:5173"),
    ("serve --models-from absent", "is no directory", "give one, or hub-cache"),
    ("serve --adapter x=absent", "has no adapter", "give the directory that holds"),
    ("serve --config absent.toml", "No such file", "`trouper serve --print-config` prints one"),
    ("serve --config key.toml", "no key prot", "did you mean port?"),
    ("serve --config model-key.toml", "paht: no model has", "did you mean path?"),
    ("serve --config value.toml", "port: 'abc'", "valid integer"),
    ("serve --config broken.toml", "is not TOML", "line 1, column"),
    ("serve qwen3", "no such directory, and not a hub id", "mlx-community/Qwen3"),
    ("serve --model qwen3", "no such directory, and not a hub id", "mlx-community/Qwen3"),
    ("serve qwen3:8b", "ollama's names mean GGUF", "hub ids are as mlx-community/Qwen3.5-9B-4bit"),
    ("serve user/gpt-oss:120b", "ollama's names", "as mlx-community/gpt-oss-120b-MXFP4-Q8"),
    ("models info gemma3:27b", "ollama's names", "hub ids are as mlx-community/gemma-4-26b"),
    ("serve /absent", "no such directory", "`trouper models ls` lists the models"),
    ("serve owner/name", "hub cannot be reached", "or give a directory"),
    ("serve model.gguf", "GGUF is not read", "`trouper models pull mlx-community/"),
    ("serve sha256-0", "GGUF is not read", "`trouper models pull mlx-community/"),
    ("serve with-gguf", "GGUF", "`trouper models pull mlx-community/"),
    ("serve empty", "has no config.json", "give one with config.json"),
    ("serve truncated", "is truncated (100 bytes)", "download it again"),
    ("serve no-weights", "has no weights", "download it again"),
    ("serve lora", "an adapter", "name its base by --model, and it by --adapter"),
    ("run", "Missing argument 'MODEL'", "see `main run --help`"),
    ("pull owner/name", "no command pull", "`trouper models pull`"),
    ("list", "no command list", "`trouper models ls`"),
    ("ps", "no command ps", "`trouper top`"),
    ("stop qwen3:8b", "no command stop", "Ctrl-C ends a server"),
    ("sevre", "no command sevre", "did you mean serve?"),
    ("restart", "no command restart", "`main` has bench, cache"),
    ("update", "no command update", "`uv tool`, pipx or pip does that"),
    ("launch claude", "not 'claude'", "`trouper connect AGENT --run` starts"),
    ("models remove owner/name", "no command remove", "`main models` has info, ls, pull, rm"),
    ("cache clean", "no command clean", "did you mean clear?"),
    ("serve https://huggingface.co/owner/name/tree/main", "is a URL", "as owner/name"),
    ("models pull https://huggingface.co/owner/name", "is a URL", "as owner/name"),
    ("serve notes.txt", "is a file", "give the directory that holds config.json"),
    ("serve pytorch", "weights of PyTorch", "use a version with config.json"),
    ("serve --config notes.txt", "is not TOML", "`trouper serve --print-config` prints one"),
    ("serve --host localhost:8000", "is no address", "the port by --port"),
    ("serve --kv-memory 80%", "'80%' is no size", "a unit as in 500MB or 4GB"),
    ("serve --memory-fraction 90", "not 90", "between 0.05 and 1"),
    ("serve --max-kv-size 8k", "--max-kv-size: '8k'", "valid integer"),
    ("connect claude codex", "'codex' would be an argument", "give --run, which starts it"),
    (f"chat --url {NOWHERE} --temperature hot hi", "'hot'", "valid number"),
    ("models pull qwen3", "not a hub id", "hub ids are as mlx-community/"),
    ("models info qwen3", "qwen3 is not in", "`trouper models pull ID` downloads one"),
    ("models rm owner/name", "is not in", "`trouper models ls` lists what is"),
    ("connect claud", "'claud' is not one of the agents", "did you mean claude?"),
    ("connect emacs", "'emacs' is not one of the agents", "`trouper connect generic`"),
    (f"connect claude --url {NOWHERE}", "no server answers", "start one by `trouper serve`"),
    (f"chat --url {NOWHERE} hi", "no server answers", "or say where it is by --url"),
    (f"top --once --url {NOWHERE}", "no server answers", "start one by `trouper serve`"),
    ("chat --url nonsense hi", "--url nonsense", "begin it with http://"),
    ("metrics", "give --grafana or --alerts", "/metrics"),
    ("completion tcsh", "'tcsh' is not one of", "'bash', 'zsh', 'fish'"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the mistakes name, and a home without settings and models."""
    for name in ("empty", "with-gguf", "truncated", "no-weights", "lora", "pytorch"):
        (tmp_path / name).mkdir()
    config = json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1})
    for name in ("with-gguf", "truncated", "no-weights", "pytorch"):
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "with-gguf" / "model.gguf").write_bytes(b"GGUF")
    for name in ("model.gguf", "sha256-0"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "pytorch" / "pytorch_model.bin").write_bytes(bytes(100))
    (tmp_path / "notes.txt").write_text("a text\n")
    (tmp_path / "truncated" / "model.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "key.toml").write_text("prot = 1\n")
    (tmp_path / "model-key.toml").write_text('[models.x]\npaht = "a"\n')
    (tmp_path / "value.toml").write_text('port = "abc"\n')
    (tmp_path / "broken.toml").write_text("port = \n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize(("typed", "cause", "remedy"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_refused_with_cause_and_remedy(
    typed: str, cause: str, remedy: str, used_port: int
) -> None:
    words = shlex.split(typed.replace("USED", str(used_port)))
    # Another program may listen at the usual port.
    outcome = CliRunner().invoke(cli.main, words, env={"TROUPER_PORT": "0"})
    assert outcome.exit_code == USAGE_ERROR, outcome.output
    last = outcome.stderr.splitlines()[-1].lower()
    assert cause.lower() in last
    assert remedy.lower() in last
