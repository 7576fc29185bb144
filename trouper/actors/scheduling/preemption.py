"""Preemption: a sequence leaves its row before the end of its answer, and goes on later in another
row.

What its row has computed is stored by the plan that drops the row, as far as there is room, so that
it resumes from its own blocks, in memory or on disk, and computes the remainder again. Tokens that
were on their way are sampled again, with the same result.
"""

from __future__ import annotations

import attrs

from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.replies import Progress


@attrs.frozen(kw_only=True, eq=False)
class Preemption:
    queue: WaitingQueue
    batch: RunningBatch

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of the batch and put it before all others of its priority in the
        queue."""
        self.batch.remove(sequence)
        sequence.preempt()
        sequence.read = None  # What it has read may be on disk alone when it returns.
        self.queue.prepend(sequence, now)
        sequence.client.report(Progress(now, preempted=True))
