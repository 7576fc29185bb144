"""A proposer that knows the answer, and is wrong when dice say so: drafts of which any number may
be right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from trouper.engine.spec_decode.prompt_lookup import Drafting, RowProposer


@attrs.define
class Oracle:
    """Of one row. `answer`: what it will say. `wrong`: whether every token of every draft is
    another."""

    answer: Sequence[int]
    dice: random.Random
    vocabulary: int
    wrong: bool = False
    said: int = 0

    @property
    def matched(self) -> int:
        return self.said

    def append(self, tokens: Sequence[int]) -> None:
        self.said += len(tokens)

    def draft(self, most: int) -> list[int]:
        """Shorter now and then; from some place on wrong, or right to its end."""
        right = list(self.answer[self.said : self.said + self.dice.randint(0, most)])
        wrong = self.dice.randint(0, 2 * len(right))
        return [
            token
            if place != wrong and not self.wrong
            else (token + self.dice.randrange(1, self.vocabulary)) % self.vocabulary
            for place, token in enumerate(right)
        ]


@attrs.frozen
class Foretelling(Drafting):
    """Oracles for prompts whose answers are known; the others draft nothing of their own."""

    answers: Mapping[tuple[int, ...], Sequence[int]] = attrs.field(factory=dict)
    dice: random.Random = attrs.field(factory=random.Random)
    vocabulary: int = 512
    wrong: bool = False
    """See `Oracle`."""

    def proposer(self, prompt: Sequence[int]) -> RowProposer:
        return Oracle(self.answers.get(tuple(prompt), ()), self.dice, self.vocabulary, self.wrong)
