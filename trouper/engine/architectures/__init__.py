"""Sources of a model's classes: mlx-lm, plugins, and text parts of mlx-vlm's models."""
