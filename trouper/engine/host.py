"""The engine's OS thread, which loads the model and runs plans."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import attrs
import mlx.core as mx
import trio

from trouper.engine.adapters_at_run_time import AdaptersAtRunTime
from trouper.engine.distributed import rank_group
from trouper.engine.loading import bundled_model
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.passes.pass_shapes import PREPARED_CARD
from trouper.engine.platform import device
from trouper.engine.platform.device import WIRED, bound_memory
from trouper.engine.platform.error_text import first_line_of, lacks_memory, system_shortage
from trouper.engine.sampling.logits_processors import NO_PROCESSORS
from trouper.engine.spec_decode.draft_model import NO_DRAFT_LIMITS
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.engine.step import StepEngine
from trouper.engine.step_loop import WAKE, SideWork, StepLoop, Waiting, model_unloaded
from trouper.engine.warm_up import IdleWork, warm_up
from trouper.protocol.installing import command_for
from trouper.protocol.loading import LoadWatch, StageTimes, nobody_watches, stage
from trouper.protocol.logits_processor import Processors
from trouper.protocol.model import AdapterCard, AdapterPlan, LoadedModel, MemoryStats
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import Stepped
from trouper.protocol.problems import (
    ModelUnusable,
    OutOfDeviceMemory,
    SystemShortage,
    is_shortage,
)
from trouper.protocol.ranks import Joined
from trouper.protocol.settings import Settings
from trouper.system import heap
from trouper.workarounds import mlx_reference_blas
from trouper.workarounds.openblas_threads import BlasThreads

IDLE = "idle engine thread"


class EngineThread:
    """Runs jobs one after another. A job's exception is raised in the caller."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_sound = True
        """False after a crashed job."""
        self._thread = Thread(target=self._work, name=IDLE, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._thread.name

    @name.setter
    def name(self, name: str) -> None:
        self._thread.name = name

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # Else the thread would hold the job's objects until the next job.

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for `work`, even if cancelled: threads are never abandoned (F18). Raises
        `BaseException` of `work`, too."""
        done, outcome = trio.Event(), list[T | BaseException]()
        token = trio.lowlevel.current_trio_token()

        def job() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001
                # Raised again where the work was ordered.
                outcome.append(error)
            token.run_sync_soon(done.set)

        await trio.lowlevel.checkpoint()
        self._jobs.put(job)
        with trio.CancelScope(shield=True):
            await done.wait()
        result = outcome.pop()
        try:
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            # Else the error holds this frame, which holds the error, whose traceback holds all the
            # rows' KV.
            del result

    def end(self) -> None:
        """End the thread after the last job."""
        self._jobs.put(None)


class EngineThreads:
    def __init__(self) -> None:
        self._idle: list[EngineThread] = []

    def take(self, name: str) -> EngineThread:
        thread = self._idle.pop() if self._idle else EngineThread()
        thread.name = name
        return thread

    def give_back(self, thread: EngineThread) -> None:
        """Keep an idle thread, or end one of a crashed engine."""
        thread.name = IDLE
        if thread.is_sound:
            self._idle.append(thread)
        else:
            thread.end()


THREADS = EngineThreads()  # MLX's threads belong to the process, not to an event loop.


log = logging.getLogger("trouper.engine")

# Exceptions that are raised unchanged. A panic in Rust (llguidance, tokenizers) is no `Exception`:
# supervision would not see it, and the process would end.
NOT_CRASHES = (Exception, trio.Cancelled, KeyboardInterrupt, SystemExit, GeneratorExit)
SLOW_BLAS = (
    "MLX multiplies by the BLAS of its wheel, which is slow: %s, and call "
    "trouper.prepare_process() before MLX is imported"
)
T = TypeVar("T")


class MlxEngine:
    """Implements `trouper.protocol.model.Engine` on MLX.

    Streams and lazy arrays belong to one thread; other threads get evaluated numbers.
    """

    def __init__(
        self,
        settings: Settings,
        watch: LoadWatch = nobody_watches,
        processors: Processors = NO_PROCESSORS,
    ) -> None:
        """`watch` and `processors` (by name) are called on the engine's thread."""
        self._settings, self._watch, self._processors = settings, watch, dict(processors)
        self._thread: EngineThread | None = None
        self._loaded: EvaluatedModel | None = None
        self._group = rank_group.ALONE
        self._side, self._adapters = SideWork(), list[str | None]()
        self._waiting: Waiting | None = None
        self._idle = IdleWork()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Ends when cancelled, after the current step (F18)."""
        self._token = trio.lowlevel.current_trio_token()
        self._thread = THREADS.take(f"engine of {self._settings.model or bundled_model.NAME}")
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:  # The process may go on with another model.
            thread, self._thread = self._thread, None
            with trio.CancelScope(shield=True):
                await thread.run(self._free)
            THREADS.give_back(thread)

    def _free(self) -> None:
        self._side.close()
        WIRED.release(self)
        self._loaded, self._idle = None, IdleWork()
        gc.collect()
        mx.clear_cache()
        heap.give_back()

    async def join(self, invitation: bytes) -> Joined:
        """The process blocks until all ranks have joined (`rank_group`)."""
        return await self._on_thread(lambda: self._join(invitation))

    def _join(self, invitation: bytes) -> Joined:
        self._group = rank_group.join()
        return Joined(self._group.rank, self._group.size, self._group.share(invitation))

    async def load(self) -> LoadedModel:
        """Load the model, and compile kernels if necessary. Raises `ModelUnusable`."""
        began, watch = time.perf_counter(), StageTimes(self._watch)
        # The self-check's products, too, leave cores to other programs.
        BlasThreads(mlx_reference_blas.load_fast()).begin(0)
        self._loaded = await self._on_thread(
            lambda: load(self._settings, log.info, watch, self._group)
        )
        await self._on_thread(partial(self._bound_memory, self._loaded.card.adapter_bytes))
        card = attrs.evolve(self._loaded.card, logits_processors=tuple(sorted(self._processors)))
        self._adapters[:] = [adapter.name for adapter in card.adapters]
        if device.prepares_shapes():
            card = attrs.evolve(card, **PREPARED_CARD)
        if device.is_cpu() and sys.platform == "linux" and mlx_reference_blas.load_fast() is None:
            log.warning(SLOW_BLAS, command_for("cpu"))
        # Embedders and rerankers have no steps.
        if device.prepares_shapes() and not card.no_generation:
            await self._on_thread(partial(self._warm_up, watch))
        weights = f"{card.dtype}, {card.weights_bytes / 1e6:.0f} MB"
        kind = f"{card.architecture}, {weights} on {card.device}"
        times = f"loaded in {time.perf_counter() - began:.1f} s ({watch})"
        log.info("model %s: %s, %s", card.id, kind, times)
        return LoadedModel(card, self._loaded.tokenizer)

    def _bound_memory(self, adapter_bytes: int) -> None:
        assert self._loaded is not None, "load() comes first"
        weights_bytes = self._loaded.card.base_weights_bytes + adapter_bytes
        bound_memory(self, self._settings, weights_bytes, self._group.sharers)

    def _warm_up(self, watch: LoadWatch) -> None:
        assert self._loaded is not None, "load() comes first"
        card = self._loaded.card
        progress = stage(watch, self._settings.model or card.id, "compiling kernels", "steps")
        progress(0, 1)
        self._idle = warm_up(
            self._engine(),
            card.vocab_size,
            card.context_length,
            self._settings.prefill_step_size,
            # Only rank 0 knows images, and all ranks have to run the same passes.
            images=card.images if self._group.size == 1 else None,
            compiled=card.self_check.remembered,
        )
        mx.clear_cache()
        progress(1, 1)

    async def step(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        """Answer plans in order until the channel ends. Raises any exception of the engine."""
        waiting: Waiting = SimpleQueue()
        self._waiting = waiting
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_put_into, waiting, plans)
            try:
                await self._on_thread(lambda: self._session(waiting, results))
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
                # Raised again below, outside of the nursery, which would wrap it.
                failure = error
            nursery.cancel_scope.cancel()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # As in `_on_thread`: the traceback holds all the rows' KV.

    async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
        """Raises `ModelUnusable`."""
        return await self._adapter_changes().plan(name, directory)

    async def load_adapter(self, name: str, directory: str) -> AdapterCard:
        return await self._adapter_changes().load(name, directory)

    async def unload_adapter(self, name: str) -> int:
        return await self._adapter_changes().unload(name)

    def _adapter_changes(self) -> AdaptersAtRunTime:
        if self._loaded is None:
            raise model_unloaded()
        return AdaptersAtRunTime(
            settings=self._settings,
            loaded=self._loaded,
            group=self._group,
            names=self._adapters,
            side=self._side,
            wake=self._wake,
            changed=self._bound_memory,
        )

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.put(WAKE)

    def memory(self) -> MemoryStats:
        """Measure the device's memory, in bytes. Any thread may call this."""
        return device.memory_stats(self._group.sharers)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()  # A cancelled engine has no thread any more.
        assert self._thread is not None, "run() comes first"
        thread = self._thread
        try:
            return await thread.run(work)
        except (ModelUnusable, OutOfDeviceMemory, SystemShortage):  # No fault of the thread.
            raise
        except NOT_CRASHES:
            thread.is_sound = False
            raise
        except BaseException as error:
            thread.is_sound = False
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _session(self, plans: Waiting, results: trio.MemorySendChannel[Stepped]) -> None:
        """A new session has no rows: no state survives a crash."""
        engine = self._engine()
        try:
            send = partial(self._send_result, results)
            StepLoop(engine, plans, self._side, send, self._idle).run()
        except (RuntimeError, MemoryError, OSError) as error:
            if lacks_memory(error):
                raise OutOfDeviceMemory(first_line_of(error)) from error
            if is_shortage(error):
                raise SystemShortage(first_line_of(error)) from error
            if short := system_shortage():
                raise SystemShortage(f"{short}: {first_line_of(error)}") from error
            raise
        finally:
            # The callback refers to the engine, which only the garbage collector would free then.
            engine.starting = None
            del engine
            mx.clear_cache()

    def _engine(self) -> StepEngine:
        assert self._loaded is not None, "load() comes first"
        loaded, settings = self._loaded, self._settings
        drafting = Drafting(
            settings.spec_ngram_min, settings.spec_ngram_max, settings.spec_draft_tokens
        )
        grammars, draft = loaded.tokenizer.grammars, loaded.draft
        return StepEngine(
            loaded.model,
            loaded.card.vocab_size,
            loaded.kv,
            grammars,
            self._group,
            drafting=drafting,
            capabilities=loaded.card.capabilities,
            draft_model=loaded.drafters.model,
            draft_limits=NO_DRAFT_LIMITS if draft is None else draft.limits,
            head=loaded.drafters.reader,
            processors=self._processors,
            adapters=self._adapters,
            modules=loaded.embedder.modules,
            tower=loaded.images.tower,
        )

    def _send_result(self, results: trio.MemorySendChannel[Stepped], stepped: Stepped) -> None:
        """Returns before the result is received. Results arrive in order, before the session's
        end."""

        def send() -> None:
            with suppress(trio.BrokenResourceError):  # The receiver is closed.
                results.send_nowait(stepped)

        self._token.run_sync_soon(send)


async def _put_into(waiting: Waiting, plans: PlanReceiver) -> None:
    try:
        await plans.put_by(waiting.put)
    finally:
        waiting.put(None)
