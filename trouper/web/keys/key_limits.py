"""Requests and tokens a minute of a key, and usage since the server started."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import ceil

import attrs

from trouper.protocol.api_keys import ApiKey, Keys
from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.protocol.record import RequestRecord

WINDOW_S = 60.0
REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"


@attrs.define(eq=False)
class SlidingWindow:
    """An amount held by running requests, or used within the last WINDOW_S."""

    _clock: Callable[[], float]
    _held: int = 0
    _held_since: float = 0.0
    _used: int = 0
    _past: deque[tuple[float, int]] = attrs.field(factory=deque)

    def anew(self) -> SlidingWindow:
        return SlidingWindow(self._clock)

    def taken(self) -> int:
        self._forget(self._clock())
        return self._held + self._used

    def _forget(self, now: float) -> None:
        while self._past and now - self._past[0][0] >= WINDOW_S:
            self._used -= self._past.popleft()[1]

    def hold(self, amount: int) -> None:
        if not self._held:
            self._held_since = self._clock()
        self._held += amount

    def settle(self, held: int, used: int) -> None:
        """Let `held` go; `used` of it counts for WINDOW_S from now on."""
        now = self._clock()
        self._forget(now)
        self._held -= held
        if used:
            self._used += used
            self._past.append((now, used))

    def wait_s(self, amount: int, limit: int) -> float:
        """Return the seconds until `amount` fits, if nothing else is taken; 0: now. If running
        requests decide, as long as some have run without a break: nobody knows their end."""
        over = self.taken() + amount - limit
        if over <= 0:
            return 0.0
        for at, used in self._past:
            over -= used
            if over <= 0:
                return self._left_s(at)
        return self._running_s()

    def reset_s(self) -> float:
        """Return the seconds until nothing counts, as `wait_s`, in constant time."""
        if not self.taken():
            return 0.0
        return self._running_s() if self._held else self._left_s(self._past[-1][0])

    def _running_s(self) -> float:
        return min(max(self._clock() - self._held_since, 1.0), WINDOW_S)

    def _left_s(self, at: float) -> float:
        # Rounded, the sum may be a little more than WINDOW_S after `at`: `Retry-After` would be a
        # second too much.
        return min(max(at + WINDOW_S - self._clock(), 0.001), WINDOW_S)


@attrs.define
class ModelUsage:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@attrs.define(eq=False)
class KeyAccount:
    """One client's windows and usage. `key` is the latest of its name."""

    key: ApiKey
    requests: SlidingWindow
    tokens: SlidingWindow
    usage: dict[str, ModelUsage] = attrs.field(factory=dict)
    refused: Counter[str] = attrs.field(factory=Counter)
    """Requests that were answered 429, by the error's code."""

    def begin(self) -> None:
        """Count a request, before its body is read. Raises `RequestFailed` (429)."""
        limit = self.key.requests_per_minute
        if limit is not None:
            self.require(REQUESTS, self.requests, 1, limit)
        self.requests.settle(0, 1)

    def ask(self, model: str) -> None:
        self.usage.setdefault(model, ModelUsage()).requests += 1

    def reserve(self, model: str, request: RequestTokens | None = None) -> Reservation:
        """Return the reservation of a prompt and an answer. `request`: common to a request's
        reservations."""
        return Reservation(self, model, self.request_tokens() if request is None else request)

    def request_tokens(self) -> RequestTokens:
        return RequestTokens(self.tokens.anew())

    def require(self, name: str, window: SlidingWindow, amount: int, limit: int) -> None:
        if wait_s := window.wait_s(amount, limit):
            message = (
                f"Rate limit reached: the API key {self.key.label!r} may use {limit} "
                f"{name.replace('_', ' ')} ({name}); "
                f"{window.taken()} are used or reserved and {amount} more are asked for: try again "
                f"in {ceil(wait_s)} s"
            )
            problem = Problem(429, message, "rate_limit_error", name, "rate_limit_exceeded")
            raise RequestFailed(attrs.evolve(problem, retry_after_s=ceil(wait_s)))

    def headers(self) -> Iterator[tuple[str, str]]:
        """OpenAI's, with the limits."""
        for name, window, limit in (
            ("requests", self.requests, self.key.requests_per_minute),
            ("tokens", self.tokens, self.key.tokens_per_minute),
        ):
            if limit is not None:
                yield f"x-ratelimit-limit-{name}", str(limit)
                yield f"x-ratelimit-remaining-{name}", str(max(0, limit - window.taken()))
                yield f"x-ratelimit-reset-{name}", f"{window.reset_s():.3f}s"


