"""A section's input, probe questions, and distances of answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import attrs

from trouper.protocol.kv import KvLayout
from trouper_lab.certify.certificate import Json, SectionResult
from trouper_lab.certify.processes import CutShort, program_rows
from trouper_lab.certify.server_runs import ServerRun, ServerStarter
from trouper_lab.load import VOCABULARY, random_words

NEAR_TIE_FACTOR, MIN_NEAR_TIE = 4.0, 1e-3
"""Near ties: leads up to MIN_NEAR_TIE, or this factor times mlx-lm's own change."""

NO_VARIABLES: Mapping[str, str] = {}


MARGIN_S = 1.5


class NotApplicable(Exception):
    """The message says why."""


class NothingShown(Exception):
    """The section's subject, such as a preemption, in the message."""


@attrs.define(eq=False, kw_only=True)
class SectionRun:
    """report: gets the part done, 0 to 1, and next measurement."""

    quick: bool
    scratch: Path
    starter: ServerStarter
    device: Json
    model: Json
    kv: KvLayout
    result: SectionResult
    report: Callable[[float, str], None]
    current: str = ""
    not_reached: list[str] = attrs.field(factory=list)

    def show(self, part: float, text: str) -> None:
        self.current = text
        self.report(part, text)

    @property
    def left_s(self) -> float:
        return self.starter.children.left_s

    @property
    def on_cpu(self) -> bool:
        return bool(self.device.get("computes_on") == "CPU")

    @property
    def exact(self) -> bool:
        """Whether equal tokens are promised: in full float32."""
        return bool(self.model.get("arithmetic") == "float32")

    @property
    def near_tie(self) -> float:
        """Lead, in log-probability, within which kernels may differ."""
        changes = [
            value
            for value in self.model.get("lead_changes", {}).values()
            if isinstance(value, float)
        ]
        return max([MIN_NEAR_TIE, *(NEAR_TIE_FACTOR * value for value in changes)])

    def rows(
        self,
        program: str,
        given: Json,
        *,
        part: float = 1.0,
        rest: str = "",
        more: Mapping[str, str] = NO_VARIABLES,
    ) -> Iterator[Json]:
        """Yield an engine program's rows within `part` of the time, else miss `rest`. `more`:
        environment variables."""
        try:
            yield from program_rows(
                self.starter.children, program, given, part * self.left_s - MARGIN_S, **more
            )
        except CutShort:
            self.not_reached += [rest] if rest else []

    def folder(self, name: str) -> Path:
        path = self.scratch / name
        path.mkdir()
        return path


Section = Callable[[SectionRun], None]


def first_line(error: BaseException) -> str:
    """Of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


LENGTHS = (3, 8, 20, 40, 70, 100, 130, 160)
"""Words of prompts around blocks, chunks and windows."""


@attrs.frozen
class ProbeQuestion:
    """Greedy without a seed."""

    prompt: str | tuple[int, ...]
    tokens: int
    seed: int | None = None

    def body(self, salt: str, **more: Any) -> Json:
        """A new `salt` starts cold."""
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
    """With leads of the best token over the second."""

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

    @classmethod
    def of_chat(cls, body: Json) -> ProbeAnswer:
        choice, usage = body["choices"][0], body["usage"]
        steps = choice["logprobs"]["content"]
        return cls(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(step["logprob"] for step in steps),
            leads=tuple(_lead_of(step["top_logprobs"]) for step in steps),
            cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
            prompt_tokens=int(usage["prompt_tokens"]),
        )


def _lead(step: dict[str, float]) -> float:
    """The best token's lead; 0 for equal texts."""
    best = sorted(step.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


def _lead_of(top: Sequence[Json]) -> float:
    return _lead({str(rank): float(one["logprob"]) for rank, one in enumerate(top)})


@attrs.frozen(kw_only=True)
class Comparison:
    """partings: leads of other tokens, by departing answer."""

    answers: int
    partings: tuple[float, ...]
    logprob_change: float
    """Largest change of a log-probability before departure."""

    @property
    def equal(self) -> int:
        return self.answers - len(self.partings)

    def within(self, near_tie: float) -> bool:
        """Whether answers depart at near ties alone."""
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


def questions(count: int, tokens: int, *, seeded: bool = False) -> list[ProbeQuestion]:
    """Questions of different lengths, constant between runs."""
    dice = random.Random(11)
    return [
        ProbeQuestion(
            f"{index}. Tell a story of " + " ".join(dice.choices(VOCABULARY, k=length)),
            tokens,
            100 + index if seeded else None,
        )
        for index, length in enumerate(islice(cycle(LENGTHS), count))
    ]


def probe_question(
    server: ServerRun, index: int, prompt_tokens: int, answer_tokens: int
) -> ProbeQuestion:
    """A question of exactly `prompt_tokens` tokens; indices share no prefix."""
    text = f"{index}. Tell a story of {random_words(prompt_tokens)}"
    tokens = server.post("/tokenize", {"prompt": text})["tokens"]
    return ProbeQuestion(tuple(tokens[:prompt_tokens]), answer_tokens)
