"""The engine: loading, the batch step, sampling, KV. The only package that imports MLX."""
