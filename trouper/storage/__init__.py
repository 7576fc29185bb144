"""Bytes and paths: the cache directory. Neither Trio nor MLX."""
