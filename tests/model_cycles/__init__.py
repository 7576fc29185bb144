"""Load, unload, sleep and wake in a loop, under load of another model."""
