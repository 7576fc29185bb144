from __future__ import annotations

import json
from functools import partial
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


BEHAVES_AS = "claude-opus-4-8"
"""The known model by whose defaults Claude Code writes requests to an unknown one. With others its
first prompt is longer or undocumented."""
MIN_WINDOW = 100_000
"""Claude Code rounds a smaller `CLAUDE_CODE_AUTO_COMPACT_WINDOW` up."""


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
    # With `behavesAs` Claude Code does not warn, and heeds no CLAUDE_CODE_MAX_CONTEXT_TOKENS.
    fits = served.context >= MIN_WINDOW
    environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.context) if fits else Dropped()
    row = {"model": served.model, "behavesAs": BEHAVES_AS if fits else Dropped()}
    settings: dict[str, Any] = {
        "env": environment,
        "modelPicker": {"options": Entries(("model",), (row,))},
        # Its auto mode, the default of 2.1.283 on, waits for a classifier that only Anthropic has.
        "permissions": {"disableAutoMode": "disable"},
    }
    if served.key:
        settings["apiKeyHelper"] = f"printenv {KEY_VARIABLE}"
    return Setup(
        files=(ConfigFile(home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json", JSON, settings),),
        arguments=("--settings", json.dumps(plain(settings))),
        variables=served.key_variables,
        unset=("ANTHROPIC_API_KEY", *(("ANTHROPIC_AUTH_TOKEN",) if served.key else ())),
        exports=served.key_variables,
    )


CODEX_INSTRUCTIONS = """\
You are a coding agent in the user's terminal. You work in the directory of their project with the \
tools that you are offered, until what they asked for is done.

- Look before you change: search and read the files that matter. AGENTS.md files say how to work \
below their directory; the user's words count more.
- Change what the task needs, in the style of the code around it. Leave other changes in the \
directory as they are. Commit and make branches only if you are asked to.
- Run the project's checks, or the program, before you say that it works.
- For a task of several steps keep a plan, if there is a tool for that.
- Before you use tools, say in a sentence what you are about to do. At the end say briefly what \
you changed, with paths, and what you could not do.
"""
"""Codex takes a model's description only together with instructions."""


def _codex_models(served: ServedModel) -> dict[str, Any]:
    """The description without which Codex warns, and assumes 272,000 tokens."""
    # Members that one version wants are unknown to others, which read past them.
    entry = {
        "slug": served.model,
        "display_name": served.model,
        "description": f"Served by Trouper at {served.url}",
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": served.context,
        "max_context_window": served.context,
        "auto_compact_token_limit": served.context - served.output,
        "experimental_supported_tools": [],
        "input_modalities": served.modalities,
    }
    return {"models": Entries(("slug",), (entry,))}


def _codex(served: ServedModel) -> Setup:
    provider: dict[str, Any] = {
        "name": "Trouper",
        "base_url": served.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": WAIT_MS,
        "env_key": KEY_VARIABLE if served.key else Dropped(),
    }
    directory = home("CODEX_HOME", ".codex")
    run_file = RunFile("models.json", JSON, _codex_models(served))
    models = ConfigFile(
        directory / "trouper-models.json",
        JSON,
        _codex_models(served),
        summary="the model as Codex wants it described; --dry-run shows it",
    )
    settings = {
        "model": served.model,
        "model_provider": PROVIDER,
        "model_context_window": served.context,
        "model_auto_compact_token_limit": served.context - served.output,
    }
    flags = {
        **settings,
        "model_catalog_json": str(run_file.path("codex")),
        **{f"model_providers.{PROVIDER}.{key}": value for key, value in plain(provider).items()},
    }
    settings["model_catalog_json"] = str(models.path)
    return Setup(
        files=(
            ConfigFile(
                directory / "config.toml",
                TOML,
                {**settings, "model_providers": {PROVIDER: provider}},
            ),
            models,
        ),
        run_files=(run_file,),
        # A JSON text or number is one in TOML, too.
        arguments=tuple(
            part for key, value in flags.items() for part in ("-c", f"{key}={json.dumps(value)}")
        ),
        variables=served.key_variables,
        exports=served.key_variables,
    )


def _opencode(served: ServedModel, program: str, schema: str) -> Setup:
    model = f"{PROVIDER}/{served.model}"
    settings = {
        "$schema": Default(schema),
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
                        **(
                            {
                                "attachment": True,
                                "modalities": {"input": served.modalities, "output": ["text"]},
                            }
                            if served.images
                            else {}
                        ),
                    }
                },
            }
        },
        "model": model,
        "small_model": model,
    }
    directory = xdg_config(program)
    names = (f"{program}.json", f"{program}.jsonc")
    name = next((name for name in names if (directory / name).exists()), names[0])
    content = f"{program.upper()}_CONFIG_CONTENT"
    return Setup(
        files=(ConfigFile(directory / name, JSON, settings),),
        variables={content: json.dumps(plain(settings)), **served.key_variables},
        exports=served.key_variables,
    )


