"""R4, R8: what ranks have written together they read together, each its own shard; what one lacks
is computed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from tests.arithmetic import CLOSE
from tests.ranks.launching import run_ranks
from tests.ranks.living import Life, live
from tests.ranks.models import save
from tests.reuse.serving import BLOCK
from trouper.engine.platform import device

pytestmark = pytest.mark.skipif(
    not device.is_cpu(), reason="float32 is the reference, and that is for CPUs"
)
LONG_TESTS = bool(os.environ.get("TROUPER_LONG_TESTS"))
LONG, LONGER = (100, 1), (180, 1)
"""Tokens and seed of two prompts; the second begins with the first."""
PIPELINE = "llama"
FAMILIES = (PIPELINE, "gpt_oss", *(("qwen3", "deepseek_v3") if LONG_TESTS else ()))
"""A pipeline's layers, heads with sliding windows (which need snapshots), and in the long version
whole KV by heads and compressed KV that every rank keeps whole."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models, caches, and a home of our own for what is remembered of files."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("disk")
        patch.setenv("XDG_CACHE_HOME", str(place / "home"))
        yield place


def written_and_read(place: Path, name: str, ranks: int) -> list[Life]:
    """Two lives of a group: what the first computes and keeps, the second finds."""
    model = str(save(name, place / name))
    kept = {
        "ssd_cache_dir": str(place / f"{name} {ranks}"),
        "pipeline": ranks == 2 and name == PIPELINE,
    }
    pieces = 1 if name == "gpt_oss" else -(-LONGER[0] // BLOCK)
    return [
        Life(model, [LONG, LONG, LONGER], kept, settle=pieces),
        Life(model, [LONGER, LONG], kept),
    ]


def spoilt(place: Path, ranks: int, rank: int) -> list[Life]:
    """Lives of the group that wrote for llama: without one rank's files, once more, and with one
    file damaged."""
    _, one = written_and_read(place, "llama", ranks)
    one = attrs.evolve(one, asks=[LONGER], settle=-(-LONGER[0] // BLOCK))
    damaged = attrs.evolve(one, spoil=(rank, "damage the last"), damaged=1)
    return [attrs.evolve(one, spoil=(rank, "remove")), one, damaged]


def played(ranks: int, lives: Sequence[Life]) -> list[dict[str, Any]]:
    """What rank 0 told of each life."""
    [told, *_] = run_ranks(
        ranks, "tests.ranks.living", json.dumps([attrs.asdict(life) for life in lives])
    )
    assert len(told) == len(lives)
    return list(told)


@pytest.fixture(scope="module")
def two(place: Path) -> dict[str, list[dict[str, Any]]]:
    """All lives of two ranks, in one pair of processes: by family, and those whose files are
    spoilt."""
    lives = [life for name in FAMILIES for life in written_and_read(place, name, 2)] + spoilt(
        place, 2, 1
    )
    told = played(2, lives)
    each = {name: told[2 * n : 2 * n + 2] for n, name in enumerate(FAMILIES)}
    return each | {"spoilt": told[2 * len(FAMILIES) :]}


def agree(answer: list[Any], wanted: list[Any]) -> None:
    """Greedy tokens, and the log-probabilities they had."""
    assert list(answer[0]) == list(wanted[0])
    assert np.abs(np.array(answer[1]) - np.array(wanted[1])).max() < CLOSE


def alone(place: Path, name: str) -> list[Any]:
    """What one rank answers to `LONGER`."""
    [told] = trio.run(live, [Life(str(place / name), [LONGER], {"cache_memory": 0})])
    return list(told["answers"][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_r4_r8_cold_from_memory_and_from_disk_after_a_restart_are_the_same(
    name: str, place: Path, two: dict[str, list[dict[str, Any]]]
) -> None:
    first, second = two[name]
    assert first["cached"][:2] == [0, LONG[0] - 1]
    assert second["cached"][0] == LONGER[0] - 1
    assert second["hits_disk"] >= LONGER[0] // BLOCK
    cold, warm, longer = first["answers"]
    agree(warm, cold)
    for answer, wanted in zip(second["answers"], (longer, cold), strict=True):
        agree(answer, wanted)
    agree(second["answers"][0], alone(place, name))
    assert (second["attached"], second["lacking"]) == (True, 0)


def test_r4_f9_what_one_rank_lacks_is_computed_and_written_anew(
    two: dict[str, list[dict[str, Any]]],
) -> None:
    """D9: also where its file is damaged. A counted miss, the right tokens, and the next life has
    it."""
    removed, healed, damaged = two["spoilt"]
    for life in two["spoilt"]:
        agree(life["answers"][0], two["llama"][1]["answers"][0])
    assert removed["cached"] == [0]
    assert removed["lacking"] > 0
    assert (healed["cached"], healed["lacking"]) == ([LONGER[0] - 1], 0)
    assert 0 <= damaged["cached"][0] < LONGER[0] - 1, (
        "found when it was read, or by an inspection before"
    )
    assert [life["others"]["1"]["damaged"] for life in two["spoilt"]] == [0, 0, 1]


@pytest.mark.skipif(
    not LONG_TESTS, reason="six processes' CPU; just test-long tests/ranks/test_disk.py"
)
def test_r4_r8_three_ranks_share_what_they_wrote(place: Path) -> None:
    first, second = played(3, written_and_read(place, "llama", 3))
    for answer in (second["answers"][0], alone(place, "llama")):
        agree(answer, first["answers"][2])
    assert second["cached"] == [LONGER[0] - 1, LONG[0] - 1]
