"""Several processes, one model: the engine split over ranks that really are processes, over MLX's
ring on loopback."""
