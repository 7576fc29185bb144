"""Choices of one request, on their way to other ranks."""

from __future__ import annotations

from trouper import Generate, Sampling, TokenPrompt
from trouper.protocol.plans import Admit, Plan, RowId
from trouper.protocol.wire import encode
from trouper.web.openai.parameters import choices_of


def test_seeds_of_all_choices_fit_into_a_message() -> None:
    """A larger one ended the whole group of ranks."""
    asked = Generate(
        request_id="", prompt=TokenPrompt((1,)), sampling=Sampling(seed=2**63), max_tokens=1
    )
    admits = tuple(
        Admit(RowId(place), b"", one.sampling) for place, one in enumerate(choices_of(asked, 20))
    )
    assert encode(Plan(0, admit=admits))
