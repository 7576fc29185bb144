"""Seven actors and the graph that wires them. Trio; never MLX, never Quart."""
