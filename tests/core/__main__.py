"""`python -m tests.core N`: seeds 0 to N-1."""

from __future__ import annotations

import sys
import time

from tests.core.worlds import play

count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
began = time.perf_counter()
play(range(count))
sys.stdout.write(f"{count} worlds in {time.perf_counter() - began:.1f} s\n")
