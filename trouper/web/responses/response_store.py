"""In-memory store of responses, bounded by number, bytes and age. Beyond a bound, the key that
holds the most of it loses its least
recently used response: so one key alone may fill the store, and none pushes out what another holds
within an equal share.

The items of a conversation are kept once, in turns that refer to the turn before. An evicted
response takes its turn along unless a later response still builds on it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import attrs
import msgspec
import trio

from trouper.protocol.problems import Problem, RequestFailed, quoted
from trouper.protocol.settings import ServerSettings
from trouper.web.output.dialect import Json
from trouper.web.streaming.event_log import EventLog


@attrs.define(eq=False)
class Turn:
    """The input and the output of one response, and a reference to the turn before."""

    items: tuple[Json, ...]
    before: Turn | None = None
    size: int = 0
    """Bytes of the items."""
    holders: int = 0
    """Number of stored responses and later turns that need this turn."""
    owner: str = ""
    """Identity of the API key of the response."""

    @property
    def conversation_bytes(self) -> int:
        """Bytes of the items of the whole conversation."""
        return sum(turn.size for turn in self._back())

    def all_items(self) -> list[Json]:
        """Return the items of the whole conversation."""
        return [item for turn in reversed(list(self._back())) for item in turn.items]

    def _back(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


@attrs.define(eq=False)
class StoredResponse:
    """A response that has ended."""

    body: Json
    input: tuple[Json, ...]
    before: Turn | None
    log: EventLog | None
    """The events of the response, if it ran in the background and was streamed."""
    owner: str = ""
    """Identity of the API key that created it. No other key sees it."""
    turn: Turn = attrs.field(init=False)
    size: int = attrs.field(init=False)
    """Bytes of all but its turn, which goes with it: tools and instructions, and the events."""
    used_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        items = (*self.input, *self.body["output"])
        events = 0 if self.log is None else self.log.size
        self.turn = Turn(items, self.before, len(msgspec.json.encode(items)), owner=self.owner)
        self.size = len(msgspec.json.encode((self.body, self.input))) - self.turn.size + events

    @property
    def id(self) -> str:
        return str(self.body["id"])


class ResponseStore:
    """The store of all keys. `owner` returns the identity of the key that asks: it finds only what
    it has created itself."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = trio.current_time,
        owner: Callable[[], str] = str,
    ) -> None:
        self._owner = owner
        self._max_count, self._max_bytes = (
            settings.stored_responses,
            settings.stored_responses_bytes,
        )
        self._ttl_s, self._clock = settings.stored_responses_ttl_s, clock
        self._responses: dict[str, StoredResponse] = {}
        """Responses by id."""
        self._owned: dict[str, OrderedDict[str, StoredResponse]] = {}
        """Those of each owner, the least recently used first."""
        self._owned_bytes = Counter[str]()
        self._items: dict[tuple[str, str], list[Json]] = {}
        """Items by owner and id. Clients may repeat an id: the first item counts."""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, stored: StoredResponse) -> None:
        """Store a response. One that is larger than the whole store is evicted at once."""
        stored.used_s = self._clock()
        self._responses[stored.id] = stored
        self._owned.setdefault(stored.owner, OrderedDict())[stored.id] = stored
        self._count(stored.owner, stored.size)
        self._hold(stored.turn)
        self._trim()

    def find(self, response_id: str) -> StoredResponse | None:
        self._trim()
        stored = self._responses.get(response_id)
        if stored is not None and stored.owner != self._owner():
            return None
        if stored is not None:
            stored.used_s = self._clock()
            self._owned[stored.owner].move_to_end(response_id)
        return stored

    def get(
        self, response_id: str, param: str | None = None, code: str = "response_not_found"
    ) -> StoredResponse:
        """Return a stored response. Raises `RequestFailed` (404)."""
        stored = self.find(response_id)
        if stored is None:
            raise RequestFailed(
                Problem(
                    404, self._missing_message(response_id), "invalid_request_error", param, code
                )
            )
        return stored

    def _missing_message(self, response_id: str) -> str:
        kept = (
            f"the last {self._max_count} responses are kept, for {self._ttl_s:g} s after their "
            "last use"
        )
        return f"no response {quoted(response_id)} is stored here, or it is gone: {kept}"

    def remove(self, response_id: str) -> bool:
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            owned = self._owned[stored.owner]
            del owned[response_id]
            if not owned:
                del self._owned[stored.owner]
            self._count(stored.owner, -stored.size)
            self._release(stored.turn)
        return stored is not None

    def item(self, item_id: str) -> Json | None:
        self._trim()
        found = self._items.get((self._owner(), item_id))
        return found[0] if found else None

    def _trim(self) -> None:
        oldest = self._clock() - self._ttl_s
        for owned in [*self._owned.values()]:
            while owned and (first := next(iter(owned.values()))).used_s < oldest:
                self.remove(first.id)
        while len(self._responses) > self._max_count:
            self._evict(max(self._owned, key=lambda owner: len(self._owned[owner])))
        while self._responses and self.bytes > self._max_bytes:
            self._evict(max(self._owned, key=self._owned_bytes.__getitem__))

    def _evict(self, owner: str) -> None:
        self.remove(next(iter(self._owned[owner])))

    def _count(self, owner: str, size: int) -> None:
        self.bytes += size
        self._owned_bytes[owner] += size
        if not self._owned_bytes[owner]:
            del self._owned_bytes[owner]

    def _hold(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders += 1
            if turn.holders > 1:
                return
            self._count(turn.owner, turn.size)
            for item in turn.items:
                self._items.setdefault((turn.owner, item["id"]), []).append(item)
            turn = turn.before

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self._count(turn.owner, -turn.size)
            for item in turn.items:
                self._forget(turn.owner, item)
            turn = turn.before

    def _forget(self, owner: str, item: Json) -> None:
        same = self._items[owner, item["id"]]
        same.remove(item)
        if not same:
            del self._items[owner, item["id"]]
