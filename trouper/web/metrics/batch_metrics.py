"""Metrics of files and batches."""

from __future__ import annotations

from trouper.web.metrics.metric import MetricFamily

COUNT = MetricFamily("gauge", "trouper_batches", "Batches, by their status.", ("status",))
RUNNING = MetricFamily(
    "gauge", "trouper_batch_requests_running", "Requests of batches that run.", ()
)
ANSWERED = MetricFamily(
    "counter",
    "trouper_batch_requests_total",
    "Requests of batches that were answered (completed), answered with an error (failed), or have "
    "to run again (again).",
    ("outcome",),
)
BYTES = MetricFamily("gauge", "trouper_batch_bytes", "Bytes of files and batches on disk.", ())
BATCH_METRICS = (COUNT, RUNNING, ANSWERED, BYTES)
