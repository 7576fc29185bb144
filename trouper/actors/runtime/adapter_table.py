"""The LoRA adapters of a loaded model, and the number of requests with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import trio

from trouper.actors.scheduling.kv_memory import room_bytes, step_bytes
from trouper.protocol.health import AdapterStats, MemoryStatus
from trouper.protocol.model import AdapterCard, AdapterPlan, ModelCard
from trouper.protocol.problems import OutOfDeviceMemory, Problem, RequestFailed, adapter_not_found
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch

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
        """Perhaps loaded again since."""
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


@attrs.frozen(eq=False)
class AdapterRoom:
    """Room of one loaded model, published to `adapters` for admission by bytes."""

    card: ModelCard
    settings: Settings
    memory: Watch[MemoryStatus]
    adapters: Watch[AdapterStats]

    @property
    def weights_bytes(self) -> int:
        return self.card.base_weights_bytes + self.adapters.latest.held_bytes

    def require(self, name: str, plan: AdapterPlan) -> None:
        """Raises `RequestFailed` (507) if an adapter does not fit beside the weights and one
        step."""
        memory = self.memory.latest
        if not memory.limit_bytes or not plan.loading_bytes:
            return
        fraction = self.settings.memory_fraction
        room = room_bytes(
            memory,
            self.adapters.latest,
            memory_fraction=fraction,
            weights_bytes=self.card.base_weights_bytes,
            margin_bytes=step_bytes(self.card, self.settings),
        )
        free = max(0, room)
        if plan.loading_bytes >= free:
            limit = int(memory.limit_bytes * fraction)
            raise insufficient(
                f"the adapter {name!r} needs {_mb(plan.loading_bytes)} while it is loaded, "
                f"{_mb(plan.added_bytes)} of it for good, and {_mb(free)} of {_mb(limit)} "
                "(--memory-fraction) are left beside the weights and one step: unload another "
                "adapter or model, or give one of a lower rank"
            )

    @contextmanager
    def reserved(self, name: str, plan: AdapterPlan) -> Iterator[None]:
        """Keep an adapter's memory from rows, after the load too unless it raises. Raises
        `RequestFailed` (507) instead of `OutOfDeviceMemory`."""
        before = self.adapters.latest
        self.adapters.publish(attrs.evolve(before, reserved_bytes=plan.loading_bytes))
        try:
            yield
        except BaseException as error:
            self.adapters.publish(before)
            if not isinstance(error, OutOfDeviceMemory):
                raise
            raise insufficient(
                f"the device had no memory for the adapter {name!r}, which needs "
                f"{_mb(plan.loading_bytes)} while it is loaded, though so much "
                "was planned: other programs use it; try again when they have ended, or unload "
                f"another adapter or model ({error})"
            ) from error
        self.left(plan.total_bytes)

    def left(self, nbytes: int) -> None:
        self.adapters.publish(AdapterStats(held_bytes=nbytes))


def insufficient(message: str) -> RequestFailed:
    return RequestFailed(
        Problem(507, message, "server_error", "lora_path", code="insufficient_memory")
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
