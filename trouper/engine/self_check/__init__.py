"""The self-check: a model that was just loaded is run through what the engine does with rows, and
compared with its own code alone. Differing features are turned off by name (docs/self-check.md)."""
