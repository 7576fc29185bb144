"""A short run of `just schemathesis`."""

from __future__ import annotations

from tests.family_configs import LONG
from tests.schemathesis import generated_here


async def test_generated_bodies_are_answered_as_described() -> None:
    result = await generated_here(
        "--max-examples", "5" if LONG else "1", "--seed", "1", "--phases", "examples,fuzzing"
    )
    said = result.stdout.decode()
    assert result.returncode == 0, said
    assert "Fuzzing" in said
