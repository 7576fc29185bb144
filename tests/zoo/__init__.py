"""Tiny configs of every module of mlx-lm that can be built, and their models played against
mlx-lm's own loop."""
