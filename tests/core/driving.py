"""A core with an engine that answers at once, for tests and measurements of what a step of the
scheduler costs."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from tests.core.worlds import RecordingClient
from tests.fakes import CUTTABLE, ByteTokenizer, card
from tests.images import FakeLayout, Part, prompt_of
from trouper.actors.scheduling.core import Core
from trouper.actors.scheduling.core_edges import CoreWatches, DiskSeam
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats
from trouper.protocol.blocks import Tensor
from trouper.protocol.capabilities import EVERYTHING, Capabilities
from trouper.protocol.health import DirectoryStats, MemoryStatus, SchedulerStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.media import DecodeImage, ImageDecoded, ItemId, Pixels, PromptImage
from trouper.protocol.model import LoadedModel
from trouper.protocol.plans import Encode, Plan, RowId, Stepped
from trouper.protocol.requests import Generate, TokenPrompt
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder, Write, Written

CONTEXT = 131_072
STEP_S = 0.01


class DrivenCore:
    """One core, with a viewer of the live page unless `viewed` is false. The disk takes each write
    as soon as it is ordered, and has nothing to read; images are decoded at once."""

    def __init__(
        self,
        kv: KvLayout = CUTTABLE,
        *,
        disk: bool = True,
        viewed: bool = True,
        capabilities: Capabilities = EVERYTHING,
        draft_context: int | None = None,
        min_restored_tokens: int = 0,
        chunk_step: int = 1,
        **settings: Any,
    ) -> None:
        self.watches = CoreWatches(
            stats=Watch(SchedulerStats()),
            memory=Watch(MemoryStatus(limit_bytes=2**40)),
            directory=Watch(DirectoryStats(attached=disk)),
            last_viewed_at=Watch(float("-inf")),
            batch=Watch[BatchStats](NOTHING_SHOWN),
        )
        defaults: dict[str, Any] = {
            "cache_memory": ByteSize(2**34),
            "ssd_cache_dir": Path("/nowhere"),
            "no_ssd": not disk,
        }
        defaults |= {"max_prompt_tokens": CONTEXT, "speculation": "off"}
        self.settings = Settings(**{**defaults, **settings})
        self._image_orders: list[DecodeImage] = []
        self._pieces: dict[ItemId, int] = {}
        """Pieces that were run of each image's encoder."""
        model_card = attrs.evolve(
            card(kv=kv),
            context_length=CONTEXT,
            capabilities=capabilities,
            draft_context=draft_context,
            draft_model=self.settings.draft_model,
            min_restored_tokens=min_restored_tokens,
            chunk_step=chunk_step,
            images=FakeLayout(),
        )
        model = LoadedModel(model_card, ByteTokenizer())
        self.core = Core(
            model,
            "fa4e",
            self.settings,
            watches=self.watches,
            disk=DiskSeam(send=self._order, known=lambda: None),
            order_image=self._image_orders.append,
        )
        self.core.take_up(0.0)
        self.clients: list[RecordingClient] = []
        self.plans: list[Plan] = []
        self.now = 0.0
        self.step_s, self.preparing = STEP_S, False
        """What the engine says of each step from now on."""
        self.prefill_s = 0.0
        """Seconds that a step takes longer if it prefills."""
        self.encode_s = 0.0
        """Seconds of each piece of an image's encoder."""
        self._viewed = viewed
        self._written: list[Write] = []
        self._in_flight: deque[tuple[Plan, Stepped]] = deque()
        self._prompts: dict[RowId, int] = {}
        """Tokens that each row has not prefilled yet."""

    def arrive(
        self,
        length: int,
        max_tokens: int = 16,
        seed: int = 0,
        prefix: tuple[int, ...] = (),
        tenant: str = "",
    ) -> RecordingClient:
        """Queue a prompt of `length` tokens that begins with `prefix`; prompts of other seeds share
        no more."""
        prompt = prefix + tuple(
            (seed * 7 + at * at + at // 5) % 90 + 1 for at in range(length - len(prefix))
        )
        return self._arrive(prompt, (), max_tokens, tenant)

    def arrive_with_images(self, *contents: Part, tenant: str = "") -> RecordingClient:
        return self._arrive(*prompt_of(*contents), 1, tenant)

    def _arrive(
        self,
        prompt: tuple[int, ...],
        images: tuple[PromptImage, ...],
        max_tokens: int,
        tenant: str,
    ) -> RecordingClient:
        request = Generate(
            request_id=str(len(self.clients)),
            prompt=TokenPrompt(prompt),
            max_tokens=max_tokens,
            tenant=tenant,
        )
        client = RecordingClient(request, prompt, max_tokens, images)
        self.clients.append(client)
        self.core.enqueue(client, self.now)
        return client

    def until_decoding(self) -> None:
        """Step until no row prefills."""
        while self.core.waiting or self._prefilling or not self.core._batch.rows:
            self.step()

    @property
    def _prefilling(self) -> bool:
        return bool(self.core._batch.prefilling)

    def step(self, watched: Callable[[Callable[[], None]], object] = lambda work: work()) -> None:
        """One round of the scheduler's loop. `watched` runs what the core does in it."""
        self.now += STEP_S
        if self._viewed:
            self.watches.last_viewed_at.publish(self.now)
        plans: list[Plan] = []

        def work() -> None:
            self.core.drop_aborted(self.now)
            while (plan := self.core.schedule(self.now)) is not None:
                plans.append(plan)
                if not plan.has_work:
                    break
            self.core.publish()
            if self._in_flight:
                self.core.update(self._in_flight.popleft()[1], self.now)
            for write in self._taken():
                self.core.hear(
                    Written(tuple(block.key for block in write.blocks), write.nbytes), self.now
                )
            while self._image_orders:
                order = self._image_orders.pop()
                pixels = Pixels(*order.shape.resized, b"")
                self.core.hear_image(ImageDecoded(order.item, pixels), self.now)

        watched(work)
        self.plans += plans
        self._in_flight += ((plan, self._answer(plan)) for plan in plans)

    def plan_ahead(self) -> None:
        """Send the second plan, which is else sent in the next step."""
        if (plan := self.core.schedule(self.now)) is not None:
            self.plans.append(plan)
            self._in_flight.append((plan, self._answer(plan)))

    def timed_step(self) -> float:
        """Seconds of the core in one round."""
        began = [0.0]

        def timed(work: Callable[[], None]) -> None:
            began[0] = time.perf_counter()
            work()
            began[0] = time.perf_counter() - began[0]

        self.step(timed)
        return began[0]

    def _taken(self) -> list[Write]:
        taken, self._written = self._written, []
        return taken

    def _order(self, order: DiskOrder) -> bool:
        if isinstance(order, Write):
            self._written.append(order)
        return True

    def _answer(self, plan: Plan) -> Stepped:
        """What an engine answers: a token for each row that decodes or whose prompt is complete."""
        for admit in plan.admit:
            self._prompts[admit.row] = len(admit.prompt) // 4 - (
                admit.restore.tokens if admit.restore else 0
            )
        rows = list(plan.decode)
        for chunk in plan.prefill:
            self._prompts[chunk.row] -= chunk.tokens
            if not self._prompts[chunk.row]:
                rows.append(chunk.row)
        encoded = tuple(order.item for order in plan.encode if self._encoded(order))
        encode_s = self.encode_s * sum(order.pieces for order in plan.encode)
        empty = (Tensor("U32", (2,), bytes(8)),)
        return Stepped(
            plan.step,
            tuple(rows),
            (97,) * len(rows),
            (),
            self.step_s + self.prefill_s * bool(plan.prefill) + encode_s,
            persisted=tuple(empty for _ in plan.persist),
            preparing=self.preparing,
            encoded=tuple((item, 1) for item in encoded),
            encode_s=encode_s,
        )

    def _encoded(self, order: Encode) -> bool:
        """Count an order's pieces. Returns whether they were the last."""
        self._pieces[order.item] = self._pieces.get(order.item, 0) + order.pieces
        return self._pieces[order.item] == FakeLayout().num_pieces(order.span.shape)


def bytecodes(work: Callable[[], object]) -> int:
    """Number of bytecodes that `work` runs, in all functions that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def bytecodes_of_steps(core: DrivenCore, steps: int) -> list[int]:
    """Number of bytecodes that the core runs in each step."""
    counts: list[int] = []
    for _ in range(steps):
        core.step(lambda work: counts.append(bytecodes(work)))
    return counts
