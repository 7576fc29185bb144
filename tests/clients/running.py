"""Runs the program of a client against a scripted server, and collects its cases."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.clients.install import CLIENTS, PROGRAMS, command
from tests.replicas.scripted_servers import scripted_servers
from tests.scripted.process import recorded

LOOP = "tests.clients.tool_loop:script"
SCHEMAS = "tests.clients.schema_answers:script"
OF_SCHEMAS = "qwen3"
LIMIT_S = 1200
QUIET = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
    "PYTHONPATH": str(PROGRAMS),
}
"""No key, no telemetry, nothing but the loopback interface."""


@attrs.frozen
class Case:
    """`limit`: why the library itself cannot do this; such a case is not `ok`. `of_objects`: an
    object of a class is asked for."""

    client: str
    name: str
    streamed: bool
    ok: bool
    detail: str = ""
    trace: Sequence[str] = ()
    limit: str = ""
    of_objects: bool = False

    @property
    def as_expected(self) -> bool:
        return self.ok or bool(self.limit)


@attrs.frozen
class Outcome:
    """What became of a client's cases. `refused`: the statuses and texts of the server's refusals,
    which not every client shows."""

    cases: Sequence[Case]
    refused: Sequence[str]


def run(client: str, family: str = "qwen3", router: str = "") -> Outcome:
    """Run the loop of tool calls, and the program about schemas, which depends on no family. With
    a `router` two servers answer."""
    loop = _run(client, CLIENTS[client].program, router, "--family", family, "--script", LOOP)
    if not (program := CLIENTS[client].schemas) or family != OF_SCHEMAS:
        return loop
    schemas = _run(client, program, router, "--script", SCHEMAS, "--follow-grammars")
    objects = [attrs.evolve(case, of_objects=True) for case in schemas.cases]
    return Outcome([*loop.cases, *objects], [*loop.refused, *schemas.refused])


def _run(client: str, program: str, router: str, *flags: str) -> Outcome:
    # Behind smg a model has no other names.
    flags = (*flags, "--set", 'served_model_name=["any"]')
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as home:
        record = Path(home) / "record.jsonl"
        with scripted_servers(router, *flags, record=record) as url:
            lines = _ran([*command(client, program), url], Path(home))
        refusals = [line for line in recorded(record) if line["status"] >= 400]
    cases = [Case(client=client, name=line.pop("case"), **line) for line in lines]
    return Outcome(
        cases, [f"{line['path']}: {line['status']} {line['answer']}" for line in refusals]
    )


def _ran(line: list[str], home: Path) -> list[dict[str, Any]]:
    """The cases that a program prints; one more if it ends with an error."""
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")
    }
    outcome = subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=home,
        env=environment | QUIET | {"HOME": str(home), "XDG_CACHE_HOME": str(home)},
    )
    cases = [
        json.loads(text[5:]) for text in outcome.stdout.splitlines() if text.startswith("CASE ")
    ]
    if outcome.returncode:
        detail = f"exit code {outcome.returncode}: {outcome.stderr[-1500:]}"
        cases.append({"case": "the program", "streamed": False, "ok": False, "detail": detail})
    return cases
