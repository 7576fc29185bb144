"""Noise that follows schemas: a random model at temperature 1, rows of other schemas beside it, and
every answer that ends is valid.

TROUPER_LONG_TESTS=1 in the environment takes 200 schemas, else 12.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from jsonschema import Draft202012Validator

from tests.families import save
from tests.real.schemas import Drawn, Schema
from tests.real.serving import hear, running
from trouper import Generate, RequestFailed, Sampling, TokenPrompt
from trouper.protocol.grammar import Grammar
from trouper.protocol.model import Tokenizer

SCHEMAS = 200 if os.environ.get("TROUPER_LONG_TESTS") else 12
TOKENS = 400
MOST_REFUSED = 0.1
LEAST_ENDED = 0.8


def wish(schema: Schema, seed: int, words: Tokenizer) -> Generate:
    """A random model closes a string once in hundreds of tokens, so closing is made likelier, and
    blanks less so."""
    closing = tuple((token, 4.0) for token in words.encode('"]}'))
    blanks = tuple((words.encode(blank)[0], -4.0) for blank in " \t\r\n")
    return Generate(
        request_id=f"schema {seed}",
        prompt=TokenPrompt((seed % 400 + 1, 7, 9)),
        sampling=Sampling(temperature=1, seed=seed, logit_bias=(*closing, *blanks)),
        max_tokens=TOKENS,
        grammar=Grammar("json_schema", json.dumps(schema)),
    )


async def test_every_answer_that_ends_is_valid(tmp_path: Path) -> None:
    schemas = [Drawn(seed).whole() for seed in range(SCHEMAS)]
    answers, refused, ended = [], [], 0
    async with running(str(save("llama", tmp_path)), max_queue_size=SCHEMAS) as runtime:
        for seed, schema in enumerate(schemas):
            Draft202012Validator.check_schema(schema)
            try:
                answers.append(
                    (schema, await runtime.submit(wish(schema, seed, runtime.tokenizer)))
                )
            except RequestFailed as failed:
                refused.append(failed.problem)
        for schema, answer in answers:
            heard = await hear(answer)
            if heard.reason == "stop":
                Draft202012Validator(schema).validate(json.loads(heard.text))
                ended += 1
    assert all(problem.status == 400 and problem.code == "invalid_grammar" for problem in refused)
    assert len(refused) <= MOST_REFUSED * SCHEMAS, [problem.message for problem in refused]
    assert ended >= LEAST_ENDED * len(answers), f"{ended} of {len(answers)}"
