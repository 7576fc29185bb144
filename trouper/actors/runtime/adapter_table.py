"""The LoRA adapters of a loaded model, and the number of requests with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import trio

from trouper.protocol.model import AdapterCard
from trouper.protocol.problems import RequestFailed, adapter_not_found

MAX_UNLOADED = 1000


def with_unloaded(names: Sequence[str], name: str) -> tuple[str, ...]:
    return (*(other for other in names if other != name), name)[-MAX_UNLOADED:]


class AdapterTable:
    """`card` may be called on any thread."""

    def __init__(self, model: str, cards: Iterable[AdapterCard] = ()) -> None:
        self._model = model
        self._cards = {card.name: card for card in cards}
        self._running: Counter[str] = Counter()
        self._changed = trio.Event()
        self.unloaded: tuple[str, ...] = ()
        """Names of unloaded adapters, perhaps loaded again since."""
        self.changing = trio.StrictFIFOLock()
        """One adapter is loaded or unloaded at a time."""

    @property
    def cards(self) -> tuple[AdapterCard, ...]:
        return tuple(self._cards.values())

    def card(self, name: str) -> AdapterCard | None:
        return self._cards.get(name)

    def begin(self, name: str) -> AdapterCard | None:
        """Count a request with this adapter. None: there is no such adapter."""
        if (card := self._cards.get(name)) is not None:
            self._running[name] += 1
        return card

    def end(self, name: str) -> None:
        self._running[name] -= 1
        self._changed.set()
        self._changed = trio.Event()

    def refusal(self, name: str) -> RequestFailed:
        return adapter_not_found(name, self._model, tuple(self._cards))

    def add(self, card: AdapterCard) -> None:
        self._cards[card.name] = card

    async def remove(self, name: str) -> None:
        """Refuse further requests with this adapter, and wait for the end of the others."""
        self._cards.pop(name, None)
        self.unloaded = with_unloaded(self.unloaded, name)
        while self._running[name]:
            await self._changed.wait()
        del self._running[name]
