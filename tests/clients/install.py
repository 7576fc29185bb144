"""Environments of the clients, outside of the checkout: one for each, kept until its packages
change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

PROGRAMS = Path(__file__).parent / "programs"
NODE = Path("node_modules", "node", "bin", "node")


@attrs.frozen
class Client:
    """A client library. `packages` () : it is among this project's own; `program` and `schemas`
    (objects of many classes, for those that make schemas) are files of programs/."""

    program: str
    packages: tuple[str, ...] = ()
    schemas: str = ""

    @property
    def is_javascript(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS: Mapping[str, Client] = {
    "openai": Client("openai_client.py"),
    "anthropic": Client("anthropic_client.py"),
    "litellm": Client("litellm_client.py", ("litellm", "mcp")),
    "langchain-openai": Client(
        "langchain_openai_client.py", ("langchain-openai",), "langchain_openai_schemas.py"
    ),
    "langchain-anthropic": Client(
        "langchain_anthropic_client.py", ("langchain-anthropic",), "langchain_anthropic_schemas.py"
    ),
    "pydantic-ai": Client(
        "pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai_schemas.py"
    ),
    "openai-agents": Client(
        "openai_agents_client.py", ("openai-agents",), "openai_agents_schemas.py"
    ),
    "instructor": Client(
        "instructor_client.py", ("instructor[anthropic]",), "instructor_schemas.py"
    ),
    "llama-index": Client("llama_index_client.py", ("llama-index-llms-openai-like",)),
    "smolagents": Client("smolagents_client.py", ("smolagents[openai]",)),
    "ai-sdk": Client(
        "ai_sdk_client.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    ),
}


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "trouper" / "clients"


def command(name: str, program: str) -> list[str]:
    """What runs a program of the client; installs the client first, if it is not there."""
    client = CLIENTS[name]
    if not client.packages:
        return [sys.executable, str(PROGRAMS / program)]
    directory, wanted = cache() / name, json.dumps(client.packages)
    installed = directory / "installed.json"
    if not installed.exists() or installed.read_text("utf-8") != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (_install_javascript if client.is_javascript else _install_python)(
            directory, client.packages
        )
        installed.write_text(wanted, "utf-8")
    if not client.is_javascript:
        return [str(directory / "bin" / "python"), str(PROGRAMS / program)]
    # Modules are found from where the program lies.
    shutil.copy(PROGRAMS / program, directory)
    return [str(directory / NODE), str(directory / program)]


def _install_python(directory: Path, packages: tuple[str, ...]) -> None:
    subprocess.run(
        ["uv", "venv", "--quiet", "--python", sys.executable, str(directory)], check=True
    )
    python = str(directory / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *packages], check=True)


def _install_javascript(directory: Path, packages: tuple[str, ...]) -> None:
    (directory / "package.json").write_text('{"private": true}', "utf-8")
    path = f"{(directory / NODE).parent}:{os.environ['PATH']}"
    # npm takes the newest versions that the Node.js below it can run: so that comes first.
    for some in (("node",), packages):
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *some],
            cwd=directory,
            check=True,
            env=os.environ | {"PATH": path},
        )


def version(name: str) -> str:
    """The installed version of the client itself."""
    client = CLIENTS[name]
    if client.is_javascript:
        package = cache() / name / "node_modules" / client.packages[0] / "package.json"
        return str(json.loads(package.read_text("utf-8"))["version"])
    package_name = (client.packages or (name,))[0].split("[")[0]
    code = f"import importlib.metadata as found; print(found.version({package_name!r}))"
    outcome = subprocess.run(
        [command(name, client.program)[0], "-c", code], capture_output=True, text=True, check=True
    )
    return outcome.stdout.strip()