@attrs.define(eq=False)
class RequestTokens:
    """Tokens that one request holds, or used within the last minute."""

    window: SlidingWindow
    left: int = 1
    """Number of prompts and choices without a reservation."""


# Prompt and longest answer are reserved before a request enters the queue, and count in full while
# the request runs. The tokens used count for another minute.
@attrs.define(eq=False)
class Reservation:
    _account: KeyAccount
    _model: str
    _request: RequestTokens
    _held: int = 0

    def admit(self, prompt_tokens: int, max_tokens: int, named: bool) -> int:
        """Reserve the tokens of a prompt and its answer. Returns the bound of the answer:
        `max_tokens`, or an equal share of the minute if the request named no length and no minute
        could hold `max_tokens`. Raises `RequestFailed`: 429 if this minute has no room, 400 if none
        has."""
        limit = self._account.key.tokens_per_minute
        if limit is None:
            return max_tokens
        others = self._request.window.taken()
        if not named:
            share = (limit - others) // max(1, self._request.left)
            max_tokens = max(1, min(max_tokens, share - prompt_tokens))
        tokens = prompt_tokens + max_tokens
        if others + tokens > limit:
            raise self._never(prompt_tokens, max_tokens, others, limit)
        self._account.require(TOKENS, self._account.tokens, tokens, limit)
        self._account.tokens.hold(tokens)
        self._request.window.hold(tokens)
        self._request.left -= 1
        self._held = tokens
        return max_tokens

    def _never(self, prompt_tokens: int, max_tokens: int, others: int, limit: int) -> RequestFailed:
        addition, remedy = "", "lower max_tokens, or shorten the prompt"
        if others:
            addition = f", beside {others} of the request's other prompts and choices,"
            remedy = "lower max_tokens, or send fewer prompts and choices at a time"
        return bad_request(
            f"{prompt_tokens} tokens of prompt and {max_tokens} of answer{addition} are more than "
            f"the {limit} tokens a minute of the API key "
            f"{self._account.key.label!r} ({TOKENS}): {remedy}",
            "max_tokens",
            "tokens_per_minute_exceeded",
        )

    def end(self, record: RequestRecord) -> None:
        """Correct the reservation to the tokens used. Called once."""
        # Refused, or left the queue: nothing was computed without a row.
        if record.admitted_at is None:
            self._account.tokens.settle(self._held, 0)
            self._request.window.settle(self._held, 0)
            return
        used = record.prompt_tokens + record.generated_tokens
        self._request.window.settle(self._held, used)
        self._account.tokens.settle(self._held, used)
        usage = self._account.usage.setdefault(self._model, ModelUsage())
        usage.prompt_tokens += record.prompt_tokens
        usage.cached_tokens += record.cached_tokens
        usage.completion_tokens += record.generated_tokens


class KeyAccounts:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, KeyAccount] = {}

    def of(self, key: ApiKey) -> KeyAccount:
        account = self._accounts.get(key.identity)
        if account is None:
            account = KeyAccount(key, SlidingWindow(self._clock), SlidingWindow(self._clock))
            self._accounts[key.identity] = account
        account.key = key
        return account

    def listed(self, keys: Keys) -> list[KeyAccount]:
        """Return the accounts of these keys, each client once, and drop those of removed keys."""
        # Labels are updated: a key may have moved in its file.
        present = {key.identity: key for key in keys.all()}
        self._accounts = {
            name: account for name, account in self._accounts.items() if name in present
        }
        for name, account in self._accounts.items():
            account.key = present[name]
        return [self._accounts[name] for name in present if name in self._accounts]
