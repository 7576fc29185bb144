"""Coding agents of the terminal: Claude Code, Codex, opencode, Qwen Code, Cline, pi, aider."""

from __future__ import annotations

import json
from typing import Any

from trouper.cli.agents.agent import (
    PROVIDER,
    WAIT_S,
    Agent,
    RunFile,
    ServedModel,
    Setup,
    home,
    run_dir,
    xdg_config,
)
from trouper.cli.agents.config_files import ConfigFile
from trouper.cli.agents.config_formats import JSON, TOML, YAML
from trouper.cli.agents.merging import KEY_VARIABLE, Blank, Default, Dropped, Entries, plain
from trouper.protocol.paths import home_directory

WAIT_MS = WAIT_S * 1000


def _claude(served: ServedModel) -> Setup:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    environment: dict[str, Any] = {
        "ANTHROPIC_BASE_URL": served.url,
        # It counts more than the helper.
        "ANTHROPIC_AUTH_TOKEN": Blank() if served.key else served.key_or_none,
        **{f"ANTHROPIC_{name}": served.model for name in names},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "API_TIMEOUT_MS": str(WAIT_MS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    settings: dict[str, Any] = {"env": environment}
    if served.key:
        settings["apiKeyHelper"] = f"printenv {KEY_VARIABLE}"
    return Setup(
        files=(ConfigFile(home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json", JSON, settings),),
        arguments=("--settings", json.dumps(plain(settings))),
        variables=_key_variable(served),
        unset=("ANTHROPIC_API_KEY", *(("ANTHROPIC_AUTH_TOKEN",) if served.key else ())),
        exports=_key_variable(served),
    )


def _key_variable(served: ServedModel) -> dict[str, Any]:
    return {KEY_VARIABLE: served.secret} if served.key else {}


def _codex(served: ServedModel) -> Setup:
    provider: dict[str, Any] = {
        "name": "Trouper",
        "base_url": served.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": WAIT_MS,
        "env_key": KEY_VARIABLE if served.key else Dropped(),
    }
    settings = {
        "model": served.model,
        "model_provider": PROVIDER,
        "model_context_window": served.context,
        "model_auto_compact_token_limit": served.context - served.output,
    }
    flags = {
        **settings,
        **{f"model_providers.{PROVIDER}.{key}": value for key, value in plain(provider).items()},
    }
    return Setup(
        files=(
            ConfigFile(
                home("CODEX_HOME", ".codex") / "config.toml",
                TOML,
                {**settings, "model_providers": {PROVIDER: provider}},
            ),
        ),
        # A JSON text or number is one in TOML, too.
        arguments=tuple(
            part for key, value in flags.items() for part in ("-c", f"{key}={json.dumps(value)}")
        ),
        variables=_key_variable(served),
        exports=_key_variable(served),
    )


def _opencode(served: ServedModel) -> Setup:
    model = f"{PROVIDER}/{served.model}"
    settings = {
        "$schema": Default("https://opencode.ai/config.json"),
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Trouper",
                "options": {
                    "baseURL": served.api,
                    "apiKey": served.key_by(f"{{env:{KEY_VARIABLE}}}"),
                },
                "models": {
                    served.model: {
                        "name": served.model,
                        "tool_call": True,
                        "limit": {"context": served.context, "output": served.output},
                    }
                },
            }
        },
        "model": model,
        "small_model": model,
    }
    directory = xdg_config("opencode")
    names = ("opencode.json", "opencode.jsonc")
    name = next((name for name in names if (directory / name).exists()), names[0])
    return Setup(
        files=(ConfigFile(directory / name, JSON, settings),),
        variables={"OPENCODE_CONFIG_CONTENT": json.dumps(plain(settings)), **_key_variable(served)},
        exports=_key_variable(served),
    )


def _qwen(served: ServedModel) -> Setup:
    entry = {
        "id": served.model,
        "name": f"{served.model} (Trouper)",
        "baseUrl": served.api,
        "envKey": KEY_VARIABLE,
        "generationConfig": {
            "timeout": WAIT_MS,
            "contextWindowSize": served.context,
            "samplingParams": {"max_tokens": served.output},
        },
    }
    settings = {
        "modelProviders": {"openai": Entries(("id", "baseUrl"), (entry,))},
        **({} if served.key else {"env": {KEY_VARIABLE: served.key_or_none}}),
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": served.model},
    }
    return Setup(
        files=(ConfigFile(home("QWEN_HOME", ".qwen") / "settings.json", JSON, settings),),
        variables={
            "OPENAI_BASE_URL": served.api,
            "OPENAI_API_KEY": served.secret,
            "OPENAI_MODEL": served.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        },
        arguments=("--auth-type", "openai", "--model", served.model),
        exports=_key_variable(served),
    )


def _cline(served: ServedModel) -> Setup:
    provider = "openai-compatible"
    entry = {
        "settings": {
            "provider": provider,
            "apiKey": served.secret,
            "model": served.model,
            "baseUrl": served.api,
            "contextWindow": served.context,
            "maxTokens": served.output,
            "timeout": WAIT_MS,
        },
        "updatedAt": Default(served.now),
        "tokenSource": Default("manual"),
    }
    settings = {
        "version": Default(1),
        "lastUsedProvider": provider,
        "modes": Default({}),
        "providers": {provider: entry},
    }
    name = "settings/providers.json"
    return Setup(
        files=(ConfigFile(home("CLINE_DATA_DIR", ".cline/data") / name, JSON, settings),),
        run_files=(RunFile(name, JSON, settings),),
        variables={"CLINE_DATA_DIR": str(run_dir("cline"))},
        notes=(
            (
                "--run keeps Cline's state in a directory of its own, so sessions of other "
                "providers are not listed."
            ),
        ),
    )


def _pi(served: ServedModel) -> Setup:
    entry = {
        "id": served.model,
        "name": f"{served.model} (Trouper)",
        "input": ["text"],
        "contextWindow": served.context,
        "maxTokens": served.output,
    }
    provider = {
        "baseUrl": served.api,
        "api": "openai-completions",
        "apiKey": served.key_by(f"${KEY_VARIABLE}"),
        "models": Entries(("id",), (entry,)),
    }
    directory = home("PI_CODING_AGENT_DIR", ".pi/agent")
    models = ConfigFile(directory / "models.json", JSON, {"providers": {PROVIDER: provider}})
    defaults = {"defaultProvider": PROVIDER, "defaultModel": served.model}
    return Setup(
        files=(models, ConfigFile(directory / "settings.json", JSON, defaults)),
        merged_to_run=(models,),
        arguments=("--provider", PROVIDER, "--model", served.model),
        variables=_key_variable(served),
        exports=_key_variable(served),
        notes=(
            (
                "--run adds the provider to models.json, which alone can hold one, and changes no "
                "default."
            ),
        ),
    )


def _aider(served: ServedModel) -> Setup:
    model = f"openai/{served.model}"
    metadata = {
        model: {
            "max_tokens": served.output,
            "max_input_tokens": served.context - served.output,
            "max_output_tokens": served.output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    settings = {
        "model": model,
        "weak-model": model,
        "openai-api-base": served.api,
        "openai-api-key": served.secret,
        "timeout": WAIT_S,
    }
    name = ".aider.model.metadata.json"
    run_file = RunFile(name, JSON, metadata)
    return Setup(
        files=(
            ConfigFile(home_directory() / ".aider.conf.yml", YAML, settings),
            ConfigFile(home_directory() / name, JSON, metadata),
        ),
        run_files=(run_file,),
        variables={
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_OPENAI_API_BASE": served.api,
            "AIDER_OPENAI_API_KEY": served.secret,
            "AIDER_TIMEOUT": str(WAIT_S),
            "AIDER_MODEL_METADATA_FILE": str(run_file.path("aider")),
        },
    )


CODING_AGENTS = (
    Agent(
        name="claude",
        title="Claude Code",
        setup=_claude,
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        first_prompt=20_000,
    ),
    Agent(
        name="codex",
        title="Codex",
        setup=_codex,
        program="codex",
        install="npm install -g @openai/codex",
        first_prompt=9_000,
    ),
    Agent(
        name="opencode",
        title="opencode",
        setup=_opencode,
        program="opencode",
        install="npm install -g opencode-ai",
        first_prompt=8_000,
    ),
    Agent(
        name="qwen",
        title="Qwen Code",
        setup=_qwen,
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        first_prompt=16_000,
    ),
    Agent(
        name="cline",
        title="Cline",
        setup=_cline,
        program="cline",
        install="npm install -g cline",
        first_prompt=6_000,
    ),
    Agent(
        name="pi",
        title="pi",
        setup=_pi,
        program="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        first_prompt=1_500,
    ),
    Agent(
        name="aider",
        title="aider",
        setup=_aider,
        program="aider",
        install="pip install aider-chat",
        first_prompt=700,
    ),
)
