"""A tiny vision model that sees: its questions, its training (examples/shapes holds the result)."""
