"""The current request: id, key, body, and resources until the request's end."""

from __future__ import annotations

import gc
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast
from uuid import uuid4

import attrs
import trio
from quart import Request, request

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.api_keys import ANYBODY, ApiKey, Keys, Right
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.settings import ServerSettings
from trouper.system import heap
from trouper.web.http.body_complexity import parsed_bytes
from trouper.web.http.body_parsing import parse_json, too_large
from trouper.web.http.byte_budget import ByteBudget, Holding, default_bytes
from trouper.web.http.content_encoding import decoded, is_encoded
from trouper.web.http.leniency import ReadPast
from trouper.web.http.loop_shares import LoopShares, Meter
from trouper.web.http.media_fetch import ReadOnce
from trouper.web.http.paced_body import PacedBody
from trouper.web.http.plain_http import WRITER
from trouper.web.http.request_body import Report, refuse
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.keys.endpoint_rights import asks_model, is_local
from trouper.web.keys.key_limits import KeyAccount, KeyAccounts, RequestTokens, Reservation
from trouper.web.observability.exchange import Exchange
from trouper.web.observability.request_log import IgnoredNames
from trouper.web.serving.running_requests import RunningRequest

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
LARGE_BODY = 2**17  # Bytes of a body beyond which parsing leaves the event loop.
LARGE_AT_ONCE = 1  # Large bodies parsed at a time: parsing holds the GIL.
HUGE_BODY = 2**20

# Bytes held for requests with small bodies, such as those for scores, after which memory goes back
# to the system.
HUGE_HOLDING = 2**24

# Bytes held for requests after which garbage is collected: the frames of a cancelled task refer to
# each other, and to the prompt.
MAX_GARBAGE_BYTES = 2**28

# Delay between a huge request and the return of memory; one call serves several requests.
GIVE_BACK_AFTER_S = 0.5
BATCH_OWNER = "trouper.batch_owner"
"""ASGI state key of a batch line: the identity of the batch's API key. Clients cannot set the
state."""
BATCH_BEGIN = "trouper.batch_begin"
"""ASGI state key: an async function, called before a model works for the line. Raises
`RequestFailed`."""
BATCH_IMAGES = "trouper.batch_images"
"""ASGI state key: a `ReadOnce`."""
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
SERVER = "x-trouper-server"
"""A header of a proxy before several servers: the name by which it knows this one."""
SERVER_NAME = re.compile("[a-z0-9]{1,32}")


@attrs.define(eq=False)
class RequestScope:
    """The state of one request, from the head to the end."""

    headers: Mapping[str, str]
    """By lower-case name; the first of several."""
    request_id: str
    """The client's X-Request-Id if valid, else a new id."""
    owned: ExitStack
    nursery: trio.Nursery
    writer: SocketWriter | None
    """The connection's writer, if the guard lends one."""
    batch_owner: str | None
    begin_line: Callable[[], Awaitable[None]] | None
    read_once: ReadOnce | None
    """Keeps the images that lines of a batch name by address."""
    meter: Meter = attrs.field(factory=Meter)
    read_past: ReadPast = attrs.field(factory=ReadPast)
    submitted: bool = False
    """Whether a model was asked, which makes an entry in the request log."""
    is_large: bool = False
    body_bytes: int = 0
    holding: Holding | None = None
    key: ApiKey | None = None
    key_is_resolved: bool = False
    account: KeyAccount | None = None
    refusal: Problem | None = None
    counted_model: str | None = None
    tokens: RequestTokens | None = None
    exchange: Exchange | None = None
    """None: no observer asks."""
    running: RunningRequest | None = None
    """Once a model is asked for."""

    @classmethod
    def open(
        cls, request: Request, state: Mapping[str, Any], owned: ExitStack, nursery: trio.Nursery
    ) -> RequestScope:
        # Quart's headers compare each name of a request with the one that is looked up, some forty
        # times a request.
        headers = {name.lower(): value for name, value in reversed([*request.headers])}
        sent = headers.get("x-request-id", "")
        return cls(
            headers,
            sent if REQUEST_ID.fullmatch(sent) else new_id(headers),
            owned,
            nursery,
            writer=state.get(WRITER),
            batch_owner=state.get(BATCH_OWNER),
            begin_line=state.get(BATCH_BEGIN),
            read_once=state.get(BATCH_IMAGES),
        )


