"""Shares of the event loop, between tenants with requests in progress."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import perf_counter
from types import coroutine
from typing import Any, TypeVar

import attrs
import trio

T = TypeVar("T")
SHARE = 0.1
"""One tenant's part of the event loop's time beside others."""
BURST_S = 0.05
MAX_DEBT_S = 0.5
MIN_WAIT_S = 0.001  # Shortest wait: a clock may not advance by less.
WEIGHT = 0.2
"""Weight of the last request in the next one's expected time."""


@attrs.define(eq=False)
class Account:
    """A tenant's requests in progress, and the debt in seconds of the event loop."""

    at: float
    in_progress: int = 0
    debt_s: float = 0.0
    expected_s: float = 0.0
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Held by the next request: a tenant's requests begin in order."""

    def owed(self, now: float) -> float:
        self.debt_s = max(0.0, self.debt_s - (now - self.at) * SHARE)
        self.at = now
        return self.debt_s

    def charge(self, seconds: float, now: float) -> None:
        self.debt_s = min(max(0.0, self.owed(now) + seconds), MAX_DEBT_S)


@attrs.define(eq=False)
class Meter:
    spent_s: float = 0.0
    since: float | None = None
    """Time since which the request has the event loop; None while waiting."""
    is_open: bool = True
    account: Account | None = None
    prepaid_s: float = 0.0

    def pause(self) -> None:
        """Count the time since the request has the event loop."""
        if self.since is not None:
            if self.is_open:
                self.spent_s += perf_counter() - self.since
            self.since = None


# A request's time before a model is asked is the tenant's debt, paid off at `SHARE` of the passing
# time. While other tenants have requests, a tenant in debt begins requests at that pace.
class LoopShares:
    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._in_progress = 0

    async def begin(self, tenant: str, meter: Meter, *, waits: bool) -> None:
        """Count a tenant's request, after a turn if the request `waits`. `end` must follow, unless
        this raises."""
        account = self._accounts.get(tenant) or self._open(tenant)
        account.in_progress += 1
        self._in_progress += 1
        try:
            if waits and (account.turn.locked() or self._delay_s(account)):
                async with account.turn:
                    # Debts grow meanwhile
                    while delay_s := self._delay_s(account):  # noqa: ASYNC110
                        await trio.sleep(delay_s)
        except BaseException:
            self.end(tenant)
            raise
        meter.account, meter.prepaid_s = account, account.expected_s
        account.charge(meter.prepaid_s, trio.current_time())

    def _open(self, tenant: str) -> Account:
        """Open an account, and drop those of tenants without requests or debts."""
        now = trio.current_time()
        for other, account in [*self._accounts.items()]:
            if not account.in_progress and not account.owed(now):
                del self._accounts[other]
        account = self._accounts[tenant] = Account(now)
        return account

    def _delay_s(self, account: Account) -> float:
        if self._in_progress == account.in_progress:
            return 0.0
        beyond_s = account.owed(trio.current_time()) - BURST_S
        return max(beyond_s / SHARE, MIN_WAIT_S) if beyond_s > 0 else 0.0

    def close(self, meter: Meter) -> None:
        """Charge the time of a request, once."""
        account = meter.account
        if account is None or not meter.is_open:
            return
        meter.pause()
        meter.is_open = False
        account.charge(meter.spent_s - meter.prepaid_s, trio.current_time())
        account.expected_s += WEIGHT * (meter.spent_s - account.expected_s)

    def end(self, tenant: str) -> None:
        self._accounts[tenant].in_progress -= 1
        self._in_progress -= 1


@coroutine
def metered(work: Coroutine[Any, Any, T], meter: Meter) -> Generator[Any, Any, T]:
    """Run `work`, adding the time on the event loop to the meter."""
    send, argument = work.send, None
    while True:
        meter.since = perf_counter()
        try:
            trap = send(argument)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        finally:
            meter.pause()
        try:
            send, argument = work.send, (yield trap)
        except BaseException as error:  # noqa: BLE001 - also a cancellation goes to the work.
            send, argument = work.throw, error
