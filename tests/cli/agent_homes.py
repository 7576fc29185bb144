"""A person's home with the files of every client, each with contents and comments of its own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trouper.cli.agents import jsonc
from trouper.cli.agents.agent import ServedModel
from trouper.cli.commands.connect import AGENTS

SERVED = ServedModel(
    "http://127.0.0.1:8000", "Qwen/Qwen3-Coder", 65536, now="2026-01-02T03:04:05.678Z"
)
KEY = "sk-of-the-server"
KEYED = ServedModel("http://127.0.0.1:8000", "Qwen/Qwen3-Coder", 65536, key=KEY)
VARIABLES = (
    "CLAUDE_CONFIG_DIR",
    "CODEX_HOME",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    "QWEN_HOME",
    "CLINE_DATA_DIR",
    "PI_CODING_AGENT_DIR",
    "CONTINUE_GLOBAL_DIR",
    "OPENCLAW_STATE_DIR",
    "VIBE_HOME",
    "TROUPER_API_KEY",
    "TROUPER_URL",
)

FILES: Mapping[str, str] = {
    ".claude/settings.json": """\
{
  "permissions": {"allow": ["Bash(ls:*)"]},
  "env": {
    "EDITOR": "vi",
    "ANTHROPIC_AUTH_TOKEN": "sk-ant-of-a-person"
  },
  "model": "opus"
}
""",
    ".codex/config.toml": """\
# My settings.
model = "gpt-5" # the best
approval_policy = "on-request"

[model_providers.other] # keep
name = "Other"
base_url = "https://example.com/v1"

[mcp_servers.files]
command = "files"
""",
    ".codex/trouper-models.json": '{"models": [{"slug": "of-another-day", "priority": 1}]}',
    ".config/opencode/opencode.jsonc": """\
{
  // My settings.
  "theme": "dark",
  "provider": {"other": {"name": "Other"}}, // keep
}
""",
    ".qwen/settings.json": """\
{
  "modelProviders": {
    "openai": [
      {"id": "Qwen/Qwen3-Coder", "baseUrl": "https://example.com/v1", "envKey": "OTHER_KEY"}
    ]
  },
  "ui": {"theme": "Dark"}
}
""",
    ".cline/data/settings/providers.json": """\
{
  "version": 1,
  "lastUsedProvider": "other",
  "providers": {
    "other": {
      "settings": {"provider": "other", "apiKey": "sk-other"},
      "updatedAt": "2026-01-01T00:00:00.000Z"
    }
  }
}
""",
    ".pi/agent/models.json": """\
{
  "providers": {
    "other": {"baseUrl": "https://example.com/v1", "api": "openai-completions", "models": []}
  }
}
""",
    ".pi/agent/settings.json": '{"theme": "dark", "defaultModel": "other"}\n',
    ".aider.conf.yml": """\
# My settings.
dark-mode: true # at night
model: gpt-5
read: [CONVENTIONS.md]
""",
    ".aider.model.metadata.json": '{"other/model": {"max_tokens": 1}}',
    ".openclaw/openclaw.json": """\
{
  // My settings.
  "gateway": {"port": 18789},
  "agents": {"defaults": {"workspace": "~/notes"}}, // keep
  "models": {
    "providers": {
      "other": {"baseUrl": "https://example.com/v1", "apiKey": "sk-other", "models": []}
    }
  }
}
""",
    ".vibe/config.toml": """\
# My settings.
active_model = "other"
theme = "dark" # keep

[[providers]]
name = "other"
api_base = "https://example.com/v1"
api_key_env_var = "OTHER_KEY"

[[models]]
name = "other/model"
provider = "other"
alias = "other"
""",
    ".config/nanocoder/agents.config.json": """\
{
  "nanocoder": {
    "providers": [
      {"name": "Other", "baseUrl": "https://example.com/v1", "apiKey": "sk-other", "models": ["m"]}
    ]
  }
}
""",
    ".config/kilo/kilo.jsonc": """\
{
  // My settings.
  "share": "disabled",
  "provider": {"other": {"name": "Other"}}, // keep
}
""",
    ".continue/config.yaml": """\
name: Mine
version: 0.0.1
schema: v1
# Models of mine.
models:
  - name: Other # keep
    provider: openai
    model: gpt-5
    apiKey: sk-other
""",
    ".config/zed/settings.json": """\
// Zed settings
//
// For information, see the documentation.
{
  "theme": "One Dark", // at night
  "language_models": {
    "openai_compatible": {
      "Other": { "api_url": "https://example.com/v1", "available_models": [] },
    },
  },
}
""",
    "project/litellm_config.yaml": """\
# The proxy.
model_list:
- model_name: other # keep
  litellm_params:
    model: openai/other
litellm_settings:
  drop_params: true
""",
}
"""What stands in the files before. Comments have the word `keep` or stand at the beginning."""

WITH_FILES = sorted(name for name, agent in AGENTS.items() if not agent.why_no_write)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, in whose directory `project` a person works."""
    home = tmp_path / "home"
    (home / "project").mkdir(parents=True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "project")
    return home


def fill(home: Path) -> None:
    """Write all files."""
    for name, text in FILES.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": jsonc.loads,
    ".jsonc": jsonc.loads,
    ".toml": tomllib.loads,
    ".yml": _yaml,
    ".yaml": _yaml,
}


def read(path: Path) -> Any:
    """The data of a file, by another reader than the one that wrote it where there is one."""
    return READERS[path.suffix](path.read_text())


def files_in(home: Path) -> dict[str, str]:
    """The texts of all files by their path."""
    return {
        str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()
    }
