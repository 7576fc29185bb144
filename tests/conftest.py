"""Fixtures of every test."""

from __future__ import annotations

import os

# A test must never wait for a model hub, and must not depend on what another test left in the cache.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(os.cpu_count() or 1))