def _qwen(served: ServedModel) -> Setup:
    # Else Qwen Code goes by the model's name.
    modalities = {"modalities": {"image": True}} if served.images else {}
    defaults = RunFile("defaults.json", JSON, {"model": {"generationConfig": modalities}})
    entry = {
        "id": served.model,
        "name": f"{served.model} (Trouper)",
        "baseUrl": served.api,
        "envKey": KEY_VARIABLE,
        "generationConfig": {
            "timeout": WAIT_MS,
            "contextWindowSize": served.context,
            "samplingParams": {"max_tokens": served.output},
            **modalities,
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
        run_files=(defaults,) if modalities else (),
        variables={
            "OPENAI_BASE_URL": served.api,
            "OPENAI_API_KEY": served.secret,
            "OPENAI_MODEL": served.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(served.output),
            **(
                {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(defaults.path("qwen"))} if modalities else {}
            ),
        },
        arguments=("--auth-type", "openai", "--model", served.model),
        exports=served.key_variables,
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
    files = {"settings/providers.json": settings}
    if served.images:
        model = {"id": served.model, "name": served.model, "capabilities": ["tools", "images"]}
        files["settings/models.json"] = {
            "version": Default(1),
            "providers": {provider: {"models": {served.model: model}}},
        }
    directory = home("CLINE_DATA_DIR", ".cline/data")
    return Setup(
        files=tuple(ConfigFile(directory / name, JSON, values) for name, values in files.items()),
        run_files=tuple(RunFile(name, JSON, values) for name, values in files.items()),
        variables={"CLINE_DATA_DIR": str(run_dir("cline"))},
        notes=(
            (
                "--run keeps Cline's state in a directory of its own, so sessions of other "
                "providers are not listed."
            ),
        ),
    )


PI_COMPACTS_FROM = 160_000
"""With a shorter context pi's defaults (16,384 tokens free, 20,000 kept, counted by characters)
leave it nothing to compact when the context is full."""


def _pi(served: ServedModel) -> Setup:
    entry = {
        "id": served.model,
        "name": f"{served.model} (Trouper)",
        "input": served.modalities,
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
    defaults: dict[str, Any] = {"defaultProvider": PROVIDER, "defaultModel": served.model}
    settings = directory / "settings.json"
    to_run: tuple[ConfigFile, ...] = (models,)
    if served.context < PI_COMPACTS_FROM:
        kept = {"reserveTokens": served.output, "keepRecentTokens": served.context // 8}
        compaction = {"compaction": {"modelOverrides": {f"{PROVIDER}/{served.model}": kept}}}
        defaults |= compaction
        to_run = (models, ConfigFile(settings, JSON, compaction))
    return Setup(
        files=(models, ConfigFile(settings, JSON, defaults)),
        merged_to_run=to_run,
        arguments=("--provider", PROVIDER, "--model", served.model),
        variables=served.key_variables,
        exports=served.key_variables,
        notes=(
            (
                "--run adds the provider to models.json, which alone can hold one, and changes no "
                "default; for a short context it adds to settings.json when this model compacts."
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
            **({"supports_vision": True} if served.images else {}),
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


def _copilot(served: ServedModel) -> Setup:
    return Setup(
        variables={
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": served.api,
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_API_KEY": served.secret,
            "COPILOT_MODEL": served.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(served.context - served.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(served.output),
            "COPILOT_OFFLINE": "true",
        },
        # They count more than the key and the model.
        unset=(
            "COPILOT_PROVIDER_BEARER_TOKEN",
            "COPILOT_PROVIDER_MODEL_ID",
            "COPILOT_PROVIDER_WIRE_MODEL",
        ),
        notes=("COPILOT_OFFLINE keeps it from asking GitHub; it needs no account so.",),
    )


def _openclaw(served: ServedModel) -> Setup:
    entry = {
        "id": served.model,
        "name": served.model,
        "input": served.modalities,
        "contextWindow": served.context,
        "maxTokens": served.output,
    }
    settings = {
        "models": {
            "mode": Default("merge"),
            "providers": {
                PROVIDER: {
                    "baseUrl": served.api,
                    "apiKey": served.key_by(f"${{{KEY_VARIABLE}}}"),
                    "api": "openai-completions",
                    "models": Entries(("id",), (entry,)),
                }
            },
        },
        "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{served.model}"}}},
    }
    name = "openclaw.json"
    run_file = RunFile(name, JSON, settings)
    return Setup(
        files=(ConfigFile(home("OPENCLAW_STATE_DIR", ".openclaw") / name, JSON, settings),),
        run_files=(run_file,),
        variables={
            "OPENCLAW_CONFIG_PATH": str(run_file.path("openclaw")),
            "OPENCLAW_STATE_DIR": str(run_dir("openclaw")),
            **served.key_variables,
        },
        exports=served.key_variables,
        notes=(
            (
                "--run keeps OpenClaw's state in a directory of its own, so it has no channels "
                "and no sessions of others."
            ),
        ),
    )


def _vibe(served: ServedModel) -> Setup:
    provider = {
        "name": PROVIDER,
        "api_base": served.api,
        "api_key_env_var": KEY_VARIABLE if served.key else "",
        "api_style": "openai",
        "backend": "generic",
    }
    model = {
        "name": served.model,
        "provider": PROVIDER,
        "alias": PROVIDER,
        "max_context_length": served.context,
        "max_output_tokens": served.output,
        "auto_compact_threshold": served.context - served.output,
        **({"supports_images": True} if served.images else {}),
    }
    settings = {
        "active_model": PROVIDER,
        "providers": Entries(("name",), (provider,)),
        "models": Entries(("alias",), (model,)),
    }
    return Setup(
        files=(ConfigFile(home("VIBE_HOME", ".vibe") / "config.toml", TOML, settings),),
        variables={
            "VIBE_ACTIVE_MODEL": PROVIDER,
            "VIBE_PROVIDERS": json.dumps([provider]),
            "VIBE_MODELS": json.dumps([model]),
            **served.key_variables,
        },
        exports=served.key_variables,
    )


def _nanocoder(served: ServedModel) -> Setup:
    provider = {
        "name": "Trouper",
        "baseUrl": served.api,
        "apiKey": served.key_by(f"${KEY_VARIABLE}"),
        "models": [served.model],
        "contextWindow": served.context,
        "requestTimeout": WAIT_MS,
        "socketTimeout": WAIT_MS,
    }
    settings = {"nanocoder": {"providers": Entries(("name",), (provider,))}}
    directory = xdg_config("nanocoder")
    return Setup(
        files=(ConfigFile(directory / "agents.config.json", JSON, settings),),
        variables={
            "NANOCODER_PROVIDERS": json.dumps([plain(provider)]),
            **served.key_variables,
        },
        arguments=("--provider", "Trouper", "--model", served.model),
        exports=served.key_variables,
    )


def _openhands(served: ServedModel) -> Setup:
    return Setup(
        variables={
            "LLM_MODEL": f"openai/{served.model}",
            "LLM_BASE_URL": served.api,
            "LLM_API_KEY": served.secret,
        },
        arguments=("--override-with-envs",),
    )


CODING_AGENTS = (
    Agent(
        name="claude",
        title="Claude Code",
        setup=_claude,
        install="npm install -g @anthropic-ai/claude-code",
    ),
    Agent(
        name="codex",
        title="Codex",
        setup=_codex,
        install="npm install -g @openai/codex",
    ),
    Agent(
        name="opencode",
        title="opencode",
        setup=partial(_opencode, program="opencode", schema="https://opencode.ai/config.json"),
        install="npm install -g opencode-ai",
    ),
    Agent(
        name="qwen",
        title="Qwen Code",
        setup=_qwen,
        install="npm install -g @qwen-code/qwen-code",
    ),
    Agent(
        name="cline",
        title="Cline",
        setup=_cline,
        install="npm install -g cline",
    ),
    Agent(
        name="pi",
        title="pi",
        setup=_pi,
        install="npm install -g @earendil-works/pi-coding-agent",
    ),
    Agent(
        name="aider",
        title="aider",
        setup=_aider,
        install="pip install aider-chat",
    ),
    Agent(
        name="copilot",
        title="GitHub Copilot CLI",
        setup=_copilot,
        install="npm install -g @github/copilot",
        why_no_write="Copilot CLI takes a provider from variables only: use --run, or set them",
    ),
    Agent(
        name="openclaw",
        title="OpenClaw",
        setup=_openclaw,
        install="npm install -g openclaw",
    ),
    Agent(
        name="openhands",
        title="OpenHands CLI",
        setup=_openhands,
        install="uv tool install openhands --python 3.12",
        why_no_write=(
            "OpenHands writes its settings itself: use --run, or set the variables and start "
            "openhands --override-with-envs"
        ),
    ),
    Agent(
        name="vibe",
        title="Mistral Vibe",
        setup=_vibe,
        install="uv tool install mistral-vibe",
    ),
    Agent(
        name="nanocoder",
        title="nanocoder",
        setup=_nanocoder,
        install="npm install -g @nanocollective/nanocoder",
    ),
    Agent(
        name="kilo",
        title="Kilo Code CLI",
        setup=partial(_opencode, program="kilo", schema="https://app.kilo.ai/config.json"),
        install="npm install -g @kilocode/cli",
    ),
)
