"""The official clients' loops of tool calls, in the formats of two families; `just clients` runs
those of all libraries."""

from __future__ import annotations

import pytest

from tests.clients.install import CLIENTS, PROGRAMS
from tests.clients.running import run
from tests.family_configs import LONG

CASES = {"openai": 8, "anthropic": 6}
PAIRS = [
    ("openai", "qwen3"),
    ("anthropic", "qwen3_5"),
    *([("openai", "qwen3_5"), ("anthropic", "qwen3")] if LONG else []),
]


@pytest.mark.parametrize(("client", "family"), PAIRS)
@pytest.mark.long(but=("openai-*",))
def test_every_loop_ends_with_the_tools_executed(client: str, family: str) -> None:
    outcome = run(client, family)
    assert [
        (case.name, case.streamed, case.detail) for case in outcome.cases if not case.as_expected
    ] == []
    assert len(outcome.cases) == CASES[client]
    assert all("thread_unsupported_request" in refusal for refusal in outcome.refused), (
        "asked again without it"
    )


def test_every_client_has_a_program() -> None:
    for part, programs in (
        ("_client.", {client.program for client in CLIENTS.values()}),
        ("_schemas.", {client.schemas for client in CLIENTS.values()}),
    ):
        files = {path.name for path in PROGRAMS.iterdir() if part in path.name}
        assert files == programs - {""}
