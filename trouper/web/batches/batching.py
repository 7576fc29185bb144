"""Storage, worker, handlers, health and metrics of one app's batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import trio

from trouper.actors.runtime.served_models import named
from trouper.protocol.api_keys import ANYBODY
from trouper.web.batches.batch_routes import Batches
from trouper.web.batches.batch_storage import NO_ROOM, BatchStorage, KeyShares
from trouper.web.batches.batch_table import STATUSES
from trouper.web.batches.batch_worker import BatchWorker
from trouper.web.batches.file_routes import Files
from trouper.web.batches.line_runner import Asgi, LineRunner
from trouper.web.serving.model_names import split_adapter
from trouper.web.serving.service import Service
from trouper.web.serving.state_database import StateDatabase

LAST_ANSWERS_S = 1.0
"""Time for writing the last answers after the models have drained."""


class Batching:
    def __init__(
        self, service: Service, app: Asgi, directory: Path, database: StateDatabase
    ) -> None:
        self._service, settings = service, service.settings
        shares = KeyShares(service.keys, settings.batch_max_bytes)
        self.storage = BatchStorage(database, directory, shares)
        self.worker = BatchWorker(
            self.storage,
            LineRunner(app),
            settings.batch_rows,
            settings.body_limit(images=True),
            check_model=self._check_model,
            budget=service.budget,
        )
        self._finished = service.models.finished
        files = Files(service, self.storage)
        service.read_upload = files.read_image
        self.groups = (files, Batches(service, self.storage, self.worker))

    def _check_model(self, name: str, owner: str) -> None:
        """Raises `RequestFailed` (404) unless the batch's key may use the model."""
        entries = self._service.entries_for(self._service.keys.of_identity(owner) or ANYBODY)
        model, _ = split_adapter(name, entries)
        named(self._service.aliases.resolved(model or name, entries), entries)

    async def run(self) -> None:
        """Run batches until shortly after the models have drained, which stores complete
        answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.worker.run)
            await self._finished.wait()
            with trio.move_on_after(LAST_ANSWERS_S):
                async with self.worker.all_slots():
                    pass
            nursery.cancel_scope.cancel()

    def health(self) -> dict[str, Any]:
        return {
            "statuses": self._statuses(),
            "requests_running": self.worker.counts.running,
            "requests": dict(self.worker.counts.outcomes),
            "files": len(self.storage.files),
            "bytes": self.storage.bytes,
            "problem": self._problem(),
        }

    def _problem(self) -> str:
        """Reason why batches wait or uploads are refused, if any."""
        storage = self.storage
        waiting = [batch.fault for batch in storage.unended if batch.fault]
        if storage.problem or not (waiting or storage.fault):
            return storage.problem or (NO_ROOM if storage.waiting else "")
        remedy = "make room there, or see --batch-dir"
        fault = storage.fault or waiting[0]
        waits = f"Batches that wait for it: {len(waiting)}"
        return f"the last write into {storage.directory} failed: {fault}; {remedy}. {waits}"

    def _statuses(self) -> dict[str, int]:
        found = Counter(batch.status for batch in self.storage.batches.values())
        return {status: found[status] for status in STATUSES}
