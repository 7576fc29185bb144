"""The file of API keys while the server runs, read on a thread."""

from __future__ import annotations

from math import inf

import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.api_keys import FILE_FLAG, Keys, Reread
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import ServerSettings

RELOAD_S = 1.0
"""Time between two looks, while requests come."""
ANSWER_S = 5.0
"""Longest wait of one request for the file."""


class KeyFile:
    def __init__(self, keys: Keys, answer_s: float = ANSWER_S) -> None:
        self._keys, self._answer_s = keys, answer_s
        self._checked_at = -inf
        self._thread = trio.CapacityLimiter(1)

    async def look(self, now: float) -> None:
        """Read the file again if changed, at most once in RELOAD_S. `now` in seconds."""
        if (
            self._keys.file is None
            or now - self._checked_at < RELOAD_S
            or not self._thread.available_tokens
        ):
            return
        self._checked_at = now
        try:
            with trio.move_on_after(self._answer_s):
                reread = await run_on_thread(
                    self._keys.read_again, self._thread, thread_name="file of keys"
                )
                self._note(reread)
                return
        except OSError:  # No thread starts for the look: the keys stay until the next one.
            return
        self._keys.stay(self._silence)

    def _note(self, reread: Reread | None) -> None:
        if reread is not None:
            self._keys.take(reread)
        elif self._keys.stale == self._silence:
            self._keys.stale = ""

    @property
    def _silence(self) -> str:
        return f"{FILE_FLAG} {self._keys.file} does not answer"


async def require_keys(settings: ServerSettings) -> None:
    """Raises `SettingsInvalid`, also for a file that does not answer."""
    if settings.api_key_file is None:
        Keys.of(settings)
        return
    with trio.move_on_after(ANSWER_S):
        await trio.to_thread.run_sync(
            Keys.of, settings, abandon_on_cancel=True, thread_name="file of keys"
        )
        return
    message = (
        f"{FILE_FLAG} {settings.api_key_file} does not answer within {ANSWER_S:g} s; give a file "
        "with one key a line"
    )
    raise SettingsInvalid(message, FILE_FLAG)
