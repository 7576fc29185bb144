"""Where the classes of a model come from: mlx-lm, a plugin, or the text part of one of mlx-vlm's
models."""
