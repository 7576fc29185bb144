"""The needs of other clients: editors, web interfaces, proxies."""

from __future__ import annotations

from pathlib import Path

from trouper.cli.agents.agent import (
    Agent,
    RunFile,
    ServedModel,
    Setup,
    home,
    xdg_config,
)
from trouper.cli.agents.config_files import ConfigFile
from trouper.cli.agents.config_formats import JSON, YAML
from trouper.cli.agents.merging import KEY_VARIABLE, Default, Entries, Secret

LITELLM_KEY = "LITELLM_MASTER_KEY"


def _continue(served: ServedModel) -> Setup:
    entry = {
        "name": f"{served.model} (Trouper)",
        "provider": "openai",
        "model": served.model,
        "apiBase": served.api,
        "apiKey": served.key_by(f"${{{{ secrets.{KEY_VARIABLE} }}}}"),
        "roles": ["chat", "edit", "apply"],
        "capabilities": [
            *(["tool_use"] if served.calls_tools else []),
            *(["image_input"] if served.images else []),
        ],
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
        variables=served.key_variables,
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
            "images": served.images,
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
            **_embedding_variables(served),
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


def _embedding_variables(served: ServedModel) -> dict[str, str | Secret]:
    """Let Open WebUI index files by the server's embedder, if there is one."""
    if not served.embedder:
        return {}
    return {
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": served.embedder,
        "RAG_OPENAI_API_BASE_URL": served.api,
        "RAG_OPENAI_API_KEY": served.secret,
        # By default each chunk of a file is a request, all at once: the queue refuses the last.
        "RAG_EMBEDDING_BATCH_SIZE": "64",
        "RAG_EMBEDDING_CONCURRENT_REQUESTS": "2",
    }


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
            **({"supports_vision": True} if served.images else {}),
        },
    }
    settings = {"model_list": Entries(("model_name",), (entry,))}
    run_file = RunFile("config.yaml", YAML, settings)
    return Setup(
        files=(ConfigFile(Path.cwd() / "litellm_config.yaml", YAML, settings, may_be_link=False),),
        run_files=(run_file,),
        arguments=("--config", str(run_file.path("litellm"))),
        variables=served.key_variables,
        exports=served.key_variables,
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
        program=None,
        why_no_run="Zed takes providers from its settings file only: use --write, and start Zed",
    ),
    Agent(
        name="open-webui",
        title="Open WebUI",
        setup=_open_webui,
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
        install="pip install 'litellm[proxy]'",
    ),
    Agent(
        name="generic",
        title="Cursor and any other client",
        setup=_generic,
        program=None,
        why_no_write=(
            "where a client that is not known has its settings is not known: set the variables, or "
            "its settings"
        ),
        why_no_run="say what to start: `trouper connect generic --run -- COMMAND`",
    ),
)
