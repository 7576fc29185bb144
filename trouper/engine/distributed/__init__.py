"""Tensor parallelism: one rank's shard of a model, and the collectives of all ranks."""
