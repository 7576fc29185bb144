"""What some of mlx-lm's models need so that rows may share a forward pass."""
