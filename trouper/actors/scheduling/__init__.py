"""The pure core of the scheduler. No Trio, no MLX."""
