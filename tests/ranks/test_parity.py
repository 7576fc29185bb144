"""R8: what ranks answer together is what one process answers. `just ranks-parity` does it for 512
tokens of each family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.naive import certain_answer
from tests.families import build
from tests.family_configs import LONG
from tests.ranks.launching import run_ranks
from tests.ranks.models import CONFIGS, SEEDS, save
from tests.ranks.playing import PROMPTS, SAMPLINGS, SEEDED_TOKENS, play_all
from trouper.engine.distributed.rank_group import ALONE
from trouper.engine.platform import device

KEPT_IN_BYTES = {"kv_bits": 8, "kv_group_size": 32}
FLOAT32_SUMS = {"tp_reduce_dtype": "float32"}
PIPELINE = {"pipeline": True}
"""Without other ranks it changes nothing."""
pytestmark = pytest.mark.skipif(
    not device.is_cpu(), reason="float32 is the reference, and that is for CPUs"
)


def saved(directory: Path, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: {"directory": str(save(name, directory / name)), **one}
        for name, one in models.items()
    }


def certain_seeds(name: str) -> list[int]:
    """Another order of additions changes no draw of these."""
    model = build(name, SEEDS[name], CONFIGS[name])
    each = zip(PROMPTS, SAMPLINGS, strict=True)
    return [
        certain_answer(model, prompt, sampling, SEEDED_TOKENS)[0].seed for prompt, sampling in each
    ]


def tokens(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {kind: said for kind, said in told[name].items() if isinstance(said, list)}


def test_r8_f21_two_ranks_answer_what_one_answers(tmp_path: Path) -> None:
    """Greedy; drawn, with other seeds on rank 1, which do not count; rows that join and leave,
    follow grammars, think; stored prefixes and copies of live rows; KV in bytes; sums in float32;
    drafts, right and wrong; a pipeline."""
    models: dict[str, dict[str, Any]] = {
        "llama": {"seeds": certain_seeds("llama"), "prefixes": True, "settings": KEPT_IN_BYTES},
        "deepseek_v3": {
            "greedy": 12,
            "drafts": True,
            "settings": KEPT_IN_BYTES | FLOAT32_SUMS,
        },
    }
    models["qwen3"] = {
        "greedy": 12,
        "drafts": True,
        "prefixes": True,
        "settings": PIPELINE,
    }
    if LONG:
        models["qwen3"]["seeds"] = certain_seeds("qwen3")
        # Experts without compressed KV.
        models["qwen3_moe"] = {"greedy": 12, "drafts": True, "settings": FLOAT32_SUMS}
    spec = saved(tmp_path, models)
    alone = play_all(spec, ALONE)
    ranks = run_ranks(2, "tests.ranks.playing", json.dumps(spec))
    for rank, told in enumerate(ranks):
        assert (told["rank"], told["invited"], told["gathered"]) == (rank, "rank 0 says so", [5, 6])
        for name in models:
            assert tokens(told, name) == tokens(alone, name), f"{name} on rank {rank}"
    llama, whole = ranks[1]["llama"], alone["llama"]
    assert llama["token_bytes"] * 2 == whole["token_bytes"], "each rank keeps its own heads"
    in_stages = [rank["qwen3"]["token_bytes"] * 2 for rank in ranks]
    assert in_stages == [alone["qwen3"]["token_bytes"]] * 2, "each rank keeps its own layers"
    assert llama["cache_bytes"] <= whole["cache_bytes"] / 2 + 1, (
        "two ranks share this machine's memory"
    )


@pytest.mark.long
def test_r8_three_ranks_answer_what_one_answers(tmp_path: Path) -> None:
    models = {
        "qwen3": {"greedy": 8, "drafts": True, "settings": KEPT_IN_BYTES},
        "deepseek_v3": {"greedy": 8, "drafts": True, "prefixes": True, "settings": PIPELINE},
    }
    spec = saved(tmp_path, models)
    alone = play_all(spec, ALONE)
    ranks = run_ranks(3, "tests.ranks.playing", json.dumps(spec))
    for name in models:
        assert [tokens(told, name) for told in ranks] == [tokens(alone, name)] * 3, name
