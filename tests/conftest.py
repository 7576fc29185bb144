"""Fixtures of every test."""

from __future__ import annotations

import os

# No test waits for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Idle BLAS threads spin; on two cores that other work shares, one thread is several times faster than two.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# First of all: a fast BLAS must be there before anything imports MLX.
import trouper.engine  # noqa: F401