def new_id(headers: Mapping[str, str]) -> str:
    """Return a new id, with the name of this server before it if a proxy gave one: by that it finds
    the server which knows the id."""
    name = headers.get(SERVER, "")
    return f"{name}_{uuid4().hex}" if SERVER_NAME.fullmatch(name) else uuid4().hex


# Read some forty times a request; Quart's `request` takes ten times as long.
SCOPE: ContextVar[RequestScope] = ContextVar("SCOPE")


@contextmanager
def at_hand(scope: RequestScope) -> Iterator[None]:
    token = SCOPE.set(scope)
    try:
        yield
    finally:
        SCOPE.reset(token)


class Heap:
    """Returns memory to the system, once for several requests."""

    def __init__(self) -> None:
        self._due = False
        self._held_bytes = self._uncollected_bytes = 0

    def count(self, held_bytes: int) -> None:
        """Count what was held for a request that has ended."""
        self._held_bytes += held_bytes
        if self._held_bytes > HUGE_HOLDING:
            self.give_back_soon()

    def give_back_soon(self) -> None:
        if not self._due:
            self._due = True
            trio.lowlevel.spawn_system_task(self._give_back)

    async def _give_back(self) -> None:
        await trio.sleep(GIVE_BACK_AFTER_S)
        self._uncollected_bytes += self._held_bytes
        self._due, self._held_bytes = False, 0
        if self._uncollected_bytes > MAX_GARBAGE_BYTES:
            self._uncollected_bytes = 0
            gc.collect(1)
        await give_back()


async def give_back() -> None:
    """Return memory to the system, if a thread starts for that."""
    # An error in a task of Trio's own would end the server.
    with suppress(OSError):
        await run_on_thread(heap.give_back, abandon_on_cancel=False)


def priority_with(key: ApiKey, given: int | None) -> int:
    """Return the request's priority (`given` None: the key's). Raises `RequestFailed` (403) if too
    urgent for the key."""
    if given is None:
        return key.priority
    if key.min_priority is None or given >= key.min_priority:
        return given
    message = (
        f"priority {given} is below {key.min_priority}, the least that the API key {key.label!r} "
        "may send (min_priority); raise it"
    )
    raise RequestFailed(
        Problem(403, message, "permission_error", "priority", "priority_not_allowed")
    )


def take_text(holding: Holding, size: int) -> None:
    holding.take(3 * size)


