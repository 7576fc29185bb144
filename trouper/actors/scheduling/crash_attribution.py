"""Attribution of crashes to requests. Pure."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

import attrs

from trouper.actors.scheduling.prepared_request import PreparedRequest

# All rows of a crashed step become *suspects*. After the restart each suspect is *tried*: alone
# until past the point of the crash. A crash in a trial *convicts*: the content is refused for a
# while, and the others are cleared. A crash that comes only in company isolates more rows at each
# repetition, hence ends.

QUARANTINE_S = 3600.0
MAX_CONTENTS = 1024
SUSPICION_S = 600.0
"""Time for which a crashed step's content stays suspect, even once answered."""
APART_S = 60.0
"""Time for which all rows first run alone, doubled each further time."""
MAX_APART_S = 3600.0


@attrs.frozen
class Cause:
    """Type of an exception and the innermost code location."""

    # No message: it may quote a prompt, and differs between crashes of one cause.

    error: str
    location: str

    def __str__(self) -> str:
        return f"{self.error} at {self.location}"


def cause_of(error: BaseException) -> Cause:
    frames = traceback.extract_tb(error.__traceback__)
    location = (
        f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        if frames
        else "an unknown place"
    )
    return Cause(type(error).__name__, location)


Content = NewType("Content", bytes)
"""Digest of prompt tokens and computation parameters."""


@attrs.define(eq=False)
class Standing:
    content: Content
    draws: bytes
    """Digest of everything else that decides the output tokens."""
    suspect: bool = False
    alone: bool = False
    passes_at: int = 1

    @property
    def isolated(self) -> bool:
        return self.suspect or self.alone


@attrs.frozen
class Involved:
    standing: Standing
    fresh: bool
    """Whether the step had prefill or the first tokens of the row."""
    output_tokens: int
    planned_tokens: int
    """Value of `output_tokens` after the crashed plans."""


@attrs.frozen
class Verdict:
    counts: bool = True
    """Whether the crash counts towards the limit of restarts."""
    suspects: frozenset[Content] = frozenset()
    convicted: Content | None = None
    """Crashes with this suspect are explained and no longer count."""


UNEXPLAINED = Verdict()


class Contents:
    def __init__(self, ttl_s: float, max_size: int = MAX_CONTENTS) -> None:
        self._ttl_s, self._max_size = ttl_s, max_size
        self._until: dict[Content, float] = {}

    def add(self, content: Content, now: float) -> None:
        self._until.pop(content, None)
        self._until[content] = now + self._ttl_s
        while len(self._until) > self._max_size:
            del self._until[next(iter(self._until))]

    def discard(self, content: Content) -> None:
        self._until.pop(content, None)

    def has(self, content: Content, now: float) -> bool:
        return self._until.get(content, now) > now

    def left_s(self, content: Content, now: float) -> float:
        return max(0.0, self._until.get(content, now) - now)

    def count(self, now: float) -> int:
        while self._until and (oldest := next(iter(self._until))) and self._until[oldest] <= now:
            del self._until[oldest]
        return len(self._until)


@attrs.frozen
class Trial:
    """Trial of a crash's suspects, without a conviction yet."""

    cause: Cause
    suspects: tuple[Standing, ...]
    fresh: frozenset[Content]


@attrs.frozen
class InCompany:
    """Cause of a crash of rows that have each passed alone since."""

    fresh: frozenset[Content]
    until: float
    remedied: bool = False
    apart: bool = False


