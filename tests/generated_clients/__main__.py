"""`just generated-clients [NAME ...]`: generators of clients, from their registries, make clients
of /openapi.json, and those in Python and TypeScript ask a server with the fake engine; two
validators read it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from tests.fakes import FakeEngine, Ranking
from tests.web.serving import exchange, get, serving

PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = (
    "openapi-python-client",
    "datamodel-code-generator",
    "openapi-generator-cli",
    "openapi-spec-validator",
)
LIMIT_S = 900
TSC = ("--strict", "--target", "es2022", "--module", "nodenext", "--skipLibCheck")


def run(home: Path, *line: str) -> None:
    outcome = subprocess.run(
        line, cwd=home, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    problem = "Endpoint will not be generated" in outcome.stdout + outcome.stderr
    if outcome.returncode or problem:
        raise RuntimeError(f"{line}: {(outcome.stdout + outcome.stderr)[-3000:]}")


def with_validator(home: Path, tool: Callable[[str], str], _: str) -> None:
    run(home, tool("openapi-spec-validator"), "openapi.json")


def with_redocly(home: Path, _: Callable[[str], str], __: str) -> None:
    run(home, "npx", "--yes", "@redocly/cli", "lint", "openapi.json")


def with_openapi_python_client(home: Path, tool: Callable[[str], str], url: str) -> None:
    generate = (tool("openapi-python-client"), "generate", "--path", "openapi.json")
    run(home, *generate, "--meta", "none", "--output-path", "trouper_client")
    shutil.copy(PROGRAMS / "python_client.py", home)
    run(home, tool("python"), "python_client.py", url)


def with_datamodel_codegen(home: Path, tool: Callable[[str], str], url: str) -> None:
    options = ("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel")
    run(
        home,
        tool("datamodel-codegen"),
        "--input",
        "openapi.json",
        "--output",
        "models.py",
        *options,
    )
    shutil.copy(PROGRAMS / "pydantic_models.py", home)
    run(home, tool("python"), "pydantic_models.py", url)


def with_openapi_typescript(home: Path, _: Callable[[str], str], url: str) -> None:
    node = home / "typescript"
    node.mkdir()
    shutil.copy(PROGRAMS / "typescript_client.mts", node)
    install(node, "openapi-typescript", "openapi-fetch", "typescript@5", "@types/node@20")
    run(node, "npx", "openapi-typescript", "../openapi.json", "--output", "schema.d.ts")
    run(node, "npx", "tsc", *TSC, "typescript_client.mts")
    run(node, "node", "typescript_client.mjs", url)


def with_openapi_generator_python(home: Path, tool: Callable[[str], str], url: str) -> None:
    later = "--additional-properties=disallowAdditionalPropertiesIfNotPresent=false"
    generate(home, tool, "python", "generated_python", later)
    python = tool("python")
    run(home, "uv", "pip", "install", "--quiet", "--python", python, "./generated_python")
    shutil.copy(PROGRAMS / "openapi_generator_client.py", home)
    run(home, python, "openapi_generator_client.py", url)


def with_openapi_generator_java(home: Path, tool: Callable[[str], str], _: str) -> None:
    generate(home, tool, "java", "java", "--library", "native")


def generate(home: Path, tool: Callable[[str], str], language: str, *options: str) -> None:
    line = (tool("openapi-generator-cli"), "generate", "-i", "openapi.json", "-g", language)
    run(home, *line, "-o", *options)


def install(home: Path, *packages: str) -> None:
    (home / "package.json").write_text('{"private": true, "type": "module"}', "utf-8")
    run(home, "npm", "install", "--silent", "--no-audit", "--no-fund", *packages)


GENERATORS = {
    with_validator: "uv",
    with_redocly: "npx",
    with_openapi_python_client: "uv",
    with_datamodel_codegen: "uv",
    with_openapi_typescript: "npx",
    with_openapi_generator_python: "java",
    with_openapi_generator_java: "java",
}
"""With the program that each needs."""


def try_all(home: Path, url: str, names: Sequence[str]) -> bool:
    run(home, "uv", "venv", "--quiet", "--python", sys.executable, "venv")
    python = str(home / "venv" / "bin" / "python")
    run(home, "uv", "pip", "install", "--quiet", "--python", python, *PACKAGES)
    failed = False
    for generator, program in GENERATORS.items():
        name = generator.__name__.removeprefix("with_").replace("_", "-")
        if names and name not in names:
            continue
        if shutil.which(program) is None:
            print(f"{name}: not tried, since {program} is missing")  # noqa: T201
            continue
        try:
            generator(home, lambda tool: str(home / "venv" / "bin" / tool), url)
            print(f"{name}: right", flush=True)  # noqa: T201
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"{name}: {error}", flush=True)  # noqa: T201
    return failed


async def main() -> int:
    with TemporaryDirectory(prefix="generated-clients-") as home:
        async with serving(FakeEngine(tokenizer=Ranking())) as served:
            _, _, document = await exchange(served, get("/openapi.json"))
            (Path(home) / "openapi.json").write_bytes(document)
            url = f"http://127.0.0.1:{served.port}"
            tries = partial(try_all, Path(home), url, sys.argv[1:])
            return int(await trio.to_thread.run_sync(tries))


if __name__ == "__main__":
    sys.exit(trio.run(main))
