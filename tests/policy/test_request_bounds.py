"""What a program may ask for: each value that would crash an actor or the engine, or mean something
else, is refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import attrs
import numpy as np
import pytest

from trouper import (
    Generate,
    InfillPrompt,
    RequestFailed,
    Sampling,
    TextPrompt,
    Timeouts,
    TokenPrompt,
)
from trouper.engine.sampling.sampler import CANDIDATES
from trouper.protocol.request_bounds import MAX_LOGPROBS, OF_REQUEST, OF_SAMPLING, check_bounds
from trouper.protocol.requests import BATCH_PRIORITY, UNBOUNDED

NAN = float("nan")


def request(**more: Any) -> Generate:
    sampling = {name: more.pop(name) for name in tuple(more) if name in attrs.fields_dict(Sampling)}
    return Generate(
        **{
            "request_id": "1",
            "prompt": TokenPrompt((1, 2)),
            "sampling": Sampling(**sampling),
            **more,
        }
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt": TextPrompt("")},
        {"prompt": TokenPrompt((np.int32(3), True, 4))},  # type: ignore[arg-type]
        {"prompt": InfillPrompt((1, 2), "b")},
        {"max_tokens": UNBOUNDED, "as_room_allows": True, "priority": BATCH_PRIORITY},
        {"seed": -(10**400), "temperature": 0, "top_p": 0, "repetition_penalty": 100},
        {
            "stop": ["a"],
            "stop_token_ids": [3],
            "logprobs": 0,
            "prompt_logprobs": 0,
            "thinking_token_budget": 0,
        },
        {"logit_bias": ((5, -float("inf")), [6, 1])},
        {
            "timeouts": Timeouts(queue_s=0, request_s=1.5),
            "speculation": "off",
            "dry_penalty_last_n": -1,
        },
    ],
)
def test_what_has_a_meaning_is_let_in(more: dict[str, Any]) -> None:
    check_bounds(request(**more))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "hello"),
        ("prompt", None),
        ("prompt", TokenPrompt((1, 2.0))),  # type: ignore[arg-type]
        ("prompt", TokenPrompt((1, NAN))),  # type: ignore[arg-type]
        ("prompt", TokenPrompt(("a",))),  # type: ignore[arg-type]
        ("prompt", TokenPrompt(None)),  # type: ignore[arg-type]
        ("prompt", TokenPrompt("12")),  # type: ignore[arg-type]
        ("prompt", InfillPrompt((1, 2.5), "b")),  # type: ignore[arg-type]
        ("sampling", None),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 3.0),
        ("max_tokens", "3"),
        ("min_tokens", None),
        ("priority", "high"),
        ("priority", BATCH_PRIORITY + 1),
        ("logprobs", -1),
        ("logprobs", 65),
        ("prompt_logprobs", 65),
        ("thinking_token_budget", -1),
        ("temperature", None),
        ("temperature", "0"),
        ("temperature", NAN),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("top_p", 2),
        ("top_k", 2**40),
        ("top_k", 2.5),
        ("repetition_penalty", 0),
        ("seed", None),
        ("seed", 0.5),
        ("dry_allowed_length", 0),
        ("dry_sequence_breakers", "ab"),
        ("stop", "abc"),
        ("stop", (5,)),
        ("stop", ("a", "")),
        ("stop", None),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {1: 2.0}),
        ("logit_bias", ((1, NAN),)),
        ("logit_bias", (("1", 2.0),)),
        ("logits_processors", "one"),
        ("cache_salt", None),
        ("grammar", "root ::= x"),
        ("speculation", "much"),
        ("timeouts", 5),
    ],
)
def test_what_has_none_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestFailed) as failed:
        check_bounds(request(**{name: value}))
    assert (failed.value.problem.status, failed.value.problem.param) == (400, name)
    assert failed.value.problem.message.startswith(f"{name} must ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 0, "must be at least 1, not 0"),
        ("max_tokens", 2**63, "must be at least 1 and at most 9223372036854775807, not 2**63"),
        ("temperature", -1, "must be at least 0, not -1"),
        ("presence_penalty", NAN, "must be a finite number, not nan"),
        ("top_p", 2, "must be at least 0 and at most 1, not 2"),
    ],
)
def test_a_bound_that_nobody_reaches_is_not_named(name: str, value: float, message: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        check_bounds(request(**{name: value}))
    assert failed.value.problem.message == f"{name} {message}".replace("2**63", str(2**63))


@pytest.mark.parametrize("value", [-1.0, NAN, "1"])
def test_a_time_limit_is_a_number(value: object) -> None:
    for limit in attrs.fields_dict(Timeouts):
        with pytest.raises(RequestFailed) as failed:
            check_bounds(request(timeouts=Timeouts(**{limit: value})))  # type: ignore[arg-type]
        assert failed.value.problem.param == limit


def test_as_many_log_probabilities_may_be_requested_as_are_computed() -> None:
    check_bounds(request(logprobs=CANDIDATES, prompt_logprobs=CANDIDATES))
    assert MAX_LOGPROBS == CANDIDATES


def test_every_number_has_bounds() -> None:
    numbers = (int, float, int | None)
    assert sorted(OF_REQUEST) == sorted(
        name for name, kind in get_type_hints(Generate).items() if kind in numbers
    )
    assert sorted(OF_SAMPLING) == sorted(
        name for name, kind in get_type_hints(Sampling).items() if kind in numbers
    )
