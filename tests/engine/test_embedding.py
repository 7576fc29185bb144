"""Vectors of prompts: of every family that gives some, in any chunks, beside rows that decode."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.arithmetic import TF32
from tests.families import FAMILIES, build, prompts
from tests.family_configs import VOCABULARY
from trouper.engine.embeddings.pooling import Pool, embedder_of, pooling_of
from trouper.engine.kv.model_body import body_of
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, Pooling, RowId
from trouper.protocol.sampling import Sampling

PROMPT = prompts((40,))[0]
OTHER = prompts((9,), seed=3)[0]
GREEDY = Sampling(temperature=0)
ROW, NEIGHBOUR = RowId(0), RowId(1)
WITHOUT = ("gemma3n",)
"""Families whose body cannot be run alone."""


def admit(row: RowId, prompt: list[int], embed: Pooling | None = None) -> Admit:
    return Admit(row, np.array(prompt, "<i4").tobytes(), GREEDY, embed=embed)


def vector(engine: StepEngine, pooling: Pooling, chunks: tuple[int, ...]) -> list[float]:
    """In these chunks, while a neighbour decodes. The row is dropped at the end."""
    found: list[bytes] = []
    decode: tuple[RowId, ...] = ()
    for step, tokens in enumerate(chunks):
        first = step == 0
        plan = Plan(
            step,
            admit=(admit(NEIGHBOUR, OTHER), admit(ROW, PROMPT, pooling)) if first else (),
            decode=decode,
            prefill=(*((Chunk(NEIGHBOUR, len(OTHER)),) if first else ()), Chunk(ROW, tokens)),
        )
        decode = (NEIGHBOUR,)
        stepped = engine.collect(engine.launch(plan))
        assert stepped.rows == (NEIGHBOUR,)
        found += [data for row, data in stepped.embedded if row == ROW]
    engine.collect(engine.launch(Plan(len(chunks), drop=(ROW, NEIGHBOUR))))
    assert engine.lengths() == {}
    [data] = found
    numbers: list[float] = np.frombuffer(data, "<f4").tolist()
    return numbers


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.long(
    but=(
        "llama",
        "deepseek_v3",
        "gemma3_text",
        "gpt_oss",
        "falcon_h1",
        "lfm2",
        "mamba2",
        "qwen3_next",
        "gemma3n",
    )
)
def test_vectors_of_every_family(name: str) -> None:
    model = build(name)
    body = body_of(model)
    if name in WITHOUT:
        assert body is None
        return
    assert body is not None, "it gives embeddings"
    hidden = body(mx.array([PROMPT]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    engine = StepEngine(model, VOCABULARY)
    weights = mx.arange(1, len(PROMPT) + 1)[:, None]
    for pooling, state in (
        ("mean", hidden.mean(0)),
        ("mean_sqrt", hidden.mean(0)),
        ("last", hidden[-1]),
        ("first", hidden[0]),
        ("max", hidden.max(0)),
        ("weighted", (hidden * weights).mean(0)),
    ):
        wanted = state / mx.linalg.norm(state)
        for chunks in ((40,), (1, 16, 23)):
            got = vector(engine, pooling, chunks)  # type: ignore[arg-type]
            np.testing.assert_allclose(got, np.array(wanted), atol=2e-2 if TF32 else 2e-5)
    assert abs(float(np.linalg.norm(got)) - 1) < 1e-5
    facts = embedder_of(model, Path("nowhere")).layout
    assert facts is not None and (facts.dimensions, facts.pooling) == (len(got), "mean")


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode": ["cls"]}, "first"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["mean", "max"]}, None),
        ({"pooling_mode": "by attention"}, None),
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_the_models_own_files_say_how_to_pool(
    tmp_path: Path, said: object, pooling: str | None
) -> None:
    """Newer files name it, and were once taken for none, so that their models got the mean."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert pooling_of(tmp_path / "1_Pooling") == pooling


def test_a_model_that_joins_several_vectors_gives_none(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode": ["mean", "max"]})
    )
    found = embedder_of(build("llama"), tmp_path)
    assert found.layout is None and "joins several vectors" in found.reason


def test_nothing_is_divided_by_zero() -> None:
    pool = Pool("mean")
    pool.add(mx.zeros((3, 4)))
    assert pool.vector().tolist() == [0.0] * 4
