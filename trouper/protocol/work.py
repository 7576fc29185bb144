"""Orders to SSDWriter."""

from __future__ import annotations

import attrs


@attrs.frozen
class Sweep:
    """Remove orphaned temporary files, and cached files unused for `ttl_s` seconds; then measure the directory."""

    ttl_s: float


DiskOrder = Sweep
