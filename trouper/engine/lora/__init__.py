"""LoRA adapters of requests: one base model, and rows of different adapters in one pass."""
