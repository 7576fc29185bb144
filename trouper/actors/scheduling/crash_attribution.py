"""Attribution of crashes to requests: suspects, trials and the quarantine. Pure; the caller passes
the time.

After a crash it is not known which row of the crashed step was the cause, so all of them are
*suspects*, those with new work in it (prefill, first decode) first. After the restart each suspect
is *tried*: its work shares no step with other rows until it is beyond the place of the crash. A
second crash then has one possible cause, which is *convicted*: its content goes into the
quarantine, and the same content is refused until that has expired. All other suspects are cleared
at once, and whoever passes its trial is acquitted.

A crash that happens only in company (everybody has passed alone) must not loop. When it comes
again, the contents that had new work in both crashes run alone for their whole life; if there are
none, or that did not help, all rows do so for a while. So each repetition either convicts, or
isolates more than the one before: there are finitely many.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NewType

import attrs

from trouper.actors.scheduling.prepared_request import PreparedRequest


@attrs.frozen
class Cause:
    """Type of an exception and the innermost location in the code. The message is left out, since
    it may quote a prompt and differs between crashes of the same cause."""

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
"""Digest of a prompt's tokens and of what shapes its computation: equal for a request that is sent
again."""
QUARANTINE_S = 3600.0
"""Time for which a convicted content is refused."""
MAX_CONTENTS = 1024
"""Maximum number of contents in each list; the oldest are forgotten."""
SUSPICION_S = 600.0
"""Time for which a content of a crashed step is remembered as a suspect, also when its answer is
complete already. It is tried when a request with it arrives."""
APART_S = 60.0
"""Time for which all rows run alone the first time. Each further time takes twice as long."""
MAX_APART_S = 3600.0
"""Upper bound of the time for which all rows run alone."""


@attrs.define(eq=False)
class Standing:
    """State of one request in the attribution of crashes. It stays with the request over
    restarts."""

    content: Content
    draws: bytes
    """Digest of what else the output tokens follow from: equal contents with equal draws have the
    same output."""
    suspect: bool = False
    """The request was in a crashed step: its work shares no step with others until it has
    passed."""
    alone: bool = False
    """The request shares no step for its whole life."""
    passes_at: int = 1
    """Output tokens with which a suspect has passed its trial."""

    @property
    def isolated(self) -> bool:
        return self.suspect or self.alone


@attrs.frozen
class Involved:
    """A row of the crashed step."""

    standing: Standing
    fresh: bool
    """The row had new work in that step: its prefill, or its first tokens."""
    output_tokens: int
    """Number of output tokens that were answered."""
    planned_tokens: int
    """Value of `output_tokens` after the crashed plans."""


@attrs.frozen
class Verdict:
    """Effect of a crash on the limit of restarts."""

    counts: bool = True
    """Whether the crash counts towards the limit. It does not if it was explained, or if rows were
    isolated in a way that was not tried before."""
    suspects: frozenset[Content] = frozenset()
    convicted: Content | None = None
    """Crashes with this content among their suspects are explained, and do not count any more."""


UNEXPLAINED = Verdict()


class Contents:
    """Contents that are remembered for a time. The number is bounded, and the oldest are forgotten
    first."""

    def __init__(self, ttl_s: float, max_size: int = MAX_CONTENTS) -> None:
        self._ttl_s, self._max_size = ttl_s, max_size
        self._until: dict[Content, float] = {}

    def add(self, content: Content, now: float) -> None:
        """Remember a content from now on; for a known content the time starts again."""
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
        """Number of remembered contents; expired ones are removed here."""
        while self._until and (oldest := next(iter(self._until))) and self._until[oldest] <= now:
            del self._until[oldest]
        return len(self._until)


@attrs.frozen
class Trial:
    """Trial of the suspects of a crash for which no content is convicted yet."""

    cause: Cause
    suspects: tuple[Standing, ...]
    fresh: frozenset[Content]


@attrs.frozen
class InCompany:
    """A cause of a crash of several rows, each of which has since passed alone."""

    fresh: frozenset[Content]
    until: float
    """Time at which the cause is forgotten."""
    remedied: bool = False
    """Rows were isolated for this cause before."""
    apart: bool = False
    """All rows ran alone for this cause before."""


class Blame:
    """Attribution of crashes, which is remembered over restarts of the engine. There is one for
    each model."""

    def __init__(self) -> None:
        self.quarantine = Contents(QUARANTINE_S)
        self._suspected = Contents(SUSPICION_S)
        self._alone = Contents(QUARANTINE_S)
        self._trial: Trial | None = None
        self._in_company: dict[Cause, InCompany] = {}
        self._apart_until, self._apart_s = -1.0, APART_S
        self._convicted = Content(b""), b"", 0
        """Content and draws of the last convicted request, and the number of output tokens that it
        had or was about to have."""

    # -- requests ---------------------------------------------------------------------------------

    def standing(self, client: PreparedRequest, tokens: bytes, now: float) -> Standing:
        """Standing of a new request; `tokens`: the tokens of its prompt."""
        content, draws = digests(client, tokens)
        return Standing(
            content,
            draws,
            suspect=self._suspected.has(content, now),
            alone=self._alone.has(content, now),
        )

    def refuses(self, standing: Standing, now: float) -> bool:
        """Whether the request's content is in the quarantine."""
        return self.quarantine.has(standing.content, now)

    def condemns(self, standing: Standing, output_tokens: int, now: float) -> bool:
        """Whether a request that was carried over a crash is refused. An answer of the same content
        that goes on beyond the place of the crash, or draws other tokens, has shown nothing
        wrong."""
        if not self.refuses(standing, now):
            return False
        content, draws, position = self._convicted
        return output_tokens == 0 or (
            (standing.content, standing.draws) == (content, draws) and output_tokens <= position
        )

    def passed(self, standing: Standing, now: float) -> None:
        """Acquit a suspect that ran alone beyond the place of the crash, or to the end of its
        answer."""
        standing.suspect = False
        self._suspected.discard(standing.content)
        trial = self._trial
        if trial is not None and not any(one.suspect for one in trial.suspects):
            self._trial = None
            self._note_company(trial, now)

    def apart(self, now: float) -> bool:
        """Whether all rows run alone at present."""
        return now < self._apart_until

    # -- crashes ----------------------------------------------------------------------------------

    def crashed(
        self, cause: Cause, involved: Sequence[Involved], now: float, *, certain: bool = False
    ) -> Verdict:
        """Attribute a crash in steps of these rows. `certain`: the crash came while the only row's
        own token was handled."""
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
        """Clear the other suspects, after one was convicted."""
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
        """Suspects in the order of their trials; those that came later last."""
        first = self._trial.suspects if self._trial is not None else ()
        order = {id(one): index for index, one in enumerate(first)}
        return sorted(
            (one for one in standings if one.suspect),
            key=lambda one: order.get(id(one), len(order)),
        )


def fresh_of(involved: Iterable[Involved]) -> frozenset[Content]:
    return frozenset(one.standing.content for one in involved if one.fresh)


def digests(client: PreparedRequest, tokens: bytes) -> tuple[Content, bytes]:
    """Digests (content, draws) of a request. A repeated request may draw another seed, so the seed
    is not part of the content. Parameters that make other code run are."""
    request, sampling = client.request, client.request.sampling
    kinds = (
        sampling.greedy,
        sampling.top_p < 1,
        sampling.top_k > 0,
        sampling.min_p > 0,
        sampling.penalized,
        sampling.typical_p < 1,
        sampling.xtc_probability > 0,
        sampling.dry,
        request.logits_processors,
        bool(sampling.logit_bias),
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
