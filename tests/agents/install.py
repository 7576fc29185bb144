"""The agents' own packages, outside of the checkout: a directory for each, kept until its packages
change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.agents.programs import AGENTS, NODE, Program


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "trouper" / "agents"


def search_path(name: str) -> str:
    """PATH with the agent's programs, and with a Node.js that is new enough for all of them."""
    directories = [
        cache() / NODE.package / "node_modules" / "node" / "bin",
        binaries(name, AGENTS[name]),
    ]
    return ":".join([*map(str, directories), os.environ["PATH"]])


def binaries(name: str, program: Program) -> Path:
    return cache() / name / ("node_modules/.bin" if program.is_javascript else "bin")


def install(name: str) -> None:
    """Install the agent, and Node.js if it needs that; does nothing where they are there."""
    program = AGENTS[name]
    if program.is_javascript:
        install_program(NODE.package, NODE)
    install_program(name, program)


def install_program(name: str, program: Program) -> None:
    directory, wanted = cache() / name, json.dumps(program.packages)
    installed = directory / "installed.json"
    if installed.exists() and installed.read_text("utf-8") == wanted:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if program.is_javascript:
        (directory / "package.json").write_text('{"private": true}', "utf-8")
        path = f"{cache() / NODE.package / 'node_modules' / 'node' / 'bin'}:{os.environ['PATH']}"
        line = ["npm", "install", "--silent", "--no-audit", "--no-fund", *program.packages]
        subprocess.run(line, cwd=directory, check=True, env=os.environ | {"PATH": path})
    else:
        subprocess.run(
            ["uv", "venv", "--quiet", "--python", program.python, str(directory)], check=True
        )
        python, without = str(directory / "bin" / "python"), directory / "without.txt"
        never = [f"{package} ; sys_platform == 'never'\n" for package in program.without]
        without.write_text("".join(never), "utf-8")
        line = ["uv", "pip", "install", "--quiet", "--python", python, "--override", str(without)]
        subprocess.run([*line, *program.packages], check=True)
    installed.write_text(wanted, "utf-8")


def version(name: str) -> str:
    """The installed version of the agent's package."""
    return program_version(name, AGENTS[name])


def program_version(name: str, program: Program) -> str:
    if program.is_javascript:
        package = cache() / name / "node_modules" / program.package / "package.json"
        return str(json.loads(package.read_text("utf-8"))["version"])
    code = f"import importlib.metadata as found; print(found.version({program.package!r}))"
    line = [str(binaries(name, program) / "python"), "-c", code]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
