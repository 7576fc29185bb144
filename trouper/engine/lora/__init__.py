"""LoRA adapters of requests: rows of different adapters in one pass."""
