"""The answers that run, by the key and the id of their request, so that they can be cancelled."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from trouper.actors.runtime.answer import Answer


class RunningAnswers:
    """One for the app. Two keys may have chosen the same id."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], set[Answer]] = {}

    def add(self, owner: str, request_id: str, answer: Answer) -> Callable[[], None]:
        """Add an answer. Returns what closes and removes it. `owner`: identity of the key."""
        self._answers.setdefault((owner, request_id), set()).add(answer)
        return partial(self._ended, (owner, request_id), answer)

    def _ended(self, name: tuple[str, str], answer: Answer) -> None:
        answer.close()
        running = self._answers[name]
        running.discard(answer)
        if not running:
            del self._answers[name]

    def cancel(self, request_id: str, owner: str | None) -> bool:
        """Cancel the answers of a request, by the id of its header or of its response body. `owner`
        None: of any key. Returns whether there were any."""
        return self._cancel(request_id, owner) or self._cancel(
            re.split("[-_]", request_id, maxsplit=1)[-1], owner
        )

    def _cancel(self, request_id: str, owner: str | None) -> bool:
        names = [
            name for name in self._answers if name[1] == request_id and owner in (None, name[0])
        ]
        answers = [answer for name in names for answer in self._answers[name]]
        for answer in answers:
            answer.cancel()
        return bool(names)
