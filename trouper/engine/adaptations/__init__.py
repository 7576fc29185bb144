"""Adaptations of mlx-lm's models, so that rows may share a forward pass."""