class CurrentRequest:
    """The current request and key. Most methods need a request context."""

    def __init__(
        self, settings: ServerSettings, keys: Keys, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self.settings = settings
        self.keys = keys
        self.accounts = KeyAccounts(clock)
        self.ignored = IgnoredNames()
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)
        self._heap = Heap()
        self._shares = LoopShares()
        given = settings.request_memory
        self.budget = ByteBudget(default_bytes(settings) if given is None else given)

    @property
    def scope(self) -> RequestScope:
        return SCOPE.get()

    @property
    def headers(self) -> Mapping[str, str]:
        return self.scope.headers

    @property
    def request_id(self) -> str:
        return self.scope.request_id

    def new_id(self, prefix: str) -> str:
        """Return an id for something that outlives the request."""
        return prefix + new_id(self.headers)

    @property
    def batch_owner(self) -> str | None:
        return self.scope.batch_owner

    async def begin_line(self) -> None:
        """Called before a model works for this batch line. Raises `RequestFailed` (503)."""
        if (begin := self.scope.begin_line) is not None:
            await begin()

    @property
    def read_past(self) -> ReadPast:
        return self.scope.read_past

    @property
    def report(self) -> Report:
        return refuse if self.settings.strict else self.read_past

    # -- its turn ---------------------------------------------------------------------------------

    async def begin_turn(self, *, waits: bool) -> None:
        """If the request `waits`, wait until the tenant may begin one more."""
        tenant = self.tenant
        await self._shares.begin(tenant, self.scope.meter, waits=waits)
        self.at_end(self._shares.end, tenant)
        self.at_end(self.end_turn)

    def end_turn(self) -> None:
        self._shares.close(self.scope.meter)

    def at_end(self, callback: Callable[..., None], *arguments: Any) -> None:
        self.scope.owned.callback(callback, *arguments)

    # -- its body ---------------------------------------------------------------------------------

    @property
    def holding(self) -> Holding:
        scope = self.scope
        if scope.holding is None:
            scope.holding = self.budget.open(self.tenant)
            self.at_end(self._give_back, scope.holding)
        return scope.holding

    def _give_back(self, holding: Holding) -> None:
        self._heap.count(holding.bytes)
        holding.give_back()

    def hold(self, amount: int) -> None:
        """Hold `amount` more bytes. Raises `RequestFailed` (413, 429, 503)."""
        self.holding.take(amount)

    @property
    def body_limit(self) -> int:
        """Most bytes of a body, before and after decompression."""
        return self.settings.body_limit()

    async def body(self) -> dict[str, Any]:
        """Return the JSON object. Raises `RequestFailed` (400, 413, 415, 429, 503), or werkzeug's
        408 and 413."""
        data = await self._received()
        encoding = self.headers.get("content-encoding", "")
        if is_encoded(encoding):
            limit = self.body_limit
            take = partial(take_text, self.holding)
            take_from_thread = partial(trio.from_thread.run_sync, take)
            decode = partial(decoded, data, encoding, limit, take_from_thread)
            data = await run_on_thread(decode, self._large, abandon_on_cancel=False)
            if len(data) > HUGE_BODY:
                self.at_end(self._heap.give_back_soon)
        self.scope.body_bytes, self.scope.is_large = len(data), len(data) > LARGE_BODY
        self.holding.take_up_to(await self.run_off_loop(parsed_bytes, data))
        try:
            return await self.run_off_loop(
                parse_json, data, None if self.settings.strict else self.read_past
            )
        finally:
            if len(data) > HUGE_BODY:
                del data
                await give_back()

    async def _received(self) -> bytes:
        body, size = cast("PacedBody", request.body), request.content_length
        try:
            self.count()
            # Else Quart refuses it.
            if size is not None and size <= self.settings.body_limit(images=True):
                self._check_length(size)
                self.hold(2 * size)  # A complete body is copied.
            body.admit(inf, partial(take_text, self.holding) if size is None else None)
        except RequestFailed:
            await body.drop(self.settings.body_timeout_s)
            raise
        try:
            data = cast("bytes", await request.get_data(cache=False, as_text=False))
        finally:
            if body.received > HUGE_BODY:
                self.at_end(self._heap.give_back_soon)
        self._check_length(len(data))
        return data

    def _check_length(self, size: int) -> None:
        """Raises `RequestFailed` (413)."""
        # The models are asked for the largest bodies only.
        if size > self.settings.body_limit() and size > self.body_limit:
            raise RequestFailed(too_large(self.body_limit))

    def note_ignored(self) -> None:
        if names := self.read_past.take_new():
            self.ignored.note(names, request.path)

    def ignored_names(self) -> str:
        self.note_ignored()
        return ", ".join(self.read_past.names)

    async def read(self, parse: Callable[[dict[str, Any], Report], T]) -> T:
        body = await self.body()
        try:
            parsed = await self.run_off_loop(parse, body, self.report)
        finally:
            self.note_ignored()
        if self.scope.exchange is not None:
            self.scope.exchange.note_parameters(parsed)
        return parsed

    async def run_off_loop(
        self, function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments
    ) -> T:
        """Call the function, for a large body on a thread: other streams go on meanwhile."""
        if not self.scope.is_large:
            return function(*arguments)
        meter = self.scope.meter

        def timed() -> T:
            began = perf_counter()
            try:
                return function(*arguments)
            finally:
                meter.spent_s += perf_counter() - began

        return await run_on_thread(timed, self._large, abandon_on_cancel=False)

    def takes_long(self) -> None:
        """Let `run_off_loop` use threads from now on."""
        self.scope.is_large = True

    # -- its key ----------------------------------------------------------------------------------

    @property
    def key(self) -> ApiKey | None:
        """The key of this request or batch, if any. A key removed meanwhile counts until the
        request's end."""
        scope = SCOPE.get(None)
        if scope is None:
            return ANYBODY
        if not scope.key_is_resolved:
            scope.key, scope.key_is_resolved = self._find_key(scope), True
        return scope.key

    def _find_key(self, scope: RequestScope) -> ApiKey | None:
        if scope.batch_owner is not None:
            return self.keys.of_identity(scope.batch_owner)
        return self.keys.find(scope.headers.get("authorization"), scope.headers.get("x-api-key"))

    @property
    def key_identity(self) -> str:
        key = self.key
        return "" if key is None or key is ANYBODY else key.identity

    @property
    def key_label(self) -> str:
        key = self.key
        return "" if key is None or key is ANYBODY else key.label

    @property
    def tenant(self) -> str:
        """Fairness tenant: the key, or without keys the address. A client's batches are a separate
        tenant."""
        scope = SCOPE.get(None)
        if scope is None:
            return self.key_identity
        if scope.batch_owner is not None:
            return f"batches of {scope.batch_owner}"
        peer = request.scope.get("client")
        return self.key_identity or (f"address {peer[0]}" if peer else "")

    @property
    def key_identities(self) -> frozenset[str]:
        """All identities of the key: older stored objects have earlier ones."""
        return self.keys.identities_of(self.key_identity)

    @property
    def managed_identities(self) -> frozenset[str] | None:
        """Identities whose files and batches this request may manage; None (`admin`): all."""
        return None if self.has_right("admin") else self.key_identities

    def owner_labels(self, owners: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return each owner's `owner` field for an answer; empty without `admin`."""
        is_admin = self.has_right("admin")
        labels = {owner: self.keys.label_of(owner) if is_admin else "" for owner in set(owners)}
        return {owner: {"owner": label} if label else {} for owner, label in labels.items()}

    def has_right(self, right: Right) -> bool:
        key = self.key
        if key is None or right not in key.rights:
            return False
        return right != "admin" or key is not ANYBODY or self._may_administer_without_key()

    def _may_administer_without_key(self) -> bool:
        scope = request.scope
        return self.settings.allow_admin_without_key or is_local(
            scope.get("client"), self.headers, scope["http_version"]
        )

    # -- the limits of the key --------------------------------------------------------------------

    def count(self) -> None:
        """Count a request that asks a model once against the key's limit. Raises `RequestFailed`
        (429)."""
        rule = request.url_rule
        if rule is not None and asks_model(rule.rule):
            self._count_once()

    def _count_once(self) -> KeyAccount:
        scope = self.scope
        if scope.account is None:
            scope.account = self.accounts.of(self.key or ANYBODY)
            scope.account.begin()
        return scope.account

    def count_refusal(self) -> None:
        problem = self.scope.refusal
        if problem is not None and problem.status == 429:
            self.accounts.of(self.key or ANYBODY).refused[problem.code or problem.type] += 1

    def account(self, model: str) -> KeyAccount:
        """Return the key's account; counts the request once for the model. Raises `RequestFailed`
        (429)."""
        account = self._count_once()
        if self.scope.counted_model is None:
            self.scope.counted_model = model
            account.ask(model)
        return account

    def begin(self, model: str, prompts: int) -> None:
        """Count the request once; `prompts` reservations follow. Raises `RequestFailed` (429)."""
        account, scope = self.account(model), self.scope
        if scope.tokens is None:
            scope.tokens = account.request_tokens()
        scope.tokens.left = prompts

    def reserve(self, model: str) -> Reservation:
        tokens = self.scope.tokens
        assert tokens is not None
        return self.account(model).reserve(model, tokens)

    def limit_headers(self) -> list[tuple[str, str]]:
        account = self.scope.account
        return [] if account is None else [*account.headers()]
