"""Seeded worlds of the core alone: random arrivals, aborts, lengths, drafts and disk answers. Every
invariant is checked after each step. `python -m tests.core 1000` plays seeds 0 to 999."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tests.fakes import CUTTABLE, UNCUTTABLE, ByteTokenizer, FakeEngine, card, letters
from tests.images import FakeLayout, Part, prompt_of
from trouper.actors.scheduling.core import Core
from trouper.actors.scheduling.core_edges import CoreWatches, DiskSeam
from trouper.actors.scheduling.crash_recovery import Recovery
from trouper.actors.scheduling.eviction import NODE_COST
from trouper.actors.scheduling.image_items import DECODED_AHEAD
from trouper.actors.scheduling.row_storing import TAIL_TOKENS
from trouper.actors.scheduling.sequence import QUEUED, Sequence, State
from trouper.actors.scheduling.tenant_shares import tenant_of
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats
from trouper.protocol.blocks import BlockData
from trouper.protocol.health import DirectoryStats, MemoryStatus, SchedulerStats
from trouper.protocol.kv import KvLayout, bank_level
from trouper.protocol.media import DecodeImage, ImageDecoded, Pixels, PromptImage
from trouper.protocol.model import LoadedModel
from trouper.protocol.plans import PLANS_IN_FLIGHT, Breakers, Plan, Stepped, ThinkingLimit
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Failed, Finished, Progress, Reply
from trouper.protocol.requests import BATCH_PRIORITY, Generate, TokenPrompt
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings
from trouper.protocol.waits import History, RequestState, WaitReason
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder, Loaded, Read, RemovedFromDisk, Write, Written

STEPS = 30
MOST_STEPS = 3000
"""A world that is not idle after so many steps never will be."""

KINDS = ("image", "image", "atomic")
"""Of images, by number."""


@attrs.define(eq=False)
class RecordingClient:
    """Keeps every reply. Raises if anything follows the terminal event."""

    request: Generate
    prompt: tuple[int, ...]
    max_tokens: int
    images: tuple[PromptImage, ...] = ()
    second_at: int = 0
    thinking: ThinkingLimit | None = None
    breakers: Breakers | None = None
    aborted: bool = False
    tokens: list[int] = attrs.field(factory=list)
    terminal: list[Finished | Failed] = attrs.field(factory=list)
    closed: bool = False
    progress: list[Progress] = attrs.field(factory=list)
    history: History = attrs.field(factory=History)

    def accept(self, max_tokens: int, /) -> None:
        assert not self.closed and not self.terminal
        self.max_tokens = max_tokens

    def reply(self, event: Reply, /) -> bool:
        assert not self.closed, f"{event} after the close"
        assert not self.terminal, f"{event} after the terminal event"
        if isinstance(event, Delta):
            self.tokens += event.tokens
        elif isinstance(event, Finished | Failed):
            self.terminal.append(event)
        return not self.aborted

    def report(self, progress: Progress, /) -> None:
        assert not self.closed, f"{progress} after the close"
        self.progress.append(progress)

    def note(self, state: RequestState, reason: WaitReason = "", detail: str = "", /) -> None:
        self.history.note(state, reason, detail)

    def fail(self, problem: Problem) -> None:
        self.reply(Failed(problem))
        self.close()

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True

    def check(self) -> None:
        """After the world's end: one terminal event, unless the client left, and the tokens of its
        prompt."""
        assert self.closed, "never closed"
        assert len(self.terminal) == (0 if self.aborted and not self.terminal else 1), (
            "no terminal event"
        )
        assert self.tokens == [letters(key_of(self.prompt), at) for at in range(len(self.tokens))]
        if self.terminal and isinstance(self.terminal[0], Finished):
            assert len(self.tokens) == self.max_tokens == self.terminal[0].completion_tokens


def key_of(prompt: tuple[int, ...]) -> int:
    return sum(prompt)


def check_kv_usage(core: Core, row: Sequence) -> None:
    """A row counts for memory where it would be counted anew."""
    if row.num_draft_tokens or row.num_scheduled_tokens >= row.kv_usage_until:
        return
    budget = core._budget
    usage = budget.kv.usage(*budget.lengths(row))
    assert usage[:2] == row.kv_usage[:2], "a row counts in another bank"
    assert budget.kv.row_bytes(usage.reserved) == budget.kv.row_bytes(row.kv_usage.reserved), (
        "a row has other bytes"
    )


def check_storing(core: Core, row: Sequence) -> None:
    """A row that is not asked whether it has something to store has nothing."""
    if row.prefilling or row.node is None or row.num_output_tokens >= row.stores_from:
        return
    tail = row.num_tokens - max(row.node.end, row.no_room_at)
    assert tail < max(TAIL_TOKENS, core._settings.block_size), "a long tail is not stored"
    assert not core._cache._storing._snapshot_due(row), "a snapshot is missed"


def padded_bytes(kv: KvLayout, lengths: list[int]) -> int:
    """What rows of these lengths hold in their banks, each as much as the longest of its bank."""
    if kv.first_bank == 0:
        return sum(map(kv.row_bytes, lengths))
    levels = [bank_level(tokens, kv.first_bank) if kv.first_bank else 0 for tokens in lengths]
    longest = {
        level: max(length for length, other in zip(lengths, levels, strict=True) if other == level)
        for level in levels
    }
    held = 0
    for tokens, level in zip(lengths, levels, strict=True):
        alone = level and kv.first_bank and (kv.first_bank << level) > kv.shared_tokens
        held += kv.row_bytes(tokens if alone else longest[level])
    return held


class CoreWorld:
    """One core, an engine that answers at once, and a disk that answers when it likes."""

    def __init__(self, seed: int, *, kv: KvLayout | None = None, **settings: Any) -> None:
        """What is not told is drawn."""
        self.dice = dice = random.Random(seed)
        self.settings = Settings(
            completion_batch_size=dice.choice((1, 2, 3, 8)),
            prefill_batch_size=dice.choice((1, 2, 8)),
            prefill_step_size=dice.choice((4, 16, 64)),
            max_queue_size=dice.choice((1, 4, 50)),
            block_size=dice.choice((2, 4, 8)),
            kv_memory=dice.choice(
                (None, ByteSize(dice.choice((2_500, 5_000, 12_000, 20_000, 30_000))))
            ),
            priority_max_wait_s=dice.choice((0.0, 0.05, 1.0)),
            batch_min_rows=dice.choice((1, 1, 2)),
            cache_memory=ByteSize(dice.choice((0, 3, 20, 1000)) * (400 + NODE_COST)),
            no_ssd=dice.random() < 0.3,
            ssd_cache_dir=Path("/nowhere"),
        )
        self.settings = attrs.evolve(self.settings, **settings)
        kv = kv or attrs.evolve(
            dice.choice((CUTTABLE, UNCUTTABLE)),
            capacity_step=dice.choice((1, 4, 16)),
            first_bank=dice.choice((0, 8, 32, None)),
            shared_tokens=dice.choice((16, 64, 2**14)),
        )
        self.engine = FakeEngine(
            kv=kv, guess=self._guess if dice.random() < 0.6 else lambda _key, _at: (0, 0)
        )
        self.watches = CoreWatches(
            stats=Watch(SchedulerStats()),
            memory=Watch(MemoryStatus(limit_bytes=100)),
            directory=Watch(DirectoryStats(attached=not self.settings.no_ssd)),
            last_viewed_at=Watch(float("-inf")),
            batch=Watch[BatchStats](NOTHING_SHOWN),
        )
        shortest = dice.choice((0, 0, 0, 6, 24))
        model_card = attrs.evolve(card(kv=kv), min_restored_tokens=shortest, images=FakeLayout())
        self.model = LoadedModel(model_card, ByteTokenizer())
        self.orders: list[Write | Read] = []
        self.parts: deque[Loaded] = deque()
        """Parts of the disk's answer that are still to come."""
        self.core = self.make_core()
        self.image_orders: list[DecodeImage] = []
        self.num_decoded = 0
        self.share_of_images = dice.choice((0.0, 0.0, 0.5))
        self.undecodable = dice.choice((0.0, 0.2))
        self.stored: dict[bytes, BlockData] = {}
        self.clients: list[RecordingClient] = []
        self.in_flight: deque[tuple[Plan, Stepped]] = deque()
        self.tenants = dice.choice((("",), ("", "a"), ("a", "a", "a", "b", "c")))
        self.texts = [tuple(dice.randrange(1, 90) for _ in range(40)) for _ in range(3)]
        self.now = 0.0
        self.overdue = 0
        self.yielded = 0
        """Number of plans in which rows of batches run beside others."""

    def make_core(self, recovery: Recovery | None = None) -> Core:
        return Core(
            self.model,
            "fa4e",
            self.settings,
            watches=self.watches,
            disk=DiskSeam(send=self._order, known=lambda: None),
            recovery=recovery,
            order_image=self._order_image,
        )

    def _guess(self, key: int, position: int) -> tuple[int, int]:
        dice = random.Random(key * 1000 + position)
        drafted = dice.randrange(4)
        return drafted, dice.randint(0, drafted)

    def _order_image(self, order: DecodeImage) -> bool:
        self.image_orders.append(order)
        assert len(self.image_orders) <= DECODED_AHEAD, "too many images are decoded ahead"
        return True

    def _order(self, order: DiskOrder) -> bool:
        """Take an order, or refuse it as a full channel does."""
        taken = self.dice.random() < 0.95
        if taken and isinstance(order, Write | Read):
            self.orders.append(order)
        return taken

    # -- what happens ----------------------------------------------------------------------------

    def play(self) -> None:
        """Raises AssertionError where an invariant does not hold."""
        self.core.take_up(self.now)
        for _ in range(STEPS):
            for act in self.dice.sample(
                (
                    self.arrive,
                    self.arrive,
                    self.leave,
                    self.disk_answers,
                    self.press,
                    self.preempt,
                    self.images_arrive,
                ),
                2,
            ):
                act()
            self.step()
        self.core.close()
        for _ in range(MOST_STEPS):
            self.disk_answers()
            self.images_arrive()
            if not self.step():
                break
        else:
            raise AssertionError("the world never came to rest")
        self.check_end()

    def arrive(self) -> None:
        text, length = self.dice.choice(self.texts), self.dice.randint(1, 36)
        prompt, max_tokens = text[:length], self.dice.randint(1, self.dice.choice((12, 12, 12, 40)))
        images: tuple[PromptImage, ...] = ()
        if self.dice.random() < self.share_of_images:
            prompt, images = self._illustrated(prompt)
        self.ask(
            prompt,
            max_tokens,
            images,
            speculation=self.dice.choice((None, "ngram", "off")),
            cache_salt=self.dice.choice(("", "", "other")),
            priority=self.dice.choice((0, 0, 0, -1, 5, BATCH_PRIORITY, BATCH_PRIORITY)),
            tenant=self.dice.choice(self.tenants),
        )

    def _illustrated(
        self, text: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """The text with one or two images of a few in it, at places that other prompts have,
        too."""
        number, tokens = self.dice.randrange(3), self.dice.choice((2, 6, 12))
        contents: list[Part] = [text[:5], (KINDS[number], number, tokens), text[5:10]]
        if self.dice.random() < 0.4:
            number = self.dice.randrange(3)
            contents += [(KINDS[number], number, 6), text[10:14]]
        return prompt_of(*contents)

    def images_arrive(self) -> None:
        while self.image_orders and self.dice.random() < 0.7:
            order = self.image_orders.pop(self.dice.randrange(len(self.image_orders)))
            if self.dice.random() < self.undecodable:
                news = ImageDecoded(order.item, fault="it is damaged")
            else:
                self.num_decoded += 1
                news = ImageDecoded(order.item, Pixels(*order.shape.resized, b""))
            self.core.hear_image(news, self.now)

    def ask(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        images: tuple[PromptImage, ...] = (),
        **more: Any,
    ) -> RecordingClient:
        request = Generate(
            request_id=str(len(self.clients)),
            prompt=TokenPrompt(prompt),
            max_tokens=max_tokens,
            **more,
        )
        client = RecordingClient(request, prompt, max_tokens, images)
        self.clients.append(client)
        self.core.enqueue(client, self.now)
        return client

    def leave(self) -> None:
        if self.clients and self.dice.random() < 0.4:
            self.dice.choice(self.clients).aborted = True

    def preempt(self) -> None:
        """A running sequence leaves its row and goes on later."""
        running = [one for one in self.core._batch.rows.values() if not one.dropped]
        if running and self.dice.random() < 0.3:
            self.core._preemption.preempt(self.dice.choice(running), self.now, "memory")

    def press(self) -> None:
        active = self.dice.choice((10, 10, 95, 200))
        last = self.watches.memory.latest
        self.watches.memory.publish(
            attrs.evolve(
                last,
                active_bytes=active,
                under_pressure=active > 90,
                releases=last.releases + (active > 100),
            )
        )

    def disk_answers(self) -> None:
        while (self.parts or self.orders) and self.dice.random() < 0.7:
            if self.parts:
                self.core.hear(self.parts.popleft(), self.now)
                continue
            order = self.orders.pop(0)
            news: DiskNews
            if isinstance(order, Write):
                refused = self.dice.random() < 0.2
                keys = tuple(piece.key for piece in order.blocks)
                self.stored |= {} if refused else {piece.key: piece for piece in order.blocks}
                news = Written(keys, order.nbytes, refused)
            else:
                news = self._in_parts(self._read(order))
            self.core.hear(news, self.now)
        if self.stored and self.dice.random() < 0.1:
            key = self.dice.choice([*self.stored])
            del self.stored[key]
            self.core.hear(RemovedFromDisk((key,)), self.now)

    def _read(self, order: Read) -> Loaded:
        found: list[BlockData] = []
        for wanted in order.blocks:
            piece = self.stored.get(wanted.key)
            whole = piece is not None and (piece.snapshot is not None or not wanted.snapshot)
            if piece is None or not whole or self.dice.random() < 0.1:
                break
            found.append(
                attrs.evolve(
                    piece,
                    payload=piece.payload if wanted.payload else (),
                    snapshot=piece.snapshot if wanted.snapshot else None,
                )
            )
        return Loaded(order.ticket, tuple(found), sum(piece.nbytes for piece in found), 0.01)

    def _in_parts(self, loaded: Loaded) -> Loaded:
        """The first part of an answer, or all of it. The other parts come later."""
        cut = self.dice.randint(0, len(loaded.blocks))
        if self.dice.random() < 0.5:
            return loaded
        self.parts.append(attrs.evolve(loaded, blocks=loaded.blocks[cut:]))
        return attrs.evolve(loaded, blocks=loaded.blocks[:cut], complete=False)

    def step(self) -> bool:
        """One turn of the Scheduler's loop; False when nothing is left to do."""
        core = self.core
        self.now += 0.01
        core.drop_aborted(self.now)
        while (plan := core.schedule(self.now)) is not None:
            self.in_flight.append((plan, self.engine._compute(plan, 0.01)))
            self.check_memory()
            self.check_yielding(plan)
            if not plan.has_work:
                break
        core.publish()
        self.check()
        if self.in_flight:
            _, stepped = self.in_flight.popleft()
            core.update(stepped, self.now)
            self.check()
        return bool(
            self.in_flight
            or core.waiting
            or core.plans_in_flight
            or self.orders
            or self.parts
            or self.image_orders
        )

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        core, cache, batch = self.core, self.core._cache, self.core._batch
        assert core.plans_in_flight == len(self.in_flight) <= PLANS_IN_FLIGHT, "plans in flight"
        assert cache.tree.eviction.bytes <= cache.tree.sizes.capacity_bytes, (
            "bytes beyond the cache's capacity"
        )
        assert not batch.rows.keys() & batch.removed.keys(), "a row is here and removed"
        assert batch.num_rows <= self.settings.rows, "too many rows"
        for row, sequence in batch.rows.items():
            assert sequence.id == row, "a sequence has another row"
            self._check_running(sequence)
            check_kv_usage(core, sequence)
            check_storing(core, sequence)
        queued = [*core._queue]
        self.overdue += any(sequence.overdue for sequence in queued)
        assert len(queued) == len({*queued}), "a sequence waits twice"
        assert not {*queued} & {*batch.rows.values()}, "a sequence waits and has a row"
        assert {sequence.state for sequence in queued} <= QUEUED | {State.PREEMPTED}, (
            "a queued sequence is in another state"
        )
        assert core._queue.num_preempted == sum(sequence.started for sequence in queued), (
            "preempted ones are miscounted"
        )
        shares = core._shares
        assert shares.waiting == Counter(map(tenant_of, queued)), "waiting tenants are miscounted"
        assert shares.running == Counter(map(tenant_of, batch.rows.values())), (
            "rows of tenants are miscounted"
        )
        for client in self.clients:
            assert len(client.terminal) <= 1, "two terminal events"

    def check_memory(self) -> None:
        """What the engine holds after a plan, by its own books."""
        limit, rows, kv = self.settings.kv_memory, self.engine.rows.values(), self.engine.kv
        if limit is None:
            return
        row_bytes = padded_bytes(kv, [max(len(row.prompt), len(row.kv)) for row in rows])
        assert row_bytes <= limit, "rows are beyond the limit"
        if len(rows) == 1:  # It runs whatever is pinned beside it: what is read or written.
            return
        block_bytes = sum(
            NODE_COST + kv.token_bytes * len(tokens) for tokens in self.engine.blocks.values()
        )
        snapshot_bytes = kv.snapshot_bytes * len(self.engine.snapshots)
        assert row_bytes + block_bytes + snapshot_bytes <= limit, (
            "rows and cached blocks are beyond the limit"
        )

    def check_yielding(self, plan: Plan) -> None:
        """Batches have few rows beside others."""
        rows = (*plan.decode, *(chunk.row for chunk in plan.prefill))
        of_batches = [sequence.of_batch for sequence in self.core._batch.named(rows).values()]
        least = self.settings.batch_min_rows
        assert all(of_batches) or sum(of_batches) <= least, "rows of batches did not yield"
        self.yielded += not all(of_batches) and sum(of_batches) > 0

    @staticmethod
    def _check_running(sequence: Sequence) -> None:
        assert (
            0 <= sequence.num_output_tokens <= sequence.num_scheduled_tokens <= sequence.max_tokens
        ), "tokens beyond those scheduled"
        assert sequence.num_unscheduled_tokens >= 0, "more was prefilled than there is"
        prefilling = sequence.num_unscheduled_tokens > 0
        assert not prefilling or sequence.num_scheduled_tokens <= sequence.num_resumed_tokens, (
            "decodes before its prompt is there"
        )
        decoding = (
            State.DECODING
            if sequence.num_scheduled_tokens < sequence.max_tokens
            else State.LAST_TOKEN_SCHEDULED
        )
        assert sequence.state is (State.PREFILLING if prefilling else decoding), (
            "state and counters differ"
        )
        assert sequence.dropped is (sequence.state is State.LAST_TOKEN_SCHEDULED), (
            "a row is dropped too early, or too late"
        )

    def check_end(self) -> None:
        """Nobody is left, and engine and cache agree on what is stored."""
        core = self.core
        assert not core._batch.rows, "a row is left"
        assert not core._batch.removed, "a row was never dropped"
        assert not self.engine.rows, "the engine keeps a row"
        nodes = [*core._cache.tree.nodes()]
        held = {node.block for node in nodes} | {node.snapshot for node in nodes}
        freed = set(core._cache.freed())
        assert {*self.engine.blocks, *self.engine.snapshots} - freed == held - {None}, (
            "a block leaked"
        )
        assert not any(node.pins for node in nodes), "a node stays pinned"
        core._images.keep_up((), (), 0)
        forgotten = core._images.take_forgotten()
        assert self.engine.encoding.keys() <= {*forgotten}, "vectors leaked"
        assert not core._images.nbytes, "items leaked"
        for client in self.clients:
            client.check()


def play(seeds: range, tell: Callable[[int], object] = lambda _: None) -> None:
    """Raises AssertionError with the seed."""
    for seed in seeds:
        try:
            CoreWorld(seed).play()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        tell(seed)
