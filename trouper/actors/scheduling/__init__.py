"""The pure core of the scheduler: sequences, the prefix cache and the disk tier, chunk sizes and
statistics. No Trio, no MLX."""
