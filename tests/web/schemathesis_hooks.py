"""What schemathesis is told besides the document. It loads this by SCHEMATHESIS_HOOKS.

All its checks run. What is allowed: a valid body may be refused with one of the codes that the
document itself lists as beyond any schema. The rule that of the many ways to ask for a structure
one may be given multiplies with the other rules beyond what the generator can spell out; so it is
taken out of what is generated from, and bodies are made to follow it afterwards.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.openapi.checks import AllowHeaderMismatch, RejectedPositiveData

from tests.web.exact_answers import without_room
from trouper.web.http.openapi import BEYOND_SCHEMA
from trouper.web.openai.schemas import NO_STRUCTURE, ONE_STRUCTURE

MODEL_COMMANDS = frozenset(
    f"/v1/models/{command}" for command in ("load", "unload", "sleep", "wake", "pin")
)

schemathesis.openapi.format("json-object", st.sampled_from(["{}", '{"a":1}', '{"type":"object"}']))


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    raw_schema["components"] = without_room(raw_schema)["components"]
    removed = 0
    for schema in raw_schema["components"]["schemas"].values():
        # The document has its rules in `then`, for other generators.
        rules = schema.get("then", {}).get("allOf", [])
        if ONE_STRUCTURE in rules:
            rules.remove(ONE_STRUCTURE)
            removed += 1
    assert removed


@schemathesis.hook
def map_case(
    context: schemathesis.HookContext, case: schemathesis.Case[Any]
) -> schemathesis.Case[Any]:
    assert case.meta is not None
    if isinstance(case.body, dict) and case.meta.generation.mode.is_positive:
        for name in [name for name in NO_STRUCTURE if case.body.get(name) is not None][1:]:
            del case.body[name]
    return case


def names_a_model(failure: AllowHeaderMismatch, case: schemathesis.Case[Any]) -> bool:
    """Whether all that OPTIONS names beyond the path's own description is a GET, which asks for a
    model called `load`: the document has it as /v1/models/{model}."""
    beyond = failure.undocumented_methods == ["GET"] and not failure.missing_methods
    return beyond and case.path in MODEL_COMMANDS


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext,
    failure: Any,
    case: schemathesis.Case[Any],
    response: schemathesis.Response,
) -> bool:
    if isinstance(failure, AllowHeaderMismatch):
        return not names_a_model(failure, case)
    if not isinstance(failure, RejectedPositiveData) or response.status_code != 400:
        return True
    error = json.loads(response.content)["error"]
    return (error.get("code") or error.get("details", {}).get("error_code")) not in BEYOND_SCHEMA
