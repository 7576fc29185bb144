"""mlx_lm.server on OpenBLAS as it is, where Trouper multiplies vectors in its own way: the server that a user has without Trouper's library."""

# ruff: noqa: E402 - what is replaced must be replaced before it is imported
from __future__ import annotations

import sys
from types import SimpleNamespace

sys.modules["trouper.engine.platform.vector_products"] = SimpleNamespace(forwarding=lambda *addresses: addresses[0])  # type: ignore[assignment]

import trouper.engine  # noqa: F401 - OpenBLAS before MLX

# isort: split
from mlx_lm.server import main

if __name__ == "__main__":
    main()
