"""The edge of the runtime: submit a request, read its answer. No HTTP, no MLX."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import TypeVar

import attrs
import trio

from trouper.actors.runtime.adapter_table import AdapterRoom, AdapterTable
from trouper.actors.runtime.answer import Answer, Ended, TimeLimits, default_timeouts
from trouper.actors.runtime.channels import Channels, Health, Leaving, Watches
from trouper.actors.runtime.image_prompts import check_images, insert_images
from trouper.actors.runtime.prompt_tokenizing import (
    LONG_LANE,
    characters_of,
    check_characters,
    is_short,
    lane_of_text,
    max_prompt_tokens_of,
    tokenize_together,
    tokens_of,
)
from trouper.actors.runtime.submission import Admit, Submission, open_submission
from trouper.actors.runtime.worker_threads import Lane, Lanes
from trouper.protocol.batch import BatchStats
from trouper.protocol.health import ChannelStats
from trouper.protocol.model import AdapterCard, Engine, ModelCard, Tokenizer
from trouper.protocol.problems import (
    MODEL_UNLOADING,
    Problem,
    RequestFailed,
    adapter_loaded,
    adapter_unknown,
    draining,
    rank_lost,
)
from trouper.protocol.replies import Accepted
from trouper.protocol.request_bounds import check_bounds
from trouper.protocol.requests import (
    Generate,
    PairPrompt,
    PairTokens,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from trouper.protocol.settings import Settings

T = TypeVar("T")
MakeRoom = Callable[[int], Awaitable[None]]
"""Makes room for so many bytes among the weights of all models. Raises `RequestFailed` (507)."""


@attrs.define(eq=False)
class Runtime:
    """A loaded model that answers requests, as `run_runtime` starts it."""

    settings: Settings
    model: ModelCard
    tokenizer: Tokenizer
    _requests: trio.MemorySendChannel[Submission]
    _watches: Watches
    _channels: Channels
    _scope: trio.CancelScope
    _adapters: AdapterTable
    _engine: Engine
    finished: trio.Event = attrs.field(factory=trio.Event)
    draining: bool = False
    drained_by: float = -inf
    """trio.current_time() at which a drain is over."""
    leaving: Leaving = ""
    """State of the model after a drain, if the server goes on."""
    # Threads for tokenizing without an answer.
    _lanes: Lanes = attrs.field(
        default=attrs.Factory(lambda self: Lanes(self.settings.max_queue_size), takes_self=True)
    )
    _room: AdapterRoom = attrs.field(init=False)

    @_room.default
    def _make_room(self) -> AdapterRoom:
        return AdapterRoom(self.model, self.settings, self._watches.memory, self._watches.adapters)

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer: the model's, or fewer by --max-kv-size."""
        return min(
            self.model.context_length, self.settings.max_kv_size or self.model.context_length
        )

    async def submit(
        self, request: Generate, ended: Ended | None = None, admit: Admit | None = None
    ) -> Answer:
        """Queue a request. Raises `RequestFailed` (400, 429, 503) if refused. `ended` is called
        exactly once, at any end or refusal. `admit` is called with the tokenized prompt."""
        answer = await self.send(request, ended, admit)
        await answer.wait_accepted()
        return answer

    async def send(
        self,
        request: Generate,
        ended: Ended | None = None,
        admit: Admit | None = None,
        tokens: PairTokens = ((), 0),
    ) -> Answer:
        """Send a request as `submit` does, without waiting for the queue
        (`Answer.wait_accepted`). `tokens`: of the prompt, if `tokenize_together` returned them."""
        # For requests that belong together: a busy engine fills the queue once a step.
        invalid = None
        try:
            check_bounds(request)
        except RequestFailed as refused:  # Nothing but the id of such a request is read.
            invalid = refused.problem
            request = Generate(request_id=request.request_id, prompt=TokenPrompt(()))
        if (adapter := self._adapters.begin(request.adapter)) is not None:
            request = attrs.evolve(
                request, cache_scope=attrs.evolve(request.cache_scope, adapter=adapter.fingerprint)
            )
        submission, replies = open_submission(
            request, self.settings, admit, trio.current_time, tokens
        )
        # Not when the answer ends: a plan may admit the row of a client that has left.
        if adapter is not None:
            submission.arrivals.when_let_go = partial(self._adapters.end, adapter.name)
        timeouts = request.timeouts or default_timeouts(self.settings)
        limits = TimeLimits(timeouts, trio.current_time(), submission.progress, submission.history)
        answer = Answer(
            request.request_id,
            Accepted((), 0),
            replies,
            limits,
            ended=ended,
            arrivals=submission.arrivals,
        )
        with answer.ends_with_failure():
            if invalid is not None:
                submission.close()
                raise RequestFailed(invalid)
            if request.adapter and adapter is None:
                submission.close()
                raise self._adapters.refusal(request.adapter)
            await self._deliver(submission, answer)
        return answer

    @property
    def adapters(self) -> tuple[AdapterCard, ...]:
        return self._adapters.cards

    @property
    def unloaded_adapters(self) -> tuple[str, ...]:
        """Perhaps loaded again since."""
        return self._adapters.unloaded

    @property
    def weights_bytes(self) -> int:
        return self._room.weights_bytes

    async def load_adapter(
        self, name: str, directory: str, make_room: MakeRoom | None = None
    ) -> AdapterCard:
        """Load a LoRA adapter beside running requests. Goes on when cancelled. `make_room` is
        awaited before, with the bytes of the adapter. Raises `ModelUnusable`, and `RequestFailed`:
        400 for a name in use, 507 for lack of memory."""
        with trio.CancelScope(shield=True):
            async with self._adapters.changing:
                if self._adapters.card(name) is not None:
                    raise adapter_loaded(name)
                plan = await self._engine.plan_adapter(name, directory)
                self._room.require(name, plan)
                if make_room is not None:
                    await make_room(plan.added_bytes)
                with self._room.reserved(name, plan):
                    card = await self._engine.load_adapter(name, directory)
                self._adapters.add(card)
        return card

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: refuse new requests, and wait for running ones. Goes on when
        cancelled. Raises `RequestFailed` (404)."""
        with trio.CancelScope(shield=True):
            async with self._adapters.changing:
                if self._adapters.card(name) is None:
                    raise adapter_unknown(name)
                await self._adapters.remove(name)
                self._room.left(await self._engine.unload_adapter(name))

    async def tokens(self, prompt: Prompt, tenant: str = "") -> tuple[int, ...]:
        """Tokenize a prompt without an answer, within the bound on characters, not on the context.
        Raises `RequestFailed` (400, 429, 503)."""
        if is_short(prompt):
            return self._tokens_of(prompt)
        return await self._in_lane(lane_of_text(prompt), tenant, partial(self._tokens_of, prompt))

    async def tokenize_together(
        self, prompts: Sequence[Prompt], tenant: str = ""
    ) -> dict[int, PairTokens]:
        """Tokenize texts and pairs of one client in one batch, on a thread. Returns their tokens
        by the `id` of the prompt; none if they are few, long or to be refused. Raises
        `RequestFailed` (429)."""
        texts = [
            prompt
            for prompt in {id(prompt): prompt for prompt in prompts}.values()
            if isinstance(prompt, PairPrompt) or (isinstance(prompt, TextPrompt) and prompt.special)
        ]
        if len(texts) < 2 or sum(map(characters_of, texts)) > LONG_LANE:
            return {}
        longest = max_prompt_tokens_of(self.model, self.settings)
        work = partial(tokenize_together, texts, self.tokenizer, longest)
        tokens = await self._in_lane("quick", tenant, work)
        return dict(zip(map(id, texts), tokens, strict=False))

    async def _in_lane(self, lane: Lane, tenant: str, work: Callable[[], T]) -> T:
        async with self._lanes[lane].turn(tenant):
            # The thread goes on when its client leaves, and keeps the turn.
            with trio.CancelScope(shield=True):
                result = await self._lanes.run(work)
        return result

    def _tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        card, tokenizer = self.model, self.tokenizer
        check_images(prompt, card)
        tokens = tokens_of(prompt, tokenizer, card.context_length, check_characters)
        return insert_images(tokens, prompt, card, tokenizer, self.settings)[0]

    async def _deliver(self, submission: Submission, answer: Answer) -> None:
        try:
            if self.draining:
                raise RequestFailed(self.problem_of_end())
            self._channels.note_peaks()
            with suppress(trio.WouldBlock):  # Mostly there is room, and no time limit to set.
                await trio.lowlevel.checkpoint_if_cancelled()
                self._requests.send_nowait(submission)
                return
            deadline = answer._limits.next_deadline()
            with trio.move_on_at(deadline.at):
                await self._requests.send(submission)
                return
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            submission.close()
            raise RequestFailed(self.problem_of_end()) from None
        except BaseException:
            submission.close()
            raise
        submission.close()
        raise RequestFailed(deadline.problem)

    def problem_of_end(self) -> Problem:
        if lost := self._watches.ranks.latest.lost:
            return rank_lost(lost)
        return MODEL_UNLOADING if self.leaving else draining(self.drained_by, trio.current_time())

    def health(self) -> Health:
        """Health from the last published values. Never waits."""
        return self._watches.health(draining=self.draining, leaving=self.leaving)

    def channels(self) -> tuple[ChannelStats, ...]:
        return self._channels.stats()

    def view_batch(self) -> BatchStats:
        """The batch as of the last view. Call again within two seconds, or the view is dropped."""
        self._watches.last_viewed_at.publish(trio.current_time())
        return self._watches.batch.latest

    async def drain(self, timeout_s: float, leaving: Leaving = "") -> bool:
        """Refuse new requests (503), let admitted ones finish, then end. `leaving`: the server goes
        on without this model. False: the time ran out, and the remaining requests got an error.
        Every actor has ended at the return."""
        self.draining, self.leaving = True, leaving
        self.drained_by = trio.current_time() + timeout_s
        self._watches.draining.publish(True)
        self._requests.close()
        with trio.move_on_after(timeout_s):
            await self.finished.wait()
            return True
        self._scope.cancel()
        await self.finished.wait()
        return False
