"""Memory for LoRA adapters that are loaded while a model serves: planned first, and kept from rows
and cached blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from trouper.actors.scheduling.kv_memory import room_bytes, step_bytes
from trouper.protocol.health import AdapterStats, MemoryStatus
from trouper.protocol.model import AdapterPlan, ModelCard
from trouper.protocol.problems import OutOfDeviceMemory, Problem, RequestFailed
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch


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
                f"{_mb(plan.added_bytes)} of it for good, and "
                f"{_mb(free)} of {_mb(limit)} (--memory-fraction) are left beside the weights and "
                "one step: unload another adapter or "
                "model, or give one of a lower rank"
            )

    @contextmanager
    def reserved(self, name: str, plan: AdapterPlan) -> Iterator[None]:
        """Keep the memory of an adapter from rows during its load, and afterwards unless the load
        raises. Raises `RequestFailed` (507) instead of `OutOfDeviceMemory`: other programs may use
        the planned memory."""
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
