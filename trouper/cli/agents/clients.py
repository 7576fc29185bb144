"""The needs of each client: coding agents first, then editors, web interfaces and proxies."""

from __future__ import annotations

import json
from pathlib import Path
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
from trouper.cli.agents.merging import KEY_VARIABLE, Blank, Default, Dropped, Entries, Secret, plain
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


LITELLM_KEY = "LITELLM_MASTER_KEY"


def _continue(served: ServedModel) -> Setup:
    entry = {
        "name": f"{served.model} (Trouper)",
        "provider": "openai",
        "model": served.model,
        "apiBase": served.api,
        "apiKey": served.key_by(f"${{{{ secrets.{KEY_VARIABLE} }}}}"),
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.context, "maxTokens": served.output},
    }
    settings = {
        "name": Default("Local Config"),
        "version": Default("1.0.0"),
        "schema": Default("v1"),
        "models": Entries(("name",), (entry,)),
    }
    run_file = RunFile("config.yaml", YAML, settings)
    key_notes = (f"Continue reads the key from ~/.continue/.env: add a line {KEY_VARIABLE}=...",)
    return Setup(
        files=(
            ConfigFile(home("CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml", YAML, settings),
        ),
        run_files=(run_file,),
        arguments=("--config", str(run_file.path("continue"))),
        variables={KEY_VARIABLE: served.secret} if served.key else {},
        notes=(
            *(key_notes if served.key else ()),
            "--run starts Continue's program for the terminal.",
        ),
    )


def _zed(served: ServedModel) -> Setup:
    provider = "Trouper"
    entry = {
        "name": served.model,
        "display_name": served.model,
        "max_tokens": served.context,
        "max_output_tokens": served.output,
        "capabilities": {
            "tools": True,
            "images": False,
            "parallel_tool_calls": True,
            "prompt_cache_key": False,
        },
    }
    settings = {
        "language_models": {
            "openai_compatible": {
                provider: {"api_url": served.api, "available_models": Entries(("name",), (entry,))}
            }
        },
        "agent": {"default_model": {"provider": provider, "model": served.model}},
    }
    return Setup(
        files=(ConfigFile(xdg_config("zed") / "settings.json", JSON, settings),),
        exports={KEY_VARIABLE: served.secret},
        notes=(
            (
                "Zed wants a key for every provider: from this variable when it starts, or in its "
                "agent settings."
            ),
        ),
    )


def _open_webui(served: ServedModel) -> Setup:
    return Setup(
        variables={
            "ENABLE_OLLAMA_API": "False",
            "ENABLE_OPENAI_API": "True",
            "OPENAI_API_BASE_URL": served.api,
            "OPENAI_API_KEY": served.secret,
            "DEFAULT_MODELS": served.model,
            "AIOHTTP_CLIENT_TIMEOUT": "",
        },
        arguments=("serve",),
        notes=(
            (
                "The connection is read at the first start only; later it is changed under Admin "
                "Settings > Connections."
            ),
            (
                "In a container the server is at http://host.docker.internal, and must listen "
                "there (--host)."
            ),
        ),
    )


def _litellm(served: ServedModel) -> Setup:
    entry = {
        "model_name": served.model,
        "litellm_params": {
            "model": f"openai/{served.model}",
            "api_base": served.api,
            "api_key": served.key_by(f"os.environ/{KEY_VARIABLE}"),
            "max_tokens": served.output,
        },
        "model_info": {
            "mode": "chat",
            "max_input_tokens": served.context - served.output,
            "max_output_tokens": served.output,
            "supports_function_calling": True,
            # Else LiteLLM itself refuses requests with thinking, whatever the model does.
            "supports_reasoning": True,
        },
    }
    settings = {"model_list": Entries(("model_name",), (entry,))}
    run_file = RunFile("config.yaml", YAML, settings)
    key = {KEY_VARIABLE: served.secret} if served.key else {}
    return Setup(
        files=(ConfigFile(Path.cwd() / "litellm_config.yaml", YAML, settings, may_be_link=False),),
        run_files=(run_file,),
        arguments=("--config", str(run_file.path("litellm"))),
        variables=key,
        exports=key,
        keys_of_its_own=(LITELLM_KEY,),
        notes=(
            "The file is written here; start the proxy by: litellm --config litellm_config.yaml",
            (
                f"It starts only with a key for its own clients: set {LITELLM_KEY} to a long "
                "random one, as sk-$(uuidgen)."
            ),
            "--run makes one if it is not set, and prints it.",
        ),
    )


def _generic(served: ServedModel) -> Setup:
    variables: dict[str, str | Secret] = {
        "OPENAI_BASE_URL": served.api,
        "OPENAI_API_BASE": served.api,
        "OPENAI_API_KEY": served.secret,
        "OPENAI_MODEL": served.model,
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.secret,
        "ANTHROPIC_MODEL": served.model,
    }
    return Setup(
        variables=variables,
        unset=("ANTHROPIC_API_KEY",),
        notes=(
            f"As an OpenAI-compatible provider: base URL {served.api}, model {served.model}.",
            (
                "Cursor asks from its maker's servers: it needs a public https URL (--url), not "
                "one of this machine."
            ),
        ),
    )


OTHER_CLIENTS = (
    Agent(
        name="continue",
        title="Continue",
        setup=_continue,
        program="cn",
        install="npm install -g @continuedev/cli",
    ),
    Agent(
        name="zed",
        title="Zed",
        setup=_zed,
        why_no_run="Zed takes providers from its settings file only: use --write, and start Zed",
    ),
    Agent(
        name="open-webui",
        title="Open WebUI",
        setup=_open_webui,
        program="open-webui",
        install="pip install open-webui",
        why_no_write=(
            "Open WebUI keeps its settings in a database: use --run, or set the variables where it "
            "starts"
        ),
    ),
    Agent(
        name="litellm",
        title="LiteLLM's proxy",
        setup=_litellm,
        program="litellm",
        install="pip install 'litellm[proxy]'",
    ),
    Agent(
        name="generic",
        title="Cursor and any other client",
        setup=_generic,
        why_no_write=(
            "where a client that is not known has its settings is not known: set the variables, or "
            "its settings"
        ),
        why_no_run="say what to start: `trouper connect generic --run -- COMMAND`",
    ),
)
