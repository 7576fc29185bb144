"""Questions that are repeated in other company, and how far two answers to the same question are
apart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs

from trouper.cli.commands.bench.load import VOCABULARY
from trouper.cli.commands.certify.certificate import Json

LENGTHS = (3, 8, 20, 40, 70, 100, 130, 160)
"""Words of the prompts: shorter and longer than blocks, chunks and windows."""


@attrs.frozen
class ProbeQuestion:
    """One request; its prompt is text, or ids of tokens. Without a seed it is greedy."""

    prompt: str | tuple[int, ...]
    tokens: int
    seed: int | None = None

    def body(self, salt: str, **more: Any) -> Json:
        """Return the request. `salt`: of the prefix cache; a new one starts cold. Two
        log-probabilities show how sure the model is."""
        sampling = (
            {"temperature": 0} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        )
        body: Json = {
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "cache_salt": salt,
            **sampling,
            **more,
        }
        return body


@attrs.frozen
class ProbeAnswer:
    """An answer: ids of its tokens, their log-probabilities, the lead of the best token over the
    second, and how much was cached."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]
    cached_tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, body: Json) -> ProbeAnswer:
        choice, usage = body["choices"][0], body["usage"]
        found = choice["logprobs"]
        return cls(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(found["token_logprobs"]),
            leads=tuple(map(_lead, found["top_logprobs"])),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
            prompt_tokens=int(usage["prompt_tokens"]),
        )


def _lead(step: dict[str, float]) -> float:
    """Return the lead of the best over the second; 0 where both have the same text, so that one
    entry is left."""
    best = sorted(step.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


@attrs.frozen(kw_only=True)
class Comparison:
    """Answers against the same questions alone. partings: for each answer that departs, the lead of
    the token that it did not take."""

    answers: int
    partings: tuple[float, ...]
    logprob_change: float
    """Largest change of a log-probability before answers depart."""

    @property
    def equal(self) -> int:
        return self.answers - len(self.partings)

    def within(self, near_tie: float) -> bool:
        """Whether answers depart only where the model hardly prefers a token."""
        return all(lead <= near_tie for lead in self.partings)

    def text(self, near_tie: float) -> str:
        text = (
            f"{self.equal} of {self.answers} answers equal; log-probabilities differ by at most "
            f"{self.logprob_change:.2g}"
        )
        if not self.partings:
            return text
        return (
            f"{text}; others part where the best token leads by at most {max(self.partings):.2g} "
            f"(a near tie here: {near_tie:.2g})"
        )


def compared(alone: Sequence[ProbeAnswer], others: Sequence[ProbeAnswer]) -> Comparison:
    """Compare pairs in order."""
    partings, changes = [], [0.0]
    for first, other in zip(alone, others, strict=True):
        pairs = zip(first.tokens, other.tokens, strict=False)
        parting = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
        same = min(len(first.tokens), len(other.tokens)) if parting is None else parting
        if parting is not None:
            partings.append(first.leads[parting])
        elif len(first.tokens) != len(other.tokens):
            partings.append(float("inf"))
        changes += [
            abs(a - b) for a, b in zip(first.logprobs[:same], other.logprobs[:same], strict=True)
        ]
    return Comparison(answers=len(alone), partings=tuple(partings), logprob_change=max(changes))


def questions(
    count: int, tokens: int, *, seeded: bool = False, longest: int = LENGTHS[-1]
) -> list[ProbeQuestion]:
    """Make questions of different lengths, the same in every run."""
    dice = random.Random(11)
    lengths = [min(LENGTHS[index % len(LENGTHS)], longest) for index in range(count)]
    return [
        ProbeQuestion(
            f"{index}. Tell a story of " + " ".join(dice.choices(VOCABULARY, k=length)),
            tokens,
            100 + index if seeded else None,
        )
        for index, length in enumerate(lengths)
    ]