class Blame:
    """Attribution for one model, over restarts of the engine."""

    def __init__(self) -> None:
        self.quarantine = Contents(QUARANTINE_S)
        self._suspected = Contents(SUSPICION_S)
        self._alone = Contents(QUARANTINE_S)
        self._trial: Trial | None = None
        self._in_company: dict[Cause, InCompany] = {}
        self._apart_until, self._apart_s = -1.0, APART_S
        # Content and draws of the last convicted request, and its number of planned output tokens.
        self._convicted = Content(b""), b"", 0

    # -- requests ---------------------------------------------------------------------------------

    def standing(self, client: PreparedRequest, tokens: bytes, now: float) -> Standing:
        content, draws = digests(client, tokens)
        return Standing(
            content,
            draws,
            suspect=self._suspected.has(content, now),
            alone=self._alone.has(content, now),
        )

    def refuses(self, standing: Standing, now: float) -> bool:
        return self.quarantine.has(standing.content, now)

    def condemns(self, standing: Standing, output_tokens: int, now: float) -> bool:
        # An answer of the same content that is past the point of the crash, or draws other tokens,
        # is innocent.
        if not self.refuses(standing, now):
            return False
        content, draws, position = self._convicted
        return output_tokens == 0 or (
            (standing.content, standing.draws) == (content, draws) and output_tokens <= position
        )

    def passed(self, standing: Standing, now: float) -> None:
        """Acquit a suspect that ran alone beyond the point of the crash, or to the end."""
        standing.suspect = False
        self._suspected.discard(standing.content)
        trial = self._trial
        if trial is not None and not any(one.suspect for one in trial.suspects):
            self._trial = None
            self._note_company(trial, now)

    def apart(self, now: float) -> bool:
        return now < self._apart_until

    # -- crashes ----------------------------------------------------------------------------------

    def crashed(
        self, cause: Cause, involved: Sequence[Involved], now: float, *, certain: bool = False
    ) -> Verdict:
        """Attribute a crash. `certain`: the only row's own token was being handled."""
        if not involved:
            return UNEXPLAINED
        if len(involved) == 1 and (certain or involved[0].standing.suspect):
            return self._convict(involved[0], now)
        known = self._in_company.get(cause)
        if len(involved) > 1 and known is not None and now < known.until:
            return self._set_apart(cause, known, involved, now)
        return self._suspect(cause, involved, now)

    def _convict(self, guilty: Involved, now: float) -> Verdict:
        standing = guilty.standing
        self.quarantine.add(standing.content, now)
        self._convicted = (
            standing.content,
            standing.draws,
            max(guilty.output_tokens, guilty.planned_tokens),
        )
        self._clear(now)
        return Verdict(counts=False, convicted=standing.content)

    def _clear(self, now: float) -> None:
        for other in self._trial.suspects if self._trial is not None else ():
            if not self.refuses(other, now):
                self._suspected.discard(other.content)
            other.suspect = False
        self._trial = None

    def _suspect(self, cause: Cause, involved: Sequence[Involved], now: float) -> Verdict:
        for row in involved:
            row.standing.suspect = True
            row.standing.passes_at = max(row.output_tokens + 1, row.planned_tokens)
            self._suspected.add(row.standing.content, now)
        suspects = tuple(one.standing for one in sorted(involved, key=lambda one: not one.fresh))
        self._trial = Trial(cause, suspects, fresh_of(involved))
        return Verdict(suspects=frozenset(one.content for one in suspects))

    def _note_company(self, trial: Trial, now: float) -> None:
        if len(trial.suspects) > 1:
            self._in_company[trial.cause] = InCompany(trial.fresh, now + SUSPICION_S)
            while len(self._in_company) > MAX_CONTENTS:
                del self._in_company[next(iter(self._in_company))]

    def _set_apart(
        self, cause: Cause, known: InCompany, involved: Sequence[Involved], now: float
    ) -> Verdict:
        both = known.fresh & fresh_of(involved)
        lone = [one for one in involved if one.standing.content in both]
        if lone and len(lone) < len(involved) and not known.remedied:
            for one in lone:
                one.standing.alone = True
                self._alone.add(one.standing.content, now)
        else:
            self._apart_s = min(2 * self._apart_s, MAX_APART_S) if known.apart else APART_S
            self._apart_until = now + self._apart_s
            known = attrs.evolve(known, apart=True)
        until = max(now, self._apart_until) + SUSPICION_S
        self._in_company[cause] = attrs.evolve(known, remedied=True, until=until)
        return Verdict(counts=False)

    def trial_order(self, standings: Iterable[Standing]) -> list[Standing]:
        first = self._trial.suspects if self._trial is not None else ()
        order = {id(one): index for index, one in enumerate(first)}
        return sorted(
            (one for one in standings if one.suspect),
            key=lambda one: order.get(id(one), len(order)),
        )


def fresh_of(involved: Iterable[Involved]) -> frozenset[Content]:
    return frozenset(one.standing.content for one in involved if one.fresh)


def digests(client: PreparedRequest, tokens: bytes) -> tuple[Content, bytes]:
    # A repeated request may draw another seed, so the content has none, but parameters that select
    # other code.
    request, sampling = client.request, client.request.sampling
    kinds = (
        sampling.code_path,
        request.logits_processors,
        request.logprobs,
        request.logprob_tokens,
        request.prompt_logprobs,
        request.embed,
        request.grammar,
        request.min_tokens > 0,
        client.thinking is not None,
        request.adapter,
    )
    digest = blake2b(tokens, digest_size=16)
    digest.update(repr(kinds).encode())
    draws = blake2b(repr((sampling, request.min_tokens, client.thinking)).encode(), digest_size=16)
    return Content(digest.digest()), draws.digest()
