"""An actor of your own beside Trouper's: what is put into its inbox is summarized, a few documents
at a time.

python examples/summarizer.py --seconds 60 README.md docs/actors.md

It keeps the rules of docs/actors.md. It waits only on its inbox, or on the one answer that it is
owed. Withdrawing is closing: synchronous, at any time. Each document has exactly one outcome, also
if the actor is cancelled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import trio

from trouper import (
    ChatPrompt,
    Engine,
    Generate,
    RequestFailed,
    Runtime,
    Settings,
    Timeouts,
    run_runtime,
)


@attrs.frozen
class Summarized:
    """The summary."""

    text: str
    tokens: int


@attrs.frozen
class NotSummarized:
    """Why there is none."""

    reason: str


Outcome = Summarized | NotSummarized


@attrs.frozen(eq=False)
class Document:
    """What travels. Whoever holds it owes it one outcome."""

    text: str
    outcomes: trio.MemorySendChannel[Outcome]
    scope: trio.CancelScope

    def end(self, outcome: Outcome) -> None:
        """Room for one is a contract, so this never waits and runs whole even in cancelled
        cleanup."""
        with self.outcomes, suppress(trio.BrokenResourceError):  # Withdrawn: nobody listens.
            self.outcomes.send_nowait(outcome)


@attrs.frozen(eq=False)
class Pending:
    """The client's end. Leave its `with` to withdraw."""

    document: Document
    _outcomes: trio.MemoryReceiveChannel[Outcome]

    @classmethod
    def of(cls, text: str) -> Pending:
        outcomes, outcomes_in = trio.open_memory_channel[Outcome](1)
        return cls(Document(text, outcomes, trio.CancelScope()), outcomes_in)

    async def outcome(self) -> Outcome:
        return await self._outcomes.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._outcomes.close()
        self.document.scope.cancel(reason="withdrawn")


async def run_summarizer(
    runtime: Runtime,
    inbox: trio.MemoryReceiveChannel[Document],
    *,
    at_a_time: int = 4,
    limit_s: float = 60.0,
) -> None:
    """Ends when `inbox` ends. A document takes at most `limit_s`; its wait in the inbox does not
    count."""
    numbers = count(1)

    async def work(documents: trio.MemoryReceiveChannel[Document]) -> None:
        with documents:
            async for document in documents:
                outcome: Outcome = NotSummarized("the summarizer ended")
                try:
                    # Cancelled already if it was withdrawn in the inbox: then nothing is asked.
                    with document.scope:
                        outcome = await _summarize(
                            runtime, f"summary-{next(numbers)}", document.text, limit_s
                        )
                finally:
                    document.end(outcome)

    with inbox:
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(at_a_time):
                    nursery.start_soon(work, inbox.clone())
        finally:
            _answer_undelivered(inbox)


def _answer_undelivered(inbox: trio.MemoryReceiveChannel[Document]) -> None:
    """Closing the last receiver would discard them, and their clients would wait for ever."""
    while True:
        try:
            inbox.receive_nowait().end(NotSummarized("the summarizer ended"))
        except (trio.WouldBlock, trio.EndOfChannel):
            return


async def _summarize(runtime: Runtime, request_id: str, text: str, limit_s: float) -> Outcome:
    """Cancelled, it leaves the `with`, and the row is gone within one step."""
    message = {"role": "user", "content": f"Summarize in two sentences:\n\n{text}"}
    request = Generate(
        request_id=request_id,
        prompt=ChatPrompt((message,)),
        max_tokens=96,
        timeouts=Timeouts(request_s=limit_s),
    )
    try:
        with await runtime.submit(request) as answer:
            summary = "".join([delta.text async for delta in answer])
            return Summarized(summary, answer.completion_tokens)
    except RequestFailed as failed:
        return NotSummarized(failed.problem.message)


async def main(
    texts: Sequence[str],
    *,
    seconds: float = 60.0,
    settings: Settings | None = None,
    engine: Engine | None = None,
) -> None:
    """Print each summary when it is there; what is not there after `seconds` is withdrawn."""
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            partial(run_runtime, settings or Settings(), engine=engine)
        )
        documents, inbox = trio.open_memory_channel[Document](16)
        nursery.start_soon(run_summarizer, runtime, inbox)
        with trio.move_on_after(seconds) as patience:
            async with trio.open_nursery() as asking:
                with documents:
                    for number, text in enumerate(texts, 1):
                        asking.start_soon(_print_summary, number, text, documents.clone())
        if patience.cancelled_caught:
            print(f"[withdrawn after {seconds:g} s]")
        await runtime.drain(timeout_s=10)


async def _print_summary(
    number: int, text: str, documents: trio.MemorySendChannel[Document]
) -> None:
    with documents, Pending.of(text) as pending:
        await documents.send(pending.document)
        match await pending.outcome():
            case Summarized(text=summary, tokens=tokens):
                print(f"{number}. {summary} [{tokens} tokens]", flush=True)
            case NotSummarized(reason=reason):
                print(f"{number}. no summary: {reason}", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Summarize files.")
    arguments.add_argument("files", nargs="+", type=Path)
    arguments.add_argument("--model", help="local directory or hub id; nothing: the embedded model")
    arguments.add_argument("--seconds", type=float, default=60.0, help="patience with all of them")
    options = arguments.parse_args()
    contents = [path.read_text("utf-8")[:8000] for path in options.files]
    trio.run(
        partial(main, contents, seconds=options.seconds, settings=Settings(model=options.model))
    )
