"""HTTP: a Quart-Trio app on Hypercorn behind a guard. Knows the runtime and the protocol; never MLX."""
