"""Parameters that leave a row no token to choose: it ends, and is told which parameters they are.
It had token 0 for ever."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest

from tests.engine.driver import Driver, Request
from tests.engine.oracle import Foretelling
from tests.engine.test_exactness import PROMPTS
from tests.engine.test_grammar import tiny
from tests.families import END, save
from tests.family_configs import VOCABULARY
from tests.real.serving import hear, running
from trouper import Generate, RequestFailed, Sampling, TokenPrompt, run_runtime
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar

NOTHING = tuple((token, -math.inf) for token in range(VOCABULARY))
ONLY_END = tuple((token, bias) for token, bias in NOTHING if token != END)
NO_A = tuple(
    (token, bias) for token, bias in NOTHING if tiny().tokenizer.token_bytes(token).startswith(b"a")
)
A = Grammar("regex", "a+", param="guided_regex")
NONE_BUT_END = {
    "end": lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) == END, logits, -mx.inf)
}


def engine(**more: Any) -> StepEngine:
    return StepEngine(
        tiny().model,
        VOCABULARY,
        grammars=tiny().tokenizer.grammars,
        processors=NONE_BUT_END,
        **more,
    )


CASES = [
    pytest.param({"logit_bias": NOTHING}, {}, "by logit_bias", id="bias"),
    pytest.param(
        {"logit_bias": ONLY_END}, {"min_tokens": 3}, "by logit_bias and min_tokens", id="min_tokens"
    ),
    pytest.param(
        {"logit_bias": NO_A}, {"grammar": A}, "by logit_bias and guided_regex", id="grammar"
    ),
    pytest.param(
        {},
        {"logits_processors": ("end",), "grammar": A},
        "by logits_processors and guided_regex",
        id="processor",
    ),
    pytest.param(
        {"logit_bias": NOTHING},
        {"thinking_token_budget": 0},
        "by logit_bias and thinking_token_budget",
        id="thinking",
    ),
]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("sampling", "fields", "_told"), CASES)
def test_the_row_ends_alone(
    sampling: dict[str, Any], fields: dict[str, Any], _told: str, temperature: float
) -> None:
    beside = Request(PROMPTS[1], 6)
    [alone] = Driver(engine()).play([beside])
    row: dict[str, Any] = {
        "processors": fields.get("logits_processors", ()),
        "grammar": fields.get("grammar"),
    }
    more: dict[str, Any] = {"min_tokens": 3, "ends": (END,)} if "min_tokens" in fields else {}
    driver = Driver(engine())
    request = Request(PROMPTS[0], 6, Sampling(temperature=temperature, **sampling), **row, **more)
    rows = driver.play([request, beside])
    first = next(fault for at, fault in driver.failed if at == rows[0].id)
    assert first.kind == "no_choice" and {at for at, _ in driver.failed} == {rows[0].id}
    assert rows[1].tokens == alone.tokens


def test_rejected_drafts_may_leave_none() -> None:
    """Drafts change the duration of an answer, never whether there is one: what would come behind a
    wrong draft means nothing."""
    [b] = [token for token in range(VOCABULARY) if tiny().tokenizer.token_bytes(token) == b"b"]
    grammar = Grammar("regex", "[cd]{12}|[cd]*ba")
    plain = Request(
        PROMPTS[0], 9, Sampling(temperature=0, logit_bias=(*NO_A, (b, -100.0))), grammar=grammar
    )
    [row] = Driver(engine()).play([plain])
    answers = {tuple(PROMPTS[0]): [*row.tokens[:2], b, *row.tokens[3:]]}
    drafting = Foretelling(tokens=4, answers=answers, dice=random.Random(0))
    driver = Driver(engine(drafting=drafting), allow=lambda _: 4)
    [drafted] = driver.play([attrs.evolve(plain, drafts=True)])
    assert driver.drafted and (drafted.tokens[:9], driver.failed) == (row.tokens, [])


class TestRuntime:
    @pytest.mark.parametrize(("sampling", "fields", "told"), CASES)
    async def test_the_parameters_are_named(
        self, tmp_path: Path, sampling: dict[str, Any], fields: dict[str, Any], told: str
    ) -> None:
        path = str(save("llama", tmp_path))
        request = Generate(
            request_id="1",
            prompt=TokenPrompt(tuple(PROMPTS[0])),
            sampling=Sampling(temperature=0, **sampling),
            max_tokens=12,
            **fields,
        )
        async with running(
            path, start=partial(run_runtime, logits_processors=NONE_BUT_END)
        ) as runtime:
            with await runtime.submit(request) as answer, pytest.raises(RequestFailed) as failed:
                await hear(answer)
        problem = failed.value.problem
        assert (problem.status, problem.code) == (400, "no_choice") and problem.message.endswith(
            told
        )
        assert problem.param is not None and told.startswith(f"by {problem.param}")
