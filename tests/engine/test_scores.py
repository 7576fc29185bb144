"""Log-probabilities of a prompt's own tokens, computed chunk by chunk beside other rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import CLOSE
from tests.engine.naive import softmax
from tests.engine.test_exactness import engine_of, model_of
from tests.families import prompts
from trouper.engine.prefill import SCORE_TOKENS
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling

LONG = 2 * SCORE_TOKENS + 40
SCORED, BESIDE = RowId(1), RowId(2)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2"])
@pytest.mark.parametrize(
    "chunks", [(LONG,), (1, SCORE_TOKENS, 100, LONG - SCORE_TOKENS - 101)], ids=["whole", "chunks"]
)
def test_each_token_but_the_first_has_its_own(name: str, chunks: tuple[int, ...]) -> None:
    """In order, each after all tokens before it: as one pass of the model over the prompt has
    them."""
    prompt, other = prompts((LONG, 30))
    engine, scores = engine_of(name), list[tuple[RowId, TokenLogprobs]]()
    greedy = Sampling(temperature=0, logit_bias=((5, 30.0),))
    admits = (
        Admit(SCORED, encoded(prompt), greedy, prompt_logprobs=3),
        Admit(BESIDE, encoded(other), greedy),
    )
    for step, size in enumerate(chunks):
        beside = (Chunk(BESIDE, 30),) if step == 0 else ()
        decode = (BESIDE,) if step else ()
        plan = Plan(
            step,
            admit=admits if step == 0 else (),
            decode=decode,
            prefill=(Chunk(SCORED, size), *beside),
        )
        scores += engine.collect(engine.launch(plan)).prompt_logprobs
    logits = np.array(model_of(name)(mx.array([prompt]))[0].astype(mx.float32), np.float64)
    assert [row for row, _ in scores] == [SCORED] * (LONG - 1)
    assert [score.token for _, score in scores] == [*prompt[1:]]
    for (_, score), row in zip(scores, logits, strict=False):
        exact = np.log(softmax(row))
        assert score.logprob == pytest.approx(exact[score.token], abs=max(2e-3, CLOSE))
        np.testing.assert_allclose(
            [value for _, value in score.top], -np.sort(-exact)[:3], atol=max(2e-3, CLOSE)
        )


def encoded(prompt: list[int]) -> bytes:
    return np.array(prompt, "<i4").tobytes()
